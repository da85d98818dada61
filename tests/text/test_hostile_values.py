"""Third-party values: refused if meaningless, reported if they are left out, and quoted in a
readable line. fuzz_meaning.py has whole tables of them."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from checkpoints import edit_config, random_llama
from models import make_model, make_profile
from paths import TESTS
from test_runtime import make_split

from hotsplit.artifacts.model_file import TOKENIZER_KEY, ModelFile
from hotsplit.artifacts.profile_file import Profile
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import read_gguf, write_gguf
from hotsplit.files.typed import MAX_SHOWN, one_line, shown
from hotsplit.runtime.text.codec import TextCodec
from hotsplit.tokens.tokenizer_text import MAX_TOKENS, read_tokenizer

FOUND = TESTS / "damage" / "fuzz_corpus"


@pytest.fixture(scope="module")
def silu(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hf") / "hf"
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}
    return random_llama(folder, hidden_act="silu", vocab_size=300, **sizes)


def copied(source: Path, tmp_path: Path, name: str, **values: object) -> Path:
    """The checkpoint with other values in one of its JSON files."""
    folder = tmp_path / "changed"
    shutil.copytree(source, folder)
    if not (folder / name).exists():
        (folder / name).write_text("{}")
    edit_config(folder, lambda found: found.update(values), name)
    return folder


def refusal_of(call, *arguments, **options) -> str:
    with pytest.raises(HotsplitError) as caught:
        call(*arguments, **options)
    line = str(caught.value)
    assert len(line) < 600
    return line


# ------------------------------------------------------------------ tokenizers

BROKEN = {
    "data did not match": {"normalizer": {"type": "x"}},
    "without text or id": {"added_tokens": [{"id": 0, "content": ["x"]}]},
    "merge that is not two": {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a"]}},
    "out of vocabulary": {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}},
    "wanted less than": {"model": {"type": "BPE", "vocab": {"a": MAX_TOKENS}, "merges": []}},
}


@pytest.mark.parametrize("words", BROKEN)
@pytest.mark.parametrize("layout", ["sparse", "stock"])
def test_a_tokenizer_that_cannot_be_read_is_not_converted(silu, tmp_path, words, layout):
    """The converter notices it even without the verification."""
    folder, output = copied(silu, tmp_path, "tokenizer.json", **BROKEN[words]), tmp_path / "m.gguf"
    line = refusal_of(convert, ConvertConfig(source=folder, output=output, layout=layout))
    assert "tokenizer.json" in line and words in line
    assert not output.exists()


def with_tokenizer(silu: Path, tmp_path: Path, text: str) -> Path:
    """A model file with this tokenizer."""
    whole, path = tmp_path / "whole.gguf", tmp_path / "changed.gguf"
    convert(ConvertConfig(source=silu, output=whole))
    keys, tensors = read_gguf(whole, "model")
    keys |= {TOKENIZER_KEY: text}
    write_gguf(path, str(keys.pop("general.architecture")), keys, tensors)
    return path


def test_a_tokenizer_that_cannot_be_read_is_refused_where_a_file_has_it(silu, tmp_path):
    values = json.loads((silu / "tokenizer.json").read_text()) | {"normalizer": {"type": "x"}}
    path = with_tokenizer(silu, tmp_path, json.dumps(values))
    line = refusal_of(TextCodec.of, ModelFile.load(path))
    assert str(path) in line and "data did not match" in line
    again = ConvertConfig(source=path, output=tmp_path / "again.gguf", outtype="q8_0")
    assert "data did not match" in refusal_of(convert, again)


def test_a_panic_of_the_library_is_a_refusal(capfd):
    text = (FOUND / "tokenizer" / "panic-on-prefix.refused").read_text()
    assert "out of range" in refusal_of(read_tokenizer, "there", text)
    assert "panicked" in capfd.readouterr().err, "otherwise the input is refused for another reason"


def test_tokens_that_share_an_id_are_refused(silu):
    """The library reads such a file, and decodes all of the tokens as one of them."""
    values = json.loads((silu / "tokenizer.json").read_text())
    vocab = values["model"]["vocab"]
    one, *others = list(vocab)[100:150]
    for token in others:
        vocab[token] = vocab[one]
    line = refusal_of(read_tokenizer, "there", json.dumps(values))
    assert f"both have the id {vocab[one]}; get tokenizer.json again" in line


def test_wrong_ids_and_empty_texts_of_added_tokens_change_no_text(silu):
    """The library takes the ids of added tokens from the vocabulary if they are in it, and leaves
    empty ones out, so neither is refused."""
    text = "def f(x):\n    return x + 1\n"
    values = json.loads((silu / "tokenizer.json").read_text())
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    token = {"id": 99_999_999, "content": next(iter(values["model"]["vocab"])), "special": True}
    token |= plain
    ids = read_tokenizer("there", json.dumps(values)).encode(text).ids
    for added in (token, token | {"content": ""}):
        found = read_tokenizer("there", json.dumps(values | {"added_tokens": [added]}))
        assert found.encode(text).ids == ids and found.decode(ids) == text


# ------------------------------------------------------------------ ids of special tokens


@pytest.mark.parametrize("key", ["eos_token_id", "bos_token_id", "pad_token_id"])
def test_a_special_token_that_is_not_an_id_is_refused(silu, tmp_path, key):
    for number, wrong in enumerate((-1, [0, "x"], "x", 1.5, True, {}, "x" * 100_000)):
        folder = copied(silu, tmp_path / str(number), "config.json", **{key: wrong})
        line = refusal_of(convert, ConvertConfig(source=folder, output=tmp_path / "m.gguf"))
        assert f"config.json: {key} has" in line


@pytest.mark.parametrize("key", ["eos_token_id", "bos_token_id", "pad_token_id"])
def test_a_special_token_that_the_model_lacks_is_noted(silu, tmp_path, key):
    folder = copied(silu, tmp_path, "config.json", **{key: 99_999})
    report = convert(ConvertConfig(source=folder, output=tmp_path / "m.gguf"))
    assert any(
        f"config.json: {key} 99999 is not a token of the model" in note for note in report.notes
    )
    numbers = ModelFile.load(report.output).extra_keys
    assert 99_999 not in [n for key, n in numbers.items() if key.endswith("token_id")]


# ------------------------------------------------------------------ quotes


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("architectures", ["x" * 100_000], "architecture 'xxx"),
        ("hidden_act", "x" * 100_000, "hidden_act 'xxx"),
        ("rope_scaling", {"rope_type": "x" * 100_000}, "of type 'xxx"),
        ("rope_scaling", "x" * 100_000, "rope_scaling is 'xxx"),
        ("quantization_config", {"a": "x" * 100_000}, "packed in a way that cannot be read"),
        ("layer_types", ["x" * 100_000], "layer_types has 'xxx"),
        ("num_hidden_layers", "x" * 100_000, "num_hidden_layers is 'xxx"),
        ("tie_word_embeddings", ["x" * 100_000], "tie_word_embeddings is ['xxx"),
    ],
)
def test_a_refusal_quotes_what_can_be_read(silu, tmp_path, name, value, words):
    folder = copied(silu, tmp_path, "config.json", **{name: value})
    line = refusal_of(convert, ConvertConfig(source=folder, output=tmp_path / "m.gguf"))
    assert words in line


def test_a_value_is_shown_short_and_in_one_line():
    assert shown("a\nb") == r"'a\nb'" and shown(np.uint32(7)) == "7" and shown(None) == "None"
    assert shown("x" * MAX_SHOWN) == repr("x" * MAX_SHOWN)
    many = (["x" * 10**6], {"x" * 10**6: 1}, list(range(99)))
    for long in ("x" * (MAX_SHOWN + 1), "x" * 10**6, *many):
        assert len(shown(long)) == MAX_SHOWN and shown(long).endswith("...")
    assert shown(10**61) == "a number of more than 60 digits"
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    assert shown(deep) == "a list in a list, and so on"
    assert one_line("a\n b") == "a b" and len(one_line("x" * 999)) == 200


# ------------------------------------------------------------------ counts and plans


def test_counts_that_overflow_are_refused():
    """The bins of one row, each below 2^63, sum to the right number modulo 2^64."""
    profile = make_profile(make_model())
    histogram_LB = profile.gate_histogram_LB.copy()
    histogram_LB[0, 1:5] = 1 << 62
    assert (histogram_LB.sum(axis=1) == profile.gate_histogram_LB.sum(axis=1)).all()
    wrong = dataclasses.replace(profile, gate_histogram_LB=histogram_LB)
    assert "every neuron once per token" in refusal_of(wrong.validate)
    many = dataclasses.replace(profile, num_tokens=1 << 62)
    assert "more than can be counted" in refusal_of(many.validate)


def test_a_sum_of_profiles_that_overflows_is_refused(tmp_path):
    profile = make_profile(make_model(), num_tokens=1 << 56)
    most = profile
    for _ in range(6):
        most = most.merge(most)
    assert most.num_tokens == 1 << 62
    assert "more than can be counted" in refusal_of(most.save, tmp_path / "p.safetensors")
    profile.save(tmp_path / "p.safetensors")
    assert Profile.load(tmp_path / "p.safetensors").num_tokens == 1 << 56


def test_a_plan_for_more_context_than_the_model_has_is_refused():
    model = make_model()
    plan = make_split(model, [[1, 2]] * model.spec.num_layers, context_length=33)
    assert "a context of 33 tokens" in refusal_of(plan.check_against, model, Path("p.gguf"))
    plan = make_split(model, [[1, 2]] * model.spec.num_layers, context_length=32)
    plan.check_against(model, Path("p.gguf"))


def test_a_plan_without_layers_is_refused():
    plan = make_split(make_model(), [[1, 2]] * 2)
    none = dataclasses.replace(plan, hot=(), dense_on_gpu=())
    assert "0 layers" in refusal_of(none.validate)
