"""What a plan of a mixture of experts says in words: what is on the GPU, why an expert is not, and
what more memory would bring. `explain` says what a faster link would bring.

Letters: L layers, F experts of a layer by rank, T recorded tokens, K experts of a token."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hotsplit.solver.inputs import Inputs
from hotsplit.solver.multi_gpu import Pipeline, PipelinePlacement
from hotsplit.solver.optimise import Answer, find_plan
from hotsplit.solver.problem import Problem, SolvedPlacement, sets_seconds
from hotsplit.system.sizes import format_bytes

MORE_BYTES = 2 << 30
WORTH_IT = 0.01  # of a token


@dataclass(frozen=True, kw_only=True)
class Edge:
    """Shares of the tokens, in a layer with experts on both sides, that chose the least chosen
    expert on the GPU, and the most chosen one on the CPU."""

    least_hot: float
    most_cold: float
    hot_expert: int
    cold_expert: int


@dataclass(frozen=True, kw_only=True)
class MoreExperts:
    """Further experts of a layer on its GPU, and the seconds of a token that they save."""

    gpu: int
    count: int
    num_bytes: int
    gain_s: float


def placed_line(
    inputs: Inputs,
    plan: PipelinePlacement,
    problem: Problem,
    by: str = "On the text of the profile",
) -> str:
    """What is on the GPUs; `by`: what the choices of experts are those of."""
    placement, spec = plan.placement, inputs.model.spec
    routed, number = problem.replayed, problem.num_neurons
    dense = [n for n, x in enumerate(spec.layers) if n not in routed and x.neurons.number]
    num_hot_L = placement.num_hot_L[routed]
    count, all_experts = int(num_hot_L.sum()), number * len(routed)
    num_blocks, num_dense = int(placement.dense_L.sum()), int(placement.hot_LF[dense].any(1).sum())
    parts = [f"attention and router of {_of(num_blocks, spec.num_layers)} layers"] * (
        num_blocks > 0
    )
    parts += [f"the neurons of {_without_experts(num_dense, len(dense))}"] * (num_dense > 0)
    parts += ["the output head"] * placement.head
    if count:
        each = f"{num_hot_L.min()} to {num_hot_L.max()} of each layer's {number}"
        each = (
            f" ({each if num_hot_L.min() < num_hot_L.max() else f'{num_hot_L[0]} of each layer'})"
        )
        parts.append(f"{_of(count, all_experts)} experts{each if count < all_experts else ''}")
    line = f"on the GPU: {', '.join(parts)}"
    if num_dense < len(dense):
        others = _without_experts(len(dense) - num_dense, len(dense))
        line += f"; the CPU has the neurons of {others}"
    if not count:
        return f"{line}; all experts are on the CPU"
    if count == all_experts:
        return line
    share = np.mean([placement.hot_LF[n][problem.sides(n).rank_TK].mean() for n in routed])
    return (
        f"{line}. {by}, {share:.0%} of the experts that a token's routers choose are"
        " there; the CPU computes the others at the same time"
    )


def _without_experts(count: int, number: int) -> str:
    which = "the one layer" if number == 1 else f"{_of(count, number)} layers"
    return f"{which} without experts"


def _of(count: int, number: int) -> str:
    return f"all {number:,}" if count == number else f"{count:,} of {number:,}"


def edges(pipeline: Pipeline, placement: SolvedPlacement) -> dict[int, Edge]:
    """The edge of each layer that has experts on both sides."""
    found = {}
    for layer in pipeline.model.replayed:
        rank_TK, is_hot_F = pipeline.model.sides(layer).rank_TK, placement.hot_LF[layer]
        if is_hot_F.any() and not is_hot_F.all():
            share_F = np.bincount(rank_TK.ravel(), minlength=len(is_hot_F)) / len(rank_TK)
            hot, cold = np.flatnonzero(is_hot_F), np.flatnonzero(~is_hot_F)
            least, most = hot[share_F[hot].argmin()], cold[share_F[cold].argmax()]
            id_F = pipeline.model.order_LF[layer]
            found[layer] = Edge(
                least_hot=float(share_F[least]),
                most_cold=float(share_F[most]),
                hot_expert=int(id_F[least]),
                cold_expert=int(id_F[most]),
            )
    return found


def why_line(
    pipeline: Pipeline, plan: PipelinePlacement, unused: Sequence[int], seconds: float
) -> str | None:
    """Why experts are on the CPU; None if none is. `unused`: bytes of each budget; `seconds`: of a
    token by the plan."""
    placement, problem = plan.placement, pipeline.model
    cold = [n for n in problem.replayed if not placement.hot_LF[n].all()]
    if not cold:
        return None
    steps = [_next(pipeline, plan, layer) for layer in cold]
    best = max(steps, key=lambda step: step.gain_s / step.num_bytes)
    count = sum(int((~placement.hot_LF[n]).sum()) for n in cold)
    begin = f"{count:,} experts are on the CPU because"
    if best.gain_s <= 0:
        return (
            f"{begin} one more on the GPU would not make a token faster: the GPU, its kernels and"
            " hand-overs would take longer than the CPU saves"
        )
    gain = f"{best.gain_s / seconds:.2%}" if best.gain_s >= 1e-4 * seconds else "less than 0.01%"
    what = f"the next expert takes {format_bytes(best.num_bytes)} and would"
    if best.count > 1:
        size = format_bytes(best.num_bytes)
        what = f"{best.count} experts of a layer, of which fewer do not pay, take {size} and would"
    fits = any(step.gain_s > 0 and step.num_bytes <= unused[step.gpu] for step in steps)
    gpus = sorted({step.gpu for step in steps})
    reason, is_one = "the budget is full", len(gpus) == 1
    if fits:
        reason = "no faster plan was found"
    elif pipeline.num_gpus > 1:
        names = " and ".join(f"GPU {gpu}" for gpu in gpus)
        have, are = ("has", "is") if is_one else ("have", "are")
        reason = f"{names}, which {have} their layers, {are} full"
    left = " and ".join(format_bytes(unused[gpu]) for gpu in gpus)
    line = f"{begin} {reason}: {left} are left, and {what} make a token {gain} faster"
    at = edges(pipeline, placement)
    if not at:
        return line
    # Experts that are chosen together are exchanged for others, so that some layers are out of
    # order.
    typical = [n for n in at if at[n].least_hot >= at[n].most_cold] or list(at)
    layer = sorted(typical, key=lambda n: at[n].most_cold)[len(typical) // 2]
    edge = at[layer]
    return (
        f"{line}. Those that the profile's tokens choose most often have the places: in layer"
        f" {layer}, say, expert {edge.hot_expert} is the last on the GPU, chosen by"
        f" {edge.least_hot:.2%} of the tokens, and expert {edge.cold_expert} the first on the CPU,"
        f" by {edge.most_cold:.2%}"
    )


def more_line(pipeline: Pipeline, answer: Answer, *, time_limit_s: float) -> str | None:
    """What MORE_BYTES more on the first GPU would bring, or as many as hold the whole model, by the
    plan for them; None if no expert is on the CPU, or if all would fit already."""
    problem, routed = pipeline.model, pipeline.model.replayed
    first, *others = pipeline.problems
    missing = first.placeable_bytes + first.workspace_bytes - first.budget_bytes
    if missing <= 0 or answer.placement.hot_LF[routed].all():
        return None
    more = min(MORE_BYTES, missing)
    larger = replace(pipeline, problems=(first.with_budget(first.budget_bytes + more), *others))
    found = find_plan(larger, time_limit_s=time_limit_s, known=[answer.plan])
    assert found is not None, "this plan fits"
    gain = answer.objective_s / found.objective_s - 1
    size = f"{format_bytes(more)} more of GPU memory"
    if gain < WORTH_IT:
        return f"{size} would make a token less than {WORTH_IT:.0%} faster"
    count, number = int(found.placement.num_hot_L[routed].sum()), problem.num_neurons * len(routed)
    return (
        f"{size} would bring {1 / found.objective_s:,.1f} tokens/s instead of"
        f" {1 / answer.objective_s:,.1f} ({gain:+.1%}), with {_of(count, number)} experts on the"
        " GPU"
    )


def _next(pipeline: Pipeline, plan: PipelinePlacement, layer: int) -> MoreExperts:
    """The most chosen experts of a layer's cold ones on its GPU: one, or as many as pay."""
    gpu, hot_F = int(plan.home_I[layer]), plan.placement.hot_LF[layer]
    problem = pipeline.problems[gpu]
    count = max(1, int(problem.min_hot_L[layer] - hot_F.sum()))
    more_F = hot_F.copy()
    more_F[np.flatnonzero(~hot_F)[:count]] = True
    is_dense = bool(plan.placement.dense_L[layer])
    now_s, then_s = sets_seconds(problem, layer, np.stack([hot_F, more_F]), is_dense)
    num_bytes = count * int(problem.neuron_bytes_L[layer])
    return MoreExperts(gpu=gpu, count=count, num_bytes=num_bytes, gain_s=float(now_s - then_s))
