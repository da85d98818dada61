"""Computes the numbers of a placement problem from the model, the profile and the machine, as the
docstring of `problem` defines them.

Letters: L layers, F neurons of a layer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import fsum
from typing import TYPE_CHECKING

import numpy as np

from hotsplit.artifacts.machine_file import Gpu, Machine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.profile_file import Profile
from hotsplit.costs.kernel_counts import ALL_GATES_KERNELS, HEAD_KERNELS, HOT_KERNELS, dense_kernels
from hotsplit.costs.part_bytes import (
    FLOAT_BYTES,
    LayerBytes,
    down_kind,
    head_bytes,
    is_dense,
    is_predictor,
    kv_read,
    layer_bytes,
    layer_tensors,
    outside_kind,
    outside_read,
    read_share,
)
from hotsplit.errors import HotsplitError
from hotsplit.model.modes import Mode, computes_all, runs_predictors
from hotsplit.model.spec import Attention, ModelSpec
from hotsplit.solver.problem import Problem
from hotsplit.solver.units import ExpertUnits, NeuronUnits

if TYPE_CHECKING:
    from hotsplit.solver.inputs import Inputs


def build_problem(inputs: "Inputs", gpu: Gpu, budget_bytes: int) -> Problem:
    """The numbers of the problem with one GPU, with every byte count from `hotsplit.costs.part_bytes`.

    A token reads the keys and values of one of the texts that are computed at a time."""
    model, machine, mode = inputs.model, inputs.machine, inputs.mode
    gpu_s, spec = 1e-9 / gpu.bandwidth_gb_per_s.median, model.spec
    layers = range(spec.num_layers)
    sizes = [layer_bytes(model, layer) for layer in layers]
    types, is_offloaded = inputs.cache_types, inputs.kv_offload is not None
    read_kv_L = np.array([kv_read(model, layer, inputs.context_length, types) for layer in layers])
    of_attention = [s.attention - s.head_norms * is_offloaded for s in sizes]
    attend_s_L = np.zeros(spec.num_layers)
    if is_offloaded:
        attend_s_L += [
            attend_seconds(attention, machine, gpu, read_kv) if attention else 0.0
            for attention, read_kv in zip(
                [x.attention for x in spec.layers], read_kv_L, strict=True
            )
        ]
    has_predictor = runs_predictors(mode)
    read_L = np.array(of_attention) + read_kv_L * (not is_offloaded)
    if has_predictor:
        read_L += np.array([s.predictor for s in sizes])
    units = _experts(inputs) if spec.has_experts else _neurons(inputs, sizes)
    saved_LF = np.cumsum(units.touched_LF, axis=1) * units.cpu_s_per_byte_L[:, None]
    kernels_s = HOT_KERNELS * gpu.kernel_s.median
    num_too_few_L = (saved_LF <= kernels_s + gpu.hand_over_s.median).sum(axis=1)
    head = head_bytes(model)
    head_cpu_s = head / machine.cpu_rate(model.tensors[model.head_name].kind)
    token_s = token_seconds(model, machine)
    options = {"has_predictor": has_predictor, "has_cache": not is_offloaded}
    kernels_L = np.array([dense_kernels(model, layer, **options) for layer in layers])

    def is_read(name: str) -> bool:
        return is_dense(name) or (has_predictor and is_predictor(name))

    return Problem(
        order_LF=units.order_LF,
        touched_LF=units.touched_LF,
        neuron_bytes_L=units.bytes_L,
        min_hot_L=np.clip(num_too_few_L + 1, units.least_L, units.most_L),
        dense_bytes_L=np.array(
            [
                of_attention[layer]
                + sizes[layer].predictor * has_predictor
                + inputs.kv_bytes(layer) * (not is_offloaded)
                + inputs.state_bytes(layer)
                for layer in layers
            ]
        ),
        dense_gpu_s_L=attend_s_L
        + [
            gpu.kernels_seconds(*pair)
            for pair in zip(kernels_L.tolist(), read_L.tolist(), strict=True)
        ],
        dense_cpu_s_L=np.array(
            [
                cpu_seconds(model, machine, layer, read_kv_L[layer], mode, is_read)
                for layer in layers
            ]
        ),
        head_bytes=head,
        head_gpu_s=head_seconds(model, gpu) + token_s,
        head_cpu_s=head_cpu_s + token_s,
        workspace_bytes=inputs.gpu_workspace,
        budget_bytes=budget_bytes,
        gpu_s_per_byte=gpu_s,
        hot_s_per_byte_L=_hot_seconds(units, spec, gpu),
        cpu_s_per_byte_L=units.cpu_s_per_byte_L,
        kernels_s=kernels_s,
        hand_over_s=gpu.hand_over_s.median,
        cpu_run_s=gpu.cpu_run_s.median,
        use_s=gpu.token_s.median,
        rank_LTK=units.rank_LTK,
    )


@dataclass(frozen=True, kw_only=True)
class _Units:
    """What is placed in each layer, hottest first, with the names of `Problem`. C_l is from `least_L`
    to `most_L`; `read_share_L`: the share of what is there that a token reads on a GPU; `read_more_L`: the
    bytes of a whole layer that a token reads there, over those that it touches."""

    order_LF: np.ndarray
    touched_LF: np.ndarray
    bytes_L: np.ndarray
    cpu_s_per_byte_L: np.ndarray
    read_share_L: np.ndarray
    least_L: np.ndarray
    most_L: np.ndarray
    read_more_L: np.ndarray
    rank_LTK: np.ndarray | None = None


def _hot_seconds(units: _Units, spec: ModelSpec, gpu: Gpu) -> np.ndarray:
    """A GPU's seconds for a touched byte of neurons. Layers that need all of their gates are there as a
    whole, so theirs include the kernels that they have more."""
    rate_L = np.array([gpu.neurons_rate(share) for share in units.read_share_L.tolist()])
    is_whole_L = np.array([layer.neurons.needs_all_gates for layer in spec.layers])
    touched_L = np.maximum(1.0, units.touched_LF.sum(axis=1))
    more_s_L = is_whole_L * ALL_GATES_KERNELS * gpu.kernel_s.median / touched_L
    return units.read_more_L / rate_L + more_s_L


def _experts(inputs: "Inputs") -> _Units:
    units = ExpertUnits(model=inputs.model, profile=inputs.profile)
    num_layers = inputs.model.spec.num_layers
    cpu_s_L = units.cpu_s_per_byte_L(inputs.machine)
    return _Units(
        order_LF=units.order_LF,
        touched_LF=units.touched_LF,
        bytes_L=units.bytes_L,
        cpu_s_per_byte_L=cpu_s_L,
        read_share_L=np.ones(num_layers),  # of an expert that is read
        least_L=np.where(units.has_experts_L, 1, units.number),
        most_L=np.full(num_layers, units.number),
        read_more_L=np.ones(num_layers),
        rank_LTK=units.rank_LTK,
    )


def _neurons(inputs: "Inputs", sizes: Sequence[LayerBytes]) -> _Units:
    """Units of several neurons touch what these do together."""
    model, machine, profile, mode = inputs.model, inputs.machine, inputs.profile, inputs.mode
    units, row_L3 = (
        NeuronUnits(model=model, profile=profile),
        [(s.gate_row, s.up_row, s.down_row) for s in sizes],
    )
    layers, overfetch_L = range(model.spec.num_layers), overfetch(model, profile)
    order_L = [units.order(layer) for layer in layers]
    parts_L, share_2L = [], np.empty((2, len(layers)))
    for layer in layers:
        frequency_FM = profile.frequency_LF[layer][order_L[layer]]
        if computes_all(mode):
            frequency_FM = np.ones_like(frequency_FM)
        named_FM = np.ones_like(frequency_FM)
        if runs_predictors(mode):
            named_FM = np.minimum(1.0, frequency_FM * overfetch_L[layer])
        shares = (named_FM, frequency_FM, frequency_FM)
        parts_L.append(
            [(share * size).sum(axis=1) for share, size in zip(shares, row_L3[layer], strict=True)]
        )
        share_2L[:, layer] = named_FM.mean(), frequency_FM.mean()
    touched_LF = np.array([gate_F + up_F + down_F for gate_F, up_F, down_F in parts_L])
    whole = np.array([[part_F.sum() for part_F in parts] for parts in parts_L]).T
    cpu_s_L = _neuron_seconds(model, machine, share_2L, *whole)
    touched_L = touched_LF.sum(axis=1)
    none_s_L = np.full(len(touched_L), 1e-9 / machine.best_cpu_bandwidth_gb_per_s)
    size_L = np.array([order_FM.shape[1] for order_FM in order_L])
    is_whole_L = np.array([layer.neurons.needs_all_gates for layer in model.spec.layers])
    # A GPU reads all ups of a layer that needs all of its gates.
    silent_ups_L = is_whole_L * np.array(row_L3)[:, 1] * size_L * units.number * (1 - share_2L[1])
    read_L = touched_L + silent_ups_L
    return _Units(
        order_LF=np.array([order_FM[:, 0] for order_FM in order_L]),
        touched_LF=touched_LF,
        bytes_L=np.array([s.neuron for s in sizes]) * size_L,
        cpu_s_per_byte_L=np.divide(cpu_s_L, touched_L, out=none_s_L, where=touched_L > 0),
        read_share_L=read_L / (np.sum(row_L3, axis=1) * size_L * units.number),
        least_L=np.where(is_whole_L, units.number, 1),
        most_L=np.full(len(layers), units.number),
        read_more_L=np.divide(read_L, touched_L, out=np.ones(len(layers)), where=touched_L > 0),
    )


def token_seconds(model: ModelFile, machine: Machine) -> float:
    """The fixed seconds of a token on the CPU, those of its logits, and of what is outside the layers there."""
    total = machine.costs.token_s.median + model.spec.vocab_size * machine.costs.logit_s.median
    if num_bytes := outside_read(model):
        total += num_bytes / machine.cpu_rate(outside_kind(model))
    return total


def head_seconds(model: ModelFile, gpu: Gpu) -> float:
    """Seconds of the head on a GPU: its kernels, and the bytes of the logits' copy."""
    logits = FLOAT_BYTES * model.spec.vocab_size
    copy_s = logits * 1e-9 / gpu.host_to_device_gb_per_s.median
    return gpu.kernels_seconds(HEAD_KERNELS, head_bytes(model)) + copy_s


def attend_seconds(attention: Attention, machine: Machine, gpu: Gpu, kv_read: float) -> float:
    """Seconds of a layer's attention on the CPU if its projections are on a GPU, with the hand-over
    and the copies; `kv_read`: bytes of keys and values."""
    values = attention.query_size + attention.qkv_size
    copies_s = FLOAT_BYTES * values * 1e-9 / gpu.host_to_device_gb_per_s.median
    return gpu.hand_over_s.median + copies_s + kv_read / (machine.costs.kv_gb_per_s.median * 1e9)


def _neuron_seconds(
    model: ModelFile,
    machine: Machine,
    share_2L: np.ndarray,
    gate_L: np.ndarray,
    up_L: np.ndarray,
    down_L: np.ndarray,
) -> np.ndarray:
    """CPU seconds of these touched bytes, f64 [L]. `share_2L`: the share of neurons whose gate rows
    are read, and the share whose up and down rows are."""
    seconds = []
    for layer in range(model.spec.num_layers):
        tensors = layer_tensors(model, layer)
        gate_kind = tensors[f"{model.spec.layers[layer].neurons.gate_name}.weight"].kind
        named, fired = share_2L[:, layer].tolist()
        gate = gate_L[layer] / machine.cpu_rate(gate_kind, density=named)
        up = up_L[layer] / machine.cpu_rate(tensors["ffn_up.weight"].kind, density=fired)
        seconds.append(
            gate + up + down_L[layer] / machine.cpu_rate(down_kind(model, layer), density=fired)
        )
    return np.array(seconds)


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
        read_share(model, layer, name) * entry.num_bytes / machine.cpu_rate(entry.kind)
        for name, entry in layer_tensors(model, layer).items()
        if is_read(name)
    )
    return fsum([kv_read / (machine.costs.kv_gb_per_s.median * 1e9), own, *tensors_s])


def overfetch(model: ModelFile, profile: Profile) -> np.ndarray:
    """Predicted neurons for each one that fires, f64 [L]; 1 if unknown, or if none fires.

    Raises HotsplitError for an invalid share of neurons."""
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
