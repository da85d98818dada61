"""End tokens are those that a model file or a checkpoint names and, as in llama.cpp, tokens with a
known text; no others."""

import json
import shutil
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from checkpoints import edit_config, random_llama
from models import make_model, make_sizes
from texts import byte_level_tokenizer
from tokenizers import Tokenizer, processors

from hotsplit import Engine
from hotsplit.artifacts.model_file import END_KEY, TOKENIZER_KEY, ModelFile
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.convert.vocabulary import vocabulary_keys
from hotsplit.errors import HotsplitError
from hotsplit.options.generation_options import SamplingOptions
from hotsplit.runtime.text import codec as codec_module
from hotsplit.runtime.text.codec import TextCodec
from hotsplit.tokens.tokenizer_kinds import CODE_TEXTS, END_TEXTS

SIZE = 400
ENDS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end|>")  # of model_of
EVERY_END = (*END_TEXTS, *(text for texts in CODE_TEXTS.values() for text in texts))


def keys_of(tokenizer: Tokenizer) -> dict:
    """llama.cpp's keys of a tokenizer."""
    values = json.loads(tokenizer.to_str())
    merges = [" ".join(merge) for merge in values["model"]["merges"]]
    return vocabulary_keys(values, SIZE) | {"tokenizer.ggml.merges": merges}


def model_of(own: bool, **keys) -> ModelFile:
    """A model with a tokenizer.json (`own`) or, like third-party files, without one."""
    tokenizer = byte_level_tokenizer("smollm", SIZE - 10)
    tokenizer.add_special_tokens(["<|im_end|>", "<|eot_id|>", "<|other|>"])
    tokenizer.add_tokens(["<|end|>"])
    ends = {tokenizer.token_to_id(text) for text in ENDS}
    assert not ends & {None, 3, 4, 5, 7, 9}
    known = keys_of(tokenizer)
    if own:
        known[TOKENIZER_KEY] = tokenizer.to_str()
    return make_model(sizes=make_sizes(vocab_size=SIZE), extra_keys=known | keys)


def key(kind: str) -> str:
    return f"tokenizer.ggml.{kind}_token_id"


def test_all_kinds_and_the_list_end_a_text():
    ids = {key(kind): np.uint32(n) for n, kind in enumerate(("eos", "eot", "eom"), start=3)}
    assert named_ends(model_of(True, **ids)) == {3, 4, 5}
    listed = {END_KEY: [np.int32(9), np.int32(7)]}
    assert named_ends(model_of(True, **ids, **listed)) == {3, 4, 5, 7, 9}
    assert named_ends(model_of(True)) == set()


def named_ends(model: ModelFile) -> set[int]:
    """The end tokens besides those with a known text, all of which must be there."""
    codec = TextCodec.of(model)
    known = {codec.tokenizer.token_to_id(text) for text in ENDS}
    assert None not in known and codec.tokenizer.token_to_id("<|other|>") not in codec.end_ids
    assert codec.end_ids >= known
    return {*codec.end_ids} - known


@pytest.mark.parametrize("own", [False, True])
def test_tokens_that_are_known_by_name_end_a_text(own):
    """A file's eos is often that of the base model, before it was trained to chat; ours have the
    checkpoint's list, which may be that as well."""
    assert named_ends(model_of(own, **{key("eos"): np.uint32(3)})) == {3}
    assert named_ends(model_of(own, **{END_KEY: [np.int32(9)]})) == {9}


def with_texts(texts: Sequence[str], kind: int, **keys) -> ModelFile:
    """A third-party file whose last tokens have these texts and this type."""
    tokenizer = byte_level_tokenizer("qwen2", SIZE - 60)
    known = keys_of(tokenizer)
    tokens, types = known["tokenizer.ggml.tokens"], known["tokenizer.ggml.token_type"]
    tokens[tokens.index("<|endoftext|>")] = "<|begin|>"
    tokens[SIZE - len(texts) :] = texts
    types[SIZE - len(texts) :] = [kind] * len(texts)
    return make_model(sizes=make_sizes(vocab_size=SIZE), extra_keys=known | keys)


@pytest.mark.parametrize("kind", [1, 3, 4, 5])
@pytest.mark.parametrize("text", EVERY_END)
def test_each_known_text_ends_a_text_whatever_its_type(text, kind):
    """A template's text is then one token, as in llama.cpp, and not its letters."""
    codec = TextCodec.of(with_texts([text], kind, **{key("eos"): np.uint32(3)}))
    assert codec.end_ids == {3, SIZE - 1}
    assert codec.encode_rendered(f"a{text}a") == [*codec.encode("a"), SIZE - 1, *codec.encode("a")]
    assert codec.literal.encode_rendered(text) != [SIZE - 1]


@pytest.mark.parametrize("text", ["<|im_start|>", "<|fim_prefix|>", "<|other|>", "<PAD", "[PAD1]"])
def test_other_texts_end_nothing(text):
    assert TextCodec.of(with_texts([text], 3)).end_ids == set()


def test_a_named_token_of_code_is_the_only_one_of_its_kind():
    named = {key("fim_pad"): np.uint32(7)}
    assert TextCodec.of(with_texts(["[PAD]", "<|file_sep|>"], 3, **named)).end_ids == {7, SIZE - 1}


PARTS = ("<|end|> <|return|> <|call|>", "<|end|> <|flush|> <|calls|>", "</s> <|tool_response>")


@pytest.mark.parametrize("texts", [*map(str.split, PARTS)])
def test_a_text_that_ends_a_part_of_a_turn_ends_nothing(texts):
    first = SIZE - len(texts)
    assert TextCodec.of(with_texts(texts, 3)).end_ids == {*range(first + 1, SIZE)}
    some = texts[:-1]
    assert TextCodec.of(with_texts(some, 3)).end_ids == {*range(SIZE - len(some), SIZE)}


@pytest.mark.parametrize("kind", [1, 3, 4])
def test_a_chat_stops_at_a_turn_that_the_file_does_not_name(tmp_path, kind):
    model = with_texts(["<|im_end|>"], kind, **{key("eos"): np.uint32(3)})
    model.save(tmp_path / "m.gguf")
    with Engine.load(tmp_path / "m.gguf") as engine:
        sampling = SamplingOptions(temperature=0, logit_bias=((SIZE - 1, 1e6),))
        assert list(engine.generate("a", 5, sampling=sampling)) == []
        assert engine.last_run.stopped_by == "end of text"


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("kind", ["eos", "eot", "eom", "bos", "fim_pad"])
@pytest.mark.parametrize(
    "above", [np.int32(-1), np.uint32(99_999), np.uint32(SIZE), np.uint64(0xFFFFFFFF)]
)
def test_a_number_that_no_token_has_is_noted_and_ignored(kind, above, own, caplog):
    """Files state such a number for a token that they do not use."""
    codec_module._note_unused.cache_clear()
    caplog.set_level("INFO", "hotsplit")
    for _ in range(2):
        codec = TextCodec.of(model_of(own, **{key(kind): above}))
    assert named_ends(model_of(own, **{key(kind): above})) == set() and codec.begin_id is None
    assert [*codec.encode("a")] == codec.encode_rendered("a")
    (line,) = caplog.messages
    assert line == (
        f"note: memory.gguf: {key(kind)} {above} is not a token of the model, 0 to 399, and is"
        " ignored"
    )


def test_a_number_that_no_token_has_is_refused_for_a_token_that_every_text_gets():
    for flag, kind in (("add_bos", "bos"), ("add_eos", "eos")):
        keys = {f"tokenizer.ggml.{flag}_token": True, key(kind): np.uint32(SIZE)}
        with pytest.raises(
            HotsplitError, match="wanted the id of a token, which is added to every"
        ):
            TextCodec.of(model_of(False, **keys))


WRONG_ID = ("x", True, np.float32(3.0), [np.int32(3)])
WRONG_LIST = ([np.int32(3), np.int32(-1)], [np.int32(SIZE)], ["x"], "x", [np.int32(3), "3"])


@pytest.mark.parametrize(
    "name, wrong",
    [
        *product(map(key, ("eos", "eot", "eom", "bos")), WRONG_ID),
        *((END_KEY, wrong) for wrong in WRONG_LIST),
    ],
)
def test_an_id_that_is_no_token_is_refused(name, wrong):
    with pytest.raises(HotsplitError, match=f"{name} is .* wanted a token"):
        TextCodec.of(model_of(True, **{name: wrong}))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return random_llama(tmp_path_factory.mktemp("checkpoint") / "hf")


def converted(checkpoint: Path, tmp_path: Path, ids: object) -> tuple[frozenset[int], str]:
    """(end tokens, notes) of a conversion with `ids` as the generation config's eos_token_id."""
    folder = Path(shutil.copytree(checkpoint, tmp_path / "hf"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    report = convert(ConvertConfig(source=folder, output=tmp_path / "m.gguf"))
    return TextCodec.of(ModelFile.load(tmp_path / "m.gguf")).end_ids, "\n".join(report.notes)


def test_a_checkpoint_that_names_one_end_stops_at_the_others_too(checkpoint, tmp_path):
    """Its template ends turns with a token that its configs leave out."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    folder = Path(shutil.copytree(checkpoint, tmp_path / "in"))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    edit_config(folder, lambda config: config.update(eos_token_id=0))
    ends, _ = converted(folder, tmp_path, 0)
    assert ends == {0, tokenizer.token_to_id("<|im_end|>")}


def test_a_checkpoints_list_is_kept(checkpoint, tmp_path):
    ends, notes = converted(checkpoint, tmp_path, [9, 5, 100_000])
    assert ends >= {5, 9} and max(ends) == 9
    assert "eos_token_id 100000 is not a token of the model" in notes
    folder = Path(shutil.copytree(checkpoint, tmp_path / "of the config"))
    edit_config(folder, lambda config: config.update(eos_token_id=[4, 6]))
    convert(ConvertConfig(source=folder, output=tmp_path / "c.gguf"))
    assert TextCodec.of(ModelFile.load(tmp_path / "c.gguf")).end_ids >= {4, 6}


# ---- the token that begins a text
# -----------------------------------------------------------------


TWICE = [(True, "<|im_end|>" * count + text) for count, text in ((1, "a"), (1, ""), (2, "a"))]
ONCE = [(True, text) for text in ("a<|im_end|>", "a", "")]
ONCE += [(False, "<|im_end|>" * count + "a") for count in (1, 2)]


@pytest.mark.parametrize(
    "adds, text, is_warned",
    [*((*case, True) for case in TWICE), *((*case, False) for case in ONCE)],
)
@pytest.mark.parametrize("own", [False, True])
def test_a_text_that_repeats_the_beginning_is_warned_of_once(own, adds, text, is_warned, caplog):
    codec_module._warn_of_two.cache_clear()
    begin = TextCodec.of(model_of(own)).tokenizer.token_to_id("<|im_end|>")
    model = model_of(own, **{key("bos"): np.uint32(begin), "tokenizer.ggml.add_bos_token": adds})
    codec = TextCodec.of(model)
    if own and adds:
        codec.tokenizer.post_processor = processors.TemplateProcessing(
            single="<|im_end|> $A", special_tokens=[("<|im_end|>", begin)]
        )
    for _ in range(2):
        codec.encode(text)
        codec.encode_rendered(text)
    assert len(caplog.messages) == is_warned
    for line in caplog.messages:
        assert "begins with <|im_end|>, which the tokenizer adds as well" in line
