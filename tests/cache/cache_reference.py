"""The reference of native/policy.cpp in numpy, neuron by neuron: slow, and the definition that the
C++ is compared with. With `dtype` float32, both round alike and decide alike; with float64, the
scores show the effect of rounding.

Letters: R tokens of a step, L layers, F neurons of a layer, N slots of a layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hotsplit.options.neuron_cache_options import CacheCosts, CacheOptions, Units

RECENT, ROOM = 0.95, 0.9
PRICE_UP, PRICE_DOWN, LEAST_PRICE = 1.1, 0.97, 1e-3
FIRST_STEPS, LEAST_LOSS = 16, 0.002


@dataclass(frozen=True)
class Swap:
    layer: int
    slot: int
    into: int
    out: int
    gain_s: float


class ReferencePolicy:
    def __init__(
        self,
        resident_LN: Sequence[np.ndarray],
        frequency_LF: np.ndarray,
        costs: CacheCosts,
        options: CacheOptions,
        dtype: type = np.float32,
        units: Units = "neurons",
    ) -> None:
        self.costs, self.options, self.dtype = costs, options.of(units), dtype
        self.are_experts = units == "experts"
        self.score_LF: np.ndarray = frequency_LF.astype(np.float32).astype(dtype)
        self.burst_LF = self.score_LF.copy()
        self.slots = [list(map(int, resident_N)) for resident_N in resident_LN]
        self.planned = [frozenset(slots) for slots in self.slots]
        self.cold_share_L = np.ones(len(self.slots))
        self.swaps: list[Swap] = []
        self.num_rows = self.num_steps = self.next_layer = 0
        self.price = self.step_s = self.free_s = self.gain_s = self.saved_s = 0.0
        self.is_on = self.is_returning = False
        self.cached_s = self.planned_s = 0.0
        self.hits = self.planned_hits = self.read = self.num_swaps = self.num_starts = 0

    def step(self, is_read_RLF: np.ndarray) -> list[Swap]:
        """Ends a step; see policy.CachePolicy.step."""
        is_read_LF: np.ndarray = np.any(is_read_RLF, axis=0)
        saved_s = self._measure(is_read_LF)
        self.saved_s = 0.99 * self.saved_s + 0.01 * saved_s
        self.num_steps += 1
        for swap in self.swaps:
            self.slots[swap.layer][swap.slot] = swap.into
        self.num_swaps += len(self.swaps)
        self.learn(is_read_RLF)
        self._switch()
        self.swaps = self._decide()
        return self.swaps

    def learn(self, is_read_RLF: np.ndarray) -> None:
        real, options = self.dtype, self.options
        for is_read_LF in is_read_RLF:
            first = real(1.0) / (real(options.prior_tokens) + real(self.num_rows + 1))
            rate = max(real(1.0) - real(np.float32(options.decay)), first)
            self.num_rows += 1
            burst_rate = real(1.0) - real(np.float32(options.burst_decay))
            for layer, slots in enumerate(self.slots):
                if not slots:
                    continue
                values_F = is_read_LF[layer].astype(real)
                self.score_LF[layer] += rate * (values_F - self.score_LF[layer])
                if options.burst_weight > 0:
                    self.burst_LF[layer] += burst_rate * (values_F - self.burst_LF[layer])

    def _measure(self, is_read_LF: np.ndarray) -> float:
        costs = self.costs
        step = planned = costs.rest_s
        busy = 0.0
        recent = RECENT if self.num_steps else 0.0
        for layer, slots in enumerate(self.slots):
            ids = set(np.flatnonzero(is_read_LF[layer]).tolist())
            hits, planned_hits = len(ids & set(slots)), len(ids & self.planned[layer])
            if 0 < len(slots) < len(is_read_LF[layer]):  # other layers have no swaps
                self.read, self.hits = self.read + len(ids), self.hits + hits
                self.planned_hits += planned_hits
            hot = costs.hot_s_L[layer] + hits * costs.hot_row_s_L[layer]
            cold = costs.cold_s_L[layer] + (len(ids) - hits) * costs.cold_row_s_L[layer]
            share = self.cold_share_L[layer]
            self.cold_share_L[layer] = recent * share + (1.0 - recent) * float(cold > hot)
            step += max(hot, cold)
            planned += max(
                costs.hot_s_L[layer] + planned_hits * costs.hot_row_s_L[layer],
                costs.cold_s_L[layer] + (len(ids) - planned_hits) * costs.cold_row_s_L[layer],
            )
            busy += cold
        gather = sum(costs.gather_row_s_L[swap.layer] for swap in self.swaps)
        copy = sum(costs.copy_row_s_L[swap.layer] for swap in self.swaps)
        free, computed = 0.0 if self.are_experts else max(0.0, step - busy), step
        step += max(0.0, gather - free)
        if self.swaps:
            step = max(step, costs.copy_s + copy)
        self.cached_s, self.planned_s = self.cached_s + step, self.planned_s + planned
        self.step_s = recent * self.step_s + (1.0 - recent) * computed
        self.free_s = recent * self.free_s + (1.0 - recent) * free
        return planned - step

    def _switch(self) -> None:
        options = self.options
        if options.is_always_on:
            self.is_on = True
        elif (
            not self.is_on
            and self.num_steps >= FIRST_STEPS
            and self.gain_s > options.start_gain * self.step_s
        ):
            self.is_on, self.is_returning = True, False
            self.num_starts += 1
            self.saved_s = options.start_gain * self.step_s
        elif self.is_on and self.saved_s < -LEAST_LOSS * self.step_s:
            self.is_on, self.is_returning = False, True

    def _decide(self) -> list[Swap]:
        num_layers = len(self.slots)
        assert self.options.visited is not None
        num_visited = max(1, round(self.options.visited * num_layers))
        found: list[Swap] = []
        gain_s = 0.0
        for number in range(num_visited):
            layer = (self.next_layer + number) % num_layers
            swaps, gained_s = self._pairs(layer, to_plan=False)
            gain_s += gained_s
            if not self.is_on:
                swaps = self._pairs(layer, to_plan=True)[0] if self.is_returning else []
            found += swaps
        self.next_layer = (self.next_layer + num_visited) % num_layers
        self.gain_s = 0.8 * self.gain_s + 0.2 * (gain_s * num_layers / num_visited)
        taken = self._fitting(found)
        if len(taken) < len(found):
            self.price = max(LEAST_PRICE, self.price * PRICE_UP)
        else:
            self.price *= PRICE_DOWN
        if self.price < LEAST_PRICE:
            self.price = 0.0
        return taken

    def _pairs(self, layer: int, *, to_plan: bool) -> tuple[list[Swap], float]:
        costs, options, slots = self.costs, self.options, self.slots[layer]
        share = self.cold_share_L[layer]
        row_s = share * costs.cold_row_s_L[layer] - (1.0 - share) * costs.hot_row_s_L[layer]
        if not slots or not row_s > 0.0:
            return [], 0.0
        cost = costs.gather_row_s_L[layer] + self.price * costs.copy_row_s_L[layer]
        most_rows = options.most_rows
        stay = options.stay
        assert options.margin is not None and most_rows is not None and stay is not None
        margin = float(np.float32(options.margin))
        least = self.dtype(np.float32(margin + cost / (row_s * stay)))
        weight = self.dtype(np.float32(options.burst_weight))
        score_F, burst_F = self.score_LF[layer], self.burst_LF[layer]
        worth_F = score_F + weight * (burst_F - score_F)
        resident = set(slots)
        cold = [j for j in range(len(worth_F)) if j not in resident]
        hot = list(slots)
        if to_plan:
            cold = [j for j in cold if j in self.planned[layer]]
            hot = [j for j in hot if j not in self.planned[layer]]
        cold.sort(key=lambda j: (-worth_F[j], j))
        hot.sort(key=lambda j: (worth_F[j], j))
        swaps: list[Swap] = []
        gain_s = 0.0
        for into, out in zip(cold, hot, strict=False):
            more = worth_F[into] - worth_F[out]
            if not to_plan and not more > least:
                break
            gained_s = (float(more) - float(least)) * row_s
            gain_s += 0.0 if to_plan else gained_s
            if len(swaps) < most_rows:
                swaps.append(Swap(layer, slots.index(out), into, out, gained_s * stay))
        return swaps, gain_s

    def _fitting(self, found: list[Swap]) -> list[Swap]:
        costs = self.costs

        def order(swap: Swap) -> tuple[float, float, int, int]:
            copy_s = costs.copy_row_s_L[swap.layer]
            per_second = swap.gain_s / copy_s if copy_s else np.inf
            return -per_second, -swap.gain_s, swap.layer, swap.into

        kept: list[Swap] = []
        copy, gather = costs.copy_s, 0.0
        for swap in sorted(found, key=order):
            copy += costs.copy_row_s_L[swap.layer]
            gather += costs.gather_row_s_L[swap.layer]
            if len(kept) == self.options.most_rows:
                break
            room_s = self.step_s if self.are_experts else self.free_s
            if copy > ROOM * self.step_s or gather > ROOM * room_s:
                break
            kept.append(swap)
        return kept
