"""Placements on several GPUs: each holds a run of consecutive layers, in the order of the GPUs.

Every layer has a home, the GPU that holds whatever of it is not on the CPU: its dense block, its
hot neurons, or both. Homes never decrease from layer to layer, and the output head's is not before
the last layer's, so a token's hidden state goes from each GPU to the next at most once, and no
layer waits for two GPUs. A plan is then a row of cuts and, for each run between two, a placement
on one GPU (`problem`), so that bounds and placements of single GPUs add up:

    T = sum_k T of the items cut_k .. cut_(k+1) - 1 on GPU k

(a run of layers on the CPU that spans two GPUs' homes counts twice, being a host function of each;
a run whose GPU holds nothing costs what it does on the CPU alone). With one GPU there is one run
and nothing to cut. A cheap bound for all cuts at once prices every layer on every GPU once: for any
prices p_k and any reward r >= 0 with p_k + r >= 0

    T >= sum_k [least T + p_k * bytes over the placements of run k  -  (p_k + r) * room_k]
         + r * need

since the bytes of run k are at most room_k, and those of all runs at least `need`, which the host
cannot hold. For a given r each run has its own best price. If need is 0, so is r. The problem of
one run is solved by `lagrangian`.

Letters: K GPUs, L layers, F neurons, I = L + 1 items (the head is the last), S = I + 1 places of a
cut, P prices, N rewards, C rows of cuts."""

from dataclasses import dataclass
from itertools import combinations_with_replacement
from math import comb

import numpy as np

from hotsplit.errors import HotsplitError
from hotsplit.solver.lagrangian import block_costs, chain_costs, first_prices
from hotsplit.solver.problem import (
    ROUNDING,
    Problem,
    SolvedPlacement,
    drive_bytes,
    gpu_use_seconds,
    head_seconds,
    held_bytes,
    is_feasible,
    layer_seconds,
    on_one_device,
    segment,
)

Groups = tuple[tuple[int, ...], ...]  # the numbers of their layers
NUM_REWARDS = 60
MAX_CUTS = 3_000_000  # most rows of cuts to compare; 4 GPUs and 80 layers have 95,284


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """`problems[k]` is the whole model with GPU k as the only one; `need_bytes` is what all GPUs
    together must hold (each problem's own is 0). `together`: groups of layers whose dense blocks
    are on one device."""

    problems: tuple[Problem, ...]
    need_bytes: int
    together: Groups = ()

    @property
    def model(self) -> Problem:
        """The first GPU's problem, for what is equal for all GPUs: layers, bytes, CPU seconds."""
        return self.problems[0]

    @property
    def num_gpus(self) -> int:
        return len(self.problems)

    @property
    def room_bytes(self) -> int:
        return sum(max(0, problem.room_bytes) for problem in self.problems)

    def run(self, gpu: int, start: int, stop: int, *, need_bytes: int = 0) -> Problem:
        """The problem of the items start..stop-1 on one GPU; item L is the head."""
        return segment(
            self.problems[gpu],
            start,
            min(stop, self.model.num_layers),
            has_head=start <= self.model.num_layers < stop,
            need_bytes=need_bytes,
        )

    @property
    def rewards_N(self) -> np.ndarray:
        """The rewards r to try, in seconds per byte: 0, and about NUM_REWARDS of the positive
        `first_prices`; 0 alone if need is 0."""
        if self.need_bytes == 0:
            return np.zeros(1)
        rising = first_prices(self.model)
        rising = rising[rising > 0]
        return np.append(0.0, rising[:: max(1, len(rising) // NUM_REWARDS)])

    def cut_rows(self) -> np.ndarray:
        """Every row of cuts from 0 to I, int [C, K + 1]; at most MAX_CUTS."""
        num_items, inner = self.model.num_layers + 1, self.num_gpus - 1
        if comb(num_items + inner, inner) > MAX_CUTS:
            raise HotsplitError(
                f"{self.num_gpus} GPUs and {self.model.num_layers} layers have more than"
                f" {MAX_CUTS:,} ways to divide the layers; give budgets for fewer GPUs"
            )
        rows = list(combinations_with_replacement(range(num_items + 1), inner))
        cut_CK = np.array(rows, np.int64).reshape(len(rows), inner)
        return np.pad(cut_CK, ((0, 0), (1, 1)), constant_values=((0, 0), (0, num_items)))

    def cuts(self) -> tuple[np.ndarray, np.ndarray]:
        """Every row of cuts [C, K + 1], and a bound for each, least first."""
        cut_CK = self.cut_rows()
        bound_KNSS = [_run_bounds(problem, self.rewards_N) for problem in self.problems]
        bound_C = np.zeros(len(cut_CK))
        for number, reward in enumerate(self.rewards_N):
            runs = [
                bound_NSS[number, cut_CK[:, gpu], cut_CK[:, gpu + 1]]
                for gpu, bound_NSS in enumerate(bound_KNSS)
            ]
            bound_C = np.maximum(bound_C, np.sum(runs, axis=0) + reward * self.need_bytes)
        bound_C *= 1 - ROUNDING
        order = np.argsort(bound_C, kind="stable")
        return cut_CK[order], bound_C[order]


@dataclass(frozen=True, kw_only=True)
class PipelinePlacement:
    """A placement, and the home GPU of each layer and the head; int [I]."""

    placement: SolvedPlacement
    home_I: np.ndarray

    def on_gpu(self, gpu: int) -> SolvedPlacement:
        """The same placement, with everything whose home is another GPU moved to the CPU."""
        is_home_I = self.home_I == gpu
        return SolvedPlacement(
            hot_LF=self.placement.hot_LF & is_home_I[:-1, None],
            dense_L=self.placement.dense_L & is_home_I[:-1],
            head=bool(self.placement.head and is_home_I[-1]),
        )


def joined(
    pipeline: Pipeline, cut_K: np.ndarray, parts: list[SolvedPlacement]
) -> PipelinePlacement:
    """The placements of the runs between these cuts, joined."""
    sizes = np.diff(cut_K)
    return PipelinePlacement(
        placement=SolvedPlacement(
            hot_LF=np.concatenate([part.hot_LF for part in parts]),
            dense_L=np.concatenate([part.dense_L for part in parts]).astype(bool),
            head=any(part.head for part in parts),
        ),
        home_I=np.repeat(np.arange(pipeline.num_gpus), sizes),
    )


def bytes_of_gpus(pipeline: Pipeline, plan: PipelinePlacement) -> list[int]:
    """Bytes on each GPU, workspaces excluded."""
    return [held_bytes(problem, plan.on_gpu(gpu)) for gpu, problem in enumerate(pipeline.problems)]


def plan_is_feasible(pipeline: Pipeline, plan: PipelinePlacement) -> bool:
    """True if the plan respects memories, the order of homes, groups, and layers' minima."""
    if (np.diff(plan.home_I) < 0).any():
        return False
    device_L = np.where(plan.placement.dense_L, plan.home_I[:-1], -1)
    if any(len({*device_L[list(group)].tolist()}) > 1 for group in pipeline.together):
        return False
    elsewhere = sum(bytes_of_gpus(pipeline, plan))
    elsewhere += drive_bytes(pipeline.model, plan.placement) if pipeline.problems else 0
    if elsewhere < pipeline.need_bytes:
        return False
    return all(is_feasible(own, plan.on_gpu(gpu)) for gpu, own in enumerate(pipeline.problems))


def plan_seconds(pipeline: Pipeline, plan: PipelinePlacement) -> float:
    """T, the expected seconds of one token."""
    placement, total = plan.placement, 0.0
    for gpu, problem in enumerate(pipeline.problems):
        is_home_L = plan.home_I[:-1] == gpu
        total += float(layer_seconds(problem, placement)[is_home_L].sum())
        if plan.home_I[-1] == gpu:
            total += head_seconds(problem, placement)
        at_home = SolvedPlacement(
            hot_LF=placement.hot_LF[is_home_L],
            dense_L=placement.dense_L[is_home_L],
            head=bool(placement.head and plan.home_I[-1] == gpu),
        )
        total += gpu_use_seconds(problem, at_home)
    return total


def _run_bounds(problem: Problem, reward_N: np.ndarray) -> np.ndarray:
    """Lower bounds on T - reward * bytes of runs; f64 [N, I + 1, I + 1], inf for start > stop."""
    num_items = problem.num_layers + 1
    bound_NSS = np.full((len(reward_N), num_items + 1, num_items + 1), np.inf)
    cpu_L = layer_seconds(problem, on_one_device(problem, gpu=False))
    cpu_S = np.concatenate([[0.0], np.cumsum(np.append(cpu_L, problem.head_cpu_s))])
    cpu_SS = np.maximum(0.0, cpu_S - cpu_S[:, None])
    cpu_SS[np.tri(num_items + 1, k=-1, dtype=bool)] = np.inf
    if problem.room_bytes < 0:
        return np.broadcast_to(cpu_SS, bound_NSS.shape)
    price_P = first_prices(problem)
    if reward_N.any():
        price_P = np.append(-price_P[:0:-1], price_P)
    off_PL, on_PL = block_costs(problem, price_P)
    for start in range(num_items):
        cost_SP = chain_costs(problem, price_P, off_PL, on_PL, first=start)
        for bound_SS, reward in zip(bound_NSS, reward_N, strict=True):
            limit_P = np.maximum(0.0, price_P + reward) * problem.room_bytes
            limit_P[price_P + reward < 0] = np.inf
            bound_SS[start, start:] = (cost_SP - limit_P).max(axis=1)
    return np.minimum(bound_NSS, cpu_SS)


def cpu_only_plan(pipeline: Pipeline) -> PipelinePlacement:
    return with_one_home(on_one_device(pipeline.model, gpu=False))


def with_one_home(placement: SolvedPlacement, gpu: int = 0) -> PipelinePlacement:
    home_I = np.full(len(placement.dense_L) + 1, gpu, np.int64)
    return PipelinePlacement(placement=placement, home_I=home_I)
