"""Converts Hugging Face's tokenizer.json to the `tokenizer.ggml.*` keys that llama.cpp reads, and
finds what llama.cpp still does differently.

Only tokenizers whose kind llama.cpp has are converted: byte-level BPE with a known pre-tokenizer,
and SentencePiece's BPE with byte fallback. Our own runtime reads tokenizer.json itself, so that the
differences are noted only when a file for llama.cpp is written."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from gguf import Keys, TokenType

from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import Value
from hotsplit.tokens.byte_level import BYTE_LEVEL_KINDS, ByteLevelKind
from hotsplit.tokens.tokenizer_kinds import BY_SCORES, BYTE_LEVEL

Json = Mapping[str, object]

BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
SPACE = "\u2581"
NFC = {"type": "NFC"}
DIGITS = {"type": "Digits", "individual_digits": True}


def check_tokenizer(path: Path, tokenizer: Json) -> None:
    """Raises HotsplitError for malformed tables of tokens and, of a BPE tokenizer, merges."""
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens") or []
    if not isinstance(model, dict) or not isinstance(added, list):
        raise HotsplitError(f"{path}: no 'model' table; wanted a tokenizer.json; download it again")
    vocabulary, merges = model.get("vocab"), model.get("merges")
    is_bpe = model.get("type") == "BPE"
    ids: list[object] = [None] if is_bpe else []  # other models may have a list of tokens
    ids = [*vocabulary.values()] if isinstance(vocabulary, dict) else ids
    ids += [item.get("id") if isinstance(item, dict) else None for item in added]
    has_text = all(isinstance(item, dict) and type(item.get("content")) is str for item in added)
    if not all(type(i) is int and i >= 0 for i in ids) or not has_text:
        raise HotsplitError(f"{path}: a token without text or id; download tokenizer.json again")
    if not is_bpe:
        return
    if not isinstance(merges, list) or not all(len(pair_of(merge)) == 2 for merge in merges):
        raise HotsplitError(f"{path}: a merge that is not two tokens; get tokenizer.json again")


def num_tokens(tokenizer: Json) -> int:
    """One more than the largest token id."""
    vocabulary, added = tables_of(tokenizer)
    return 1 + max([*vocabulary.values(), *(cast(int, token["id"]) for token in added)], default=-1)


def vocabulary_keys(tokenizer: Json, vocab_size: int) -> dict[str, Value] | None:
    """`tokenizer.ggml.*` for `vocab_size` tokens, or None if llama.cpp has no counterpart. Ids
    without a token become [PADn] of type unused, as in llama.cpp's converter. Also None if two
    tokens have the same text (llama.cpp aborts), or if a text is empty or contains a NUL (llama.cpp
    reads only up to it)."""
    model = cast(Json, tokenizer["model"])
    if model.get("type") != "BPE":
        return None
    tokens, types = _tokens(tokenizer, vocab_size)
    if len(set(tokens)) < len(tokens) or any(not token or "\0" in token for token in tokens):
        return None
    kind = byte_level_kind(tokenizer)
    if kind is not None:
        return {
            Keys.Tokenizer.MODEL: BYTE_LEVEL,
            Keys.Tokenizer.PRE: kind.name,
            Keys.Tokenizer.LIST: tokens,
            Keys.Tokenizer.TOKEN_TYPE: types,
        }
    adds_space = sentencepiece_prefix(tokenizer)
    if adds_space is None:
        return None
    return {
        Keys.Tokenizer.MODEL: BY_SCORES,
        Keys.Tokenizer.PRE: "default",
        Keys.Tokenizer.LIST: tokens,
        Keys.Tokenizer.SCORES: _scores(model, tokens),
        Keys.Tokenizer.TOKEN_TYPE: types,
        Keys.Tokenizer.ADD_PREFIX: adds_space,
    }


def byte_level_kind(tokenizer: Json) -> ByteLevelKind | None:
    """The kind of a byte-level BPE; None for others, and where llama.cpp would split otherwise."""
    steps = steps_of(tokenizer.get("pre_tokenizer"), "pretokenizers")
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    before = steps[:-1]
    splits_digits = before == [DIGITS]
    patterns: tuple[str, ...] = ()
    if not steps[-1].get("use_regex", True):
        if not all(
            step.get("behavior") == "Isolated" and not step.get("invert") for step in before
        ):
            return None
        expressions = (cast(Json, step.get("pattern") or {}).get("Regex") for step in before)
        patterns = tuple(map(str, expressions))
        if not patterns:
            return None
    elif before and not splits_digits:
        return None
    model = cast(Json, tokenizer["model"])
    kinds = {(k.patterns, k.splits_digits, k.whole_words_first): k for k in BYTE_LEVEL_KINDS}
    kind = kinds.get((patterns, splits_digits, bool(model.get("ignore_merges"))))
    if kind is None or model.get("byte_fallback"):
        return None
    normalizers = steps_of(tokenizer.get("normalizer"), "normalizers")
    is_known = not normalizers or (kind.is_published_with_nfc and normalizers == [NFC])
    return kind if is_known else None


def sentencepiece_prefix(tokenizer: Json) -> bool | None:
    """Whether a SentencePiece BPE puts a space before the text; None if it is not one. Spaces
    become U+2581 by normalizers (as Llama 2 was published) or by Metaspace (later)."""
    model = cast(Json, tokenizer["model"])
    before = steps_of(tokenizer.get("pre_tokenizer"), "pretokenizers")
    normalizers = steps_of(tokenizer.get("normalizer"), "normalizers")
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


def steps_of(part: object, key: str) -> list[dict]:
    """The steps of a (pre-tokenizer or normalizer) sequence; a single step is a sequence of one."""
    if not isinstance(part, dict):
        return []
    return part.get(key, []) if part.get("type") == "Sequence" else [part]


def tables_of(tokenizer: Json) -> tuple[dict[str, int], list[dict]]:
    model = cast(Json, tokenizer["model"])
    vocabulary = model.get("vocab")
    added = cast(list[dict], tokenizer.get("added_tokens") or [])
    return (vocabulary if isinstance(vocabulary, dict) else {}), added


def _tokens(tokenizer: Json, vocab_size: int) -> tuple[list[str], list[int]]:
    tokens = [f"[PAD{number}]" for number in range(vocab_size)]
    types = [int(TokenType.UNUSED)] * vocab_size
    model = cast(Json, tokenizer["model"])
    vocabulary, added = tables_of(tokenizer)
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
    """Scores that make llama.cpp, which joins the pair whose token has the highest score, follow
    the order of the merges: a token's score is minus the index of the first merge that makes it.
    Tokens that no merge makes come last."""
    places: dict[str, int] = {}
    merges = cast(list, model["merges"])
    for place, merge in enumerate(merges):
        places.setdefault("".join(pair_of(merge)), place)
    return [-float(places.get(token, len(merges))) for token in tokens]


def pair_of(merge: object) -> list[str]:
    """The tokens of a merge, which is "a b" in old files and ["a", "b"] in new ones."""
    if isinstance(merge, str):
        return merge.split(" ")
    return merge if isinstance(merge, list) and all(isinstance(m, str) for m in merge) else []


def differences(tokenizer: Json) -> list[str]:
    """A line for each kind of text that llama.cpp splits differently, for a tokenizer that
    `vocabulary_keys` has converted."""
    _, added = tables_of(tokenizer)
    flags = ("lstrip", "rstrip", "single_word")
    found = [str(token["content"]) for token in added if any(token.get(flag) for flag in flags)]
    lines = []
    if found:
        lines.append(
            f"llama.cpp ignores the lstrip, rstrip and single_word flags of {len(found)} added"
            f" tokens, such as {found[0]!r}"
        )
    kind = byte_level_kind(tokenizer)
    if kind is None:
        return lines + _sentencepiece_differences(tokenizer)
    if kind.in_llama_cpp:
        lines.append(
            f"llama.cpp's {kind.name!r} splits otherwise, and may give other tokens for,"
            f" {', '.join(kind.in_llama_cpp)}"
        )
    if steps_of(tokenizer.get("normalizer"), "normalizers") == [NFC]:
        lines.append(
            "llama.cpp does not compose letters and accents (NFC) as this tokenizer does: text"
            " with combining accents gets other tokens there"
        )
    return lines


def _sentencepiece_differences(tokenizer: Json) -> list[str]:
    lines = []
    if tokenizer.get("pre_tokenizer") and sentencepiece_prefix(tokenizer):
        lines.append(
            "llama.cpp puts a space before text that begins with one and after special tokens,"
            " this tokenizer (Metaspace) does not"
        )
    pairs = _pairs_joined_otherwise(tokenizer)
    if pairs:
        left, right = pairs[0]
        lines.append(
            f"llama.cpp joins {len(pairs)} pairs of tokens that the merges do not join, or in"
            f" another order, e.g. {left!r} and {right!r}"
        )
    return lines


def _pairs_joined_otherwise(tokenizer: Json) -> list[tuple[str, str]]:
    """Pairs of tokens that llama.cpp joins although no merge does, or in another order than the
    merges. llama.cpp joins any two tokens whose texts make a third. The merges may lack such a
    pair, or have merges of other tokens between those that make one token."""
    vocabulary, added = tables_of(tokenizer)
    specials = {token["content"] for token in added}
    merges = cast(list, cast(Json, tokenizer["model"])["merges"])
    places = {(p[0], p[1]): place for place, p in enumerate(map(pair_of, merges))}
    found = []
    for token in vocabulary:
        if len(token) < 2 or token in specials or BYTE_TOKEN.fullmatch(token):
            continue
        cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
        pairs = [pair for pair in cuts if pair[0] in vocabulary and pair[1] in vocabulary]
        at = [places[pair] for pair in pairs if pair in places]
        if len(at) < len(pairs):
            found += [pair for pair in pairs if pair not in places]
        elif at and max(at) - min(at) >= len(at):
            found.append(pairs[0])
    return found
