"""Candidates, the tokens that may still be drawn, and the search for the largest of many numbers.

Letters: V vocabulary, A candidates. After mask and logit bias, samplers see only finite logits:
tokens with a logit of -inf are dropped, and if any logit is +inf, all other tokens are."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from hotsplit.errors import HotsplitError

# Columns whose maxima bound the k-th largest number. The maxima of 151,936 float32 take 23 us in
# 512 columns, 21 us in 1,024 and 17 us in 2,048 (Zen 4); with fewer columns more numbers pass the
# bound.
_COLUMNS = 1024
_FIRST_LOOK = 256  # tokens that llama.cpp's top-p examines before it sorts everything


@dataclass(frozen=True, eq=False)
class Candidates:
    """Ids and finite logits, at least one. They ascend by id, or descend by logit with the lower id
    first among equals (llama.cpp does not define the order of equals)."""

    ids_A: np.ndarray  # int64
    logits_A: np.ndarray  # float32 or float64
    is_sorted: bool  # by logit
    origin: "Candidates | None" = None  # the input of adaptive-p, if these are its output

    def __len__(self) -> int:
        return len(self.ids_A)

    @cached_property
    def probability_A(self) -> np.ndarray:
        """Softmax of the logits in float64; sums to 1 up to rounding."""
        logits_A = self.logits_A.astype(np.float64)
        logits_A -= logits_A[0] if self.is_sorted else logits_A.max()
        np.exp(logits_A, out=logits_A)
        logits_A /= logits_A.sum()
        return logits_A

    def probability_of(self, token_id: int) -> float:
        """The probability of one candidate."""
        (found,) = self.probability_A[self.ids_A == token_id]
        return float(found)

    def only(self, index: np.ndarray | slice, *, is_sorted: bool | None = None) -> "Candidates":
        """The candidates at an index. `is_sorted`: whether they are sorted by logit; None: as
        now."""
        return Candidates(
            self.ids_A[index],
            self.logits_A[index],
            self.is_sorted if is_sorted is None else is_sorted,
        )

    def largest(self, count: int) -> "Candidates":
        """The `count` candidates with the largest logits, sorted, in float64."""
        if self.is_sorted:
            return self.only(slice(count))
        index = largest(self.logits_A, count)
        return Candidates(self.ids_A[index], self.logits_A[index].astype(np.float64), True)

    def with_logits_at(self, index: np.ndarray, logits: np.ndarray) -> "Candidates":
        """A copy with `logits` at `index`, clipped to finite values; sorted if `is_sorted`."""
        if not len(index):
            return self
        logits_A = self.logits_A.copy()
        limit = float(np.finfo(logits_A.dtype).max)
        logits_A[index] = np.clip(logits, -limit, limit)
        changed = Candidates(self.ids_A, logits_A, False)
        if not self.is_sorted:
            return changed
        by_id = np.argsort(self.ids_A)
        return Candidates(self.ids_A[by_id], logits_A[by_id], False).largest(len(self))

    def positions_of(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(positions of those `ids` that are candidates, their indices in `ids`)."""
        if self.is_sorted:
            by_id = np.argsort(self.ids_A)
            found = np.searchsorted(self.ids_A, ids, sorter=by_id)
            positions = by_id[np.minimum(found, len(self) - 1)]
        else:
            positions = np.minimum(np.searchsorted(self.ids_A, ids), len(self) - 1)
        there = np.flatnonzero(self.ids_A[positions] == ids)
        return positions[there], there


@lru_cache(maxsize=4)
def all_ids(vocab_size: int) -> np.ndarray:
    """0 to V - 1, shared by all chains of a model; read-only."""
    ids_V = np.arange(vocab_size)
    ids_V.setflags(write=False)
    return ids_V


def allowed_ids(mask_V: Tensor, vocab_size: int) -> np.ndarray:
    """Ids that a mask, bool [V], allows, ascending."""
    assert mask_V.dtype == torch.bool and mask_V.shape == (vocab_size,), mask_V.shape
    return np.flatnonzero(mask_V.numpy(force=True))


def possible(ids_A: np.ndarray, logits_A: np.ndarray) -> Candidates:
    """Candidates from ascending ids, without logits of -inf; if any logit is +inf, only those.

    Raises HotsplitError for NaN, and if no candidate is left."""
    lowest, highest = (logits_A.min(), logits_A.max()) if len(ids_A) else (-np.inf, -np.inf)
    if np.isnan(lowest):
        raise nan_error()
    if highest == -np.inf:
        raise nothing_error()
    if highest == np.inf:
        ids_A = ids_A[logits_A == np.inf]
        return Candidates(ids_A, np.zeros(len(ids_A)), False)
    if lowest == -np.inf:
        kept = np.flatnonzero(logits_A > -np.inf)
        ids_A, logits_A = ids_A[kept], logits_A[kept]
    return Candidates(ids_A, logits_A, False)


def nan_error() -> HotsplitError:
    return HotsplitError("the model gave NaN logits; convert its checkpoint again")


def nothing_error() -> HotsplitError:
    return HotsplitError(
        "no token can be drawn: every logit is -inf (by the model, the logit bias or a grammar);"
        " allow at least one token"
    )


def largest(values_A: np.ndarray, count: int) -> np.ndarray:
    """Positions of the `count` largest values, largest first; equal values in order of position.

    Sorts only the values that reach a lower bound of the count-th largest."""
    if count == 1:
        return np.array([values_A.argmax()])
    if count >= len(values_A):
        return np.argsort(-values_A, kind="stable")
    near = _near_the_largest(values_A, count)
    return near[np.argsort(-values_A[near], kind="stable")[:count]]


def _near_the_largest(values_A: np.ndarray, count: int) -> np.ndarray:
    """Ascending positions of the `count` largest values, and usually of few others.

    At least `count` values reach the count-th largest column maximum; all that do are in columns
    whose maxima do, or in the last, incomplete row. (torch.topk of 40 in 151,936 takes 255 us on a
    Zen 4, this takes 45.)"""
    rows = len(values_A) // _COLUMNS
    if rows < 2:
        bound = np.partition(values_A, len(values_A) - count)[len(values_A) - count]
        return np.flatnonzero(values_A >= bound)
    if 4 * count > _COLUMNS:
        bound = torch.topk(torch.from_numpy(values_A), count).values[-1].item()
        return np.flatnonzero(values_A >= bound)
    table = values_A[: rows * _COLUMNS].reshape(rows, _COLUMNS)
    maxima = table.max(axis=0)
    bound = np.partition(maxima, _COLUMNS - count)[_COLUMNS - count]
    columns = np.flatnonzero(maxima >= bound)
    found = np.flatnonzero(table.take(columns, axis=1) >= bound)
    row, column = np.divmod(found, len(columns))
    rest = np.flatnonzero(values_A[rows * _COLUMNS :] >= bound)
    return np.concatenate([row * _COLUMNS + columns[column], rest + rows * _COLUMNS])


def largest_until(
    values_A: np.ndarray, is_enough: Callable[[np.ndarray], int | None]
) -> np.ndarray:
    """Positions of the largest values, largest first. `is_enough` is called with growing numbers of
    them; it returns the number to keep, or None if there are too few."""
    count = _FIRST_LOOK
    while True:
        index = largest(values_A, count)
        enough = is_enough(index)
        if enough is not None or count >= len(values_A):
            return index[:enough]
        count *= 8
