"""What a plan of a mixture of experts says in words: what is on the GPU, and why an expert is not.
`explain` says what more memory or a faster link would bring.

Letters: L layers, F experts of a layer by rank, T recorded tokens, K experts of a token."""

from dataclasses import dataclass

import numpy as np

from hotsplit.solver.inputs import Inputs
from hotsplit.solver.multi_gpu import Pipeline
from hotsplit.solver.problem import Placement, Problem, sets_seconds
from hotsplit.system.sizes import format_bytes


@dataclass(frozen=True, kw_only=True)
class Edge:
    """Shares of the tokens, in a layer with experts on both sides, that chose the least chosen expert on
    the GPU, and the most chosen one on the CPU."""

    least_hot: float
    most_cold: float


def placed_line(inputs: Inputs, pipeline: Pipeline, placement: Placement) -> str:
    """What is on the GPUs."""
    problem, spec = pipeline.model, inputs.model.spec
    routed, number = problem.replayed, problem.num_neurons
    num_hot_L = placement.num_hot_L[routed]
    blocks = int(placement.dense_L.sum())
    parts = [f"attention of {blocks} of {spec.num_layers} layers"] if blocks else []
    parts += ["the output head"] if placement.head else []
    if not num_hot_L.any():
        return f"on the GPU: {' and '.join(parts)}; all experts are on the CPU"
    each = f"{num_hot_L.min()} to {num_hot_L.max()} of each layer's {number}"
    if num_hot_L.min() == num_hot_L.max():
        each = f"{num_hot_L[0]} of each layer's {number}"
    share = np.mean([_share(problem.sides(n).rank_TK, placement.hot_LF[n]) for n in routed])
    parts.append(f"{num_hot_L.sum():,} of {number * len(routed):,} experts ({each})")
    rest = "" if share == 1 else "; the CPU computes the others at the same time"
    return f"on the GPU: {', '.join(parts)}, for {share:.0%} of the choices in the profile{rest}"


def _share(rank_TK: np.ndarray, is_hot_F: np.ndarray) -> float:
    return float(is_hot_F[rank_TK].mean())


def edges(pipeline: Pipeline, placement: Placement) -> dict[int, Edge]:
    """The edge of each layer that has experts on both sides."""
    found = {}
    for layer in pipeline.model.replayed:
        rank_TK, is_hot_F = pipeline.model.sides(layer).rank_TK, placement.hot_LF[layer]
        if is_hot_F.any() and not is_hot_F.all():
            share_F = np.bincount(rank_TK.ravel(), minlength=len(is_hot_F)) / len(rank_TK)
            found[layer] = Edge(
                least_hot=float(share_F[is_hot_F].min()),
                most_cold=float(share_F[~is_hot_F].max()),
            )
    return found


def why_line(pipeline: Pipeline, placement: Placement, free_bytes: int) -> str | None:
    """Why an expert is on the CPU; None if none is. `free_bytes`: of the budgets."""
    problem = pipeline.model
    cold = [n for n in problem.replayed if not placement.hot_LF[n].all()]
    if not cold:
        return None
    steps = [_next(problem, placement, layer) for layer in cold]
    gain_s, count, num_bytes = max(steps, key=lambda step: step[0] / step[2])
    if gain_s <= 0:
        return (
            "an expert is on the CPU because one more on the GPU would not make a token faster: the"
            " GPU, its kernels and hand-overs would take longer than the CPU saves"
        )
    what = "expert" if count == 1 else f"{count} experts of a layer, of which fewer do not pay,"
    line = (
        f"an expert is on the CPU because the budget is full: the next {what} would take"
        f" {format_bytes(num_bytes)} and save {1e6 * gain_s:.2g} us a token; {format_bytes(free_bytes)} are"
        " left"
    )
    at = edges(pipeline, placement)
    if not at:
        return line
    least, most = (
        float(np.median([getattr(edge, name) for edge in at.values()]))
        for name in ("least_hot", "most_cold")
    )
    return (
        f"{line}; in the middle layer the least chosen one on the GPU is chosen by {least:.1%} of the"
        f" tokens, the most chosen one on the CPU by {most:.1%}"
    )


def _next(problem: Problem, placement: Placement, layer: int) -> tuple[float, int, int]:
    """What the most chosen experts of a layer's cold ones would save on the GPU, in seconds of a token;
    their number, one or as many as pay; and their bytes."""
    hot_F = placement.hot_LF[layer]
    count = max(1, int(problem.min_hot_L[layer] - hot_F.sum()))
    more_F = hot_F.copy()
    more_F[np.flatnonzero(~hot_F)[:count]] = True
    is_dense = bool(placement.dense_L[layer])
    now_s, then_s = sets_seconds(problem, layer, np.stack([hot_F, more_F]), is_dense)
    return float(now_s - then_s), count, count * int(problem.neuron_bytes_L[layer])
