"""Predicts the time of llama.cpp's layer split at the same budgets and, for a mixture of experts,
of its --n-cpu-moe, by `llamacpp_speed`.

- -ngl n puts the last n layers on the GPUs, each with its whole KV cache; with n = L + 1, the head
  too. The largest n that fits is taken. Several GPUs are filled one after the other, in order.
- Every GPU in use has a compute buffer of the size of our workspace. Memory that the driver takes
  for itself is counted for neither program.
- There is no sparsity and there are no predictors: a token reads every weight, of a mixture those
  of as many experts as it chooses, and half of the KV cache, in the types of this file.
- --n-cpu-moe n puts all but the experts of the first n layers on the GPU; the smallest n that fits
  is taken.

Letters: L layers, F neurons, I = L + 1 items (the head is the last)."""

from dataclasses import dataclass

import numpy as np

from hotsplit.costs.part_bytes import head_bytes, is_expert, is_predictor
from hotsplit.solver.inputs import Inputs
from hotsplit.solver.llamacpp_speed import Division, step_seconds, whole
from hotsplit.solver.multi_gpu import PipelinePlacement
from hotsplit.solver.problem import SolvedPlacement
from hotsplit.solver.units import ExpertUnits


@dataclass(frozen=True, kw_only=True)
class LayerSplit:
    """Seconds per token, the number of layers on GPUs, whether the head is on one, and the GPU of
    each of these layers and of the head."""

    seconds: float
    num_layers: int
    has_head: bool
    homes: tuple[int, ...]

    def division(self, num_layers: int) -> Division:
        homes = self.homes[: self.num_layers]
        return Division(
            homes=(None,) * (num_layers - self.num_layers) + homes,
            head=self.homes[-1] if self.has_head else None,
        )


def layer_split(inputs: Inputs) -> LayerSplit:
    """The split with the largest -ngl that fits."""
    num_layers = inputs.model.spec.num_layers
    sizes = [kept_bytes(inputs, layer) for layer in range(num_layers)]
    for first, has_head in [(0, True), *((first, False) for first in range(num_layers + 1))]:
        home = homes_of(inputs, sizes[first:] + [head_bytes(inputs.model)] * has_head)
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
    model, num_layers = inputs.model, inputs.model.spec.num_layers
    if not model.spec.has_experts or not any(inputs.budgets):
        return None
    room = inputs.budgets[0] - inputs.workspace - head_bytes(model)
    room -= sum(kept_bytes(inputs, layer) for layer in range(num_layers))
    for count in range(num_layers + 1):
        if room >= 0:
            return count, moe_seconds(inputs, count)
        if count < num_layers:
            kept = kept_bytes(inputs, count) - kept_bytes(inputs, count, has_experts=False)
            room += kept
    return None


def moe_seconds(inputs: Inputs, count: int) -> float:
    """Seconds per token with all but the experts of the first `count` layers on the first GPU."""
    return step_seconds(inputs, moe_division(inputs, count))


def moe_division(inputs: Inputs, count: int) -> Division:
    """All but the experts of the first `count` layers on the first GPU."""
    layers = inputs.model.spec.layers[:count]
    return whole(inputs, [n for n, layer in enumerate(layers) if layer.route is not None])


def on_gpu_seconds(inputs: Inputs) -> float:
    """Seconds per token with everything on the first GPU."""
    return step_seconds(inputs, whole(inputs))


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
        homes = homes_of(inputs, sizes + [head_bytes(inputs.model)] * has_head)
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


def homes_of(inputs: Inputs, sizes: list[int]) -> list[int] | None:
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
    num_there = inputs.model.spec.num_layers - first
    there = (None,) * first + tuple(homes[:num_there])
    return step_seconds(inputs, Division(homes=there, head=homes[-1] if has_head else None))


def kept_bytes(inputs: Inputs, layer: int, *, has_experts: bool = True) -> int:
    """Bytes of a layer's keys, values, states, and weights without its predictor's."""
    weights = sum(
        entry.num_bytes
        for name, entry in inputs.model.layer_tensors[layer].items()
        if not is_predictor(name) and (has_experts or not is_expert(name))
    )
    return weights + inputs.kv_bytes(layer) + inputs.state_bytes(layer)
