"""End tokens are those that a model file or a checkpoint names and, in third-party files without a
list of them, special tokens with a known text; no others."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from checkpoints import edit_config, random_llama
from models import make_model, make_sizes
from texts import byte_level_tokenizer

from hotsplit.artifacts.model_file import END_KEY, TOKENIZER_KEY, ModelFile
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.convert.vocabulary import vocabulary_keys
from hotsplit.errors import HotsplitError
from hotsplit.runtime.text.codec import TextCodec

SIZE = 400


def model_of(own: bool, **keys) -> ModelFile:
    """A model with a tokenizer.json (`own`) or, like third-party files, without one."""
    tokenizer = byte_level_tokenizer("smollm", SIZE - 10)
    tokenizer.add_special_tokens(["<|im_end|>", "<|eot_id|>", "<|other|>"])
    tokenizer.add_tokens(["<|end|>"])
    known = vocabulary_keys(json.loads(tokenizer.to_str()), SIZE)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    known["tokenizer.ggml.merges"] = [" ".join(merge) for merge in merges]
    if own:
        known[TOKENIZER_KEY] = tokenizer.to_str()
    return make_model(sizes=make_sizes(vocab_size=SIZE), extra_keys=known | keys)


def key(kind: str) -> str:
    return f"tokenizer.ggml.{kind}_token_id"


def test_all_kinds_and_the_list_end_a_text():
    ids = {key(kind): np.uint32(n) for n, kind in enumerate(("eos", "eot", "eom"), start=3)}
    assert TextCodec.of(model_of(True, **ids)).end_ids == {3, 4, 5}
    listed = {END_KEY: [np.int32(9), np.int32(7)]}
    assert TextCodec.of(model_of(True, **ids, **listed)).end_ids == {3, 4, 5, 7, 9}
    assert TextCodec.of(model_of(True)).end_ids == set()


def test_third_party_files_end_at_tokens_that_are_known_by_name():
    """Their eos is often that of the base model, before it was trained to chat."""
    codec = TextCodec.of(model_of(False, **{key("eos"): np.uint32(3)}))
    known = {codec.tokenizer.token_to_id(text) for text in ("<|im_end|>", "<|eot_id|>")}
    known.add(codec.tokenizer.token_to_id("<|endoftext|>"))
    assert codec.end_ids == (known | {3}) - {None}
    assert codec.tokenizer.token_to_id("<|end|>") not in codec.end_ids  # not a special token
    listed = {END_KEY: [np.int32(9)]}
    assert TextCodec.of(model_of(False, **listed)).end_ids == {9}


@pytest.mark.parametrize("kind", ["eos", "eot", "eom", "bos"])
@pytest.mark.parametrize(
    "wrong", [np.int32(-1), np.uint32(99_999), np.uint32(SIZE), np.uint32(0xFFFFFFFF), "x", True,
              np.float32(3.0), [np.int32(3)]],
)  # fmt: skip
def test_an_id_that_no_token_has_is_refused(kind, wrong):
    with pytest.raises(HotsplitError, match=f"{kind}_token_id is .* wanted a token") as refusal:
        TextCodec.of(model_of(True, **{key(kind): wrong}))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "wrong", [[np.int32(3), np.int32(-1)], [np.int32(SIZE)], ["x"], "x", [np.int32(3), "3"]]
)
def test_a_list_with_a_wrong_id_is_refused(wrong):
    with pytest.raises(HotsplitError, match="end_token_ids is .* wanted a token") as refusal:
        TextCodec.of(model_of(True, **{END_KEY: wrong}))
    assert "\n" not in str(refusal.value)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return random_llama(tmp_path_factory.mktemp("checkpoint") / "hf")


def converted(checkpoint: Path, tmp_path: Path, ids: object) -> tuple[frozenset[int], str]:
    """(end tokens, notes) of a conversion with `ids` as the generation config's eos_token_id."""
    folder = Path(shutil.copytree(checkpoint, tmp_path / "hf"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    report = convert(ConvertConfig(source=folder, output=tmp_path / "m.gguf"))
    return TextCodec.of(ModelFile.load(tmp_path / "m.gguf")).end_ids, "\n".join(report.notes)


def test_a_checkpoints_list_is_kept(checkpoint, tmp_path):
    ends, notes = converted(checkpoint, tmp_path, [9, 5, 100_000])
    assert ends >= {5, 9} and max(ends) == 9
    assert "eos_token_id 100000 is not a token of the model" in notes


@pytest.mark.parametrize("wrong", [-1, "x", [3, -1], [3, "3"], [True], 2.0, {"a": 1}])
def test_a_checkpoint_with_a_wrong_id_is_refused(wrong, checkpoint, tmp_path):
    with pytest.raises(HotsplitError, match="eos_token_id has .* wanted token ids") as refusal:
        converted(checkpoint, tmp_path, wrong)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "m.gguf").exists()


def test_the_list_of_the_config_is_kept_too(checkpoint, tmp_path):
    folder = Path(shutil.copytree(checkpoint, tmp_path / "hf"))
    edit_config(folder, lambda config: config.update(eos_token_id=[4, 6]))
    convert(ConvertConfig(source=folder, output=tmp_path / "m.gguf"))
    assert TextCodec.of(ModelFile.load(tmp_path / "m.gguf")).end_ids >= {4, 6}


def test_the_end_of_a_message_of_gpt_oss_does_not_end_its_answer():
    marks = ["<|end|>", "<|return|>", "<|call|>"]
    for count in (1, 2, 3):
        tokenizer = byte_level_tokenizer("smollm", SIZE - 10)
        tokenizer.add_special_tokens(marks[:count])
        known = vocabulary_keys(json.loads(tokenizer.to_str()), SIZE)
        merges = json.loads(tokenizer.to_str())["model"]["merges"]
        known["tokenizer.ggml.merges"] = [" ".join(merge) for merge in merges]
        known[key("eot")] = np.uint32(tokenizer.token_to_id("<|end|>"))
        codec = TextCodec.of(make_model(sizes=make_sizes(vocab_size=SIZE), extra_keys=known))
        names = {codec.tokenizer.id_to_token(i) for i in codec.end_ids}
        assert names & {*marks} == ({*marks[1:]} if count == 3 else {*marks[:count]})
