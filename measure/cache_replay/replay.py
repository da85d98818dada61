"""Compares policies of the neuron cache on a text, without a GPU: records once which neurons each
token reads, then replays each policy on that record and adds up the plan's times.

Letters: T tokens, L layers, F neurons of a layer, N slots of a layer."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hotsplit.artifacts.split_file import Split
from hotsplit.costs.cache_bytes import is_cached
from hotsplit.errors import HotsplitError
from hotsplit.files.json_file import read_text
from hotsplit.measure.cache_replay.bound import Bound, lower_bound
from hotsplit.measure.cache_replay.policies import (
    POLICIES,
    Case,
    Outcome,
    belady,
    hindsight,
)
from hotsplit.measure.cache_replay.recording import Trace, record
from hotsplit.options.neuron_cache import CacheCosts, CacheOptions, Units
from hotsplit.runtime.engine import Engine

LEAST_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """The options of a replay."""

    model: Path
    split: Path
    text: Path
    num_tokens: int = 2000
    options: CacheOptions = CacheOptions()

    def __post_init__(self) -> None:
        if self.num_tokens < LEAST_TOKENS:
            raise HotsplitError(
                f"a replay of {self.num_tokens} tokens asked for, wanted at least {LEAST_TOKENS}"
            )


@dataclass(frozen=True, kw_only=True)
class PolicyResult:
    """One policy: `ms` and `copied` are means per token, `hit_rate` is the share of all reads."""

    name: str
    hit_rate: float
    ms: float
    copied: float  # number of neurons


@dataclass(frozen=True, kw_only=True)
class ReplayReport:
    """Counts, and means per token. `bound_ms`: a lower bound for policies that compute misses on
    the CPU and copy no more neurons for a step than there are slots; `hindsight`: the neurons that
    the text reads most stay in the slots; `belady_hit_rate`: the highest hit rate without
    prefetching."""

    num_tokens: int
    num_cached_layers: int
    num_slots: int
    read: float  # neurons read in cached layers, per token
    policies: tuple[PolicyResult, ...]
    hindsight: PolicyResult
    belady_hit_rate: float
    bound_ms: float
    bound_copies: float
    link_weight: float  # m in bound.py
    units: Units = "neurons"

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
        share = self.share_of_bound
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
        if share is not None:
            found.append(f"ours closes {share:.0%} of the gap between static and the bound")
        return found


def replay(
    config: ReplayConfig, advance: Callable[[float], None] = lambda count: None
) -> ReplayReport:
    """Runs all policies; calls `advance` with 1 after each of the `num_stages()` stages.

    Raises HotsplitError for a plan without a cache, and for a text that is too short."""
    plan = Split.load(config.split)
    if plan.cache is None:
        raise HotsplitError(
            f"{config.split}: the plan has no neuron cache; make one with hotsplit solve"
            " --neuron-cache"
        )
    with Engine.load(config.model, mode=plan.mode, device="cpu") as engine:
        plan.check_against(engine.model, config.split)
        ids = engine.codec.encode(read_text(config.text, "text"))[: config.num_tokens]
        if len(ids) < LEAST_TOKENS:
            raise HotsplitError(
                f"{config.text}: has {len(ids)} tokens, wanted at least {LEAST_TOKENS}"
            )
        trace = record(engine, ids, min(len(ids), engine.model.spec.context_length))
    advance(1)
    return compare(case_of(plan, trace, config.options), advance)


def num_stages() -> int:
    return len(POLICIES) + 2


def case_of(plan: Split, trace: Trace, options: CacheOptions) -> Case:
    """The cached layers of a plan."""
    assert plan.cache is not None
    chosen = [
        layer
        for layer, (ids, dense) in enumerate(zip(plan.hot, plan.dense_on_gpu, strict=True))
        if is_cached(len(ids), trace.num_neurons) and (dense or plan.units == "neurons")
    ]
    times = {
        name: value[chosen] if name.endswith("_L") else value
        for name, value in vars(plan.cache.costs).items()
    }
    return Case(
        trace=trace.layers(chosen),
        slots_LN=tuple(plan.hot[layer] for layer in chosen),
        frequency_LF=plan.cache.frequency_LF[chosen].astype(np.float64),
        costs=CacheCosts(**times),
        options=options,
        units=plan.units,
    )


def compare(case: Case, advance: Callable[[float], None] = lambda count: None) -> ReplayReport:
    """Runs all policies and computes the bound."""
    read_TL = case.trace.read_TL
    results = []
    for name, policy in POLICIES.items():
        results.append(_result(name, case, policy(case), read_TL))
        advance(1)
    best_s = min(result.ms for result in results) / 1e3
    bound: Bound = lower_bound(case, best_s)
    most = belady(case)
    advance(1)
    return ReplayReport(
        num_tokens=case.num_tokens,
        num_cached_layers=len(case.slots_LN),
        num_slots=int(case.num_slots_L.sum()),
        read=float(read_TL.sum(axis=1).mean()),
        policies=tuple(results),
        hindsight=_result("hindsight", case, hindsight(case), read_TL),
        belady_hit_rate=_hit_rate(most, read_TL),
        bound_ms=bound.seconds * 1e3,
        bound_copies=bound.num_copies,
        link_weight=bound.link_weight,
        units=case.units,
    )


def _result(name: str, case: Case, outcome: Outcome, read_TL: np.ndarray) -> PolicyResult:
    return PolicyResult(
        name=name,
        hit_rate=_hit_rate(outcome, read_TL),
        ms=case.seconds(outcome) * 1e3,
        copied=outcome.num_copied / case.num_tokens,
    )


def _hit_rate(outcome: Outcome, read_TL: np.ndarray) -> float:
    return float(outcome.hits_TL.sum() / max(1, read_TL.sum()))
