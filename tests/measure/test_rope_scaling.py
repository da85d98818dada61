"""Texts longer than those a model was trained on, by scaled rotary embeddings.

Oracle: transformers with the same scaling in its config."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from checkpoints import random_llama, random_model
from hybrid_plans import SOME, L, make
from spec_keys import spec_keys
from test_families import GATED, OPT
from test_runtime import make_split
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile, with_rope_scaling
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.errors import HotsplitError
from hotsplit.model.rope import NO_SCALING, RopeScaling
from hotsplit.options.engine_config import EngineConfig

TRAINED, FACTOR = 128, 4.0
NUM_TOKENS = 300
PARAMETERS = {
    "none": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": FACTOR},
    "yarn": {"rope_type": "yarn", "factor": FACTOR, "original_max_position_embeddings": TRAINED},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return random_llama(tmp_path_factory.mktemp("llama") / "hf")


@pytest.fixture(scope="module")
def model(folder, tmp_path_factory) -> ModelFile:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    convert(ConvertConfig(source=folder, output=path, outtype="f32"))
    return ModelFile.load(path)


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return torch.randint(0, 256, (NUM_TOKENS,), generator=torch.manual_seed(1)).tolist()


def oracle(folder, ids, kind: str) -> torch.Tensor:
    own = AutoModelForCausalLM.from_pretrained(folder).config.rope_parameters["rope_theta"]
    rope = PARAMETERS[kind] | {"rope_theta": own}
    found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, rope_parameters=rope)
    with torch.no_grad():
        return found.eval()(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_logits_past_the_trained_length_equal_those_of_transformers(folder, model, ids, kind):
    want = oracle(folder, ids, kind)
    assert (want - oracle(folder, ids, "none")).abs().max() > 0.01 * want.abs().max()
    scaled = with_rope_scaling(model, kind, FACTOR, None)
    assert scaled.spec.context_length == TRAINED * FACTOR
    with Engine.of(scaled, device="cpu", context_length=NUM_TOKENS + 1) as engine:
        got = engine.logits(ids)
        assert (got - want).abs().max() < 2e-5 * want.abs().max()
        with engine.observe(lambda name, layer, tensor: None):
            in_torch = engine.logits(ids[:200])
        assert (in_torch - want[:200]).abs().max() < 2e-5 * want.abs().max()


def test_a_factor_follows_from_the_context(model):
    scaled = with_rope_scaling(model, "yarn", None, 3 * TRAINED)
    assert scaled.spec.rope_scaling == RopeScaling(kind="yarn", factor=3.0, original_length=TRAINED)
    assert scaled.spec.context_length == 3 * TRAINED
    assert with_rope_scaling(model, None, 3.0, None).spec == scaled.spec


def test_a_model_with_yarn_runs_without_it_or_with_another_factor(model):
    own = with_rope_scaling(model, "yarn", 2.0, None)
    assert with_rope_scaling(own, "none", None, None).spec == model.spec
    longer = with_rope_scaling(own, "yarn", 8.0, None).spec
    assert (longer.rope_scaling.factor, longer.context_length) == (8.0, 8 * TRAINED)
    assert with_rope_scaling(own, None, None, None) is own


def test_a_scaled_model_is_written_and_read_back(model, tmp_path):
    scaling = RopeScaling(
        kind="yarn",
        factor=2.5,
        original_length=TRAINED,
        beta_fast=16.0,
        beta_slow=0.5,
        attn_factor=0.75,
    )
    for wanted in (scaling, RopeScaling(kind="linear", factor=2.0), NO_SCALING):
        spec = model.bare_spec.with_scaling(wanted)
        path = tmp_path / f"{wanted.factor}.gguf"
        dataclasses.replace(model, bare_spec=spec, keys=spec_keys(spec)).save(path)
        assert ModelFile.load(path).spec.rope_scaling == wanted


def test_yarn_at_its_borders():
    """Pairs that turn more than `beta_fast` times within the original length keep their frequency;
    for those that turn less than `beta_slow` times, it is divided by the factor. A factor of 1
    changes nothing."""
    scaling = RopeScaling(kind="yarn", factor=4.0, original_length=4096)
    divisors = scaling.divisors(10000.0, 128)
    turns = 4096 * 10000.0 ** (-np.arange(64) / 64) / (2 * np.pi)
    assert (divisors[turns > 33] == 1.0).all() and (divisors[turns < 0.8] == 4.0).all()
    assert (np.diff(divisors) >= 0).all()
    none = RopeScaling(kind="yarn", factor=1.0, original_length=4096)
    assert (none.divisors(10000.0, 128) == 1.0).all() and none.magnitude == 1.0
    upside_down = dataclasses.replace(scaling, beta_fast=1.0, beta_slow=32.0)
    assert np.isfinite(upside_down.divisors(10000.0, 128)).all()


REFUSED = {
    "rope scaling 'ntk' is unknown; known: none, linear, yarn": ("ntk", 2.0, None),
    "needs a factor, --rope-scale, or a context above the 128": ("yarn", None, 128),
    "--rope-scaling linear needs a factor": ("linear", None, None),
    "rope scale 0.5, wanted 1 to 10,000": (None, 0.5, None),
    "context of 1,280,001 asked for, 10,000 times the 128 tokens": ("yarn", None, 1_280_001),
    "rope scale nan, wanted": ("yarn", float("nan"), None),
    "rope scale inf, wanted": ("linear", float("inf"), None),
    "a rope scale of 2 and --rope-scaling none": ("none", 2.0, None),
}


@pytest.mark.parametrize("words", REFUSED)
def test_useless_scalings_are_refused_in_a_line(model, words):
    with pytest.raises(HotsplitError, match=words):
        with_rope_scaling(model, *REFUSED[words])


def test_a_plan_for_longer_texts_wants_the_scaling_that_it_was_made_with(tmp_path):
    model = make(tmp_path)
    model.save(model.path)
    length = model.spec.context_length
    scaled = with_rope_scaling(model, None, 2.0, None)
    make_split(scaled, [SOME] * L, context_length=2 * length).save(tmp_path / "s.gguf")
    with pytest.raises(HotsplitError, match="give the --rope-scaling that it was made with"):
        Engine.load(model.path, tmp_path / "s.gguf", device="cpu")
    with Engine.load(model.path, tmp_path / "s.gguf", device="cpu", rope_scale=2.0) as engine:
        assert engine.context_length == 2 * length


def test_the_command_line_says_what_it_did(model, capfd):
    from click.testing import CliRunner

    from hotsplit.commands.all_commands import cli

    asked = ["generate", str(model.path), "-p", "a", "-n", "2", "--device", "cpu"]
    refused = CliRunner().invoke(cli, [*asked, "-c", "256"])
    assert "--rope-scaling yarn stretches it" in str(refused.exception)
    done = CliRunner().invoke(cli, [*asked, "-c", "256", "--rope-scaling", "yarn"])
    assert done.exit_code == 0, done.exception
    assert "rotary embeddings: YaRN, 2 times the 128 tokens of its training" in done.output


def test_a_scale_of_1_is_said_to_change_nothing(model, capsys):
    from hotsplit.cli import main

    asked = ["generate", str(model.path), "-p", "a", "-n", "2", "--device", "cpu"]
    said = []
    for scale in ("1", "2"):
        assert main([*asked, "--rope-scaling", "yarn", "--rope-scale", scale]) == 0
        said.append("a rope scale of 1 changes nothing" in capsys.readouterr().err)
    assert said == [True, False]


def test_eval_compares_modes_under_a_scaling_and_says_which(model, tmp_path, capsys):
    """Under a scaling, pieces of the text are longer than the trained context."""
    from hotsplit.cli import main
    from hotsplit.measure.evaluate.evaluate_config import EvalConfig
    from hotsplit.measure.evaluate.quality import evaluate

    text = tmp_path / "t.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 300)
    config = EvalConfig(
        model=model.path,
        corpora=(text,),
        max_tokens=600,
        engine=EngineConfig(mode="exact", device="cpu", context_length=512, rope_scaling="yarn"),
    )
    totals, pieces = [], []
    report = evaluate(config, pieces.append, totals.append)
    assert max(pieces) > TRAINED and sum(pieces) == sum(totals)
    assert report.perplexity == pytest.approx(report.dense_perplexity, rel=1e-3)
    own = dataclasses.replace(config.engine, context_length=None, rope_scaling=None)
    plain = evaluate(dataclasses.replace(config, engine=own))
    other = dataclasses.replace(config.engine, rope_scaling="linear")
    linear = evaluate(dataclasses.replace(config, engine=other))
    assert len({each.dense_perplexity for each in (report, plain, linear)}) == 3
    words = ["eval", str(model.path), "--corpus", str(text), "--mode", "exact", "--tokens", "300"]
    assert main([*words, "--device", "cpu", "-c", "512", "--rope-scaling", "yarn"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert "rotary embeddings: YaRN, 4 times the 128 tokens of its training" in lines
    assert main([*words, "--device", "cpu"]) == 0
    assert "rotary" not in capsys.readouterr().err
    assert main([*words, "--rope-scaling", "yarn"]) == 1
    assert "needs a factor, --rope-scale" in capsys.readouterr().err
    with pytest.raises(HotsplitError, match="rope scale 0.5"):
        dataclasses.replace(config.engine, rope_scale=0.5)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 1e4,
}
FIXED = {
    "its positions are learned": OPTConfig(**OPT),
    "it was trained with positions divided by 4": LlamaConfig(
        **GATED, rope_parameters=PARAMETERS["linear"] | {"rope_theta": 1e4}
    ),
    "its frequencies are scaled already": LlamaConfig(**GATED, rope_parameters=LLAMA3),
}


@pytest.mark.parametrize("words", FIXED)
def test_models_whose_positions_cannot_be_scaled(tmp_path, words):
    convert(
        ConvertConfig(source=random_model(tmp_path / "hf", FIXED[words]), output=tmp_path / "m")
    )
    with pytest.raises(HotsplitError, match=words) as caught:
        with_rope_scaling(ModelFile.load(tmp_path / "m"), "yarn", 2.0, None)
    assert "leave --rope-scaling and --rope-scale out" in str(caught.value)


@pytest.mark.parametrize("factor", [1e9, 10**30])
def test_a_context_beyond_every_count_is_refused_before_anything_is_written(
    folder, tmp_path, factor
):
    found = json.loads((folder / "config.json").read_text())
    found["rope_parameters"] |= PARAMETERS["yarn"] | {"factor": factor}
    hostile = shutil.copytree(folder, tmp_path / "hf")
    (hostile / "config.json").write_text(json.dumps(found))
    with pytest.raises(HotsplitError, match=r"factor is 1e\+\d+; times 128 tokens it is a context"):
        convert(ConvertConfig(source=hostile, output=tmp_path / "m.gguf"))
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_prompt_kept_under_another_scaling_is_not_restored(model, ids, tmp_path):
    from hotsplit.runtime.generate.prompt_cache import restore_prompt, save_prompt

    def engine(factor):
        return Engine.of(with_rope_scaling(model, "yarn", factor, None), device="cpu")

    with engine(2.0) as first, first.sequence() as sequence:
        sequence.extend(ids[:20])
        save_prompt(sequence, tmp_path / "state", first.prompt_key())
    with (
        engine(4.0) as second,
        second.sequence() as sequence,
        pytest.raises(HotsplitError, match="another rope scaling: 'YaRN, 2 times"),
    ):
        restore_prompt(sequence, tmp_path / "state", second.prompt_key())
