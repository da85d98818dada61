"""Plans with an online neuron cache: its bytes in both memories, its section of the plan, and
notes.

The most that staging and tables can take on the GPU is taken from the budget with the workspace,
before neurons are placed. Main memory holds a copy of every hot neuron of a divided layer, so its
use depends on the plan: the search ignores it and finds the fastest plan for the GPU's budget, and
`check_host` checks it afterwards.

Letters: L layers, F neurons."""

import numpy as np

from hotsplit.artifacts.cache_plan import CachePlan
from hotsplit.artifacts.split_file import Split, held_in
from hotsplit.costs.cache_bytes import CacheSize, copied_bytes
from hotsplit.costs.part_bytes import plan_bytes
from hotsplit.errors import HotsplitError
from hotsplit.model.modes import runs_predictors
from hotsplit.options.neuron_cache_options import CacheOptions
from hotsplit.solver.cache_costs import cache_costs, cached_layers, expected_reads
from hotsplit.solver.inputs import Inputs, swapped_rows
from hotsplit.solver.memories import Smallest, TooSmallError
from hotsplit.solver.multi_gpu import Pipeline
from hotsplit.solver.problem import SolvedPlacement
from hotsplit.system.sizes import format_bytes

# Advice is given if the cache takes at most this share of the hot neurons' bytes on the GPU.
SMALL_SHARE = 0.02


def check_host(inputs: Inputs, pipeline: Pipeline, placement: SolvedPlacement) -> None:
    """Raises TooSmallError if main memory does not hold this plan with its neuron cache."""
    items = plan_bytes(
        held_in(inputs.model, inputs.mode),
        context_length=inputs.context_length,
        num_sequences=inputs.num_sequences,
        num_hot=num_hot_of(inputs, placement),
        dense_on_gpu=placement.dense_L.tolist(),
        head_on_gpu=placement.head,
        workspace=inputs.workspace,
        neuron_cache=inputs.cache_size,
        cache_types=inputs.cache_types,
    )[1]
    needed = sum(items.values())
    if needed > inputs.host_budget:
        raise TooSmallError(inputs, pipeline, Smallest(budgets=None, host=needed))


def check_divided(inputs: Inputs, placement: SolvedPlacement) -> None:
    """Raises HotsplitError if a neuron cache was asked for and no layer is divided."""
    if inputs.swapped_rows and not cached_layers(inputs.model, placement).any():
        units = "experts" if inputs.model.spec.has_experts else "neurons"
        raise HotsplitError(
            f"{inputs.paths[0]}: with this budget the best plan divides no layer's {units} between"
            " GPU and CPU, so a neuron cache has nothing to swap; leave --neuron-cache out, or give"
            " another --vram-budget"
        )


def planned_cache(
    inputs: Inputs, pipeline: Pipeline, placement: SolvedPlacement
) -> CachePlan | None:
    """The cache's section of a plan; None if no cache was asked for."""
    if not inputs.swapped_rows:
        return None
    costs = cache_costs(inputs, pipeline.model, placement)
    frequency = tuple(expected_reads(inputs).astype(np.float32))
    return CachePlan(most_rows=inputs.swapped_rows, costs=costs, frequency=frequency)


def cost_line(inputs: Inputs, placement: SolvedPlacement, split: Split, without_s: float) -> str:
    """A line on the bytes of a plan's cache. `without_s`: of a token without a cache."""
    num_layers, units = int(cached_layers(inputs.model, placement).sum()), split.units
    num_hot, dense = num_hot_of(inputs, placement), placement.dense_L.tolist()
    copies = copied_bytes(inputs.model, num_hot, dense)
    return (
        f"the neuron cache of {num_layers} layers takes"
        f" {format_bytes(split.gpu_bytes['neuron_cache'])} of the GPU's budget, for up to"
        f" {inputs.swapped_rows} swaps a token, and {format_bytes(split.cpu_bytes['neuron_cache'])}"
        f" of main memory, {format_bytes(copies)} of it copies of hot {units}; without it the plan"
        f" is for {1 / without_s:,.1f} tokens/s"
    )


def advice_line(
    inputs: Inputs, pipeline: Pipeline, placement: SolvedPlacement, split: Split
) -> str | None:
    """A line that says that there is room for a cache, and its bytes. None in mode dense, with
    several GPUs, if the cache would take more than SMALL_SHARE on the GPU or more main memory than
    is free, and if no swap is expected to make a token faster, because no layer is divided or none
    waits for the CPU."""
    has_units = inputs.mode != "dense" or inputs.model.spec.has_experts
    is_cached_L = cached_layers(inputs.model, placement)
    if len(inputs.budgets) > 1 or not has_units or not is_cached_L.any():
        return None
    size = CacheSize(
        most_rows=swapped_rows(CacheOptions(), inputs.model),
        packs_bits=not runs_predictors(inputs.mode),
    )
    on_gpu = size.most_gpu_bytes(inputs.model)
    num_hot, dense = num_hot_of(inputs, placement), placement.dense_L.tolist()
    on_host = size.host_bytes(inputs.model, num_hot, dense)
    free = min(inputs.host_budget, inputs.machine.free_bytes) - sum(split.cpu_bytes.values())
    if on_gpu > SMALL_SHARE * split.gpu_bytes["neurons"] or on_host > free:
        return None
    # Do the cold neurons of a divided layer take longer than the hot ones?
    problem = pipeline.model
    hot_L = (problem.touched_LF * placement.hot_LF).sum(axis=1)
    gpu_L = hot_L * problem.hot_s_per_byte_L + problem.kernels_s_L
    cpu_L = (problem.touched_L - hot_L) * problem.cpu_s_per_byte_L + problem.hand_over_s_L
    if not (is_cached_L & (cpu_L > gpu_L)).any():
        return None
    return (
        "there is room for a neuron cache, which helps where texts differ from the profile's:"
        f" --neuron-cache on takes {format_bytes(on_gpu)} of the GPU's budget and"
        f" {format_bytes(on_host)} of main memory"
    )


def num_hot_of(inputs: Inputs, placement: SolvedPlacement) -> list[int]:
    """The hot neurons or experts of each layer, as a plan counts them."""
    units = inputs.units
    return [len(units.ids(layer, hot_F)) for layer, hot_F in enumerate(placement.hot_LF)]
