"""Finds text that llama.cpp tokenizes differently from tokenizer.json, although it supports the
tokenizer.

The differences are noted when a file for llama.cpp is written; they do not affect our runtime."""

from typing import cast

from hotsplit.convert.vocabulary import (
    BYTE_TOKEN,
    NFC,
    Json,
    byte_level_kind,
    pair_of,
    sentencepiece_prefix,
    steps_of,
    tables_of,
)


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
    if byte_level_kind(tokenizer) is None:
        return lines + _sentencepiece_differences(tokenizer)
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
