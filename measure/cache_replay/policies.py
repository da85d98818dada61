"""Policies of the neuron cache: ours as it runs, and the published ones that it is compared with;
the hits and copies of each, and their seconds.

All start with the plan's neurons in the slots, except `hindsight`, which starts with the neurons
that the text reads most, and `sparkinfer`, which starts with the best groups by profile. Copies
decided after a step are made while the next step runs. In `ours`, as in the engine, the copied
neurons are in the slots from the step after that on; in `lfu` and `sparkinfer` they are there
already in the step that copies them, which favours these two. `lru` and `ring` copy misses before
computing them.

Letters: T tokens, L layers, F neurons of a layer, N slots of a layer, G groups of neurons,
W 32-bit words that hold a bit for each of F neurons."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hotsplit.measure.cache_replay.recording import Trace
from hotsplit.options.neuron_cache import CacheCosts, CacheOptions, Units
from hotsplit.runtime.neuron_cache.policy import CachePolicy

GROUP = 16  # neurons, of experts 1; the usual size in SparkInfer's plans
RING_SHARE = 0.25  # of the slots
LFU_DECAY = 0.9
NEVER = np.iinfo(np.int32).max - 1  # the next read of a neuron that is not read again


@dataclass(frozen=True, kw_only=True)
class Case:
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
    uses the CPU's idle time first. Critical copies begin when the neurons to read are known (after the gates of
    cold neurons in mode exact, after a round trip otherwise); all neurons are then computed on the
    hot side."""
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


def ours(case: Case) -> Outcome:
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


def static(case: Case) -> Outcome:
    """The plan's neurons stay in the slots."""
    return _replay(case, lambda resident_LF, is_read_LF: resident_LF)


def hindsight(case: Case) -> Outcome:
    """The neurons that this text reads most are in the slots throughout, as if the plan had been
    made from a profile of this very text."""
    best_LF = _top(case.trace.frequency_LF(), case.num_slots_L)
    return _replay(
        case, lambda resident_LF, is_read_LF: resident_LF, start_LF=best_LF, is_free=True
    )


def lru(case: Case) -> Outcome:
    """Copies every miss before computing it, to the slot of the least recently read neuron, as
    caches of experts do (llama.cpp's). If a step reads more neurons than there are slots, the rest are
    copied but not kept."""
    return _admitting_misses(case, np.zeros(case.planned_LF.shape, bool))


def ring(case: Case) -> Outcome:
    """Luce Spark's policy (lucebox.com/blog/spark): the plan's most frequent neurons keep their slots,
    and the other slots, RING_SHARE of them, are a ring that takes every miss before it is computed."""
    num_pinned_L = case.num_slots_L - np.ceil(RING_SHARE * case.num_slots_L).astype(int)
    score_LF = np.where(case.planned_LF, case.frequency_LF, -1.0)
    return _admitting_misses(case, _top(score_LF, num_pinned_L))


def _admitting_misses(case: Case, is_pinned_LF: np.ndarray) -> Outcome:
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


def lfu(case: Case) -> Outcome:
    """Keeps the neurons with the largest decayed counts; all swaps that this takes are made during
    the next step."""
    count_LF = case.frequency_LF / (1.0 - LFU_DECAY)

    def then(resident_LF: np.ndarray, is_read_LF: np.ndarray) -> np.ndarray:
        count_LF[...] = LFU_DECAY * count_LF + is_read_LF
        return _top(count_LF + 1e-9 * resident_LF, case.num_slots_L)

    return _replay(case, then)


def sparkinfer(case: Case) -> Outcome:
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


def belady(case: Case) -> Outcome:
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


POLICIES: dict[str, Callable[[Case], Outcome]] = {
    "static": static,
    "lru": lru,
    "ring": ring,
    "lfu": lfu,
    "sparkinfer": sparkinfer,
    "ours": ours,
}


def _nothing(case: Case) -> Outcome:
    shape = case.num_tokens, len(case.slots_LN)
    return Outcome(hits_TL=np.zeros(shape, np.int64), copied_TL=np.zeros(shape, np.int64))


def _replay(
    case: Case,
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
