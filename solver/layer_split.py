"""Predicts the time of llama.cpp's layer split at the same budgets and, for a mixture of experts,
of its --n-cpu-moe, from this machine's figures.

Assumptions:

- -ngl n puts the last n layers on the GPUs, each with its whole KV cache; with n = L + 1, the head
  too. The largest n that fits is taken. Several GPUs are filled one after the other, in order.
- Every GPU in use has a compute buffer of the size of our workspace. Memory that the driver takes
  for itself is counted for neither program.
- There is no sparsity and there are no predictors: a token reads every weight, of a mixture those
of
  as many experts as it chooses, and half of the KV cache, in the types of this file; on the CPU at
  the measured rates of our products of whole
  matrices, plus the fixed cost of a layer. The fixed cost of a token is added in any case.
- Nothing overlaps. The kernels of a layer on a GPU take as long as ours that read as many bytes,
but
  a feed-forward part has DENSE_FFN_KERNELS of them, one more than ours.
- --n-cpu-moe n puts all but the experts of the first n layers on the GPU; the smallest n that fits
is
  taken. Such a layer waits for the CPU, which costs a hand-over of ours.
- Each GPU in use, and the run of layers on the CPU before the first, cost a token what they cost
us.
  If a GPU has the head, the logits are copied from it as well.

The rates of llama.cpp's own kernels are not modelled.

Letters: L layers, F neurons, I = L + 1 items (the head is the last)."""

from dataclasses import dataclass

import numpy as np

from hotsplit.artifacts.machine_file import Gpu
from hotsplit.costs.kernel_counts import DENSE_FFN_KERNELS, dense_kernels
from hotsplit.costs.part_bytes import head_bytes, is_expert, is_predictor, kv_read, read_share
from hotsplit.solver.inputs import Inputs
from hotsplit.solver.multi_gpu import PipelinePlacement
from hotsplit.solver.problem import SolvedPlacement
from hotsplit.solver.problem_builder import cpu_seconds, head_seconds, token_seconds
from hotsplit.solver.units import ExpertUnits


@dataclass(frozen=True, kw_only=True)
class LayerSplit:
    """Seconds per token, the number of layers on GPUs, whether the head is on one, and the GPU of
    each of these layers and of the head."""

    seconds: float
    num_layers: int
    has_head: bool
    homes: tuple[int, ...]


def layer_split(inputs: Inputs) -> LayerSplit:
    """The split with the largest -ngl that fits."""
    num_layers = inputs.model.spec.num_layers
    sizes = [kept_bytes(inputs, layer) for layer in range(num_layers)]
    for first, has_head in [(0, True), *((first, False) for first in range(num_layers + 1))]:
        home = _homes(inputs, sizes[first:] + [head_bytes(inputs.model)] * has_head)
        if home is not None:
            return LayerSplit(
                seconds=split_seconds(inputs, first, home, has_head),
                num_layers=num_layers - first,
                has_head=has_head,
                homes=tuple(home),
            )
    raise AssertionError("a split without a layer on a GPU fits any budget")


def cpu_moe(inputs: Inputs) -> tuple[int, float] | None:
    """The smallest n of --n-cpu-moe that fits the first GPU, and its seconds per token; None if the
    rest does not fit, and without experts."""
    model, machine, gpu = inputs.model, inputs.machine, inputs.gpus[0]
    num_layers, room = model.spec.num_layers, inputs.budgets[0] - inputs.workspace
    if not model.spec.has_experts or not any(inputs.budgets):
        return None
    room -= head_bytes(model)
    room -= sum(kept_bytes(inputs, layer) for layer in range(num_layers))
    total = on_gpu_seconds(inputs)
    for count in range(num_layers):
        if room >= 0:
            return count, total
        experts = [
            (read_share(model, count, name), entry)
            for name, entry in model.layer_tensors[count].items()
            if is_expert(name)
        ]
        room += sum(entry.num_bytes for _, entry in experts)
        total -= sum(s * e.num_bytes for s, e in experts) * 1e-9 / gpu.bandwidth_gb_per_s.median
        total += sum(s * e.num_bytes / machine.cpu_rate(e.kind) for s, e in experts)
        total += gpu.hand_over_s.median if experts else 0.0
    return (num_layers, total) if room >= 0 else None


def on_gpu_seconds(inputs: Inputs) -> float:
    """Seconds per token with everything on the first GPU."""
    model, gpu = inputs.model, inputs.gpus[0]
    total = token_seconds(model, inputs.machine) + head_seconds(model, gpu) + gpu.token_s.median
    return total + sum(_layer_seconds(inputs, gpu, n) for n in range(model.spec.num_layers))


def _layer_seconds(inputs: Inputs, gpu: Gpu, layer: int) -> float:
    model = inputs.model
    kernels = dense_kernels(model, layer, has_predictor=False) + DENSE_FFN_KERNELS
    read = sum(
        read_share(model, layer, name) * entry.num_bytes
        for name, entry in model.layer_tensors[layer].items()
        if not is_predictor(name)
    )
    return gpu.kernels_seconds(kernels, kv_read(model, layer, inputs.context_length) + read)


def as_plan(inputs: Inputs, split: LayerSplit) -> PipelinePlacement:
    """The same whole layers on the GPUs, as a plan of ours."""
    spec = inputs.model.spec
    is_there_L = np.arange(spec.num_layers) >= spec.num_layers - split.num_layers
    before = [split.homes[0] if split.homes else 0] * (spec.num_layers - split.num_layers)
    home = [*before, *split.homes]
    home += home[-1:] * (spec.num_layers + 1 - len(home))
    hot_LF = np.repeat(is_there_L[:, None], inputs.units.number, axis=1)
    return PipelinePlacement(
        placement=SolvedPlacement(hot_LF=hot_LF, dense_L=is_there_L, head=split.has_head),
        home_I=np.array(home, np.int64),
    )


def without_experts(inputs: Inputs) -> PipelinePlacement | None:
    """A plan of ours with everything but a mixture's experts on the GPUs, as llama.cpp's --cpu-moe
    has it; without the head if that does not fit. None if neither fits, and without experts."""
    units = inputs.units
    if not isinstance(units, ExpertUnits):
        return None
    is_dense_L = ~units.has_experts_L
    sizes = [kept_bytes(inputs, layer, has_experts=False) for layer in range(len(is_dense_L))]
    for has_head in (True, False):
        homes = _homes(inputs, sizes + [head_bytes(inputs.model)] * has_head)
        if homes is not None:
            home = homes if has_head else [*homes, homes[-1]]
            return PipelinePlacement(
                placement=SolvedPlacement(
                    hot_LF=np.repeat(is_dense_L[:, None], units.number, axis=1),
                    dense_L=np.ones(len(is_dense_L), bool),
                    head=has_head,
                ),
                home_I=np.array(home, np.int64),
            )
    return None


def _homes(inputs: Inputs, sizes: list[int]) -> list[int] | None:
    """The GPU of each of these items, in order; None if they do not fit."""
    homes = list[int]()
    gpu, room = -1, -1
    for size in sizes:
        while size > room:
            gpu += 1
            if gpu == len(inputs.budgets):
                return None
            room = inputs.budgets[gpu] - inputs.workspace
        homes.append(gpu)
        room -= size
    return homes


def split_seconds(inputs: Inputs, first: int, homes: list[int], has_head: bool) -> float:
    """Seconds of a token with the layers from `first` on, and perhaps the head, on these GPUs."""
    model, machine = inputs.model, inputs.machine
    total = token_seconds(model, machine) + sum(
        cpu_seconds(
            model,
            machine,
            layer,
            kv_read(model, layer, inputs.context_length),
            "dense",
            lambda name: not is_predictor(name),
        )
        for layer in range(first)
    )
    for layer, home in zip(range(first, model.spec.num_layers), homes, strict=False):
        total += _layer_seconds(inputs, inputs.gpus[home], layer)
    if has_head:
        total += head_seconds(model, inputs.gpus[homes[-1]])
    else:
        kind = model.tensors[model.head_name].kind
        total += head_bytes(model) / machine.cpu_rate(kind)
    total += sum(inputs.gpus[home].token_s.median for home in set(homes))
    return total + (inputs.gpus[homes[0]].cpu_run_s.median if homes and first > 0 else 0.0)


def kept_bytes(inputs: Inputs, layer: int, *, has_experts: bool = True) -> int:
    """Bytes of a layer's keys, values, states, and weights without its predictor's."""
    weights = sum(
        entry.num_bytes
        for name, entry in inputs.model.layer_tensors[layer].items()
        if not is_predictor(name) and (has_experts or not is_expert(name))
    )
    return weights + inputs.kv_bytes(layer) + inputs.state_bytes(layer)
