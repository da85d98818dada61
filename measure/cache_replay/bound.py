"""A lower bound on the time of policies of the neuron cache, even of one that knows the text in
advance.

A step takes at least the larger of its compute time and its copy time, and a layer at least the
larger of its hot and its cold side. A maximum is at least any weighted mean of its arguments, so
for weights a, b, m >= 0 with a_l + b_l + m = 1 for every layer l

    seconds(t) >= (1 - m) rest_s + sum_l [a_l cold_l(t) + b_l hot_l(t)] + m link(t),

which is linear in the hits and the copies. The limit of N slots per layer and step is relaxed with
a price for each slot and step (Lagrangian relaxation). Then neurons are independent: a hit saves
a_l cold_row_s - b_l hot_row_s, a copy costs m copy_row_s, and dynamic programming finds the best
times for a neuron to be in a slot (runtime/neuron_cache/native/bound.cpp). The sum is a lower bound
for any weights and prices; a subgradient method searches for those that make it large. It leaves
out gathering, the fixed times of copies, and the rule that a copy must begin a step before it is
used; each of these could only raise it. It holds for policies that compute neurons without a slot
on the CPU, not for one that copies more neurons for a step than there are slots.

Letters: T steps, L layers, F neurons of a layer, N slots of a layer, W 32-bit words that hold a
bit for each of F neurons."""

from dataclasses import dataclass

import numpy as np

from hotsplit.measure.cache_replay.policies import Case
from hotsplit.runtime.neuron_cache.native.library import best_gain
from hotsplit.runtime.neuron_cache.policy import packed

ROUNDS = 30  # of the subgradient method, for the first weight of the link
LATER_ROUNDS = 8  # for later weights, which start from the prices found before
LINK_WEIGHTS = 7  # steps of the search for the link's weight


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The bound in seconds per step, and the copies per step of its relaxed solution."""

    seconds: float
    link_weight: float
    num_copies: float


def lower_bound(case: Case, known_s: float) -> Bound:
    """The largest bound found. `known_s`: the seconds per step of some policy, from which the
    subgradient's step size follows."""
    search = _Search(case, known_s)
    low, high = 0.0, 1.0
    tried: dict[float, Bound] = {}

    def at(weight: float) -> Bound:
        if weight not in tried:
            tried[weight] = search.run(weight)
        return tried[weight]

    # The bound is concave in the weight of the link. This ternary search tries points near the
    # lower end, since the best weight of a fast link is near 0.
    for _ in range(LINK_WEIGHTS):
        left, right = low + (high - low) / 6, low + (high - low) / 3
        if at(left).seconds >= at(right).seconds:
            high = right
        else:
            low = left
    return max(tried.values(), key=lambda bound: bound.seconds)


class _Search:
    def __init__(self, case: Case, known_s: float) -> None:
        self.case, self.known_s = case, known_s * case.num_tokens
        self.planned_LW = packed(case.planned_LF)
        self.read_L = case.trace.read_TL.sum(axis=0)
        shape = len(case.slots_LN), case.num_tokens
        costs = case.costs
        # Prices are fractions of the time that a hit saves.
        self.price_LT = np.full(shape, 0.05)
        self.hot_share_L = np.where(costs.hot_row_s_L < costs.cold_row_s_L, 0.0, 0.5)
        self.num_rounds = ROUNDS

    def run(self, link_weight: float) -> Bound:
        """The best bound for this weight of the link, starting from the prices found before."""
        best: Bound | None = None
        scale = 1.0
        for number in range(self.num_rounds):
            bound, slope_LT, lean_L = self._evaluate(link_weight)
            if best is None or bound.seconds > best.seconds:
                best, kept = bound, (self.price_LT.copy(), self.hot_share_L.copy())
            else:
                scale *= 0.9
            norm = float((slope_LT**2).sum())
            if not norm:
                break
            gap_s = max(0.0, self.known_s - bound.seconds * self.case.num_tokens)
            # Slots can stay empty, so a hit costs nothing.
            earned_s = np.maximum(0.0, self._weights(link_weight)[2]).mean() or 1.0
            step = 0.5 * scale * gap_s / earned_s / norm
            self.price_LT = np.maximum(0.0, self.price_LT + step * slope_LT)
            turn = 0.1 * scale / np.sqrt(1 + number)
            self.hot_share_L = np.clip(self.hot_share_L + turn * lean_L, 0.0, 1.0)
        assert best is not None
        self.price_LT, self.hot_share_L = kept
        self.num_rounds = LATER_ROUNDS
        return best

    def _weights(self, link_weight: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """a and b of each layer, and the seconds that a hit saves, [L]."""
        costs, rest = self.case.costs, 1.0 - link_weight
        cold_L, hot_L = rest * (1.0 - self.hot_share_L), rest * self.hot_share_L
        return cold_L, hot_L, cold_L * costs.cold_row_s_L - hot_L * costs.hot_row_s_L

    def _evaluate(self, link_weight: float) -> tuple[Bound, np.ndarray, np.ndarray]:
        """The bound at these weights and prices; its subgradient in the prices, which is the slots
        used minus those available [L, T]; and +1 for layers whose hot side takes longer, -1 for
        those whose cold side does [L]."""
        case, costs = self.case, self.case.costs
        num_tokens = case.num_tokens
        cold_L, hot_L, earned_L = self._weights(link_weight)
        fetch_L = link_weight * costs.copy_row_s_L
        total = num_tokens * (1.0 - link_weight) * costs.rest_s
        slope_LT, lean_L = np.zeros_like(self.price_LT), np.zeros(len(earned_L))
        all_copies = 0
        for layer, slots_N in enumerate(case.slots_LN):
            fixed = cold_L[layer] * costs.cold_s_L[layer] + hot_L[layer] * costs.hot_s_L[layer]
            missed = cold_L[layer] * costs.cold_row_s_L[layer] * self.read_L[layer]
            gain_s, used_T, copies, hits = self._gain(layer, earned_L[layer], fetch_L[layer])
            total += num_tokens * fixed + missed - gain_s
            slope_LT[layer] = used_T - len(slots_N)
            misses = self.read_L[layer] - hits
            hot_s = num_tokens * costs.hot_s_L[layer] + hits * costs.hot_row_s_L[layer]
            cold_s = num_tokens * costs.cold_s_L[layer] + misses * costs.cold_row_s_L[layer]
            lean_L[layer] = np.sign(hot_s - cold_s)
            all_copies += copies
        bound = Bound(
            seconds=total / num_tokens,
            link_weight=link_weight,
            num_copies=all_copies / num_tokens,
        )
        return bound, slope_LT, lean_L

    def _gain(
        self, layer: int, earned_s: float, fetch_s: float
    ) -> tuple[float, np.ndarray, int, int]:
        """An upper bound, from these prices, on the seconds that a layer's slots can save; and the
        slots used [T], copies and hits of the solution that it comes from."""
        case = self.case
        if earned_s <= 0:  # leaving slots empty is best, and costs nothing
            return 0.0, np.zeros(case.num_tokens, np.int32), 0, 0
        price_T = self.price_LT[layer].astype(np.float32)
        gain, used_T, copies, hits = best_gain(
            case.trace.bits_TLW[:, layer], case.trace.num_neurons, self.planned_LW[layer], price_T,
            1.0, fetch_s / earned_s,
        )  # fmt: skip
        paid = float(price_T.astype(np.float64).sum()) * len(case.slots_LN[layer])
        return earned_s * (gain + paid), used_T, copies, hits
