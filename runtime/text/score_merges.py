"""Converts token scores to a list of merges, so that BPE by merges gives the same tokens as BPE by
scores.

SentencePiece joins, of all adjacent pairs that form a token, the one whose token has the highest
score, leftmost first. BPE joins the pair whose merge comes first in its list, leftmost first. So
all pairs that form a token become merges, in the order of the token's score. The two algorithms may
differ if pairs of equal score overlap: if they form different tokens, the scores are refused; if
they form the same token (runs of one letter), the pair with the longer left part comes first,
because joining from the left leaves longer tokens on the left."""

from collections.abc import Mapping
from pathlib import Path

from hotsplit.errors import HotsplitError
from hotsplit.files.typed import shown


def merges_of_scores(path: Path, scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """The merges. Raises HotsplitError, naming `path`, if the scores do not determine the order,
    or a token is formed with a character that is not a token."""
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
                f"{path}: the token {shown(token)} is formed with {lone[0]!r}, which is not a token, and"
                " BPE by merges cannot do that; convert a checkpoint that has a tokenizer.json"
            )
    return pairs


def _refuse_overlaps(path: Path, pairs: Mapping[str, list[tuple[str, str]]]) -> None:
    """Refuses two tokens of equal score that compete for a part: the right part of one is the left
    part of the other."""
    by_left: dict[str, set[str]] = {}
    for token, cuts in pairs.items():
        for left, _ in cuts:
            by_left.setdefault(left, set()).add(token)
    for token, cuts in pairs.items():
        for _, right in cuts:
            for other in sorted(by_left.get(right, set()) - {token}):
                raise HotsplitError(
                    f"{path}: the tokens {shown(token)} and {shown(other)} have the same score, which"
                    " makes tokenisation ambiguous; convert a checkpoint that has a tokenizer.json"
                )
