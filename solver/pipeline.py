"""Several GPUs: each holds a run of consecutive layers, the first GPU the first of them.

Every layer has a home, the GPU on which whatever of it is not on the CPU lies: its dense block, its
hot neurons, or both. Homes never fall from layer to layer, and that of the output head is not
before the last layer's, so a token's hidden state passes from one GPU to the next at most once
each, and no layer waits for two. A plan is then a row of cuts, and between two cuts stands the
problem of one GPU (`problem`), so that bounds and placements of single GPUs add up:

    T = sum_k T of the layers cut_k .. cut_(k+1) - 1 on GPU k, the head with the last run

With one GPU there is one run and nothing to cut. For all cuts at once a quick bound is had by
pricing every layer on every GPU once and adding up prefixes: for any prices

    T of a run >= min(T without the GPU,  sum over its items of the least cost at a price - price * room)

What the host must not hold (`need_bytes`) is a sum over GPUs and does not enter this bound.
What this module does not know: how the problem of one run is solved.

Letters: K GPUs, L layers, I = L + 1 items (the head is the last), P prices."""

from dataclasses import dataclass
from functools import cached_property
from itertools import combinations_with_replacement
from math import comb

import numpy as np

from sparkinfer.errors import SparkinferError
from sparkinfer.solver.lagrangian import first_prices, priced_layers
from sparkinfer.solver.problem import (
    Placement,
    Problem,
    ffn_seconds,
    on_one_device,
    segment,
)

MAX_CUTS = 3_000_000  # rows of cuts that are compared: 4 GPUs for 80 layers are 98,770


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """`problems[k]` is the whole model with GPU k as the only one; `need_bytes` is of all GPUs
    together (that of a problem is 0)."""

    problems: tuple[Problem, ...]
    need_bytes: int

    @property
    def model(self) -> Problem:
        """What is the same with any of the GPUs: layers, bytes, CPU seconds."""
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

    @cached_property
    def run_bound_KII(self) -> np.ndarray:
        """No placement of the items start..stop-1 on GPU k takes less; f64 [K, I + 1, I + 1]."""
        return np.stack([_run_bounds(problem) for problem in self.problems])

    def cuts(self) -> tuple[np.ndarray, np.ndarray]:
        """Every row of cuts [C, K + 1] from 0 to I, and a bound of each, least first."""
        num_items, inner = self.model.num_layers + 1, self.num_gpus - 1
        if comb(num_items + inner, inner) > MAX_CUTS:
            raise SparkinferError(
                f"{self.num_gpus} GPUs and {self.model.num_layers} layers have more than"
                f" {MAX_CUTS:,} ways to cut; give budgets for fewer GPUs"
            )
        rows = list(combinations_with_replacement(range(num_items + 1), inner))
        cut_CK = np.array(rows, np.int64).reshape(len(rows), inner)
        cut_CK = np.pad(cut_CK, ((0, 0), (1, 1)), constant_values=((0, 0), (0, num_items)))
        bound_C = sum(
            self.run_bound_KII[gpu, cut_CK[:, gpu], cut_CK[:, gpu + 1]]
            for gpu in range(self.num_gpus)
        )
        assert isinstance(bound_C, np.ndarray)
        order = np.argsort(bound_C, kind="stable")
        return cut_CK[order], bound_C[order]


@dataclass(frozen=True, kw_only=True)
class PipelinePlacement:
    """A placement, and the GPU that each layer and the head call home; int [I]."""

    placement: Placement
    home_I: np.ndarray

    def on_gpu(self, pipeline: Pipeline, gpu: int) -> Placement:
        """The same with all of what is not at home there on the CPU."""
        is_home_I = self.home_I == gpu
        return Placement(
            hot_LF=self.placement.hot_LF & is_home_I[:-1, None],
            dense_L=self.placement.dense_L & is_home_I[:-1],
            head=bool(self.placement.head and is_home_I[-1]),
        )


def joined(pipeline: Pipeline, cut_K: np.ndarray, parts: list[Placement]) -> PipelinePlacement:
    """The placements of the runs between these cuts, as one."""
    sizes = np.diff(cut_K)
    return PipelinePlacement(
        placement=Placement(
            hot_LF=np.concatenate([part.hot_LF for part in parts]),
            dense_L=np.concatenate([part.dense_L for part in parts]).astype(bool),
            head=any(part.head for part in parts),
        ),
        home_I=np.repeat(np.arange(pipeline.num_gpus), sizes),
    )


def held_bytes(pipeline: Pipeline, plan: PipelinePlacement) -> list[int]:
    """Bytes on each GPU, workspaces apart."""
    found = []
    for gpu, problem in enumerate(pipeline.problems):
        part = plan.on_gpu(pipeline, gpu)
        neurons = int(part.num_hot_L @ problem.neuron_bytes_L)
        dense = int(problem.dense_bytes_L[part.dense_L].sum())
        found.append(neurons + dense + problem.head_bytes * part.head)
    return found


def plan_is_feasible(pipeline: Pipeline, plan: PipelinePlacement) -> bool:
    """Whether it keeps to all memories, to the order of homes, and to every layer's minimum."""
    held = held_bytes(pipeline, plan)
    if (np.diff(plan.home_I) < 0).any() or sum(held) < pipeline.need_bytes:
        return False
    for gpu, problem in enumerate(pipeline.problems):
        num_hot_L = plan.on_gpu(pipeline, gpu).num_hot_L
        if ((num_hot_L > 0) & (num_hot_L < problem.min_hot_L)).any():
            return False
        if held[gpu] and held[gpu] > problem.room_bytes:
            return False
    return True


def plan_seconds(pipeline: Pipeline, plan: PipelinePlacement) -> float:
    """T, the expected seconds of one token."""
    placement, total = plan.placement, 0.0
    for gpu, problem in enumerate(pipeline.problems):
        is_home_L = plan.home_I[:-1] == gpu
        ffn_L = ffn_seconds(
            problem,
            hot_touched_L=(problem.touched_LF * placement.hot_LF).sum(axis=1),
            num_hot_L=placement.num_hot_L,
            dense_L=placement.dense_L,
        )
        dense_L = np.where(placement.dense_L, problem.dense_gpu_s_L, problem.dense_cpu_s_L)
        total += float((ffn_L + dense_L)[is_home_L].sum())
        if plan.home_I[-1] == gpu:
            total += problem.head_gpu_s if placement.head else problem.head_cpu_s
    return total


def _run_bounds(problem: Problem) -> np.ndarray:
    """A bound of every run of items; f64 [I + 1, I + 1], infinite where start > stop."""
    cpu_L = problem.touched_L * problem.cpu_s_per_byte_L + problem.dense_cpu_s_L
    cpu_S = np.concatenate([[0.0], np.cumsum(np.append(cpu_L, problem.head_cpu_s))])
    bound_SS = cpu_S[None, :] - cpu_S[:, None]
    if problem.room_bytes >= 0:
        price_P = first_prices(problem)
        cost_2PL, _ = priced_layers(problem, price_P)
        on_PL = cost_2PL[1] + problem.dense_gpu_s_L + price_P[:, None] * problem.dense_bytes_L
        least_PL = np.minimum(cost_2PL[0] + problem.dense_cpu_s_L, on_PL)
        head_P = np.minimum(problem.head_cpu_s, problem.head_gpu_s + price_P * problem.head_bytes)
        sums_PS = np.cumsum(np.column_stack([np.zeros(len(price_P)), least_PL, head_P]), axis=1)
        for start in range(len(cpu_S)):
            priced_PS = sums_PS - sums_PS[:, [start]] - price_P[:, None] * problem.room_bytes
            bound_SS[start] = np.minimum(bound_SS[start], priced_PS.max(axis=0))
    bound_SS[np.tri(len(cpu_S), k=-1, dtype=bool)] = np.inf
    return np.maximum(bound_SS, 0.0) * (1 - 1e-12)


def cpu_only_plan(pipeline: Pipeline) -> PipelinePlacement:
    return PipelinePlacement(
        placement=on_one_device(pipeline.model, gpu=False),
        home_I=np.zeros(pipeline.model.num_layers + 1, np.int64),
    )
