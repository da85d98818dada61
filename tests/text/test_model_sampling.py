"""Sampling settings that a model comes with: from a checkpoint or a GGUF to what texts are sampled
with, and what replaces them."""

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from case_tables import rows_of
from checkpoints import random_llama
from gguf import Keys
from serving import Served, save_model
from transformers import GenerationConfig

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.cli import main
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.convert.sampling import sampling_keys
from hotsplit.errors import HotsplitError
from hotsplit.options.generation_options import GenerationOptions, SamplingOptions
from hotsplit.options.model_sampling import sampling_line, sampling_of, settings_of
from hotsplit.runtime.generate.chat import ChatOptions

PATH = Path("m.gguf")
# gguf-py's names, as its writer stores them, and the field of each.
FULL = {
    Keys.General.SAMPLING_SEQUENCE: ("top_k;temperature", "samplers", ("top_k", "temperature")),
    Keys.General.SAMPLING_TOP_K: (np.int32(20), "top_k", 20),
    Keys.General.SAMPLING_TOP_P: (np.float32(0.95), "top_p", 0.95),
    Keys.General.SAMPLING_MIN_P: (np.float32(0.1), "min_p", 0.1),
    Keys.General.SAMPLING_XTC_PROBABILITY: (np.float32(0.5), "xtc_probability", 0.5),
    Keys.General.SAMPLING_XTC_THRESHOLD: (np.float32(0.2), "xtc_threshold", 0.2),
    Keys.General.SAMPLING_TEMP: (np.float32(0.6), "temperature", 0.6),
    Keys.General.SAMPLING_PENALTY_LAST_N: (np.int32(-1), "repeat_last_n", -1),
    Keys.General.SAMPLING_PENALTY_REPEAT: (np.float32(1.1), "repeat_penalty", 1.1),
    Keys.General.SAMPLING_MIROSTAT: (np.int32(2), "mirostat", 2),
    Keys.General.SAMPLING_MIROSTAT_TAU: (np.float32(4.5), "mirostat_ent", 4.5),
    Keys.General.SAMPLING_MIROSTAT_ETA: (np.float32(0.2), "mirostat_lr", 0.2),
}


def test_all_of_llama_cpps_keys_are_read():
    keys = {key: stored for key, (stored, _, _) in FULL.items()}
    wanted = {field: value for _, field, value in FULL.values()}
    assert settings_of(PATH, keys) == wanted
    assert sampling_of(PATH, keys, {}) == SamplingOptions(**wanted)
    assert sampling_of(PATH, keys, {"top_p": 1.0, "seed": 3}) == SamplingOptions(
        **{**wanted, "top_p": 1.0, "seed": 3}
    )
    named = {v for n, v in vars(Keys.General).items() if n.startswith("SAMPLING_")}
    assert named == set(FULL)


@pytest.mark.parametrize(
    ("value", "field", "found"),
    [
        (np.float32(64), "top_k", 64),  # a whole number, in whatever type
        (np.float64(0.3), "temp", 0.3),
        (np.uint8(1), "temp", 1),
    ],
)
def test_numbers_in_other_types(value, field, found):
    (got,) = settings_of(PATH, {f"general.sampling.{field}": value}).values()
    assert got == found and type(got) is type(found)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("temp", "hot", "general.sampling.temp is 'hot', wanted a number; "),
        ("temp", np.float32("nan"), "general.sampling.temp is nan, wanted a number; "),
        ("temp", True, "general.sampling.temp is True, wanted a number; "),
        ("temp", [np.float32(1)], "general.sampling.temp is "),
        ("top_k", np.float32(1.5), "general.sampling.top_k is 1.5, wanted a whole number; "),
        ("top_p", np.float32(1.5), "general.sampling.top_p is 1.5, wanted a number from 0 to 1; "),
        ("penalty_repeat", np.float32(0), "general.sampling.penalty_repeat is 0, wanted more than"),
        ("mirostat", np.int32(3), "general.sampling.mirostat is 3, wanted 0, 1 or 2; "),
        ("sequence", "top_k;best", "no sampler is called 'best'; known: "),
        ("sequence", np.int32(1), "general.sampling.sequence is 1, wanted "),
    ],
)
def test_a_wrong_value_is_one_line_unless_an_option_replaces_it(key, value, reason):
    keys = {f"general.sampling.{key}": value}
    with pytest.raises(HotsplitError) as refused:
        sampling_of(PATH, keys, {})
    assert str(refused.value).startswith(f"m.gguf: {reason}")
    fields = {
        found[0].rpartition(".")[2]: found[1]
        for found in ((name, field) for name, (_, field, _) in FULL.items())
    }
    given = {fields[key]: getattr(SamplingOptions, fields[key])}
    assert sampling_of(PATH, keys, given) == SamplingOptions()


def test_the_line_names_what_comes_from_the_file():
    keys = {"general.sampling.temp": np.float32(0.6), "general.sampling.top_k": np.int32(20)}
    line = "sampling as the model's file says: temperature 0.6, top_k 20; options replace it"
    assert sampling_line(PATH, keys, {}) == line
    assert "temperature" not in sampling_line(PATH, keys, {"temperature": 1.0})
    assert sampling_line(PATH, keys, {"temperature": 1.0, "top_k": 0}) is None
    assert sampling_line(PATH, {"general.name": "x"}, {}) is None
    more = {**keys, "general.sampling.typical_p": np.float32(0.9)}
    assert sampling_line(PATH, more, {}) == (
        f"{line}; general.sampling.typical_p: not known here, and left out"
    )


# ---- from a checkpoint ---------------------------------------------------------------------


SETTINGS = """
{"do_sample": true, "temperature": 0.6, "top_k": 20} => {"temperature": 0.6, "top_k": 20}
{"temperature": 0.7, "repetition_penalty": 1.05, "min_p": 0.0} =>
  {"temperature": 0.7, "repeat_penalty": 1.05, "min_p": 0.0}
{"do_sample": false, "temperature": 0.7} => {"temperature": 0.0}
{"do_sample": true, "top_p": null, "top_k": 0, "eos_token_id": 2} => {"top_k": 0}
{"do_sample": true, "top_p": 0.95} => {"top_p": 0.95}
{"do_sample": true} => {}
"""


@pytest.mark.parametrize(("config", "wanted"), rows_of(SETTINGS))
def test_a_checkpoints_settings(config, wanted, tmp_path):
    (tmp_path / "generation_config.json").write_text(config)
    config, wanted = json.loads(config), json.loads(wanted)
    theirs = GenerationConfig.from_pretrained(tmp_path)
    keys = sampling_keys(tmp_path)
    assert settings_of(PATH, keys) == wanted
    if theirs.do_sample is not False:
        for name, value in config.items():
            if value is not None and name not in ("do_sample", "eos_token_id"):
                assert getattr(theirs, name) == value


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"temperature": "hot"}, "temperature is 'hot', wanted a number; correct it there"),
        ({"top_k": 1.5}, "top_k is 1.5, wanted a whole number; correct it there"),
        ({"top_k": 10**12}, "top_k is 1000000000000, wanted a number of 32 bits; correct it"),
        ({"temperature": 1e300}, "temperature is 1e+300, wanted a number of 32 bits; correct"),
        ({"top_p": 7}, "top_p is 7, wanted a number from 0 to 1; correct it there"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0, wanted more than 0"),
        ({"do_sample": "no"}, "do_sample is 'no', wanted true or false; correct it there"),
    ],
)
def test_a_checkpoints_wrong_setting_is_one_line(config, reason, tmp_path):
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(HotsplitError) as refused:
        sampling_keys(tmp_path)
    assert str(refused.value).startswith(f"{path}: {reason}")


def test_conversions_carry_them(tmp_path):
    folder = random_llama(tmp_path / "hf")
    config = {"do_sample": True, "temperature": 0.6, "top_k": 20}
    (folder / "generation_config.json").write_text(json.dumps(config))
    convert(ConvertConfig(source=folder, output=tmp_path / "m.gguf"))
    convert(ConvertConfig(source=tmp_path / "m.gguf", output=tmp_path / "n.gguf", outtype="q8_0"))
    for name in ("m.gguf", "n.gguf"):
        keys = ModelFile.load(tmp_path / name).extra_keys
        assert settings_of(PATH, keys) == {"temperature": 0.6, "top_k": 20}


# ---- what uses them ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def greedy(tmp_path_factory):
    """A model whose file says that the likeliest token is taken."""
    folder = tmp_path_factory.mktemp("greedy")
    return save_model(folder, **{"general.sampling.temp": np.float32(0)})


def text_of(tokens):
    return "".join(token.text for token in tokens)


def test_the_engine_uses_them(greedy):
    plain = SamplingOptions(temperature=0.0)
    few = ChatOptions(generation=GenerationOptions(max_tokens=12))
    with Engine.load(greedy) as engine:
        assert engine.sampling == plain
        wanted = text_of(engine.generate("Once", 12, sampling=plain))
        assert text_of(engine.generate("Once", 12)) == wanted
        assert text_of(engine.generate("Once", 12, seed=5)) == wanted
        many = engine.generate_many(["Once"])
        assert text_of(token for _, token in many).startswith(wanted)
        said = []
        for sampling in (None, plain):
            with engine.chat(sampling=sampling, options=few) as chat:
                said.append(text_of(chat.say("Hi")))
        assert said[0] == said[1]
        hot = text_of(engine.generate("Once", 12, temperature=50.0, seed=1))
        own = replace(engine.sampling, temperature=50.0, seed=1)
        assert hot == text_of(engine.generate("Once", 12, sampling=own)) != wanted


def test_the_commands_use_them_and_say_so_once(greedy, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HOTSPLIT_CACHE", str(tmp_path))
    said = "sampling as the model's file says: temperature 0; options replace it"

    def run(*arguments):
        code = main([*arguments[:1], str(greedy), "-n", "12", "-t", "1", *arguments[1:]])
        found = capsys.readouterr()
        assert code == 0, found.err
        return found

    texts = []
    for command, *more in (["generate"], ["run"], ["generate", "--chat"], ["run", "--chat"]):
        arguments = [command, "-p", "Once", "--no-display-prompt", "--json", *more]
        done = run(*arguments)
        assert done.err.count(said) == 1, done.err
        report = json.loads(done.out)
        assert "seed" not in report  # nothing was drawn
        texts.append(report["text"])
        hot = run(*arguments, "--temp", "50", "-s", "1")
        assert "the model's file says" not in hot.err
        assert json.loads(hot.out)["text"] != texts[-1]
    assert texts[0] == texts[1] and texts[2] == texts[3]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Once\n")))
    done = run("chat")
    assert done.err.count(said) == 1 and texts[2] in done.out


def test_the_server_uses_them(greedy):
    with Served(greedy) as served:
        assert sum("temperature 0; options replace it" in line for line in served.log) == 1
        _, props = served.ask("/props")
        assert props["default_generation_settings"]["params"]["temperature"] == 0
        body = {"prompt": "Once", "max_tokens": 12}
        texts = [
            served.ask("/v1/completions", {**body, **more})[1]["choices"][0]["text"]
            for more in ({}, {"temperature": 0}, {"temperature": 50, "seed": 1})
        ]
        assert texts[0] == texts[1] != texts[2]
    with Served(greedy, "--temp", "50", "-s", "1") as served:
        assert not any("the model's file says" in line for line in served.log)
        assert served.ask("/v1/completions", body)[1]["choices"][0]["text"] == texts[2]
