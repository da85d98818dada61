"""Connects the neuron cache to a hybrid step: where the host gets the bits of the units that a step
reads, and the slots on the GPU. A cache is on one GPU.

Of neurons, the bits in mode "predicted" are the predictions that the cold neurons need anyway, kept
separately for each layer; in mode "exact" the CPU writes the bits of its neurons and the GPU those
of its own, which are copied to the host once per step. Layers that are not divided may have no
bits. Of experts, a router on the GPU writes its choice to main memory, where the CPU reads it; here
each layer with slots has memory of its own for it, from which the step's bits are made.

Letters: L layers, F neurons or E experts of a layer, K experts of a token, W words of F or E
bits."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from hotsplit.runtime.device.streams import Stream
from hotsplit.runtime.model.layers import Weights
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.neuron_cache.cache_slots import Carrier, GpuSlots
from hotsplit.runtime.neuron_cache.expert_parts import ExpertLayer, ExpertParts
from hotsplit.runtime.neuron_cache.neuron_cache import NeuronCache
from hotsplit.runtime.neuron_cache.neuron_rows import NeuronRows, SlotLayer
from hotsplit.runtime.neuron_cache.policy import packed
from hotsplit.runtime.step.backend import Backend
from hotsplit.runtime.weights.expert_block import ExpertBlock
from hotsplit.runtime.weights.neuron_block import NeuronBlock, by_role


class HybridCache(ABC):
    """What a step asks of its cache, which is built before its layers. `connect` attaches it to the
    GPU's stream."""

    def __init__(self, placement: Placement, backend: Backend, cache: NeuronCache) -> None:
        cache.complete()  # what another step began
        self.cache, self._backend, self._is_pinned = cache, backend, backend.is_pinned
        self._cached = np.flatnonzero(cache.residency.num_slots_L).tolist()
        (self._number,) = {placement.numbers[layer] for layer in self._cached}
        self._gpu = placement.gpu(self._number)
        num_layers, num_units = cache.residency.slot_LF.shape
        self._bits_1LW = torch.zeros(1, num_layers, -(-num_units // 32), dtype=torch.int32)

    def cold_bits(self, layer: int) -> Tensor | None:
        """A layer's bits [W] on the host: in mode "predicted" the predictions, in mode "exact" the
        bits that its cold neurons write; None: predictions are in a buffer that layers share, and
        nothing else is asked for."""
        return None

    def hot_bits(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """(slot of each neuron [F], bits of hot neurons [W]) on the GPU; None if it writes no bits
        for the layer."""
        return None

    def bits_of_gpu(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """The bits of the GPU, (there, on the host), if this is its last layer with bits; else
        None."""
        return None

    def routed(self, layer: int) -> Tensor | None:
        """Where the host gets a router's result [2 K], the numbers of experts and their weights;
        None: in a buffer that layers share."""
        return None

    @abstractmethod
    def _carrier(self) -> Carrier:
        """What moves units to the slots."""

    @abstractmethod
    def _read_bits(self) -> None:
        """Writes to `_bits_1LW` which units a token has read."""

    def connect(self, mains: Mapping[int, Stream]) -> None:
        """Attaches the cache to a step whose GPUs have these streams."""
        copier, residency = self._backend.stream(self._gpu), self.cache.residency
        self.cache.use(GpuSlots(self._carrier(), residency, mains[self._number], copier))

    def before_step(self) -> None:
        self.cache.before_step()

    def after_step(self) -> None:
        """Called when the bits or choices of a token are on the host."""
        self._read_bits()
        self.cache.after_step(self._bits_1LW.numpy().view(np.uint32))


class HybridNeuronCache(HybridCache):
    """The cache of neurons."""

    def __init__(
        self, weights: Weights, placement: Placement, backend: Backend, cache: NeuronCache
    ) -> None:
        super().__init__(placement, backend, cache)
        # Without predictors, each side finds out which of its neurons a token reads.
        self.packs_bits = not any(layer.predict for layer in weights.spec.layers)
        self._bits_LW = self._host_bits()  # in mode "exact", of cold neurons only
        if self.packs_bits:
            self._of_gpu_LW = self._host_bits()
            self._device_LW = backend.take(self._gpu)(tuple(self._bits_LW.shape), torch.int32)
        self._layers = {index: self._layer(weights, index) for index in self._cached}

    def _host_bits(self) -> Tensor:
        return torch.zeros(self._bits_1LW.shape[1:], dtype=torch.int32, pin_memory=self._is_pinned)

    def _layer(self, weights: Weights, index: int) -> SlotLayer:
        hot, cold = by_role(weights.layers[index].ffn.blocks)
        assert isinstance(hot, NeuronBlock) and isinstance(cold, NeuronBlock), index
        slot_F = None
        if self.packs_bits:
            slots = torch.from_numpy(self.cache.residency.slot_LF[index])
            slot_F = self._backend.take(self._gpu)((len(slots),), torch.int32).copy_(slots)
        return SlotLayer(hot=hot, cold=cold, hot_id_N=hot.id_N, slot_F=slot_F)

    def cold_bits(self, layer: int) -> Tensor:
        return self._bits_LW[layer]

    def hot_bits(self, layer: int) -> tuple[Tensor, Tensor] | None:
        slots = self._layers.get(layer)
        if slots is None or slots.slot_F is None:
            return None
        return slots.slot_F, self._device_LW[layer]

    def bits_of_gpu(self, layer: int) -> tuple[Tensor, Tensor] | None:
        is_last = self.packs_bits and layer == self._cached[-1]
        return (self._device_LW, self._of_gpu_LW) if is_last else None

    def _carrier(self) -> NeuronRows:
        return NeuronRows(
            self._layers,
            self.cache.residency,
            self._backend.kernels,
            self._backend.take(self._gpu),
            most_rows=self.cache.most_rows,
            is_pinned=self._is_pinned,
        )

    def _read_bits(self) -> None:
        self._bits_1LW[0].copy_(self._bits_LW)
        if self.packs_bits:
            self._bits_1LW[0].bitwise_or_(self._of_gpu_LW)


class HybridExpertCache(HybridCache):
    """The cache of experts."""

    def __init__(
        self, weights: Weights, placement: Placement, backend: Backend, cache: NeuronCache
    ) -> None:
        super().__init__(placement, backend, cache)
        self._layers: dict[int, ExpertLayer] = {}
        self._num_used: dict[int, int] = {}
        for index in self._cached:
            layer = weights.layers[index]
            hot, cold = by_role(layer.ffn.blocks)
            assert isinstance(hot, ExpertBlock) and isinstance(cold, ExpertBlock), index
            assert layer.router is not None
            self._layers[index] = ExpertLayer(hot=hot, cold=cold)
            self._num_used[index] = layer.router.spec.num_used
        num_layers, num_experts = cache.residency.slot_LF.shape
        self._routed_LR = torch.zeros(
            num_layers, 2 * max(self._num_used.values()), pin_memory=self._is_pinned
        )
        self._is_read_1LE = np.zeros((1, num_layers, num_experts), bool)

    def routed(self, layer: int) -> Tensor | None:
        if layer not in self._layers:
            return None
        return self._routed_LR[layer, : 2 * self._num_used[layer]]

    def _carrier(self) -> ExpertParts:
        return ExpertParts(
            self._layers,
            self.cache.residency,
            self._backend.take(self._gpu),
            most_rows=self.cache.most_rows,
            is_pinned=self._is_pinned,
        )

    def _read_bits(self) -> None:
        self._is_read_1LE[:] = False
        for layer, num_used in self._num_used.items():
            id_K = self._routed_LR[layer, :num_used].numpy().astype(np.int64)
            self._is_read_1LE[0, layer, id_K] = True
        self._bits_1LW.numpy().view(np.uint32)[:] = packed(self._is_read_1LE)
