"""What the solver places in a layer of a mixture: its experts. The neurons of a layer without
experts are placed all together, as if they were as many equal parts. In a model without experts it
places neurons, or several at once in the layers that have more than others.

Letters: L layers, F units (experts, or parts) of a layer, M neurons, T recorded tokens, K experts
of a token."""

from dataclasses import dataclass
from functools import cached_property
from math import gcd

import numpy as np

from hotsplit.artifacts.machine_file import Machine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.profile_file import Profile
from hotsplit.costs.part_bytes import is_expert, layer_units
from hotsplit.model.modes import Mode, computes_all


def counted_layers(model: ModelFile) -> list[int]:
    """The layers whose units reports count: in a mixture, those with experts."""
    spec = model.spec
    return [n for n, x in enumerate(spec.layers) if not spec.has_experts or x.route is not None]


@dataclass(frozen=True, kw_only=True)
class ExpertUnits:
    """The units of a mixture, hottest first, ties by number."""

    model: ModelFile
    profile: Profile

    @property
    def number(self) -> int:
        return max(layer.neurons.num_experts for layer in self.model.spec.layers)

    @cached_property
    def count_LF(self) -> np.ndarray:
        """Recorded tokens that chose each expert, by number; zeros in layers without experts."""
        id_LTK, number = self.profile.routing_LTK, self.number
        assert id_LTK is not None
        return np.stack([np.bincount(id_TK[id_TK >= 0], minlength=number) for id_TK in id_LTK])

    @cached_property
    def order_LF(self) -> np.ndarray:
        """int32; by the recorded tokens, with which plans are priced."""
        return np.argsort(-self.count_LF, axis=1, kind="stable").astype(np.int32)

    @property
    def has_experts_L(self) -> np.ndarray:
        return np.array([layer.neurons.num_experts > 1 for layer in self.model.spec.layers])

    @cached_property
    def touched_LF(self) -> np.ndarray:
        """Expected bytes that a token touches, f64, non-increasing."""
        size_L1 = np.array([sum(units.values()) for units in self._bytes_L])[:, None]
        count_LF = np.take_along_axis(self.count_LF, self.order_LF, axis=1)
        share_LF = count_LF / self.rank_LTK.shape[1]
        share_LF[~self.has_experts_L] = 1.0
        return share_LF * size_L1

    @property
    def bytes_L(self) -> np.ndarray:
        """Bytes of a unit, int64; of parts, rounded up."""
        return np.array([-int(-sum(units.values()) // 1) for units in self._bytes_L])

    @cached_property
    def _bytes_L(self) -> list[dict[str, float]]:
        layers = range(self.model.spec.num_layers)
        return [layer_units(self.model, layer, self.number) for layer in layers]

    def cpu_s_per_byte_L(self, machine: Machine, mode: Mode) -> np.ndarray:
        """Seconds on the CPU of a unit, over all of its bytes. Mode exact does not read the rows of
        an expert's silent neurons; a GPU is priced as if it read them."""
        layers = range(self.model.spec.num_layers)
        return np.array([self._cpu_s_per_byte(layer, machine, mode) for layer in layers])

    def _cpu_s_per_byte(self, layer: int, machine: Machine, mode: Mode) -> float:
        units, neurons = self._bytes_L[layer], self.model.spec.layers[layer].neurons
        if not units:
            return 0.0
        if neurons.num_experts == 1 or computes_all(mode):
            return sum(size / machine.cpu_rate(kind) for kind, size in units.items()) / sum(
                units.values()
            )
        fired = self.profile.fired_of_chosen(layer, neurons.of_expert)
        seconds = num_bytes = 0.0
        for name, entry in self.model.layer_tensors[layer].items():
            if is_expert(name):
                share = 1.0 if name.startswith(f"{neurons.gate_name}.") else fired
                seconds += share * entry.num_bytes / machine.cpu_rate(entry.kind, density=share)
                num_bytes += entry.num_bytes
        return seconds / num_bytes

    @cached_property
    def rank_LTK(self) -> np.ndarray:
        """The recorded experts by rank, int16; -1 in layers without."""
        id_LTK = self.profile.routing_LTK
        assert id_LTK is not None
        rank_LF = np.argsort(self.order_LF, axis=1)
        rank_LTK = np.take_along_axis(rank_LF[:, None], np.maximum(id_LTK, 0).astype(np.int64), 2)
        return np.where(id_LTK < 0, -1, rank_LTK).astype(np.int16)

    def ids(self, layer: int, is_hot_F: np.ndarray) -> np.ndarray:
        """The hot units of a layer as a plan lists them, int32, hottest first."""
        if self.has_experts_L[layer]:
            return self.order_LF[layer][is_hot_F]
        count_F = self.profile.active_count_LF[
            layer, : self.model.spec.layers[layer].neurons.number
        ]
        order_F = np.argsort(-count_F, kind="stable").astype(np.int32)
        return order_F if is_hot_F.all() else order_F[:0]

    def resident_ids(
        self, layer: int, is_hot_F: np.ndarray, is_resident_F: np.ndarray
    ) -> np.ndarray | None:
        """The experts of a layer in main memory as a plan lists them, int32, ascending; None if all
        that are not on a GPU are there."""
        if not self.has_experts_L[layer] or (is_hot_F | is_resident_F).all():
            return None
        return np.sort(self.order_LF[layer][is_resident_F & ~is_hot_F])

    def is_hot(self, layer: int, ids: np.ndarray) -> np.ndarray:
        """The units of a layer that a plan has on a GPU, by rank; bool [F]."""
        if self.has_experts_L[layer]:
            return np.isin(self.order_LF[layer], ids)
        return np.full(self.number, len(ids) > 0)


@dataclass(frozen=True, kw_only=True)
class NeuronUnits:
    """The units of a model without experts: as many in each layer, each of as many neurons as the
    layer's number requires, hottest first, ties by id."""

    model: ModelFile
    profile: Profile

    @cached_property
    def number(self) -> int:
        """Units of a layer."""
        return gcd(*self.model.spec.num_neurons_L)

    def order(self, layer: int) -> np.ndarray:
        """The ids of a layer's neurons by unit, int32 [F, M]; M is 0 in a layer without any."""
        count_M = self.profile.active_count_LF[layer, : self.model.spec.num_neurons_L[layer]]
        order_M = np.argsort(-count_M, kind="stable").astype(np.int32)
        return order_M.reshape(self.number, -1)

    def ids(self, layer: int, is_hot_F: np.ndarray) -> np.ndarray:
        """The hot neurons of a layer as a plan lists them, int32, hottest first."""
        return self.order(layer)[is_hot_F].flatten()

    def is_hot(self, layer: int, ids: np.ndarray) -> np.ndarray:
        """The units of a layer that a plan has on a GPU, by rank; bool [F]."""
        is_hot_FU = np.isin(self.order(layer)[:, :1], ids)  # U: 1, or 0 in a layer without neurons
        is_hot_F: np.ndarray = np.logical_or.reduce(is_hot_FU, axis=1)
        return is_hot_F
