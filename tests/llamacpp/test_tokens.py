"""llama.cpp splits a text into the same tokens as the tokenizer.json of a file, and as the
tokenizer that our runtime rebuilds from llama.cpp's keys."""

import json
import re
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from checkpoints import random_llama
from test_end_tokens import EVERY_END, with_texts
from texts import (
    COMBINING,
    HARD,
    byte_level_tokenizer,
    mixed_lines,
    put_tokenizer,
    sentencepiece_tokenizer,
    whole_line_tokenizer,
)
from tokenizers import Tokenizer, normalizers, pre_tokenizers

from hotsplit.artifacts.model_file import TOKENIZER_KEY, ModelFile
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.files.gguf_file import read_gguf, write_gguf
from hotsplit.runtime.text.codec import TextCodec
from hotsplit.tokens.byte_level import BYTE_LEVEL_KINDS
from hotsplit.tokens.tokenizer_kinds import END_TEXTS

ROOT = Path(__file__).parent.parent.parent
LINES = mixed_lines()
VOCAB_SIZE = 700
END = "<|endoftext|>"


def stock_file(folder: Path, tokenizer: Tokenizer, begin: str = END, end: str = END) -> Path:
    """A random model with this tokenizer, in the layout of llama.cpp."""
    size = max(VOCAB_SIZE, tokenizer.get_vocab_size())
    random_llama(folder, hidden_act="silu", vocab_size=size, has_tokenizer=False)
    put_tokenizer(folder, tokenizer, begin, end)
    path = folder / "m.gguf"
    convert(ConvertConfig(source=folder, output=path, layout="stock"))
    return path


@pytest.fixture(scope="module")
def whole_lines(tmp_path_factory) -> tuple[dict, dict]:
    """Keys and tensors of a model whose merges go across words."""
    folder = tmp_path_factory.mktemp("whole")
    keys, tensors = read_gguf(stock_file(folder / "c", byte_level_tokenizer("gpt-2", 600)), "model")
    del keys[TOKENIZER_KEY], keys["general.architecture"]
    model = json.loads(whole_line_tokenizer(1400).to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return keys | {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.add_bos_token": False,
    }, tensors


def has(line: str, *kinds: str) -> bool:
    return any(unicodedata.category(letter) in kinds for letter in line)


# The lines that llama.cpp may split otherwise, by ByteLevelKind.in_llama_cpp.
SPLIT_OTHERWISE = {
    "words with combining marks": lambda line: has(line, "Mn", "Mc", "Me"),
    "words with capitals beyond ASCII": lambda line: any(
        not each.isascii() and has(each, "Lu", "Lt", "Ll") for each in line
    ),
    "words with capitals after small letters": lambda line: re.search("[a-z]['A-Z]", line),
    "numbers and what is before them": lambda line: has(line, "Nd", "No", "Nl"),
    "white space beyond ASCII": lambda line: any(e.isspace() and not e.isascii() for e in line),
    "digits beyond ASCII": lambda line: any(not e.isascii() and has(e, "Nd") for e in line),
}


@pytest.mark.parametrize("kind", BYTE_LEVEL_KINDS, ids=lambda kind: kind.name)
def test_all_names_of_a_pre_tokenizer_split_alike(llama_cpp, tmp_path, whole_lines, kind):
    keys, tensors = whole_lines
    lines = [line for line in LINES + HARD if unicodedata.is_normalized("NFC", line)]
    may_differ = [SPLIT_OTHERWISE[words] for words in kind.in_llama_cpp]
    for name in (kind.name, *kind.other_names.split()):
        path = tmp_path / "m.gguf"
        write_gguf(path, "llama", keys | {"tokenizer.ggml.pre": name}, tensors)
        codec = TextCodec.of(ModelFile.load(path))
        found = llama_cpp(
            "tokenize", model=path, lines=lines, add_special=False, parse_special=True
        )
        pairs = zip(lines, map(codec.encode_rendered, lines), found["ids"], strict=True)
        differing = [line for line, ours, theirs in pairs if ours != theirs]
        assert not [li for li in differing if not any(may(li) for may in may_differ)], name
        assert all(any(map(may, differing)) for may in may_differ), (name, "the words are not true")


def named(name: str) -> tuple[Tokenizer, str, str]:
    if name == "bundled":
        path = ROOT / "examples/tiny-relu/tokenizer.json"
        return Tokenizer.from_file(str(path)), END, END
    if name == "llama":
        return sentencepiece_tokenizer(600), "<s>", "</s>"
    return byte_level_tokenizer(name, 600), END, END


@pytest.mark.parametrize("kind", [1, 3, 4, 5])
def test_the_same_tokens_end_a_text(llama_cpp, tmp_path, kind):
    """All texts at once, in which some end nothing; and each alone, with others that never do."""
    others = ["<|im_start|>", "<|fim_prefix|>", "<|start|>", "< EOT >", "[e~", "</S>", "<pad>"]
    for number, texts in enumerate([list(END_TEXTS), *([text, *others] for text in EVERY_END)]):
        model = with_texts(texts, kind, **{"tokenizer.ggml.eos_token_id": np.uint32(3)})
        model.save(path := tmp_path / f"{number}.gguf")
        assert {*llama_cpp("ends", model=path)["ids"]} == TextCodec.of(model).end_ids, texts


@pytest.mark.parametrize(
    "name", ["bundled", "gpt-2", "smollm", "llama-bpe", "smaug-bpe", "qwen2", "qwen35", "llama"]
)
def test_all_three_give_the_same_tokens(llama_cpp, tmp_path, name):
    tokenizer, begin, end = named(name)
    path = stock_file(tmp_path, tokenizer, begin, end)
    model = ModelFile.load(path)
    ours = TextCodec.of(model)
    del model.extra_keys[TOKENIZER_KEY]
    rebuilt = TextCodec.of(model)
    # llama.cpp does not normalise (noted by convert): text in normal form must agree.
    lines = [li for li in LINES if "qwen" not in name or unicodedata.is_normalized("NFC", li)]
    assert len(lines) > 240

    def theirs(*, add_special: bool, parse_special: bool) -> list[list[int]]:
        given = {"add_special": add_special, "parse_special": parse_special}
        return llama_cpp("tokenize", model=path, lines=lines, **given)["ids"]

    for codec in (ours, rebuilt):
        with_ends = [list(codec.tokenizer.encode(line).ids) for line in lines]
        assert_same(lines, with_ends, theirs(add_special=True, parse_special=True))
        plain = [codec.tokenizer.encode(line, add_special_tokens=False).ids for line in lines]
        assert_same(lines, plain, theirs(add_special=False, parse_special=True))
        literal = [codec.literal.encode_rendered(line) for line in lines]
        assert_same(lines, literal, theirs(add_special=False, parse_special=False))
        assert literal != plain or name == "llama"
    print(f"{name}: {len(lines)} lines, {sum(map(len, plain))} tokens, 3 ways, 2 tokenizers")


def assert_same(lines: list[str], got: list[list[int]], want: list[list[int]]) -> None:
    wrong = [case for case in zip(lines, got, want, strict=True) if case[1] != case[2]]
    assert not wrong, f"{len(wrong)} of {len(lines)} lines differ, e.g. {wrong[:3]}"


def test_llama_cpp_differs_where_convert_notes_it(llama_cpp, tmp_path):
    """llama.cpp differs for letters with combining accents, Metaspace, and merges that leave pairs
    out. On the first it agrees with the same tokenizer without its normalizer."""
    values = json.loads(sentencepiece_tokenizer(600).to_str())
    tokens = sorted(values["model"]["vocab"], key=values["model"]["vocab"].get)
    values["model"]["vocab"]["\u2581foxe"] = len(tokens)  # and no merge makes it
    partial = Tokenizer.from_str(json.dumps(values))
    metaspace = sentencepiece_tokenizer(600)
    metaspace.normalizer = normalizers.Sequence([])
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    cases = {
        "accents": (byte_level_tokenizer("qwen2", 600), END, COMBINING),
        "spaces": (metaspace, "<s>", ["  a", "a <tool> b"]),
        "pairs": (partial, "<s>", ["foxes and a foxes"]),
    }
    for name, (tokenizer, begin, lines) in cases.items():
        path = stock_file(tmp_path / name, tokenizer, begin, begin)
        found = llama_cpp(
            "tokenize", model=path, lines=lines, add_special=False, parse_special=True
        )
        ours = [list(tokenizer.encode(line, add_special_tokens=False).ids) for line in lines]
        differing = sum(a != b for a, b in zip(ours, found["ids"], strict=True))
        print(f"{name}: {differing} of {len(lines)} lines differ")
        assert differing
    bare = byte_level_tokenizer("qwen2", 600)
    bare.normalizer = normalizers.Sequence([])
    path = tmp_path / "accents/m.gguf"
    found = llama_cpp("tokenize", model=path, lines=LINES, add_special=False, parse_special=True)
    plain = [list(bare.encode(line, add_special_tokens=False).ids) for line in LINES]
    assert_same(LINES, plain, found["ids"])
