"""Builds a tokenizer from the `tokenizer.ggml.*` keys of a third-party model file.

Three kinds are supported: byte-level BPE ("gpt2") with a known pre-tokenizer, SentencePiece's BPE
("llama"), which joins the adjacent pair whose token has the highest score, the leftmost among
equals, and the same with a list of merges (tokenizer_kinds.py). Our own files have a
tokenizer.json, which takes precedence over these keys."""

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import Keys, TokenType
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from hotsplit.artifacts.model_file import TOKENIZER_KEY
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import Value
from hotsplit.files.typed import shown
from hotsplit.tokens.byte_level import ByteLevelKind, kind_of
from hotsplit.tokens.tokenizer_kinds import (
    BYTE_LEVEL,
    CONTROL_TEXTS,
    GIVE,
    SENTENCEPIECE_KINDS,
    SentencePieceKind,
    strips,
    why_model,
    why_pre_tokenizer,
)
from hotsplit.tokens.tokenizer_text import read_tokenizer

BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
SPACE = "\u2581"
SPECIAL = (TokenType.CONTROL, TokenType.UNKNOWN)


def check_text_keys(path: Path, keys: Mapping[str, Value]) -> None:
    """Raises HotsplitError if the file has a tokenizer that cannot be used."""
    content = keys.get(TOKENIZER_KEY)
    if isinstance(content, str):
        read_tokenizer(f"{path}: {TOKENIZER_KEY}", content)
    elif Keys.Tokenizer.MODEL in keys:
        ggml_tokenizer(path, keys)


def ggml_tokenizer(path: Path, keys: Mapping[str, Value]) -> Tokenizer:
    """The tokenizer that llama.cpp builds from these keys, plus NFC where the published one has it.
    Raises HotsplitError, naming `path`, for an unknown kind and for invalid keys."""
    vocabulary = _Vocabulary.read(path, keys)
    model = keys.get(Keys.Tokenizer.MODEL)
    pieces = SENTENCEPIECE_KINDS.get(model) if isinstance(model, str) else None
    if pieces is not None:
        tokenizer, adds_begin = _sentencepiece(vocabulary, pieces), True
    elif model == BYTE_LEVEL:
        kind = _byte_level_kind(path, keys.get(Keys.Tokenizer.PRE))
        tokenizer, adds_begin = _byte_level(vocabulary, kind), kind.adds_begin
    else:
        *known, last = map(repr, (BYTE_LEVEL, *SENTENCEPIECE_KINDS))
        raise HotsplitError(
            f"{path}: its tokenizer ({Keys.Tokenizer.MODEL}) is {shown(model)}{why_model(model)};"
            f" known are {', '.join(known)} and {last}; {GIVE}"
        )
    tokenizer.add_special_tokens(vocabulary.added_tokens(*SPECIAL))
    tokenizer.add_tokens(vocabulary.added_tokens(TokenType.USER_DEFINED))
    _add_ends(tokenizer, vocabulary, adds_begin, pieces is not None and pieces.always_begins)
    return tokenizer


@dataclass(frozen=True, kw_only=True)
class _Vocabulary:
    path: Path
    keys: Mapping[str, Value]
    tokens: list[str]
    types: list[int]

    @classmethod
    def read(cls, path: Path, keys: Mapping[str, Value]) -> "_Vocabulary":
        tokens = _strings(path, keys, Keys.Tokenizer.LIST)
        # Surrogates stand for bytes that are not UTF-8.
        has_surrogates = re.compile("[\ud800-\udfff]").search
        other = next((i for i, token in enumerate(tokens) if has_surrogates(token)), None)
        if other is not None:
            raise HotsplitError(
                f"{path}: token {other} has bytes that are not UTF-8, which the tokenizers library"
                f" rejects; {GIVE}"
            )
        if len(set(tokens)) != len(tokens):
            raise HotsplitError(
                f"{path}: tokens repeat the text of another one ({len(tokens) - len(set(tokens))}"
                f" of {len(tokens)}) and are ambiguous; download the file again"
            )
        read = cls(path=path, keys=keys, tokens=tokens, types=[TokenType.NORMAL] * len(tokens))
        types = read.types
        if Keys.Tokenizer.TOKEN_TYPE in keys:
            types = [int(number) for number in read.numbers(Keys.Tokenizer.TOKEN_TYPE)]
        for number, token in enumerate(tokens):
            if token in CONTROL_TEXTS:  # whatever the file says, as in llama.cpp
                types[number] = TokenType.CONTROL
        return dataclasses.replace(read, types=types)

    def numbers(self, key: str) -> list[float]:
        """The numbers of `key`, one for each token; NaN as a score would leave the order open."""
        values = self.keys.get(key)
        is_right = (
            isinstance(values, list)
            and len(values) == len(self.tokens)
            and all(isinstance(value, int | float) and math.isfinite(value) for value in values)
        )
        if not isinstance(values, list) or not is_right:
            raise HotsplitError(
                f"{self.path}: {key} does not have {len(self.tokens)} finite numbers, one for each"
                " token; download the file again"
            )
        return [float(value) for value in values]

    def texts(self, *kinds: TokenType) -> list[str]:
        pairs = zip(self.tokens, self.types, strict=True)
        return [token for token, kind in pairs if kind in kinds]

    def added_tokens(self, *kinds: TokenType) -> list[AddedToken]:
        """The tokens of these types, as they are cut out of a text."""
        name = str(self.keys.get(Keys.General.NAME, ""))
        return [
            AddedToken(text, normalized=False, rstrip=strips(name, text))
            for text in self.texts(*kinds)
        ]

    def ids(self) -> dict[str, int]:
        """Ids of all tokens that can occur in a text, which excludes padding."""
        pairs = enumerate(zip(self.tokens, self.types, strict=True))
        return {token: i for i, (token, kind) in pairs if kind != TokenType.UNUSED}

    def is_set(self, key: str, default: bool) -> bool:
        value = self.keys.get(key, default)
        if not isinstance(value, bool):
            raise HotsplitError(f"{self.path}: {key} is {shown(value)}, wanted true or false")
        return value

    def special(self, key: str) -> str:
        """The text of the token whose id is the value of `key`."""
        value = self.keys.get(key)
        if not isinstance(value, np.integer) or not 0 <= value < len(self.tokens):
            raise HotsplitError(
                f"{self.path}: {key} is {shown(value)}, wanted the id of a token, which is added to"
                " every text; download the file again"
            )
        return self.tokens[int(value)]


def _byte_level_kind(path: Path, name: Value | None) -> ByteLevelKind:
    kind = kind_of(name)
    if kind is not None:
        return kind
    found = "missing" if name is None else shown(name)
    raise HotsplitError(
        f"{path}: its pre-tokenizer ({Keys.Tokenizer.PRE}) is {found}, {why_pre_tokenizer(name)};"
        f" {GIVE}"
    )


def _byte_level(vocabulary: _Vocabulary, kind: ByteLevelKind) -> Tokenizer:
    ids, merges = vocabulary.ids(), _listed_merges(vocabulary)
    tokenizer = Tokenizer(models.BPE(ids, merges, ignore_merges=kind.whole_words_first))
    steps: list[pre_tokenizers.PreTokenizer] = []
    if kind.splits_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in kind.patterns]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not kind.patterns)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, last])
    if kind.is_published_with_nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _listed_merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """The merges of two tokens to a third. Left out are those that no text needs: of more than two
    parts, which files of the first GLM-4 have for tokens that no pair makes, and of bytes that
    spell a special token, such as Phi-4's U+FFFD, which is cut out of a text before."""
    ids, merges = vocabulary.ids(), []
    special = {_as_bytes(text) for text in vocabulary.texts(*SPECIAL, TokenType.USER_DEFINED)}
    for merge in _strings(vocabulary.path, vocabulary.keys, Keys.Tokenizer.MERGES):
        left, _, right = merge.partition(" ")
        if left in ids and right in ids and left + right in ids:
            merges.append((left, right))
            continue
        parts = merge.split(" ")
        is_long = len(parts) > 2 and all(part in ids for part in parts)
        if not is_long and special.isdisjoint((left, right, left + right)):
            raise HotsplitError(
                f"{vocabulary.path}: the merge {shown(merge)} does not join two tokens to a third;"
                " download the file again"
            )
    return merges


def _as_bytes(text: str) -> str:
    """The text as byte-level tokens spell its bytes."""
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in whole.pre_tokenize_str(text))


def _sentencepiece(vocabulary: _Vocabulary, kind: SentencePieceKind) -> Tokenizer:
    ids, path = vocabulary.ids(), vocabulary.path
    missing = [token for token in BYTE_TOKENS if token not in ids]
    if missing:
        raise HotsplitError(
            f"{path}: {len(missing)} of the 256 byte tokens are missing, first {missing[0]}; {GIVE}"
        )
    if kind.has_merges:
        merges = _listed_merges(vocabulary)
    else:
        scores = vocabulary.numbers(Keys.Tokenizer.SCORES)
        normal = zip(vocabulary.tokens, scores, vocabulary.types, strict=True)
        scored = {token: score for token, score, kind in normal if kind == TokenType.NORMAL}
        merges = merges_of_scores(path, scored)
    unknown = vocabulary.texts(TokenType.UNKNOWN)
    tokenizer = Tokenizer(
        models.BPE(
            ids,
            merges,
            unk_token=unknown[0] if unknown else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    adds_space = vocabulary.is_set(Keys.Tokenizer.ADD_PREFIX, not kind.has_merges)
    prepend = [normalizers.Prepend(SPACE)] if adds_space else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if adds_space else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _add_ends(
    tokenizer: Tokenizer, vocabulary: _Vocabulary, adds_begin: bool, always_begins: bool
) -> None:
    """Adds the tokens that begin or end every text. `adds_begin`: if the file does not say."""
    names = Keys.Tokenizer
    begin = end = None
    if vocabulary.is_set(names.ADD_BOS, adds_begin) or always_begins:
        begin = vocabulary.special(names.BOS_ID)
    if vocabulary.is_set(names.ADD_EOS, False):
        end = vocabulary.special(names.EOS_ID)
    if begin is None and end is None:
        return
    special_tokens = [(text, tokenizer.token_to_id(text)) for text in (begin, end) if text]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[text for text in (begin, "$A", end) if text],
        special_tokens=list(dict(special_tokens).items()),
    )


def _strings(path: Path, keys: Mapping[str, Value], key: str) -> list[str]:
    values = keys.get(key)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        found = "is missing" if values is None else "is not a list of texts"
        raise HotsplitError(f"{path}: {key} {found}; text needs a tokenizer; {GIVE}")
    return [str(value) for value in values]


def merges_of_scores(path: Path, scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """The merges with which BPE gives the same tokens as SentencePiece with these scores.

    SentencePiece joins, of all adjacent pairs that form a token, the one whose token has the
    highest score; BPE joins the pair whose merge comes first in its list. So all pairs that form a
    token become merges, in the order of the token's score. The two algorithms may differ if pairs
    of equal score overlap: if they form different tokens, the scores are refused; if they form the
    same token (runs of one letter), the pair with the longer left part comes first, because joining
    from the left leaves longer tokens on the left. Raises HotsplitError, naming `path`, if the
    scores do not determine the order, or a token is formed with a character that is not a token."""
    order = sorted((token for token in scores if len(token) > 1), key=lambda t: -scores[t])
    pairs = {token: _pairs(path, token, scores) for token in order}
    start = 0
    while start < len(order):
        stop = start + 1
        while stop < len(order) and scores[order[stop]] == scores[order[start]]:
            stop += 1
        if stop - start > 1:
            _refuse_overlaps(path, {token: pairs[token] for token in order[start:stop]})
        start = stop
    return [pair for token in order for pair in pairs[token]]


def _pairs(path: Path, token: str, scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """The splits of a token into two tokens, longest left part first."""
    cuts = [(token[:i], token[i:]) for i in range(len(token) - 1, 0, -1)]
    pairs = [(left, right) for left, right in cuts if left in scores and right in scores]
    for left, right in cuts:
        lone = [part for part in (left, right) if len(part) == 1 and part not in scores]
        if lone and (left in scores or right in scores or len(token) == 2):
            raise HotsplitError(
                f"{path}: the token {shown(token)} is formed with {lone[0]!r}, which is not a"
                f" token, and BPE by merges cannot do that; {GIVE}"
            )
    return pairs


def _refuse_overlaps(path: Path, pairs: Mapping[str, list[tuple[str, str]]]) -> None:
    """Refuses two tokens of equal score that compete: one's right part is the other's left."""
    by_left: dict[str, set[str]] = {}
    for token, cuts in pairs.items():
        for left, _ in cuts:
            by_left.setdefault(left, set()).add(token)
    for token, cuts in pairs.items():
        for _, right in cuts:
            for other in sorted(by_left.get(right, set()) - {token}):
                raise HotsplitError(
                    f"{path}: the tokens {shown(token)} and {shown(other)} have the same score,"
                    f" which makes tokenisation ambiguous; {GIVE}"
                )
