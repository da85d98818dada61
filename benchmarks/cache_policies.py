"""Compares the neuron cache's policy with others and with a bound, without a GPU.

    python benchmarks/cache_policies.py MODEL PLAN TEXT [--tokens 2000] [--settings margin=0.05]

The text runs once, and which units (neurons, or experts of a mixture) each token reads is
recorded; every policy is then replayed on that record, and its seconds follow from the times in
the plan, which `solve --neuron-cache` made.

All policies start with the plan's units in the slots, except `hindsight`, which starts with the
units that the text reads most, and `sparkinfer`, which starts with the best groups by profile.
Copies decided after a step are made while the next step runs. In `ours`, as in the engine, the
copied units are in the slots from the step after that on; in `lfu` and `sparkinfer` they are
there already in the step that copies them, which favours these two. `lru` and `ring` copy misses
before computing them.

The bound is on the time of every policy that computes units without a slot on the CPU and copies
no more units for a step than there are slots, even of one that knows the text in advance. A step
takes at least the larger of its compute time and its copy time, and a layer at least the larger
of its hot and its cold side. A maximum is at least any weighted mean of its arguments, so for
weights a, b, m >= 0 with a_l + b_l + m = 1 for every layer l

    seconds(t) >= (1 - m) rest_s + sum_l [a_l cold_l(t) + b_l hot_l(t)] + m link(t),

which is linear in the hits and the copies. The limit of N slots per layer and step is relaxed
with a price for each slot and step (Lagrangian relaxation). Then units are independent: a hit
saves a_l cold_row_s - b_l hot_row_s, a copy costs m copy_row_s, and dynamic programming finds the
best times for a unit to be in a slot (`best_gain`). The sum is a lower bound for any weights and
prices; a subgradient method searches for those that make it large. It leaves out gathering, the
fixed times of copies, and the rule that a copy must begin a step before it is used; each of these
could only raise it.

Letters: T tokens, L layers, F units of a layer, N slots of a layer, G groups of units, W 32-bit
words that hold a bit for each of F units."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hotsplit import Engine
from hotsplit.artifacts.split_file import Split
from hotsplit.costs.cache_bytes import is_cached
from hotsplit.costs.part_bytes import most_units
from hotsplit.files.json_file import read_text
from hotsplit.model.modes import computes_all, runs_predictors
from hotsplit.options.neuron_cache_options import CacheCosts, CacheOptions, Units
from hotsplit.runtime.neuron_cache.policy import CachePolicy, packed

GROUP = 16  # neurons, of experts 1; the usual size in SparkInfer's plans
RING_SHARE = 0.25  # of the slots
LFU_DECAY = 0.9
NEVER = np.iinfo(np.int32).max - 1  # the next read of a unit that is not read again
ROUNDS = 30  # of the subgradient method, for the first weight of the link
LATER_ROUNDS = 8  # for later weights, which start from the prices found before
LINK_WEIGHTS = 7  # steps of the search for the link's weight


# ---- what a text reads ----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The neurons read by each token of a text, as bits."""

    num_neurons: int
    bits_TLW: np.ndarray  # uint32, bit j % 32 of word j // 32 for neuron j

    def layers(self, chosen: Sequence[int]) -> "Trace":
        """The trace of these layers only."""
        bits = np.ascontiguousarray(self.bits_TLW[:, list(chosen)])
        return Trace(num_neurons=self.num_neurons, bits_TLW=bits)

    def is_read(self, token: int) -> np.ndarray:
        """Whether a token reads each neuron, bool [L, F]."""
        as_bytes = self.bits_TLW[token].view(np.uint8)
        bits = np.unpackbits(as_bytes, axis=1, bitorder="little", count=self.num_neurons)
        return bits.view(bool)

    @property
    def read_TL(self) -> np.ndarray:
        """Number of neurons read, int64."""
        return np.bitwise_count(self.bits_TLW).sum(axis=2, dtype=np.int64)

    def frequency_LF(self) -> np.ndarray:
        """The share of tokens that read each neuron, f64."""
        total = np.zeros(self.bits_TLW.shape[1:2] + (self.num_neurons,), np.int64)
        for token in range(len(self.bits_TLW)):
            total += self.is_read(token)
        return total / len(self.bits_TLW)


def record(engine: Engine, token_ids: Sequence[int], window: int) -> Trace:
    """Runs the model over the tokens in windows of at most `window`, each a separate text.

    In mode predicted a neuron is read if the predictor names it; in mode exact, if its hidden
    value is not 0, so that its `down` row is read; in mode dense, of a mixture, the experts that
    its routers choose."""
    has_experts = computes_all(engine.mode)
    assert has_experts == engine.model.spec.has_experts, "every neuron is read: nothing to cache"
    name = "ffn_predicted" if runs_predictors(engine.mode) else "ffn_hidden"
    number = most_units(engine.model.spec)
    is_read_TLF = np.zeros((len(token_ids), engine.model.spec.num_layers, number), bool)
    first_L = np.zeros(engine.model.spec.num_layers, np.int64)

    def see(_: str, layer: int | None, value: Tensor) -> None:
        assert layer is not None
        own_TF = is_read_TLF[first_L[layer] :, layer][: len(value)]
        if has_experts:
            np.put_along_axis(own_TF, value.cpu().numpy(), True, axis=1)
        else:
            predictor = engine.layers[layer].ffn.predictor
            own_TF[:] = ~(value <= predictor.threshold) if predictor else value != 0
        first_L[layer] += len(value)

    name = "ffn_experts" if has_experts else name
    with engine.observe(see, lambda shown, layer: shown == name), torch.inference_mode():
        for start in range(0, len(token_ids), window):
            engine.logits(list(token_ids[start : start + window]))
    return Trace(num_neurons=number, bits_TLW=packed(is_read_TLF))


# ---- policies -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ReplayCase:
    """A recorded text, and the slots and times of a plan."""

    trace: Trace
    slots_LN: tuple[np.ndarray, ...]  # the plan's neurons
    frequency_LF: np.ndarray  # from the profile
    costs: CacheCosts
    options: CacheOptions
    units: Units = "neurons"

    @property
    def num_slots_L(self) -> np.ndarray:
        return np.array([len(slots_N) for slots_N in self.slots_LN])

    @property
    def planned_LF(self) -> np.ndarray:
        """True for the plan's neurons."""
        planned_LF = np.zeros(self.frequency_LF.shape, bool)
        for planned_F, slots_N in zip(planned_LF, self.slots_LN, strict=True):
            planned_F[slots_N] = True
        return planned_LF

    @property
    def num_tokens(self) -> int:
        return len(self.trace.bits_TLW)

    def seconds(self, outcome: "Outcome") -> float:
        """The mean of a step with this outcome."""
        found_T = seconds_T(self.costs, self.trace.read_TL, outcome, self.units)
        return float(found_T.mean())


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A policy's hits and copies at each step."""

    hits_TL: np.ndarray  # neurons read that were in slots
    copied_TL: np.ndarray  # neurons copied while the step ran
    is_critical: bool = False  # misses are copied to the hot side before they are computed there
    num_copies_T: np.ndarray | None = None  # transfers, each with a fixed time; None: at most one

    @property
    def num_copied(self) -> int:
        return int(self.copied_TL.sum())


def seconds_T(
    costs: CacheCosts, read_TL: np.ndarray, outcome: Outcome, units: Units = "neurons"
) -> np.ndarray:
    """Seconds of each step.

    Copies run concurrently with a step, which waits for them at its end; gathering of neurons
    uses the CPU's idle time first. Critical copies begin when the neurons to read are known
    (after the gates of cold neurons in mode exact, after a round trip otherwise); all neurons are
    then computed on the hot side."""
    hits_TL, copied_TL = outcome.hits_TL, outcome.copied_TL
    copies_T = (copied_TL.any(axis=1)) * 1 if outcome.num_copies_T is None else outcome.num_copies_T
    link_T = copied_TL @ costs.copy_row_s_L + copies_T * costs.copy_s
    if outcome.is_critical:
        known_TL = np.maximum(costs.hot_s_L, costs.cold_s_L) + read_TL * costs.hot_row_s_L
        return costs.rest_s + known_TL.sum(axis=1) + link_T
    hot_TL = costs.hot_s_L + hits_TL * costs.hot_row_s_L
    cold_TL = costs.cold_s_L + (read_TL - hits_TL) * costs.cold_row_s_L
    step_T = costs.rest_s + np.maximum(hot_TL, cold_TL).sum(axis=1)
    spare_T = 0.0 if units == "experts" else np.maximum(0.0, step_T - cold_TL.sum(axis=1))
    gather_T = copied_TL @ costs.gather_row_s_L
    return np.maximum(step_T + np.maximum(0.0, gather_T - spare_T), link_T)


def ours(case: ReplayCase) -> Outcome:
    """The neuron cache's own policy, run by the engine's code."""
    policy = CachePolicy(case.slots_LN, case.frequency_LF, case.costs, case.options, case.units)
    bits_TLW = case.trace.bits_TLW
    outcome = _nothing(case)
    for token in range(len(bits_TLW)):
        before_L = policy.hits_L()
        swaps = policy.step(bits_TLW[token : token + 1])
        outcome.hits_TL[token] = policy.hits_L() - before_L
        copied_L = np.bincount(swaps["layer"], minlength=len(case.slots_LN))
        outcome.copied_TL[token + 1 : token + 2] = copied_L
    return outcome


def static(case: ReplayCase) -> Outcome:
    """The plan's neurons stay in the slots."""
    return _replay(case, lambda resident_LF, is_read_LF: resident_LF)


def hindsight(case: ReplayCase) -> Outcome:
    """The neurons that this text reads most are in the slots throughout, as if the plan had been
    made from a profile of this very text."""
    best_LF = _top(case.trace.frequency_LF(), case.num_slots_L)
    return _replay(
        case, lambda resident_LF, is_read_LF: resident_LF, start_LF=best_LF, is_free=True
    )


def lru(case: ReplayCase) -> Outcome:
    """Copies every miss before computing it, to the slot of the least recently read neuron, as
    caches of experts do (llama.cpp's). If a step reads more neurons than there are slots, the
    rest are copied but not kept."""
    return _admitting_misses(case, np.zeros(case.planned_LF.shape, bool))


def ring(case: ReplayCase) -> Outcome:
    """Luce Spark's policy (lucebox.com/blog/spark): the plan's most frequent neurons keep their
    slots, and the other slots, RING_SHARE of them, are a ring that takes every miss before it is
    computed."""
    num_pinned_L = case.num_slots_L - np.ceil(RING_SHARE * case.num_slots_L).astype(int)
    score_LF = np.where(case.planned_LF, case.frequency_LF, -1.0)
    return _admitting_misses(case, _top(score_LF, num_pinned_L))


def _admitting_misses(case: ReplayCase, is_pinned_LF: np.ndarray) -> Outcome:
    """Copies every miss to the slot of the least recently read neuron that is not pinned."""
    last_LF = np.where(case.planned_LF, case.frequency_LF - 2.0, -np.inf)  # last step that read it
    clock = 0

    def then(resident_LF: np.ndarray, is_read_LF: np.ndarray) -> np.ndarray:
        nonlocal clock
        clock += 1
        last_LF[is_read_LF] = clock
        return _top(np.where(is_pinned_LF, np.inf, last_LF), case.num_slots_L)

    outcome = _replay(case, then)
    missed_TL = case.trace.read_TL - outcome.hits_TL
    copies_T = (missed_TL > 0).sum(axis=1)
    return Outcome(
        hits_TL=outcome.hits_TL, copied_TL=missed_TL, is_critical=True, num_copies_T=copies_T
    )


def lfu(case: ReplayCase) -> Outcome:
    """Keeps the neurons with the largest decayed counts; all swaps that this takes are made during
    the next step."""
    count_LF = case.frequency_LF / (1.0 - LFU_DECAY)

    def then(resident_LF: np.ndarray, is_read_LF: np.ndarray) -> np.ndarray:
        count_LF[...] = LFU_DECAY * count_LF + is_read_LF
        return _top(count_LF + 1e-9 * resident_LF, case.num_slots_L)

    return _replay(case, then)


def sparkinfer(case: ReplayCase) -> Outcome:
    """SparkInfer's policy (Kairox): groups of 16 neurons in order of the profile's frequency,
    scored by the moving average S <- lambda S + (1 - lambda) A of the share A of a group that is
    read; every step loads the best groups that are not in slots. lambda starts at 0.67, is
    multiplied by 1.05 after a step that waited for the copy and by 0.95 after one that did not, and
    stays within 0.05 to 0.95. Every group is copied separately."""
    costs, num_layers = case.costs, len(case.slots_LN)
    group = GROUP if case.units == "neurons" else 1
    order_LF = np.argsort(-case.frequency_LF, axis=1, kind="stable")
    num_groups = -(-case.trace.num_neurons // group)
    group_LF = np.empty_like(order_LF)
    np.put_along_axis(group_LF, order_LF, np.arange(case.trace.num_neurons)[None] // group, axis=1)
    layer_L1 = np.arange(num_layers)[:, None]
    size_G = np.bincount(group_LF[0], minlength=num_groups)
    num_slots_L = case.num_slots_L // group
    score_LG = np.zeros((num_layers, num_groups))
    np.add.at(score_LG, (layer_L1, group_LF), case.frequency_LF / size_G[group_LF[0]].mean())
    resident_LG = _top(score_LG, num_slots_L)
    keep, copied_L = 0.67, np.zeros(num_layers, np.int64)
    outcome, copies_T = _nothing(case), np.zeros(case.num_tokens, np.int64)
    for token in range(case.num_tokens):
        is_read_LF = case.trace.is_read(token)
        hits_L = (is_read_LF & np.take_along_axis(resident_LG, group_LF, axis=1)).sum(axis=1)
        outcome.hits_TL[token], outcome.copied_TL[token] = hits_L, copied_L * group
        copies_T[token] = copied_L.sum()
        misses_L = is_read_LF.sum(axis=1) - hits_L
        cold_L = costs.cold_s_L + misses_L * costs.cold_row_s_L
        hot_L = costs.hot_s_L + hits_L * costs.hot_row_s_L
        step_s = costs.rest_s + np.maximum(hot_L, cold_L).sum()
        copy_s = copied_L @ costs.copy_row_s_L * group + copied_L.sum() * costs.copy_s
        keep = float(np.clip(keep * (1.05 if copy_s > step_s else 0.95), 0.05, 0.95))
        read_LG = np.zeros((num_layers, num_groups))
        np.add.at(read_LG, (layer_L1, group_LF), is_read_LF)
        score_LG = keep * score_LG + (1.0 - keep) * read_LG / size_G
        target_LG = _top(score_LG, num_slots_L)
        copied_L = (target_LG & ~resident_LG).sum(axis=1)
        resident_LG = target_LG
    return Outcome(hits_TL=outcome.hits_TL, copied_TL=outcome.copied_TL, num_copies_T=copies_T)


def belady(case: ReplayCase) -> Outcome:
    """The most hits of any policy that copies a neuron only when it is read: the slots keep the
    neurons that will be read soonest (Belady 1966). Its copies are not counted."""
    num_tokens, num_neurons = case.num_tokens, case.trace.num_neurons
    outcome = _nothing(case)
    for layer, slots_N in enumerate(case.slots_LN):
        words = case.trace.bits_TLW[:, layer]
        is_read_TF = np.unpackbits(
            np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little", count=num_neurons
        ).view(bool)
        next_TF = np.empty((num_tokens, num_neurons), np.int32)
        coming_F = np.full(num_neurons, NEVER, np.int32)
        for token in range(num_tokens - 1, -1, -1):
            next_TF[token] = coming_F
            coming_F[is_read_TF[token]] = token
        resident_F = case.planned_LF[layer]
        for token in range(num_tokens):
            outcome.hits_TL[token, layer] = (is_read_TF[token] & resident_F).sum()
            wanted_F = np.where(resident_F | is_read_TF[token], next_TF[token], NEVER + 1)
            kept_N = np.argpartition(wanted_F, len(slots_N) - 1)[: len(slots_N)]
            resident_F = np.zeros(num_neurons, bool)
            resident_F[kept_N] = True
    return outcome


POLICIES: dict[str, Callable[[ReplayCase], Outcome]] = {
    "static": static,
    "lru": lru,
    "ring": ring,
    "lfu": lfu,
    "sparkinfer": sparkinfer,
    "ours": ours,
}


def _nothing(case: ReplayCase) -> Outcome:
    shape = case.num_tokens, len(case.slots_LN)
    return Outcome(hits_TL=np.zeros(shape, np.int64), copied_TL=np.zeros(shape, np.int64))


def _replay(
    case: ReplayCase,
    then: Callable[[np.ndarray, np.ndarray], np.ndarray],
    *,
    start_LF: np.ndarray | None = None,
    is_free: bool = False,
) -> Outcome:
    """Runs a policy. After each step it chooses the resident neurons of the next step, given those
    that are resident and those that were read. `is_free`: copies are not counted."""
    outcome = _nothing(case)
    resident_LF = case.planned_LF if start_LF is None else start_LF
    copied_L = np.zeros(len(case.slots_LN), np.int64)
    for token in range(case.num_tokens):
        is_read_LF = case.trace.is_read(token)
        outcome.hits_TL[token] = (is_read_LF & resident_LF).sum(axis=1)
        outcome.copied_TL[token] = 0 if is_free else copied_L
        next_LF = then(resident_LF, is_read_LF)
        copied_L = (next_LF & ~resident_LF).sum(axis=1)
        resident_LF = next_LF
    return outcome


def _top(score_LF: np.ndarray, num_L: Sequence[int] | np.ndarray) -> np.ndarray:
    """True for the largest scores of each layer, `num_L` of them by layer."""
    chosen_LF = np.zeros(score_LF.shape, bool)
    for chosen_F, score_F, num in zip(chosen_LF, score_LF, num_L, strict=True):
        if num:
            chosen_F[np.argpartition(-score_F, min(num, len(score_F)) - 1)[:num]] = True
    return chosen_LF


# ---- the bound ------------------------------------------------------------------------------


def best_gain(
    is_read_TLF: np.ndarray, initial_LF: np.ndarray, price_TL: np.ndarray, fetch_L: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The sum over a layer's units of the most that each can gain if it may enter or leave a slot
    at every step, f64 [L]: it gains 1 for a step that reads it in a slot, and pays the slot's price
    at each step and `fetch` for each copy. Also, for that choice, the slots in use at each step [T,
    L], the copies and the hits [L]. `initial_LF`: the units in slots before the first step.

    A dynamic program over steps with two states. `ahead` is the best gain of a unit that ends a
    step in a slot, less that of one that ends it outside, which has grown to `outside`."""
    fetch_L1, num_steps = fetch_L[:, None], len(is_read_TLF)
    ahead_LF, outside_LF = np.where(initial_LF, 0.0, -fetch_L1), np.zeros(initial_LF.shape)
    # Whether a unit that ends a step in a slot, or outside, is best in one before that step.
    stays_TLF, leaves_TLF = np.empty((2, *is_read_TLF.shape), bool)
    for t, (is_read_LF, price_L) in enumerate(zip(is_read_TLF, price_TL, strict=True)):
        stays_TLF[t], leaves_TLF[t] = ahead_LF >= -fetch_L1, ahead_LF > 0.0
        grown_LF = np.maximum(ahead_LF, 0.0)
        ahead_LF = np.maximum(ahead_LF, -fetch_L1) + is_read_LF - price_L[:, None] - grown_LF
        outside_LF += grown_LF
    stays_TLF[:1], leaves_TLF[:1] = initial_LF, False
    gain_L = (outside_LF + np.maximum(ahead_LF, 0.0)).sum(axis=1)
    used_TL, copies_TL, hits_TL = np.zeros((3, *price_TL.shape), np.int64)
    is_in_LF = ahead_LF > 0.0
    for t in reversed(range(num_steps)):
        before_LF = np.where(is_in_LF, stays_TLF[t], leaves_TLF[t])
        used_TL[t] = is_in_LF.sum(axis=1)
        hits_TL[t] = (is_in_LF & is_read_TLF[t]).sum(axis=1)
        copies_TL[t] = (is_in_LF & ~before_LF).sum(axis=1)
        is_in_LF = before_LF
    return gain_L, used_TL, copies_TL.sum(axis=0), hits_TL.sum(axis=0)


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The bound in seconds per step, and the copies per step of its relaxed solution."""

    seconds: float
    link_weight: float  # m
    num_copies: float


def lower_bound(case: ReplayCase, known_s: float) -> Bound:
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
    def __init__(self, case: ReplayCase, known_s: float) -> None:
        self.case, self.known_s = case, known_s * case.num_tokens
        self.is_read_TLF = np.stack([case.trace.is_read(t) for t in range(case.num_tokens)])
        costs = case.costs
        # Prices are fractions of the time that a hit saves.
        self.price_TL = np.full((case.num_tokens, costs.num_layers), 0.05)
        self.hot_share_L = np.where(costs.hot_row_s_L < costs.cold_row_s_L, 0.0, 0.5)
        self.num_rounds = ROUNDS

    def run(self, link_weight: float) -> Bound:
        """The best bound for this weight of the link, starting from the prices found before."""
        best: Bound | None = None
        scale = 1.0
        for number in range(self.num_rounds):
            bound, slope_TL, lean_L = self._evaluate(link_weight)
            if best is None or bound.seconds > best.seconds:
                best, kept = bound, (self.price_TL.copy(), self.hot_share_L.copy())
            else:
                scale *= 0.9
            norm = float((slope_TL**2).sum())
            if not norm:
                break
            gap_s = max(0.0, self.known_s - bound.seconds * self.case.num_tokens)
            # Slots can stay empty, so a hit costs nothing.
            earned_s = np.maximum(0.0, self._weights(link_weight)[2]).mean() or 1.0
            step = 0.5 * scale * gap_s / earned_s / norm
            self.price_TL = np.maximum(0.0, self.price_TL + step * slope_TL)
            turn = 0.1 * scale / np.sqrt(1 + number)
            self.hot_share_L = np.clip(self.hot_share_L + turn * lean_L, 0.0, 1.0)
        assert best is not None
        self.price_TL, self.hot_share_L = kept
        self.num_rounds = LATER_ROUNDS
        return best

    def _weights(self, link_weight: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """a and b of each layer, and the seconds that a hit saves, [L]."""
        costs, rest = self.case.costs, 1.0 - link_weight
        cold_L, hot_L = rest * (1.0 - self.hot_share_L), rest * self.hot_share_L
        return cold_L, hot_L, cold_L * costs.cold_row_s_L - hot_L * costs.hot_row_s_L

    def _evaluate(self, link_weight: float) -> tuple[Bound, np.ndarray, np.ndarray]:
        """The bound at these weights and prices; its subgradient in the prices, which is the slots
        used minus those available [T, L]; and +1 for layers whose hot side takes longer, -1 for
        those whose cold side does [L]."""
        case, costs, num_tokens = self.case, self.case.costs, self.case.num_tokens
        cold_L, hot_L, earned_L = self._weights(link_weight)
        read_L = case.trace.read_TL.sum(axis=0)
        # Where a hit saves nothing, leaving slots empty is best, and costs nothing.
        pays_L = earned_L > 0
        fetch_s_L = link_weight * costs.copy_row_s_L
        fetch_L = np.divide(fetch_s_L, earned_L, out=np.zeros_like(earned_L), where=pays_L)
        gain_L, used_TL, copies_L, hits_L = (
            values * pays_L
            for values in best_gain(self.is_read_TLF, case.planned_LF, self.price_TL, fetch_L)
        )
        gain_s_L = earned_L * (gain_L + pays_L * self.price_TL.sum(axis=0) * case.num_slots_L)
        fixed_L = num_tokens * (cold_L * costs.cold_s_L + hot_L * costs.hot_s_L)
        missed_L = cold_L * costs.cold_row_s_L * read_L
        total = num_tokens * (1.0 - link_weight) * costs.rest_s
        total += float((fixed_L + missed_L - gain_s_L).sum())
        hot_s_L = num_tokens * costs.hot_s_L + hits_L * costs.hot_row_s_L
        cold_s_L = num_tokens * costs.cold_s_L + (read_L - hits_L) * costs.cold_row_s_L
        bound = Bound(
            seconds=total / num_tokens,
            link_weight=link_weight,
            num_copies=float(copies_L.sum()) / num_tokens,
        )
        return bound, used_TL - case.num_slots_L, np.sign(hot_s_L - cold_s_L)


# ---- the comparison -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PolicyResult:
    """One policy: `ms` and `copied` are means per token, `hit_rate` is the share of all reads."""

    name: str
    hit_rate: float
    ms: float
    copied: float  # number of units


@dataclass(frozen=True, kw_only=True)
class ReplayReport:
    """Counts, and means per token. `hindsight`: the units that the text reads most stay in the
    slots; `belady_hit_rate`: the highest hit rate without prefetching."""

    num_tokens: int
    num_cached_layers: int
    num_slots: int
    read: float  # units read in cached layers, per token
    policies: tuple[PolicyResult, ...]
    hindsight: PolicyResult
    belady_hit_rate: float
    bound_ms: float
    bound_copies: float
    link_weight: float
    units: Units

    @property
    def of(self) -> dict[str, PolicyResult]:
        return {result.name: result for result in self.policies}

    @property
    def share_of_bound(self) -> float | None:
        """The share of the gap between static and the bound that ours closes; None: no gap."""
        static_ms = self.of["static"].ms
        if static_ms <= self.bound_ms * (1 + 1e-9):
            return None
        return (static_ms - self.of["ours"].ms) / (static_ms - self.bound_ms)

    @property
    def lines(self) -> list[str]:
        """The report for people."""
        found = [
            f"{self.num_tokens} tokens, which read {self.read:,.0f} {self.units} each in"
            f" {self.num_cached_layers} layers with {self.num_slots:,} slots"
        ]
        for result in (*self.policies, self.hindsight):
            found.append(
                f"{result.name:<10} {result.ms:9.3f} ms per token, hits {result.hit_rate:6.1%},"
                f" {result.copied:8.1f} {self.units} copied"
            )
        found.append(
            f"{'bound':<10} {self.bound_ms:9.3f} ms per token at least, if misses are computed on"
            f" the CPU (most hits without prefetching: {self.belady_hit_rate:.1%})"
        )
        share = self.share_of_bound
        if share is not None:
            found.append(f"ours closes {share:.0%} of the gap between static and the bound")
        return found


def compare(case: ReplayCase) -> ReplayReport:
    """Runs all policies and computes the bound."""
    read_TL = case.trace.read_TL

    def result_of(name: str, outcome: Outcome) -> PolicyResult:
        return PolicyResult(
            name=name,
            hit_rate=_hit_rate(outcome, read_TL),
            ms=case.seconds(outcome) * 1e3,
            copied=outcome.num_copied / case.num_tokens,
        )

    results = tuple(result_of(name, policy(case)) for name, policy in POLICIES.items())
    bound = lower_bound(case, min(result.ms for result in results) / 1e3)
    return ReplayReport(
        num_tokens=case.num_tokens,
        num_cached_layers=len(case.slots_LN),
        num_slots=int(case.num_slots_L.sum()),
        read=float(read_TL.sum(axis=1).mean()),
        policies=results,
        hindsight=result_of("hindsight", hindsight(case)),
        belady_hit_rate=_hit_rate(belady(case), read_TL),
        bound_ms=bound.seconds * 1e3,
        bound_copies=bound.num_copies,
        link_weight=bound.link_weight,
        units=case.units,
    )


def _hit_rate(outcome: Outcome, read_TL: np.ndarray) -> float:
    return float(outcome.hits_TL.sum() / max(1, read_TL.sum()))


def case_of(plan: Split, trace: Trace, options: CacheOptions) -> ReplayCase:
    """The cached layers of a plan."""
    assert plan.cache is not None, "the plan has no neuron cache: hotsplit solve --neuron-cache on"
    chosen = [
        layer
        for layer, (ids, dense) in enumerate(zip(plan.hot, plan.dense_on_gpu, strict=True))
        if is_cached(len(ids), trace.num_neurons) and (dense or plan.units == "neurons")
    ]
    times = {
        name: value[chosen] if name.endswith("_L") else value
        for name, value in vars(plan.cache.costs).items()
    }
    return ReplayCase(
        trace=trace.layers(chosen),
        slots_LN=tuple(plan.hot[layer] for layer in chosen),
        frequency_LF=plan.cache.frequency_LF[chosen].astype(np.float64),
        costs=CacheCosts(**times),
        options=options,
        units=plan.units,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("plan", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--settings", type=CacheOptions.parse, default=CacheOptions())
    arguments = parser.parse_args()
    plan = Split.load(arguments.plan)
    with Engine.load(arguments.model, mode=plan.mode, device="cpu") as engine:
        plan.check_against(engine.model, arguments.plan)
        ids = engine.codec.encode(read_text(arguments.text, "text"))[: arguments.tokens]
        trace = record(engine, ids, min(len(ids), engine.model.spec.context_length))
    report = compare(case_of(plan, trace, arguments.settings))
    print(*report.lines, sep="\n", file=sys.stderr)
    print(json.dumps({**asdict(report), "share_of_bound": report.share_of_bound}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
