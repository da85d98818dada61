"""Prices the experts of a layer by recorded choices, and bounds those prices.

For a token t with h_t of its K experts on the GPU, by Sides,

    M_t = g(h_t) = max(h_t * hot_s + kernels, (K - h_t) * cold_s + hand_over)

and M is the mean over the recorded tokens. With S hot experts, h_t is the number of the token's
experts in S: an integer, so g may be replaced by the convex function of straight lines through its
values at 0..K. Any mean of these lines, with weights of the token's own, is at most g(h_t); summed
over the tokens it is a constant plus one weight for each expert in S, and over all sets of n
experts least for the n smallest weights. So every choice of means bounds M for all n at once,
convexly in n. `relax` finds good ones by Frank and Wolfe's method (1956) for the sets' relaxation,
whose experts may be there in part, with the lines' maximum smoothed by a softmax. The bound by
means (`Problem.least_split_s_LN`) holds as well, by Jensen's inequality.

Of experts that are on the drive, m_t are chosen for a token. They are read while others are
computed, and computed as they come, so a third side is as long as

    m_t * drive_s + hand_over

Letters: T recorded tokens, K experts of a token, E experts of the layer by rank (0 is the most
frequent), H sets, N = E + 1 counts of hot experts."""

from dataclasses import dataclass

import numpy as np

ROUNDS = 40
GRID = 6  # numbers of hot experts for which sets are relaxed
ROUNDING = 1e-9  # of an expert's seconds on the CPU
SMOOTH = 0.25, 0.06  # of an expert's seconds on the CPU, in the first and the last round


@dataclass(frozen=True, kw_only=True)
class Sides:
    """A layer's choices, and seconds: of an expert on each side, of kernels, of a hand-over."""

    rank_TK: np.ndarray
    num_experts: int
    hot_s: float
    cold_s: float
    kernels_s: float
    hand_over_s: float
    drive_s: float = 0.0  # of reading an expert from the drive and computing it

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


def prefix_seconds(sides: Sides, dense: bool) -> np.ndarray:
    """M with the n most frequent experts on the GPU, n = 0..E; f64 [N]."""
    counts_N, num_tokens = np.arange(sides.num_experts + 1), len(sides.rank_TK)
    has_NT = np.zeros((len(counts_N), num_tokens), np.int64)
    np.add.at(has_NT, (sides.rank_TK.T + 1, np.arange(num_tokens)), 1)
    return sides.seconds(np.cumsum(has_NT, axis=0), counts_N, dense).mean(axis=1)


def sets_seconds(
    sides: Sides, hot_HE: np.ndarray, dense: bool, resident_HE: np.ndarray | None = None
) -> np.ndarray:
    """M of each of these sets, f64 [H]; with `resident_HE`, experts in neither are on the drive."""
    hot_HT = hot_HE[:, sides.rank_TK].sum(axis=2)
    seconds_HT = sides.seconds(hot_HT, hot_HE.sum(axis=1), dense)
    if resident_HE is not None:
        missing_HT = (~hot_HE & ~resident_HE)[:, sides.rank_TK].sum(axis=2)
        is_split_H1 = (hot_HE.sum(axis=1) > 0)[:, None] | dense
        drive_HT = missing_HT * sides.drive_s + sides.hand_over_s * is_split_H1
        seconds_HT = np.where(missing_HT > 0, np.maximum(seconds_HT, drive_HT), seconds_HT)
    return seconds_HT.mean(axis=1)


def least_seconds(sides: Sides, counts: range, by_means_N: np.ndarray) -> np.ndarray:
    """A lower bound on M of a divided layer with any n hot experts, for n in `counts`; convex in n,
    and at least `by_means_N`, which is such a bound."""
    least_N = by_means_N.copy()
    ends = np.linspace(counts.start, counts.stop - 1, min(len(counts), GRID)).round()
    for count in np.unique(ends.astype(int)).tolist():
        for constant, weight_E in relax(sides, count)[1]:
            sums_N = np.concatenate([[0.0], np.cumsum(np.sort(weight_E))])
            least_N = np.maximum(least_N, constant + sums_N[counts.start : counts.stop])
    return least_N


def relax(sides: Sides, count: int) -> tuple[np.ndarray, list[tuple[float, np.ndarray]]]:
    """The shares of experts that ROUNDS of Frank and Wolfe's method end with for a divided layer
    with `count` of them, f64 [E], and each round's constant and weights f64 [E]."""
    # Slopes and values at 0 of the lines through g at 0..K, at most three different ones.
    hot_N, value_N = np.arange(sides.num_used + 1), _values(sides)
    slope_K = np.diff(value_N)
    start_K = value_N[:-1] - slope_K * hot_N[:-1]
    _, first = np.unique((slope_K / sides.cold_s).round(9), return_index=True)
    slope_P, start_P = slope_K[first], start_K[first]
    num_tokens, num_used = sides.rank_TK.shape
    share_E, found = (np.arange(sides.num_experts) < count).astype(float), []
    rank = sides.rank_TK.ravel().astype(np.int64)
    for number, smooth in enumerate(np.geomspace(*SMOOTH, ROUNDS)):
        hot_T = share_E[rank].reshape(num_tokens, num_used).sum(axis=1)
        value_TP = start_P + slope_P * hot_T[:, None]
        value_TP -= value_TP.max(axis=1, keepdims=True)
        mean_TP = np.exp(value_TP / (smooth * sides.cold_s))
        mean_TP /= mean_TP.sum(axis=1, keepdims=True)
        weight_E = _of_experts(sides, mean_TP @ slope_P / num_tokens)
        found.append((float((mean_TP @ start_P).mean()), weight_E))
        share_E *= 1 - 2 / (number + 3)
        share_E[np.argsort(weight_E, kind="stable")[:count]] += 2 / (number + 3)
    return share_E, found


def _values(sides: Sides) -> np.ndarray:
    """g at 0..K."""
    return sides.seconds(np.arange(sides.num_used + 1)[None], np.ones(1), True)[0]


def _of_experts(sides: Sides, value_T: np.ndarray) -> np.ndarray:
    """For each expert the sum over the tokens that chose it; f64 [E]."""
    value_TK = np.repeat(value_T, sides.num_used)
    return np.bincount(sides.rank_TK.ravel(), value_TK, minlength=sides.num_experts)


def polished(sides: Sides, hot_E: np.ndarray) -> np.ndarray:
    """A set with as many experts that is no slower in a divided layer: this one or the largest
    shares of `relax`, both `improved`."""
    share_E, count = relax(sides, int(hot_E.sum()))[0], int(hot_E.sum())
    found_E = np.zeros_like(hot_E)
    found_E[np.argsort(-share_E, kind="stable")[:count]] = True
    found_HE = np.stack([improved(sides, each_E, ROUNDS) for each_E in (hot_E, found_E)])
    return found_HE[int(sets_seconds(sides, found_HE, True).argmin())]


def improved(sides: Sides, hot_E: np.ndarray, most: int) -> np.ndarray:
    """A set with as many experts that is no slower in a divided layer: the exchange of a hot expert
    for a cold one that saves most, repeated at most `most` times while one saves."""
    hot_E, number = hot_E.copy(), sides.num_experts
    rank_TK = sides.rank_TK.astype(np.int64)
    value_N = _values(sides)
    down_N, up_N = -np.diff(value_N, prepend=np.nan), np.diff(value_N, append=np.nan)
    for _ in range(most):
        hot_T = hot_E[rank_TK].sum(axis=1)
        less_s, more_s = (_of_experts(sides, each_N[hot_T]) for each_N in (down_N, up_N))
        # A token that chose both experts keeps its number; it is in both sums.
        bend_T = np.nan_to_num(down_N + up_N)[hot_T]
        token_B = np.flatnonzero(bend_T > ROUNDING * sides.cold_s)
        pair_BKK = rank_TK[token_B, :, None] * number + rank_TK[token_B, None, :]
        bend_B = np.repeat(bend_T[token_B], sides.num_used**2)
        both_EE = np.bincount(pair_BKK.ravel(), bend_B, number**2).reshape(number, number)
        hot_H, cold_C = np.flatnonzero(hot_E), np.flatnonzero(~hot_E)
        gain_HC = less_s[hot_H, None] + more_s[cold_C] - both_EE[np.ix_(hot_H, cold_C)]
        hot, cold = np.unravel_index(int(gain_HC.argmin()), gain_HC.shape)
        if gain_HC[hot, cold] >= -ROUNDING * sides.cold_s * len(hot_T):
            break
        hot_E[[hot_H[hot], cold_C[cold]]] = False, True
    return hot_E
