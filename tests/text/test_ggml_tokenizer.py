"""A tokenizer rebuilt from llama.cpp's keys equals the one that the keys were made from. One that
cannot be used is refused before any work, with all else that is wrong; a tokenizer.json that the
user gives takes its place."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from checkpoints import random_llama, save_tokenizer
from paths import ROOT
from texts import (
    COMBINING,
    PUBLISHED,
    byte_level_tokenizer,
    merge_by_score,
    mixed_lines,
    put_tokenizer,
    sentencepiece_tokenizer,
)
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from hotsplit.artifacts.model_file import TOKENIZER_KEY, ModelFile
from hotsplit.cli import main
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.convert.tokenizer import tokenizer_keys
from hotsplit.convert.vocabulary import byte_level_kind
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import read_gguf, write_gguf
from hotsplit.run.housekeeping import list_cache
from hotsplit.runtime.text.codec import TextCodec, TextStream
from hotsplit.tokens.byte_level import BYTE_LEVEL_KINDS
from hotsplit.tokens.ggml_tokenizer import ggml_tokenizer, merges_of_scores

BUNDLED = ROOT / "examples/tiny-relu"
WHERE = Path("theirs.gguf")


def folder_of(name: str, folder: Path) -> Path:
    """A folder with the tokenizer of that name."""
    if name == "bundled":
        return BUNDLED
    folder.mkdir(exist_ok=True)
    if name == "few words":
        save_tokenizer(folder, 320)
    elif name == "llama":
        put_tokenizer(folder, sentencepiece_tokenizer(600), "<s>", "</s>")
    else:
        end = "<|endoftext|>"
        put_tokenizer(folder, byte_level_tokenizer(name, 600), end, end)
    return folder


def keys_of(folder: Path, **changes: object) -> dict:
    """llama.cpp's keys alone; a change to None leaves the key out."""
    size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    keys = tokenizer_keys(folder, size + 5, "stock").keys
    del keys[TOKENIZER_KEY]
    keys |= {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    return {name: value for name, value in keys.items() if value is not None}


NAMES = ["bundled", "few words", "gpt-2", "smollm", "llama-bpe", "smaug-bpe", "qwen2", "qwen35"]
NAMES += ["llama"]


@pytest.mark.parametrize("name", NAMES)
def test_a_rebuilt_tokenizer_gives_the_same_tokens_and_text(tmp_path, name):
    folder = folder_of(name, tmp_path / "c")
    source = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rebuilt = ggml_tokenizer(WHERE, keys_of(folder))
    lines = mixed_lines()
    assert len(lines) > 250
    for line in lines:
        ids = source.encode(line).ids
        assert rebuilt.encode(line).ids == ids, line
        plain = source.encode(line, add_special_tokens=False).ids
        assert rebuilt.encode(line, add_special_tokens=False).ids == plain
        for skips in (False, True):
            assert rebuilt.decode(ids, skips) == source.decode(ids, skips)
            assert streamed(rebuilt, ids, skips) == streamed(source, ids, skips)
    assert rebuilt.decode([source.get_vocab_size()]) == "", "padding has no text"


OTHERS = "qwen2 deepseek-r1-qwen, llama-bpe falcon3, gpt-2 phi-2, smollm refact, smaug-bpe glm4"


@pytest.mark.parametrize("name, other", [*map(str.split, OTHERS.split(", "))])
def test_a_pre_tokenizer_has_all_its_names(tmp_path, name, other):
    """tests/llamacpp compares each name with llama.cpp's."""
    keys = keys_of(folder_of(name, tmp_path / "c"), add_bos_token=None)
    found = ggml_tokenizer(WHERE, keys | {"tokenizer.ggml.pre": other})
    assert found.to_str() == ggml_tokenizer(WHERE, keys).to_str()


SPLIT = "HelloWORLD it'S x==y, 12345 a.b\n\nαΑहि 数あア\t  1"
SPLITS = {  # tests/llamacpp compares tokens with llama.cpp itself
    "gpt-2": "HelloWORLD| it|'|S| x|==|y|,| 12345| a|.|b|\n|\n|αΑह|ि| 数あア|\t | 1",
    "smollm": "HelloWORLD| it|'|S| x|==|y|,| |1|2|3|4|5| a|.|b|\n|\n|αΑह|ि| 数あア|\t  |1",
    "llama-bpe": "HelloWORLD| it|'S| x|==|y|,| |123|45| a|.b|\n\n|αΑह|ि| 数あア|\t | |1",
    "smaug-bpe": "HelloWORLD| it|'S| x|==|y|,| |123|45| a|.b|\n\n|αΑह|ि| 数あア|\t | |1",
    "qwen2": "HelloWORLD| it|'S| x|==|y|,| |1|2|3|4|5| a|.b|\n\n|αΑह|ि| 数あア|\t | |1",
    "qwen35": "HelloWORLD| it|'S| x|==|y|,| |1|2|3|4|5| a|.b|\n\n|αΑहि| 数あア|\t | |1",
    "falcon": "HelloWORLD| it|'|S| x|==|y|,| |123|45| a|.|b|\n|\n|αΑह|ि| 数あア|\t | 1",
    "default": "HelloWORLD| it|'|S| x|==|y|,| |123|45| a|.|b|\n|\n|αΑह|ि| 数あア|\t | |1",
    "tekken": "Hello|WORLD| it|'S| x|==|y|,| |1|2|3|4|5| a|.b|\n\n|α|Αहि| 数あア|\t | |1",
    "gpt-4o": "Hello|WORLD| it'S| x|==|y|,| |123|45| a|.b|\n\n|α|Αहि| 数あア|\t | |1",
    "granite-embed-multi-97m": "Hello|WORLD| it'S| x|==|y|,|"
    " |123|45| a|.b|\n\n|α|Αहि| 数あア|\t | |1",
    "tiny_aya": "Hello|WORLD| it'S| x|==|y|,| |12|345| a|.b|\n\n|α|Αहि| 数あア|\t  |1",
    "kimi-k2": "Hello|WORLD| it'S| x|==|y|,| |123|45| a|.b|\n\n|α|Αहि| |数|あア|\t | |1",
    "youtu": "Hello|WORLD| it'S| x|==|y|,| |1|2|3|4|5| a|.b|\n\n|α|Αहि| |数あア|\t | |1",
    "deepseek-llm": "HelloWORLD| it|'|S| x|==|y|,| |12345| a|.|b|\n|\n|αΑ|हि| |数あア|\t  |1",
    "deepseek-coder": "HelloWORLD| it|'|S| x|==|y|,|"
    " |1|2|3|4|5| a|.|b|\n|\n|αΑ|ह|ि| |数あア|\t  |1",
    "deepseek-v3": "HelloWORLD| it|'S| x|==|y|,| |123|45| a|.b|\n\n|αΑहि| |数あア|\t  |1",
    "afmoe": "HelloWORLD| it|'S| x|==|y|,| |12|345| a|.b|\n\n|αΑहि| |数あア|\t  |1",
    "seed-coder": "HelloWORLD| it|'S| x|==|y|,| |1|2|3|4|5| a|.b|\n\n|αΑह|ि| 数あア|\t | |1",
    "minicpm5": "HelloWORLD| it|'S| x|==|y|,| |123|45| a|.b|\n\n|αΑह|ि| 数あア|\t  |1",
    "jais-2": "HelloWORLD| it|'S| x|==|y|,| |123|45| a|.b|\n\n|αΑह|ि| 数あア|\t | |1",
    "exaone-moe": "HelloWORLD it|'S| x|==|y|,| |1|2|3|4|5| a|.b|\n\n|αΑहि 数あア|\t | |1",
    "bailingmoe": "HelloWORLD| it|'S| x|==|y|,| |1|2|3|4|5| a|.b|\n\n|αΑह|ि| 数あア|\t | |1",
    "superbpe": "HelloWORLD it'S x==y, |12|345| a.b\n\nαΑहि 数あア\t  |1",
    "laguna": "HelloWORLD| it|'S| x|==|y|,| |1|2|3|4|5| a|.b|\n\n|αΑह|ि| 数あア|\t | |1",
    "chameleon": "HelloWORLD| it|'|S| x|=|=|y|,| |1|2|3|4|5| a|.|b|\n|\n|αΑह|ि| 数あア|\t|  |1",
    "poro-chat": "HelloWORLD| it'S| x==y|,| 12345| a|.|b|\n\n|αΑहि| 数あア|\t | 1",
    "viking": "HelloWORLD| it'S| x==y|,| |1|2|3|4|5| a|.|b|\n\n|αΑहि| 数あア|\t | |1",
}


def test_the_document_lists_the_table():
    page = (BUNDLED.parent.parent / "docs/tokenizers.md").read_text(encoding="utf-8")
    lines = []
    for kind in BYTE_LEVEL_KINDS:
        names = ", ".join(f"`{name}`" for name in (kind.name, *kind.other_names.split()))
        lines.append(f"- {names}{': ' if kind.in_llama_cpp else ''}{', '.join(kind.in_llama_cpp)}")
    assert "compares -->\n" + "\n".join(lines) + "\n<!-- end -->" in page


@pytest.fixture(scope="module")
def plain_keys(tmp_path_factory) -> dict:
    return keys_of(folder_of("gpt-2", tmp_path_factory.mktemp("plain") / "c"), add_bos_token=False)


@pytest.mark.parametrize("kind", BYTE_LEVEL_KINDS, ids=lambda kind: kind.name)
def test_each_pre_tokenizer_splits_as_its_pattern_says(plain_keys, kind):
    keys = plain_keys | {"tokenizer.ggml.pre": kind.name}
    found = ggml_tokenizer(WHERE, keys).pre_tokenizer.pre_tokenize_str(SPLIT)
    assert [SPLIT[slice(*place)] for _, place in found] == SPLITS[kind.name].split("|")


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_tokenizer_has_its_name(name):
    """Its expressions, as they are in a tokenizer.json, and those under its name are the same."""
    splits = [
        {"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False}
        for each in PUBLISHED[name]
    ]
    last = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    values = {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, last]},
        "model": {"ignore_merges": name in ("tekken", "minicpm5")},
    }
    kind = byte_level_kind(values)
    assert kind is not None and kind.name == name
    splits[0]["behavior"] = "Removed"
    assert byte_level_kind(values) is None


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_gives_the_text_piece_by_piece(tmp_path, name):
    folder = folder_of(name, tmp_path / "c")
    codec = TextCodec(ggml_tokenizer(WHERE, keys_of(folder)), None, frozenset())
    for line in mixed_lines():
        ids, stream = codec.encode(line), codec.stream()
        whole = codec.tokenizer.decode(ids)
        assert "".join(map(stream.text, ids)) == whole.rstrip("\ufffd"), line
        assert whole.rstrip("\ufffd") + stream.flush() == whole and not stream.flush()
        for half in (1, len(ids) // 2):
            before, stream = codec.tokenizer.decode(ids[:half]), codec.stream(ids[:half])
            rest = "".join(map(stream.text, ids[half:]))
            assert before.rstrip("\ufffd") + rest == whole.rstrip("\ufffd") or "\ufffd" in before


def test_a_stream_of_arbitrary_tokens_does_not_fail(tmp_path):
    """Some are bytes that are not UTF-8, for which the DecodeStream of tokenizers raises; the text
    after them is whole."""
    codec = TextCodec(
        ggml_tokenizer(WHERE, keys_of(folder_of("llama", tmp_path / "c"))), None, frozenset()
    )
    random_source = random.Random(3)
    byte, fox = 3, codec.tokenizer.encode("fox", add_special_tokens=False).ids
    broken = [byte + 0xC3, byte + 0xA9, byte + 0xFF, *fox]
    with pytest.raises(Exception, match="Invalid prefix"):
        streamed(codec.tokenizer, broken, True)
    for _ in range(200):
        noise = [random_source.randrange(byte, byte + 280) for _ in range(30)]
        for ids in (broken, noise + fox):
            stream = codec.stream()
            assert "".join(map(stream.text, ids)).endswith("fox")


class CountingTokenizer:
    """Counts the tokens that are decoded."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.decoded = tokenizer, 0

    def decode(self, ids: list[int]) -> str:
        self.decoded += len(ids)
        return self.tokenizer.decode(ids)


def test_the_cost_of_many_tokens_without_text_is_linear(tmp_path):
    """Special tokens, and bytes that make no character; the text after them is whole."""
    tokenizer = ggml_tokenizer(WHERE, keys_of(folder_of("llama", tmp_path / "c")))
    byte, fox = 3, tokenizer.encode("fox", add_special_tokens=False).ids
    for silent in (1, byte + 0xFF):
        counting = CountingTokenizer(tokenizer)
        stream = TextStream(counting, fox * 100)
        text = "".join(map(stream.text, [silent] * 1000 + fox))
        assert text.strip("\ufffd ") == "fox"
        assert counting.decoded < 1000 * 50


@pytest.mark.parametrize("name", ["llama", "gpt-2"])
def test_replacement_characters_of_the_text_itself_are_streamed(tmp_path, name):
    tokenizer = ggml_tokenizer(WHERE, keys_of(folder_of(name, tmp_path / "c")))
    for count in range(1, 20):
        line = "a" + "\ufffd" * count + "\u00e9\U0001f600x"
        ids = tokenizer.encode(line, add_special_tokens=False).ids
        assert "".join(map(TextStream(tokenizer, ()).text, ids)) == tokenizer.decode(ids) == line
        ids, stream = (
            tokenizer.encode(line[:-3], add_special_tokens=False).ids,
            TextStream(tokenizer, ()),
        )
        assert "".join(map(stream.text, ids)) + stream.flush() == line[:-3]


def streamed(tokenizer: Tokenizer, ids: list[int], skips: bool) -> list[str | None]:
    stream = DecodeStream(skip_special_tokens=skips)
    return [stream.step(tokenizer, number) for number in ids]


@pytest.mark.parametrize(
    "name, wrong", [("qwen2", "gpt-2"), ("gpt-2", "smollm"), ("llama-bpe", "qwen2")]
)
def test_the_comparison_finds_another_pre_tokenizer(tmp_path, name, wrong):
    folder = folder_of(name, tmp_path / "c")
    source = Tokenizer.from_file(str(folder / "tokenizer.json"))
    other = ggml_tokenizer(WHERE, keys_of(folder, pre=wrong))
    differing = [
        line for line in mixed_lines() if other.encode(line).ids != source.encode(line).ids
    ]
    assert len(differing) > 20
    if wrong == "gpt-2":
        assert set(COMBINING) & set(differing)


def test_scores_join_as_sentencepiece_does(tmp_path):
    """Compared with the definition: join the best pair, the leftmost of equals, one at a time."""
    folder = folder_of("llama", tmp_path / "c")
    keys = keys_of(folder, add_bos_token=False)
    rebuilt = ggml_tokenizer(WHERE, keys)
    tokens, scores = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.scores"]
    runs = [letter * count for letter in (" ", "e", "=", "!") for count in range(1, 30)]
    lines = [line for line in mixed_lines() if "<" not in line and line] + runs
    for line in lines:
        assert rebuilt.encode(line).ids == merge_by_score(line, tokens, scores), line
    worse = list(reversed(scores))
    assert any(rebuilt.encode(li).ids != merge_by_score(li, tokens, worse) for li in lines)


def test_merges_of_gemma_4_give_what_its_scores_gave(tmp_path):
    """llama.cpp's files of Gemma 4 have no scores that count, but merges."""
    folder = folder_of("llama", tmp_path / "c")
    source = Tokenizer.from_file(str(folder / "tokenizer.json"))
    merges = json.loads((folder / "tokenizer.json").read_text())["model"]["merges"]
    keys = keys_of(folder, model="gemma4", scores=[0.0] * source.get_vocab_size())
    keys |= {"tokenizer.ggml.merges": [" ".join(pair) for pair in merges]}
    rebuilt = ggml_tokenizer(WHERE, keys)
    for line in mixed_lines():
        ids = source.encode(line).ids
        assert rebuilt.encode(line).ids == ids, line
        assert rebuilt.decode(ids, False) == source.decode(ids, False)
    with pytest.raises(HotsplitError, match="does not join two tokens"):
        ggml_tokenizer(WHERE, keys | {"tokenizer.ggml.merges": ["a bb"]})
    begun = ggml_tokenizer(WHERE, keys | {"tokenizer.ggml.add_bos_token": False})
    assert begun.encode("a").ids[0] == 1, "whatever the file says, as in llama.cpp"


def test_equal_scores_are_refused_only_where_they_are_ambiguous():
    letters = dict.fromkeys("abcd", -9.0)
    assert merges_of_scores(WHERE, {**letters, "ab": -1.0, "cd": -1.0}) == [("a", "b"), ("c", "d")]
    assert merges_of_scores(WHERE, {**letters, "aaa": -2.0, "aa": -1.0}) == [
        ("a", "a"),
        ("aa", "a"),
        ("a", "aa"),
    ]
    with pytest.raises(HotsplitError, match="'ab' and 'bc' have the same score"):
        merges_of_scores(WHERE, {**letters, "ab": -1.0, "bc": -1.0})
    with pytest.raises(HotsplitError, match="'xa' is formed with 'x', which is not a token"):
        merges_of_scores(WHERE, {**letters, "xa": -1.0})


def test_the_begin_and_end_tokens_of_a_text(tmp_path):
    folder = folder_of("gpt-2", tmp_path / "c")

    def ids(text: str, **changes: object) -> list[int]:
        return list(ggml_tokenizer(WHERE, keys_of(folder, **changes)).encode(text).ids)

    a = ids("a", add_bos_token=None)
    assert len(a) == 1
    assert ids("a", add_bos_token=True) == [0, *a]
    assert ids("a", add_bos_token=True, add_eos_token=True) == [0, *a, 0]
    assert ids("a", add_eos_token=True, eos_token_id=np.uint32(5)) == [*a, 5]
    assert ids("a", pre="llama-bpe", add_bos_token=None)[0] == 0, "llama.cpp's default"
    assert ids("a", pre="llama3", add_bos_token=False) == a


def test_merges_that_no_text_needs_are_left_out(tmp_path):
    """The first GLM-4's files have merges with more than two parts, and in Phi-4's the special
    token U+FFFD is spelt as bytes. All else has the same tokens."""
    keys = keys_of(folder_of("gpt-2", tmp_path / "c"))
    tokens, types, merges = (
        list(keys[f"tokenizer.ggml.{name}"]) for name in ("tokens", "token_type", "merges")
    )
    more = {
        "tokenizer.ggml.tokens": [*tokens, "\ufffd", "\xbf\xbd"],
        "tokenizer.ggml.token_type": [*types, 4, 1],
        "tokenizer.ggml.merges": [*merges, "\xbf \xbd", "a b c", "\xef \xbf\xbd", "\xef\xbf\xbd a"],
    }
    plain, found = ggml_tokenizer(WHERE, keys), ggml_tokenizer(WHERE, keys | more)
    for line in mixed_lines():
        if "\ufffd" not in line:
            assert found.encode(line).ids == plain.encode(line).ids, line
    a, b = (plain.token_to_id(letter) for letter in "ab")
    assert found.encode("a\ufffdb").ids == [a, len(tokens), b]
    for wrong in ("a b cc", "\xef \xbe"):
        with pytest.raises(HotsplitError, match="does not join two tokens to a third"):
            ggml_tokenizer(WHERE, keys | more | {"tokenizer.ggml.merges": [*merges, wrong]})


@pytest.mark.parametrize("name, strips", [("Phi3", True), ("Phi-3.5", True), ("Phi 3.1", False)])
def test_special_tokens_of_the_first_phi_3_take_the_white_space_behind_them(tmp_path, name, strips):
    """llama.cpp knows them by the model's name, too."""
    keys = keys_of(folder_of("llama", tmp_path / "c"), add_bos_token=False) | {"general.name": name}
    tokenizer = ggml_tokenizer(WHERE, keys)
    assert (tokenizer.encode("</s>\n a").ids == tokenizer.encode("</s>a").ids) == strips
    assert tokenizer.encode("<s>\n a").ids != tokenizer.encode("<s>a").ids


REFUSALS = [
    ({"model": "bert"}, "is 'bert' (WordPiece, of encoders, which generate no text); k"),
    ({"model": "t5"}, "is 't5' (SentencePiece's unigram model"),
    ({"model": "rwkv"}, "is 'rwkv' (RWKV's own tokenizer); known are 'gpt2'"),
    ({"model": "x"}, "is 'x'; known are 'gpt2', 'llama' and 'gemma4'; give the model's tokenizer"),
    ({"model": None}, "is None; known are"),
    ({"pre": "new"}, "is 'new', which is unknown (docs/tokenizers.md lists the known"),
    ({"pre": "gemma4"}, "is 'gemma4', which is for merges of characters"),
    ({"pre": None}, "is missing, as in files made before May 2024"),
    ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
    ({"tokens": ["a", "a"], "token_type": None}, "of another one (1 of 2)"),
    ({"token_type": [1]}, "token_type does not have"),
    ({"merges": None}, "tokenizer.ggml.merges is missing"),
    ({"merges": ["a bb"]}, "the merge 'a bb' does not join two tokens to a third"),
    ({"add_bos_token": np.uint32(1)}, "wanted true or false"),
    ({"add_bos_token": True, "bos_token_id": None}, "wanted the id of a token"),
    ({"add_eos_token": True, "eos_token_id": np.uint32(999)}, "wanted the id"),
    ({"model": "llama", "scores": None}, "of the 256 byte tokens are missing"),
]


@pytest.mark.parametrize("changes, words", REFUSALS)
def test_unsupported_keys_are_refused(tmp_path, changes, words):
    keys = keys_of(folder_of("few words", tmp_path / "c"), **changes)
    with pytest.raises(HotsplitError) as caught:
        ggml_tokenizer(WHERE, keys)
    assert words in str(caught.value) and str(WHERE) in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["scores", "token_type"])
def test_numbers_of_tokens_that_are_not_finite_are_refused(tmp_path, name, value):
    """With NaN as a score, the order of merges would be undefined."""
    keys = keys_of(folder_of("llama", tmp_path / "c"))
    numbers = [float(number) for number in keys[f"tokenizer.ggml.{name}"]]
    ggml_tokenizer(WHERE, keys | {f"tokenizer.ggml.{name}": numbers})
    with pytest.raises(HotsplitError, match=f"{name} does not have"):
        ggml_tokenizer(WHERE, keys | {f"tokenizer.ggml.{name}": None})
    numbers[-1] = value
    with pytest.raises(HotsplitError, match=f"{name} does not have .* finite numbers"):
        ggml_tokenizer(WHERE, keys | {f"tokenizer.ggml.{name}": numbers})


def test_a_file_without_tokenizer_json_is_read_by_its_keys(tmp_path):
    folder = random_llama(tmp_path / "c", hidden_act="silu")
    path = tmp_path / "m.gguf"
    convert(ConvertConfig(source=folder, output=path, layout="stock"))
    model = ModelFile.load(path)
    ours = TextCodec.of(model)
    del model.extra_keys[TOKENIZER_KEY]
    theirs = TextCodec.of(model)
    assert theirs.encode_many(mixed_lines()) == ours.encode_many(mixed_lines())
    assert (theirs.begin_id, theirs.end_ids) == (ours.begin_id, ours.end_ids)
    stream = theirs.stream()
    assert "".join(map(stream.text, theirs.encode("brown fox"))) == "brown fox"


pytest_plugins = ("run_fixtures",)
CARD = "rtx-4060-8gb"  # the machine of a plan, by its data sheet
TEXT = "brown fox 123"
GIVE = "give the model's tokenizer.json with --tokenizer FILE, to run or to convert"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return random_llama(tmp_path_factory.mktemp("hf") / "hf", hidden_act="silu")


@pytest.fixture(scope="module")
def stock(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("stock") / "m.gguf"
    convert(ConvertConfig(source=folder, output=path, layout="stock"))
    return path


def changed(stock, path, **values):
    """llama.cpp's file with other keys."""
    keys, tensors = read_gguf(stock, "model file")
    del keys[TOKENIZER_KEY], keys["general.architecture"]
    names = {f"tokenizer.ggml.{name}": value for name, value in values.items() if name != "odd"}
    odd = {"llama.odd": True} if values.get("odd") else {}
    write_gguf(path, "llama", keys | names | odd, tensors)
    return path


@pytest.mark.parametrize(
    "values, reasons",
    [
        ({"pre": "new"}, ["its pre-tokenizer (tokenizer.ggml.pre) is 'new', which is unknown"]),
        ({"model": "t5"}, ["its tokenizer (tokenizer.ggml.model) is 't5' (SentencePiece's"]),
        ({"model": "rwkv", "odd": True}, ["key 'llama.odd'", "'rwkv' (RWKV's own tokenizer)"]),
    ],
)
def test_what_cannot_be_used_is_refused_before_any_work(
    stock, tmp_path, capsys, cache, values, reasons
):
    path = changed(stock, tmp_path / "in.gguf", **values)
    with pytest.raises(HotsplitError) as caught:
        convert(ConvertConfig(source=path, output=tmp_path / "out.gguf"))
    for command in (["plan", "--machine", CARD], ["run", "-p", "the", "--outtype", "q8_0"]):
        assert main([*command, str(path)]) == 1
        line = capsys.readouterr().err.splitlines()[-1]
        assert all(why in line for why in [*reasons, GIVE]), line
    assert main(["inspect", str(path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "refused as tokenizer" in shown
    assert all(why in str(caught.value) for why in [*reasons, GIVE])
    assert not (tmp_path / "out.gguf").exists() and list_cache(cache) == ()


def test_a_given_tokenizer_takes_the_place_of_one_that_cannot_be_used(
    folder, stock, tmp_path, capsys, cache
):
    path, given = changed(stock, tmp_path / "in.gguf", pre="new"), folder / "tokenizer.json"
    output = tmp_path / "out.gguf"
    convert(ConvertConfig(source=path, output=output, tokenizer=given))
    want = TextCodec.of(ModelFile.load(stock)).encode(TEXT)
    assert TextCodec.of(ModelFile.load(output)).encode(TEXT) == want
    asked = ["run", str(path), "-p", TEXT, "-n", "2", "--no-verify", "--tokenizer", str(given)]
    assert main([*asked, "--json", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["prefill_tokens"] == len(want)
    names = json.loads(given.read_text())
    vocabulary = names["model"]["vocab"]
    a, b = list(vocabulary)[40:42]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    renamed = tmp_path / "renamed.json"
    renamed.write_text(json.dumps(names))
    convert(ConvertConfig(source=path, output=output, tokenizer=renamed, force=True))
    turned = dict(zip(vocabulary, reversed(vocabulary.values()), strict=True))
    renamed.write_text(json.dumps(names | {"model": names["model"] | {"vocab": turned}}))
    with pytest.raises(HotsplitError, match=r"is another model's tokenizer: its token \d+ is"):
        convert(ConvertConfig(source=path, output=output, tokenizer=renamed, force=True))


def test_a_checkpoint_without_a_tokenizer_is_given_one(folder, tmp_path, capsys, cache):
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare)
    (bare / "tokenizer.json").unlink()
    assert main(["plan", str(bare), "--machine", CARD]) == 1
    assert f"bare: has no tokenizer, which text needs; {GIVE}" in capsys.readouterr().err
    given, output = folder / "tokenizer.json", tmp_path / "m.gguf"
    assert main(["plan", str(bare), "--machine", CARD, "--tokenizer", str(given)]) == 0
    report = convert(ConvertConfig(source=bare, output=output))
    assert f"no tokenizer.json, which text needs; {GIVE}" in report.notes[0]
    convert(ConvertConfig(source=bare, output=output, tokenizer=given, force=True))
    assert len(TextCodec.of(ModelFile.load(output)).encode(TEXT)) > 2
    with pytest.raises(HotsplitError, match="put it there as tokenizer.json"):
        convert(
            ConvertConfig(source=bare, output=output, tokenizer=given, layout="stock", force=True)
        )
    assert list_cache(cache) == ()
