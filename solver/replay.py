"""Prices the experts of a layer by recorded choices, and bounds those prices.

For a token t with h_t of its K experts on the GPU, by Sides,

    M_t = max(h_t * hot_s + kernels, (K - h_t) * cold_s + hand_over)

and M is the mean over the recorded tokens. With S hot experts, h_t is the number of the token's
experts in S, so M is a mean of convex functions of sums over S. For any numbers h'_t, each function
is at least its tangent at h'_t; the sum of the tangents is a constant plus one weight for each
expert in S, so over all sets of n experts it is least for the n smallest weights. Tangents at the
choice of the n most frequent experts give a bound that is reached where these are the n smallest
weights; `least_seconds` has it for every n. The bound by means (`Problem.least_split_s_LN`) holds as
well, by Jensen's inequality.

Letters: T recorded tokens, K experts of a token, E experts of the layer by rank (0 is the most
frequent), H sets, N = E + 1 counts of hot experts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Sides:
    """A layer's choices, and seconds: of one expert on the GPU and on the CPU, of a layer's kernels
    and of its hand-over."""

    rank_TK: np.ndarray
    num_experts: int
    hot_s: float
    cold_s: float
    kernels_s: float
    hand_over_s: float

    @property
    def num_used(self) -> int:
        return self.rank_TK.shape[1]

    def seconds(self, hot_HT: np.ndarray, num_hot_H: np.ndarray, dense: bool) -> np.ndarray:
        """M_t [H, T] of H sets that have `num_hot_H` experts, `hot_HT` of them chosen for a token;
        `dense`: the dense block is on the GPU."""
        has_hot_H1 = (num_hot_H > 0)[:, None]
        has_cold_H1 = (num_hot_H < self.num_experts)[:, None]
        is_split_H1 = has_cold_H1 if dense else has_hot_H1
        hot_HT = hot_HT.astype(np.float64)
        gpu_HT = hot_HT * self.hot_s + self.kernels_s * has_hot_H1
        cpu_HT = (self.num_used - hot_HT) * self.cold_s + self.hand_over_s * is_split_H1
        return np.maximum(gpu_HT, cpu_HT)


def prefix_counts(sides: Sides) -> np.ndarray:
    """h_t with the n most frequent experts on the GPU, int64 [N, T]."""
    num_tokens, num_experts = len(sides.rank_TK), sides.num_experts
    has_NT = np.zeros((num_experts + 1, num_tokens), np.int64)
    np.add.at(has_NT, (sides.rank_TK.T + 1, np.arange(num_tokens)), 1)
    return np.cumsum(has_NT, axis=0)


def prefix_seconds(sides: Sides, dense: bool) -> np.ndarray:
    """M with the n most frequent experts on the GPU, n = 0..E; f64 [N]."""
    counts_N = np.arange(sides.num_experts + 1)
    return sides.seconds(prefix_counts(sides), counts_N, dense).mean(axis=1)


def sets_seconds(sides: Sides, hot_HE: np.ndarray, dense: bool) -> np.ndarray:
    """M of each of these sets, f64 [H]."""
    hot_HT = hot_HE[:, sides.rank_TK].sum(axis=2)
    return sides.seconds(hot_HT, hot_HE.sum(axis=1), dense).mean(axis=1)


def weights(sides: Sides, hot_T: np.ndarray) -> np.ndarray:
    """The slopes of the tangents at h_t of a divided layer, summed over the tokens that chose an
    expert and divided by T; f64 [E]."""
    gpu_s = hot_T * sides.hot_s + sides.kernels_s
    cpu_s = (sides.num_used - hot_T) * sides.cold_s + sides.hand_over_s
    slope_T = np.where(gpu_s > cpu_s, sides.hot_s, -sides.cold_s) / len(hot_T)
    slope_TK = np.broadcast_to(slope_T[:, None], sides.rank_TK.shape)
    return np.bincount(sides.rank_TK.ravel(), slope_TK.ravel(), minlength=sides.num_experts)


def least_seconds(sides: Sides, counts: Sequence[int], by_means_N: np.ndarray) -> np.ndarray:
    """A lower bound on M of a divided layer with any n hot experts, for n in `counts`, which are
    consecutive; convex in n, and at least `by_means_N`, which is such a bound."""
    prefix_NT, least_N = prefix_counts(sides), by_means_N.copy()
    prefix_s_N = sides.seconds(prefix_NT, np.ones(len(prefix_NT)), True).mean(axis=1)
    for place, count in enumerate(counts):
        weight_E = weights(sides, prefix_NT[count])
        smallest = np.sort(weight_E)[:count].sum()
        least = prefix_s_N[count] - weight_E[:count].sum() + smallest
        least_N[place] = max(least_N[place], least)
    return convex(least_N)


def convex(values_N: np.ndarray) -> np.ndarray:
    """The largest convex sequence that is nowhere above the values (Andrew's monotone chain)."""
    hull: list[int] = []
    for place, value in enumerate(values_N.tolist()):
        while len(hull) > 1:
            before, last = hull[-2:]
            slope = (value - values_N[before]) / (place - before)
            if values_N[last] < values_N[before] + slope * (last - before):
                break
            hull.pop()
        hull.append(place)
    return np.interp(np.arange(len(values_N)), hull, values_N[hull])


def improved(sides: Sides, hot_E: np.ndarray, dense: bool, most: int) -> np.ndarray:
    """A set with as many experts that is no slower: the experts of the smallest weights at the
    set's own choices, repeated at most `most` times while that is faster."""
    count, best_s = int(hot_E.sum()), float(sets_seconds(sides, hot_E[None], dense)[0])
    for _ in range(most):
        weight_E = weights(sides, hot_E[sides.rank_TK].sum(axis=1))
        found_E = np.zeros_like(hot_E)
        found_E[np.argsort(weight_E, kind="stable")[:count]] = True
        seconds = float(sets_seconds(sides, found_E[None], dense)[0])
        if seconds >= best_s:
            break
        hot_E, best_s = found_E, seconds
    return hot_E
