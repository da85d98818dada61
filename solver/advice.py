"""Advises on a plan: its speed limit, the speed of other placements, and budgets that would help.

    limit         the bytes that a step of the plan reads on each side over that side's bandwidth,
                  fully overlapped and without fixed costs: max(GPU bytes / B_g, CPU bytes / B_c)
    fits from     the smallest budget that holds everything
    helps from    below this budget no placement is more than WORTH_IT faster than the CPU alone, by
                  the bound of `lagrangian` without its branches, which is never above the true
                  minimum; found to a NUM_BUDGETS-th of the range of budgets

B_c is the highest rate of row products and of torch's sum in the machine file. Splits by whole
layers are in `layer_split`.

Letters: L layers, F neurons of a layer, I = L + 1 items (the head is the last), P prices."""

from dataclasses import dataclass

import numpy as np

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.split_file import Split
from hotsplit.costs.part_bytes import head_bytes, kv_read, layer_bytes
from hotsplit.model.modes import runs_predictors
from hotsplit.solver.inputs import Inputs
from hotsplit.solver.lagrangian import first_prices, least_costs
from hotsplit.solver.layer_split import cpu_moe, layer_split
from hotsplit.solver.multi_gpu import Pipeline, PipelinePlacement
from hotsplit.solver.problem import Problem, on_one_device, placement_seconds
from hotsplit.system.sizes import format_bytes

WORTH_IT = 0.01
SMALL_GAP = 1e-4  # of a plan's speed: too small to mention
UNUSED = 0.01  # of a budget: less room than this needs no reason
NUM_BUDGETS = 4096


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Seconds per token and bytes; `helps_from_bytes` is None if nothing on a GPU helps."""

    cpu_only_s: float
    limit_s: float
    layer_split_s: float
    layer_split_layers: int  # on GPUs
    layer_split_has_head: bool
    cpu_moe: tuple[int, float] | None  # llama.cpp's --n-cpu-moe that fits, and its seconds
    fits_from_bytes: int
    helps_from_bytes: int | None


def advise(inputs: Inputs, pipeline: Pipeline, plan: PipelinePlacement) -> Advice:
    problem = pipeline.model
    others = layer_split(inputs)
    return Advice(
        cpu_only_s=placement_seconds(problem, on_one_device(problem, gpu=False)),
        limit_s=limit_seconds(inputs, pipeline, plan),
        layer_split_s=others.seconds,
        layer_split_layers=others.num_layers,
        layer_split_has_head=others.has_head,
        cpu_moe=cpu_moe(inputs),
        fits_from_bytes=problem.placeable_bytes + problem.workspace_bytes,
        helps_from_bytes=helps_from(problem),
    )


def limit_seconds(inputs: Inputs, pipeline: Pipeline, plan: PipelinePlacement) -> float:
    """Seconds per token at least. GPUs run in turn; the CPU overlaps with all of them."""
    model, placement = inputs.model, plan.placement
    is_offloaded = inputs.kv_offload is not None
    layers = range(model.spec.num_layers)
    types, sizes = inputs.cache_types, [layer_bytes(model, layer) for layer in layers]
    kv_L = np.array([kv_read(model, layer, inputs.context_length, types) for layer in layers])
    is_predicted = runs_predictors(inputs.mode)
    dense_L = np.array([s.attention + s.predictor * is_predicted for s in sizes])
    dense_L = dense_L + kv_L * (not is_offloaded)
    touched_LF, head = pipeline.model.touched_LF, head_bytes(model)
    hot_L = (touched_LF * placement.hot_LF).sum(axis=1)
    gpu_s = 0.0
    for gpu, problem in enumerate(pipeline.problems):
        is_home_L = plan.home_I[:-1] == gpu
        touched = hot_L[is_home_L].sum() + dense_L[is_home_L & placement.dense_L].sum()
        touched += head * bool(placement.head and plan.home_I[-1] == gpu)
        gpu_s += touched * problem.gpu_s_per_byte
    cold = (touched_LF.sum(axis=1) - hot_L).sum() + dense_L[~placement.dense_L].sum()
    cold += head * (not placement.head) + kv_L.sum() * is_offloaded
    machine = inputs.machine
    rates = [figure.best for figure in machine.cpu_sum_gb_per_s.values()]
    rates += [figure.best for figure in machine.costs.all_rows_gb_per_s.values()]
    return max(gpu_s, float(cold) / (1e9 * max([machine.best_cpu_bandwidth_gb_per_s, *rates])))


def helps_from(problem: Problem) -> int | None:
    """The smallest of NUM_BUDGETS evenly spaced budgets at which a placement may be WORTH_IT faster
    than the CPU alone; None if there is none."""
    cpu_only_s = placement_seconds(problem, on_one_device(problem, gpu=False))
    price_P = first_prices(problem)
    least_P = least_costs(problem, price_P)
    most = problem.placeable_bytes + problem.workspace_bytes
    for budget in np.linspace(problem.minimum_bytes, most, NUM_BUDGETS).astype(np.int64):
        bound_s = (least_P - price_P * (budget - problem.workspace_bytes)).max()
        if bound_s < (1 - WORTH_IT) * cpu_only_s:
            return int(budget)
    return None


def room_notes(advice: Advice, split: Split, model: ModelFile) -> list[str]:
    """Notes on budgets that would help or suffice, and on why a GPU has room left: by the plan's
    bound, no other plan for these budgets, however full, is faster by more than the gap."""
    notes, helps = [], advice.helps_from_bytes
    if max(split.budgets) < advice.fits_from_bytes:
        fits = f"everything fits from {format_bytes(advice.fits_from_bytes)} on"
        if len(split.budgets) > 1:
            fits = f"on the first GPU alone {fits}"
        notes.append(
            f"at no budget does this GPU help on this machine (by 1 % or more); {fits}"
            if helps is None
            else f"below {format_bytes(helps)} nothing on the GPU helps on this machine (by 1 % or"
            f" more); {fits}"
        )
    if split.is_whole or helps is None or sum(split.budgets) < helps:
        return notes  # nothing is left to place, or the note above says why nothing is placed
    faster = "faster" if split.gap < SMALL_GAP else f"faster by more than {split.gap:.2%}"
    for number, (left, limit) in enumerate(zip(unused(split, model), split.budgets, strict=True)):
        if left >= UNUSED * limit > 0:
            notes.append(
                f"{format_bytes(left)} of the {format_bytes(limit)} of GPU {number} stay unused:"
                " nothing that is left for the CPU and fits there would make a token"
                f" {faster} on this machine"
            )
    return notes


def unused(split: Split, model: ModelFile) -> list[int]:
    """Bytes of each GPU's budget that a plan leaves."""
    used = [sum(items.values()) for items in split.items_of_gpus(model)[0]]
    used += [0] * (len(split.budgets) - len(used))
    return [limit - taken for limit, taken in zip(split.budgets, used, strict=True)]
