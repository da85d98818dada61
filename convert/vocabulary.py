"""tokenizer.json of Hugging Face to the `tokenizer.ggml.*` keys that llama.cpp reads.

Only what is known to split text the same way there is written: byte-level BPE with one of three
pre-tokenizers, and SentencePiece's BPE with byte fallback. What this module does not know: how to
tokenize. (Our own runtime reads tokenizer.json itself.)"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from gguf import Keys, TokenType

from sparkinfer.errors import SparkinferError
from sparkinfer.gguf_file import Value

Json = Mapping[str, object]

# The patterns of Meta-Llama-3 and Qwen2 as they stand in their tokenizer.json; llama.cpp's
# llama-vocab.cpp has them under these names.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_SPACES = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    _CONTRACTIONS + r"\p{N}{1,3}" + _SPACES: "llama-bpe",
    _CONTRACTIONS + r"\p{N}" + _SPACES: "qwen2",
}
# What llama.cpp does besides splitting, by name: (whole words first, normalizers of the source).
BEHAVIOUR = {
    "gpt-2": (False, ([],)),
    "llama-bpe": (True, ([],)),
    "qwen2": (False, ([], [{"type": "NFC"}])),
}
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
SPACE = "\u2581"
UNSCORED = -1000.0  # what llama.cpp's converter gives to tokens that no merge makes


def check_tokenizer(path: Path, tokenizer: Json) -> None:
    """Raises SparkinferError where a BPE tokenizer's tables are not what they should be."""
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens") or []
    if not isinstance(model, dict) or not isinstance(added, list):
        raise SparkinferError(f"{path}: no 'model' table; wanted a tokenizer.json; get it again")
    if model.get("type") != "BPE":
        return
    vocabulary, merges = model.get("vocab"), model.get("merges")
    ids = vocabulary.values() if isinstance(vocabulary, dict) else [None]
    ids = [*ids, *(item.get("id") if isinstance(item, dict) else None for item in added)]
    has_content = all(isinstance(item, dict) and "content" in item for item in added)
    if not all(isinstance(i, int) and i >= 0 for i in ids) or not has_content:
        raise SparkinferError(f"{path}: a token without text or number; get tokenizer.json again")
    if not isinstance(merges, list) or not all(len(_pair(merge)) == 2 for merge in merges):
        raise SparkinferError(f"{path}: a merge that is not two tokens; get tokenizer.json again")


def num_tokens(tokenizer: Json) -> int:
    """One more than the largest token number."""
    vocabulary, added = _tables(tokenizer)
    return 1 + max([*vocabulary.values(), *(cast(int, token["id"]) for token in added)], default=-1)


def vocabulary_keys(tokenizer: Json, vocab_size: int) -> dict[str, Value] | None:
    """`tokenizer.ggml.*` for `vocab_size` tokens, or None where llama.cpp has no counterpart.

    Numbers without a token become [PADn] of type unused, as llama.cpp's converter has it."""
    model = cast(Json, tokenizer["model"])
    if model.get("type") != "BPE":
        return None
    pre = byte_level_name(tokenizer)
    if pre is not None:
        tokens, types = _tokens(tokenizer, vocab_size)
        return {
            Keys.Tokenizer.MODEL: "gpt2",
            Keys.Tokenizer.PRE: pre,
            Keys.Tokenizer.LIST: tokens,
            Keys.Tokenizer.TOKEN_TYPE: types,
        }
    adds_space = _sentencepiece_prefix(tokenizer)
    if adds_space is None:
        return None
    tokens, types = _tokens(tokenizer, vocab_size)
    return {
        Keys.Tokenizer.MODEL: "llama",
        Keys.Tokenizer.PRE: "default",
        Keys.Tokenizer.LIST: tokens,
        Keys.Tokenizer.SCORES: _scores(model, tokens),
        Keys.Tokenizer.TOKEN_TYPE: types,
        Keys.Tokenizer.ADD_PREFIX: adds_space,
    }


def byte_level_name(tokenizer: Json) -> str | None:
    """llama.cpp's name of a byte-level BPE, or None for one that it would split differently."""
    steps = _steps(tokenizer.get("pre_tokenizer"), "pretokenizers")
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    model, uses_regex = cast(Json, tokenizer["model"]), steps[-1].get("use_regex", True)
    name = "gpt-2" if uses_regex and len(steps) == 1 else None
    if len(steps) == 2 and not uses_regex:
        pattern = cast(Json, steps[0].get("pattern") or {}).get("Regex")
        is_plain = steps[0].get("behavior") == "Isolated" and not steps[0].get("invert")
        name = SPLITS.get(str(pattern)) if is_plain else None
    if name is None or model.get("byte_fallback"):
        return None
    whole_words_first, normalizers = BEHAVIOUR[name]
    if bool(model.get("ignore_merges")) != whole_words_first:
        return None
    return name if _steps(tokenizer.get("normalizer"), "normalizers") in normalizers else None


def _sentencepiece_prefix(tokenizer: Json) -> bool | None:
    """Whether a SentencePiece BPE puts a space before the text; None if it is not one.

    Spaces become U+2581 by normalizers (as Llama 2 was published) or by Metaspace (later)."""
    model = cast(Json, tokenizer["model"])
    before = _steps(tokenizer.get("pre_tokenizer"), "pretokenizers")
    normalizers = _steps(tokenizer.get("normalizer"), "normalizers")
    if not model.get("byte_fallback"):
        return None
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    if not before and normalizers == [{"type": "Prepend", "prepend": SPACE}, replace]:
        return True
    if not before and normalizers == [replace]:
        return False
    is_metaspace = len(before) == 1 and before[0].get("type") == "Metaspace"
    if normalizers or not is_metaspace or before[0].get("split", True):
        return None
    return before[0].get("prepend_scheme", "always") != "never"


def _steps(part: object, key: str) -> list[dict]:
    """The steps of a (pre-tokenizer or normalizer) sequence; a single step is one of one."""
    if not isinstance(part, dict):
        return []
    return part.get(key, []) if part.get("type") == "Sequence" else [part]


def _tables(tokenizer: Json) -> tuple[dict[str, int], list[dict]]:
    model = cast(Json, tokenizer["model"])
    vocabulary = model.get("vocab")
    added = cast(list[dict], tokenizer.get("added_tokens") or [])
    return (vocabulary if isinstance(vocabulary, dict) else {}), added


def _tokens(tokenizer: Json, vocab_size: int) -> tuple[list[str], list[int]]:
    """Texts and types of the tokens 0 .. vocab_size - 1."""
    tokens = [f"[PAD{number}]" for number in range(vocab_size)]
    types = [int(TokenType.UNUSED)] * vocab_size
    model = cast(Json, tokenizer["model"])
    vocabulary, added = _tables(tokenizer)
    for text, number in vocabulary.items():
        if number < vocab_size:
            is_byte = model.get("byte_fallback") and BYTE_TOKEN.fullmatch(text)
            tokens[number] = text
            types[number] = int(TokenType.BYTE if is_byte else TokenType.NORMAL)
    for token in added:
        if token["id"] < vocab_size:
            kind = TokenType.CONTROL if token.get("special") else TokenType.USER_DEFINED
            tokens[token["id"]] = token["content"]
            types[token["id"]] = int(kind)
    unknown = vocabulary.get(str(model.get("unk_token")), vocab_size)
    if unknown < vocab_size:
        types[unknown] = int(TokenType.UNKNOWN)
    return tokens, types


def _scores(model: Json, tokens: list[str]) -> list[float]:
    """llama.cpp joins the pair whose token has the highest score, tokenizer.json the one whose
    merge comes first: a token's score is minus the place of the first merge that makes it."""
    places: dict[str, int] = {}
    for place, merge in enumerate(cast(list, model["merges"])):
        places.setdefault("".join(_pair(merge)), place)
    return [-float(places[token]) if token in places else UNSCORED for token in tokens]


def _pair(merge: object) -> list[str]:
    """A merge is "a b" in old files and ["a", "b"] in new ones."""
    if isinstance(merge, str):
        return merge.split(" ")
    return merge if isinstance(merge, list) and all(isinstance(m, str) for m in merge) else []
