"""The costs in seconds by which the online neuron cache decides, from the machine's figures.

A cached layer has hot and cold neurons. Its seconds (M_l in `problem`) are expressed in the neurons
that a token reads on each side, so that they follow the swaps:

    M_l = max(hot_s + hot_row_s * hot rows read,  cold_s + cold_row_s * cold rows read)

What counts as read depends on the mode:

    exact      the neurons that fire: up and down rows of each. All gates are read wherever they
               are, and a swap does not change their number on either side, so they are in hot_s
               and cold_s.
    predicted  the neurons that the predictor names: the gate row of each and, as often as a named
               neuron fires, its up and down rows.

Of a mixture, a layer reads the experts that its router chooses: hot_row_s and cold_row_s are an
expert's seconds as in `replay`, hot_s those of the kernels, cold_s the hand-over.

With the profile's expected counts, the sum over the cached layers plus `rest_s` is the plan's
objective; of a mixture, the mean of that over the recorded tokens. A row on the GPU takes its bytes
over the GPU's rate; on the CPU, in mode exact, its bytes over the rates of its matrices at the
layer's density. `problem` spreads a layer's CPU seconds over all of its bytes, gates included;
cold_s takes the difference. In mode predicted a row on either side takes that side's expected
seconds over its expected rows.

A copied neuron takes all of its bytes over the rate of the link (from pinned memory), and each
step's copy takes `Gpu.copy_latency_s` in addition. Gathering reads and writes all of a neuron's
bytes, at the rate measured with the fewest threads, since one thread gathers; SWAP_S is added for
the host's work on a swap that does not depend on bytes. Experts are not gathered, but the GPU moves
them from staging to their slots between steps, in another layout.

Letters: L layers, F neurons of a layer."""

import numpy as np

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.costs import cache_bytes
from hotsplit.costs.part_bytes import down_kind, layer_bytes
from hotsplit.model.modes import computes_all, runs_predictors
from hotsplit.options.neuron_cache_options import CacheCosts
from hotsplit.solver.inputs import Inputs
from hotsplit.solver.problem import Problem, SolvedPlacement, placement_seconds
from hotsplit.solver.problem_builder import overfetch
from hotsplit.solver.units import ExpertUnits

# The host's bookkeeping for a swap: measured on two busy cores, with 47 swaps a step.
SWAP_S = 1e-5
# Of a swap of experts, whose matrices it sends one by one: 96 us alone, 60 us of three at a time,
# on two busy cores, with the CPU in the GPU's role and small matrices.
EXPERT_SWAP_S = 1e-4
# A byte that a GPU moves from staging to a slot is read and written, and so are four of a table.
MOVED_BYTES = 6


def expected_reads(inputs: Inputs) -> np.ndarray:
    """How often a token reads each neuron or expert, by id; f64 [L, F]."""
    if inputs.model.spec.has_experts:
        units = inputs.units
        assert isinstance(units, ExpertUnits)
        return units.count_LF / units.rank_LTK.shape[1]
    assert not computes_all(inputs.mode), "every neuron is read"
    frequency_LF = inputs.profile.frequency_LF
    if not runs_predictors(inputs.mode):
        return frequency_LF
    return np.minimum(1.0, frequency_LF * overfetch(inputs.model, inputs.profile)[:, None])


def cache_costs(inputs: Inputs, problem: Problem, placement: SolvedPlacement) -> CacheCosts:
    """The costs for a placement; `problem` was built for the inputs' first GPU. Layers that are not
    cached have costs of zero: their seconds are in `rest_s`."""
    machine, gpu = inputs.machine, inputs.machine.gpus[0]
    is_cached_L = cached_layers(inputs.model, placement)
    reads_LF = np.take_along_axis(expected_reads(inputs), problem.order_LF.astype(np.int64), axis=1)
    sides_L4 = np.zeros((problem.num_layers, 4))
    for layer in np.flatnonzero(is_cached_L).tolist():
        if inputs.model.spec.has_experts:
            own = problem.sides(layer)
            sides_L4[layer] = own.kernels_s, own.hot_s, own.hand_over_s, own.cold_s
        else:
            is_hot_F = placement.hot_LF[layer]
            sides_L4[layer] = _neuron_sides(inputs, problem, is_hot_F, reads_LF[layer], layer)
    link_s = 1e-9 / gpu.host_to_device_gb_per_s.median
    copied_L = problem.neuron_bytes_L * is_cached_L
    if inputs.model.spec.has_experts:
        move_s = MOVED_BYTES * 1e-9 / gpu.bandwidth_gb_per_s.median
        gather_row_s_L = copied_L * move_s + EXPERT_SWAP_S * is_cached_L
    else:
        least = min(machine.cpu_bandwidth_gb_per_s)
        gather_s = 2e-9 / machine.cpu_bandwidth_gb_per_s[least].median
        gather_row_s_L = copied_L * gather_s + SWAP_S * is_cached_L
    return CacheCosts(
        hot_s_L=sides_L4[:, 0],
        hot_row_s_L=sides_L4[:, 1],
        cold_s_L=sides_L4[:, 2],
        cold_row_s_L=sides_L4[:, 3],
        copy_row_s_L=copied_L * link_s,
        gather_row_s_L=gather_row_s_L,
        rest_s=placement_seconds(problem, placement, counts_L=~is_cached_L),
        copy_s=gpu.copy_latency_s.median,
    )


def cached_layers(model: ModelFile, placement: SolvedPlacement) -> np.ndarray:
    """Whether a neuron cache serves each layer, bool [L]."""
    dense = placement.dense_L.tolist()
    return np.array(cache_bytes.cached_layers(model, placement.num_hot_L.tolist(), dense))


def _neuron_sides(
    inputs: Inputs, problem: Problem, is_hot_F: np.ndarray, reads_F: np.ndarray, layer: int
) -> tuple[float, float, float, float]:
    """hot_s, hot_row_s, cold_s and cold_row_s of a layer's neurons."""
    model, touched_F, gpu_s = (
        inputs.model,
        problem.touched_LF[layer],
        problem.hot_s_per_byte_L[layer],
    )
    hot_s = touched_F[is_hot_F].sum() * gpu_s
    cold_s = touched_F[~is_hot_F].sum() * problem.cpu_s_per_byte_L[layer]
    num_hot, num_cold = reads_F[is_hot_F].sum(), reads_F[~is_hot_F].sum()
    if not runs_predictors(inputs.mode):
        sizes, rate, density = layer_bytes(model, layer), inputs.machine.cpu_rate, reads_F.mean()
        hot_row_s = (sizes.up_row + sizes.down_row) * gpu_s
        up_s = sizes.up_row / rate(model.entry(layer, "ffn_up.weight").kind, density=density)
        cold_row_s = up_s + sizes.down_row / rate(down_kind(model, layer), density=density)
        if num_cold > 0:  # what is left of cold_s, for the gates, must not become negative
            cold_row_s = min(cold_row_s, cold_s / num_cold)
    else:
        row_bytes = touched_F.sum() / max(reads_F.sum(), 1e-300)
        hot_row_s = hot_s / num_hot if num_hot > 0 else row_bytes * gpu_s
        each_s = row_bytes * problem.cpu_s_per_byte_L[layer]
        cold_row_s = cold_s / num_cold if num_cold > 0 else each_s
    fixed_hot_s = problem.kernels_s + max(0.0, hot_s - num_hot * hot_row_s)
    fixed_cold_s = problem.hand_over_s + max(0.0, cold_s - num_cold * cold_row_s)
    return fixed_hot_s, hot_row_s, fixed_cold_s, cold_row_s
