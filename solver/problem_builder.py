"""Computes the numbers of a placement problem from the model, the profile and the machine, as the
docstring of `problem` defines them.

Letters: L layers, F neurons of a layer."""

from collections.abc import Callable
from dataclasses import dataclass
from math import fsum
from typing import TYPE_CHECKING

import numpy as np

from hotsplit.artifacts.machine_file import Drive, Gpu, Machine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.profile_file import Profile
from hotsplit.costs import part_bytes
from hotsplit.costs.kernel_counts import ALL_GATES_KERNELS, HEAD_KERNELS, HOT_KERNELS, dense_kernels
from hotsplit.errors import HotsplitError
from hotsplit.model.modes import Mode, computes_all, runs_predictors
from hotsplit.solver.problem import Problem
from hotsplit.solver.units import ExpertUnits, NeuronUnits

if TYPE_CHECKING:
    from hotsplit.solver.inputs import Inputs


def build_problem(inputs: "Inputs", gpu: Gpu, budget_bytes: int) -> Problem:
    """The numbers of the problem with one GPU, with every byte count from
    `hotsplit.costs.part_bytes`. A token reads the keys and values of one of the texts that are
    computed at a time."""
    model, machine, spec = inputs.model, inputs.machine, inputs.model.spec
    has_predictor, is_offloaded = runs_predictors(inputs.mode), inputs.kv_offload is not None

    def is_read(name: str) -> bool:
        return part_bytes.is_dense(name) or (has_predictor and part_bytes.is_predictor(name))

    dense_bytes, dense_gpu_s, dense_cpu_s = [], [], []
    for layer, own in enumerate(spec.layers):
        sizes = part_bytes.layer_bytes(model, layer)
        read_kv = part_bytes.kv_read(model, layer, inputs.context_length, inputs.cache_types)
        num_bytes = sizes.attention - sizes.head_norms * is_offloaded
        num_bytes += sizes.predictor * has_predictor
        kernels = dense_kernels(
            model, layer, has_predictor=has_predictor, has_cache=not is_offloaded
        )
        gpu_s = gpu.kernels_seconds(kernels, num_bytes + read_kv * (not is_offloaded))
        if is_offloaded and own.attention:  # the CPU attends
            values = own.attention.heads_size + own.attention.qkv_size
            copies_s = part_bytes.FLOAT_BYTES * values * 1e-9 / gpu.host_to_device_gb_per_s.median
            read_s = read_kv / (machine.costs.kv_gb_per_s.median * 1e9)
            gpu_s += gpu.hand_over_s.median + copies_s + read_s
        kept = 0 if is_offloaded else inputs.kv_bytes(layer)
        if inputs.places_draft and layer == spec.last_attending:
            kept += sum(
                part_bytes.draft_gpu_bytes(
                    model, inputs.context_length, inputs.num_sequences
                ).values()
            )
        dense_bytes.append(num_bytes + kept + inputs.state_bytes(layer))
        dense_gpu_s.append(gpu_s)
        dense_cpu_s.append(cpu_seconds(model, machine, layer, read_kv, inputs.mode, is_read))
    units = _experts(inputs) if spec.has_experts else _neurons(inputs)
    kernels_s = HOT_KERNELS * gpu.kernel_s.median
    saved_LF = np.cumsum(units.touched_LF, axis=1) * units.cpu_s_per_byte_L[:, None]
    num_too_few_L = (saved_LF <= kernels_s + gpu.hand_over_s.median).sum(axis=1)
    # Layers that need all of their gates are on a GPU as a whole, with the kernels that they have
    # more.
    is_whole_L = np.array([layer.neurons.needs_all_gates for layer in spec.layers])
    touched_L = np.maximum(1.0, units.touched_LF.sum(axis=1))
    more_s_L = is_whole_L * ALL_GATES_KERNELS * gpu.kernel_s.median / touched_L
    rate_L = np.array([gpu.neurons_rate(share) for share in units.read_share_L.tolist()])
    head, token_s = part_bytes.head_bytes(model), token_seconds(model, machine)
    return Problem(
        order_LF=units.order_LF,
        touched_LF=units.touched_LF,
        neuron_bytes_L=units.bytes_L,
        min_hot_L=np.clip(num_too_few_L + 1, units.least_L, units.touched_LF.shape[1]),
        dense_bytes_L=np.array(dense_bytes),
        dense_gpu_s_L=np.array(dense_gpu_s),
        dense_cpu_s_L=np.array(dense_cpu_s),
        head_bytes=head,
        head_gpu_s=head_seconds(model, gpu) + token_s,
        head_cpu_s=head / machine.cpu_rate(model.tensors[model.head_name].kind) + token_s,
        workspace_bytes=inputs.gpu_workspace,
        budget_bytes=budget_bytes,
        gpu_s_per_byte=1e-9 / gpu.bandwidth_gb_per_s.median,
        hot_s_per_byte_L=units.read_more_L / rate_L + more_s_L,
        cpu_s_per_byte_L=units.cpu_s_per_byte_L,
        kernels_s=kernels_s,
        hand_over_s=gpu.hand_over_s.median,
        cpu_run_s=gpu.cpu_run_s.median,
        use_s=gpu.token_s.median,
        rank_LTK=units.rank_LTK,
        drive_s_L=None if inputs.drive is None else _drive_seconds(inputs, inputs.drive, units),
    )


def _drive_seconds(inputs: "Inputs", drive: Drive, units: "_Placeable") -> np.ndarray:
    """Seconds to read an expert of each layer, matrix by matrix, and to compute it, f64 [L]; what a
    read takes of a core is taken from all threads."""
    model, threads = inputs.model, inputs.machine.num_threads
    seconds = np.zeros(model.spec.num_layers)
    for layer, own in enumerate(model.spec.layers):
        if own.route is None:
            continue
        sizes = [
            entry.num_bytes / own.neurons.num_experts
            for name, entry in model.layer_tensors[layer].items()
            if part_bytes.is_expert(name)
        ]
        cores_s = [1e-9 * size * drive.best_reads(size).cpu_s_per_gb / threads for size in sizes]
        seconds[layer] = fsum([*map(drive.read_seconds, sizes), *cores_s])
        seconds[layer] += units.bytes_L[layer] * units.cpu_s_per_byte_L[layer]
    return seconds


@dataclass(frozen=True, kw_only=True)
class _Placeable:
    """What is placed in each layer, hottest first, with the names of `Problem`. C_l is at least
    `least_L`; `read_share_L`: the share of what is there that a token reads on a GPU;
    `read_more_L`: the bytes of a whole layer that a token reads there, over those that it
    touches."""

    order_LF: np.ndarray
    touched_LF: np.ndarray
    bytes_L: np.ndarray
    cpu_s_per_byte_L: np.ndarray
    read_share_L: np.ndarray
    least_L: np.ndarray
    read_more_L: np.ndarray
    rank_LTK: np.ndarray | None = None


def _experts(inputs: "Inputs") -> _Placeable:
    units = inputs.units
    assert isinstance(units, ExpertUnits)
    ones_L = np.ones(inputs.model.spec.num_layers)
    return _Placeable(
        order_LF=units.order_LF,
        touched_LF=units.touched_LF,
        bytes_L=units.bytes_L,
        cpu_s_per_byte_L=units.cpu_s_per_byte_L(inputs.machine, inputs.mode),
        read_share_L=ones_L,  # of an expert that is read
        least_L=np.where(units.has_experts_L, 1, units.number),
        read_more_L=ones_L,
        rank_LTK=units.rank_LTK,
    )


def _neurons(inputs: "Inputs") -> _Placeable:
    """Units of several neurons touch what these do together."""
    model, machine, units = inputs.model, inputs.machine, inputs.units
    assert isinstance(units, NeuronUnits)
    overfetch_L, all_LF = overfetch(model, inputs.profile), inputs.profile.frequency_LF
    touched_LF, cpu_s, sizes_L, read_L, order_LF = [], [], [], [], []
    for layer, spec in enumerate(model.spec.layers):
        order_FM, sizes = units.order(layer), part_bytes.layer_bytes(model, layer)
        least_s = 1e-9 / machine.best_cpu_bandwidth_gb_per_s  # where nothing is touched
        if not order_FM.size:
            touched_LF.append(np.zeros(len(order_FM)))
            order_LF.append(np.arange(len(order_FM)))
            cpu_s.append(least_s)
            sizes_L.append(0)
            read_L.append((1.0, 1.0))
            continue
        frequency_FM = all_LF[layer][order_FM]
        if computes_all(inputs.mode):
            frequency_FM = np.ones_like(frequency_FM)
        named_FM = np.ones_like(frequency_FM)
        if runs_predictors(inputs.mode):
            named_FM = np.minimum(1.0, frequency_FM * overfetch_L[layer])
        gate_F = (named_FM * sizes.gate_row).sum(axis=1)
        up_F = (frequency_FM * sizes.up_row).sum(axis=1)
        down_F = (frequency_FM * sizes.down_row).sum(axis=1)
        touched_F = gate_F + up_F + down_F
        named, fired = float(named_FM.mean()), float(frequency_FM.mean())
        gate_kind = model.entry(layer, f"{spec.neurons.gate_name}.weight").kind
        up_kind = model.entry(layer, "ffn_up.weight").kind
        seconds = (
            gate_F.sum() / machine.cpu_rate(gate_kind, density=named)
            + up_F.sum() / machine.cpu_rate(up_kind, density=fired)
            + down_F.sum() / machine.cpu_rate(part_bytes.down_kind(model, layer), density=fired)
        )
        touched, read = touched_F.sum(), touched_F.sum()
        if spec.neurons.needs_all_gates:  # a GPU reads all ups
            read += sizes.up_row * order_FM.size * (1 - fired)
        cpu_s.append(seconds / touched if touched > 0 else least_s)
        sizes_L.append(sizes.neuron * order_FM.shape[1])
        read_L.append((read / (sizes.neuron * order_FM.size), read / touched if touched else 1.0))
        touched_LF.append(touched_F)
        order_LF.append(order_FM[:, 0])
    is_whole = [layer.neurons.needs_all_gates for layer in model.spec.layers]
    read_share_L, read_more_L = np.array(read_L).T
    return _Placeable(
        order_LF=np.array(order_LF),
        touched_LF=np.array(touched_LF),
        bytes_L=np.array(sizes_L),
        cpu_s_per_byte_L=np.array(cpu_s),
        read_share_L=read_share_L,
        least_L=np.where(is_whole, units.number, 1),
        read_more_L=read_more_L,
    )


def token_seconds(model: ModelFile, machine: Machine) -> float:
    """Fixed seconds of a token on the CPU, of its logits, and of what is outside the layers."""
    total = machine.costs.token_s.median + model.spec.vocab_size * machine.costs.logit_s.median
    if num_bytes := part_bytes.outside_read(model):
        total += num_bytes / machine.cpu_rate(part_bytes.outside_kind(model))
    return total


def head_seconds(model: ModelFile, gpu: Gpu) -> float:
    """Seconds of the head on a GPU: its kernels, and the bytes of the logits' copy."""
    logits = part_bytes.FLOAT_BYTES * model.spec.vocab_size
    copy_s = logits * 1e-9 / gpu.host_to_device_gb_per_s.median
    return gpu.kernels_seconds(HEAD_KERNELS, part_bytes.head_bytes(model)) + copy_s


def cpu_seconds(
    model: ModelFile,
    machine: Machine,
    layer: int,
    kv_read: float,
    mode: Mode,
    is_read: Callable[[str], bool],
) -> float:
    """Seconds on the CPU of a layer's keys and values, of the tensors whose names are read, and of
    the layer itself; rounded once, whatever order a file has its tensors in."""
    own = machine.costs.layer_s["predicted" if runs_predictors(mode) else "exact"].median
    tensors_s = (
        part_bytes.read_share(model, layer, name) * entry.num_bytes / machine.cpu_rate(entry.kind)
        for name, entry in model.layer_tensors[layer].items()
        if is_read(name)
    )
    return fsum([kv_read / (machine.costs.kv_gb_per_s.median * 1e9), own, *tensors_s])


def overfetch(model: ModelFile, profile: Profile) -> np.ndarray:
    """Predicted neurons for each one that fires, f64 [L]; 1 if unknown, or if none fires. Raises
    HotsplitError for an invalid share of neurons."""
    named = model.predictor.density_L if model.predictor is not None else ()
    if not all(0 <= share <= 1 for share in named):
        raise HotsplitError(
            f"{model.path}: predictors that name {list(named)} of the neurons, wanted shares from 0"
            " to 1; train them again"
        )
    if not named:
        return np.ones(model.spec.num_layers)
    density_L = profile.density_L
    return np.divide(named, density_L, out=np.ones_like(density_L), where=density_L > 0)
