"""Counts, while the model runs, how often each neuron fires and how large its gate is.

The sums of gates stay on the model's device; nothing synchronises with it until they are read.

Letters: T tokens, L layers, F neurons, B histogram bins, A values of any shape, E experts, K
experts of a token, R slots for tokens whose experts are recorded."""

from collections.abc import Sequence
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.profile_file import MAX_RECORDED, NUM_BINS
from hotsplit.errors import HotsplitError
from hotsplit.model.neurons import SMOOTH
from hotsplit.profile.count.run import Tensors
from hotsplit.profile.native.counting_library import count, tables
from hotsplit.runtime.kernels.gate import Gate

_MAX_ADDED = 255  # ones that a uint8 can count


class Counter(Tensors):
    """An observer of `ffn_gate`, `ffn_experts` and the last `layer_out`; it counts what this
    process runs, in the tensors active_count_LF, gate_histogram_LB, num_tokens and, of a mixture,
    expert_count_LE and recorded_LRK (experts + 1, ascending, 0 in unused slots), all int64.

    `experts_L`: the number of each layer's experts (() for none), which are counted too, and those
    of the first tokens are recorded. `share`: the number of this process, and of processes that
    record. Neurons of experts that a router does not choose, and those that a layer lacks of
    `num_neurons`, do not fire; their gates count as 0."""

    def __init__(
        self,
        gates: tuple[Gate, ...],
        num_neurons: int,
        experts_L: Sequence[int] = (),
        share: tuple[int, int] = (0, 1),
        device: torch.device | str = "cpu",
    ) -> None:
        self.gates, self.experts_L = gates, tuple(experts_L) or (1,) * len(gates)
        self._id_TK: Tensor | None = None  # of the tokens whose gates come next
        number, size = share
        self._slots = slice(MAX_RECORDED * number // size, MAX_RECORDED * (number + 1) // size)
        self._has_nan: Tensor | None = None  # bool []
        num_layers, most_experts = len(gates), max(self.experts_L)
        zeros = partial(torch.zeros, dtype=torch.int64)
        tensors = {
            "active_count_LF": zeros(num_layers, num_neurons, device=device),
            "gate_histogram_LB": zeros(num_layers, NUM_BINS, device=device),
            "num_tokens": zeros(()),
        }
        if most_experts > 1:
            tensors["expert_count_LE"] = zeros(num_layers, most_experts)
            tensors["recorded_LRK"] = zeros(num_layers, MAX_RECORDED, 0)
        super().__init__(tensors, is_sum=True)

    def arrays(self) -> dict[str, Tensor]:
        return {name: tensor.cpu() for name, tensor in self.tensors.items()}

    def load(self, arrays: dict[str, Tensor]) -> None:
        if "recorded_LRK" in arrays:
            self._widen(arrays["recorded_LRK"].shape[2])
        super().load(arrays)

    def check(self) -> None:
        """Raises HotsplitError for NaN: such a model has no firings to count."""
        if self._has_nan is not None and self._has_nan:
            raise HotsplitError("the model gave NaN; convert its checkpoint again")

    def wants(self, name: str, layer: int | None) -> bool:
        is_last = layer == len(self.gates) - 1
        return name in ("ffn_experts", "ffn_gate") or (name == "layer_out" and is_last)

    def observe(self, name: str, layer: int | None, tensor: Tensor) -> None:
        assert layer is not None
        if name == "layer_out":  # a NaN in any layer reaches the last one's output
            is_nan = torch.isnan(tensor.max())  # max returns NaN if there is one
            self._has_nan = is_nan if self._has_nan is None else self._has_nan | is_nan
            return
        if name == "ffn_experts":
            self._id_TK = tensor.cpu()
            counted = torch.bincount(self._id_TK.flatten(), minlength=self.experts_L[layer])
            self.tensors["expert_count_LE"][layer, : len(counted)] += counted
            self._record(layer, self._id_TK.sort(dim=1).values)
            return
        count_F = self.tensors["active_count_LF"][layer]
        if self.experts_L[layer] > 1:
            self._add_experts(layer, tensor, count_F)
        else:
            self._add(layer, tensor, count_F[: tensor.shape[1]])
        self.tensors["gate_histogram_LB"][layer, 0] += len(tensor) * (
            len(count_F) - tensor.shape[1]
        )
        if layer == 0:
            self.tensors["num_tokens"] += len(tensor)

    def _add_experts(self, layer: int, gate_TA: Tensor, count_F: Tensor) -> None:
        """Adds the gates [T, K * neurons of an expert] of the experts that were chosen last."""
        assert self._id_TK is not None
        id_P, order_P = self._id_TK.flatten().sort(stable=True)
        gate_PN = gate_TA.reshape(len(id_P), -1)[order_P.to(gate_TA.device)]
        size, start = gate_PN.shape[1], 0
        experts, counts = id_P.unique_consecutive(return_counts=True)
        for expert, num_tokens in zip(experts.tolist(), counts.tolist(), strict=True):
            own_N = count_F[expert * size : (expert + 1) * size]
            self._add(layer, gate_PN[start : start + num_tokens], own_N)
            start += num_tokens

    def _record(self, layer: int, id_TK: Tensor) -> None:
        """Records the experts of these tokens, in ascending order, as far as there are slots."""
        self._widen(id_TK.shape[1])
        slots_SK = self.tensors["recorded_LRK"][layer, self._slots, : id_TK.shape[1]]
        start = int((slots_SK[:, 0] > 0).sum())
        added_NK = id_TK[: len(slots_SK) - start]
        slots_SK[start : start + len(added_NK)] = added_NK + 1

    def _widen(self, num_used: int) -> None:
        recorded_LRK = self.tensors["recorded_LRK"]
        more = num_used - recorded_LRK.shape[2]
        if more > 0:
            self.tensors["recorded_LRK"] = torch.nn.functional.pad(recorded_LRK, (0, more))

    def _add(self, layer: int, gate_TF: Tensor, count_F: Tensor) -> None:
        """Adds gates of a layer to the histogram, and to `count_F` how often they fire."""
        if not gate_TF.numel():  # of a layer without neurons
            return
        gate, is_magnitude = self.gates[layer], self.gates[layer].activation in SMOOTH
        histogram_B = self.tensors["gate_histogram_LB"][layer]
        if gate_TF.device.type == "cpu":
            value_TF = gate.smooth(gate_TF) if is_magnitude else gate_TF
            above = 0.0 if is_magnitude else gate.opens_above
            count(value_TF, above, count_F, histogram_B, is_magnitude=is_magnitude)
            return
        active_TF, fires_TF = gate.act(gate_TF)
        histogram_B += histogram(active_TF)
        for part_TF in fires_TF.view(torch.uint8).split(_MAX_ADDED):
            count_F += part_TF.sum(dim=0, dtype=torch.uint8)


def histogram(value: Tensor) -> Tensor:
    """int64 [B]: the number of |values| (f32) in each bin of EDGES; NaN counts in the last. For
    GPUs: in torch operations that do not synchronise (bincount would, for its largest bin)."""
    size_A = value.abs().flatten()
    bucket_A = (size_A.view(torch.int32) >> 16).long()
    first, edge = _tables_on(size_A.device)
    bins_A = first[bucket_A].int() + (size_A >= edge[bucket_A])
    total_B = torch.zeros(NUM_BINS, dtype=torch.int64, device=value.device)
    for part in bins_A.split(1 << 24):  # histc counts in f32
        total_B += torch.histc(part.float(), NUM_BINS, 0, NUM_BINS).long()
    return total_B


@cache
def _tables_on(device: torch.device) -> tuple[Tensor, Tensor]:
    """The tables of `count`, copied to a device once: each copy synchronises with it."""
    first, edge = tables()
    return first.to(device), edge.to(device)


def experts_of(model: ModelFile) -> tuple[int, ...]:
    """The number of each layer's experts; 1 without any."""
    return tuple(layer.neurons.num_experts for layer in model.spec.layers)


def gates_of(model: ModelFile) -> tuple[Gate, ...]:
    """The gates of all layers."""
    return tuple(Gate(activation=model.activation, threshold=t) for t in model.threshold_L)


def routing_of(arrays: dict[str, Tensor]) -> np.ndarray | None:
    """The recorded experts of `Counter.arrays`, int16 [L, T, K]: those of the tokens that all
    layers with experts have recorded; -1 in layers without. None if there are none."""
    if "recorded_LRK" not in arrays:
        return None
    id_LRK = arrays["recorded_LRK"].numpy().astype(np.int16) - 1
    has_LR = np.all(id_LRK >= 0, axis=2)
    is_mixed_L = np.any(has_LR, axis=1)
    is_whole_R = has_LR[is_mixed_L].all(axis=0)
    return id_LRK[:, is_whole_R] if is_mixed_L.any() and is_whole_R.any() else None
