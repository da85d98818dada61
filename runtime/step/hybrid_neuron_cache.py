"""Connects the neuron cache to a hybrid step: the bits of the neurons read, and the slots on GPUs.

In mode "predicted" the bits are the predictions that the cold neurons need anyway, kept separately
for each layer. In mode "exact" the CPU writes the bits of its neurons and each GPU those of its
own, which are copied to the host once per step and GPU. Layers that are not divided may have no
bits.

Letters: L layers, F neurons of a layer, W words of F bits."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hotsplit.runtime.device.streams import Stream
from hotsplit.runtime.model.layers import Weights
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.neuron_cache.neuron_cache import NeuronCache
from hotsplit.runtime.neuron_cache.slots import DeviceSlots, SlotDevice, SlotLayer
from hotsplit.runtime.step.hybrid_step import Backend
from hotsplit.runtime.weights.neuron_block import by_role


@dataclass(frozen=True, kw_only=True)
class _GpuBits:
    """int32 [L, W]: the bits of a GPU's neurons, on the GPU and on the host."""

    device_LW: Tensor
    host_LW: Tensor
    last: int  # the last layer with slots on this GPU


class HybridCache:
    """What a step asks of its cache, which is built before its layers: where the host gets the bits
    of neurons or the choices of routers that each layer reads. `connect` attaches it to the streams
    of the GPUs."""

    def __init__(self, placement: Placement, cache: NeuronCache) -> None:
        cache.complete()  # what another step began
        self.cache, self._placement = cache, placement

    def cold_bits(self, layer: int) -> Tensor:
        """A layer's bits [W] on the host: in mode "predicted" the predictions, in mode "exact" the
        bits that its cold neurons write."""
        raise NotImplementedError

    def hot_bits(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """(slot of each neuron [F], bits of hot neurons [W]) on a layer's GPU; None if that GPU
        writes no bits for the layer."""
        return None

    def bits_of_gpu(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """The bits of a layer's GPU, (on the GPU, on the host), if this is its last layer with
        bits; else None."""
        return None

    def routed(self, layer: int) -> Tensor | None:
        """Where the host gets a router's result; None: in a buffer that layers share."""
        return None

    def connect(self, mains: Mapping[int, Stream]) -> None:
        """Attaches the cache to a step whose GPUs have these streams."""
        raise NotImplementedError

    def before_step(self) -> None:
        self.cache.before_step()

    def after_step(self) -> None:
        """Called when the bits or choices of a token are on the host."""
        raise NotImplementedError


class HybridNeuronCache(HybridCache):
    """The cache of neurons."""

    def __init__(
        self, weights: Weights, placement: Placement, backend: Backend, cache: NeuronCache
    ) -> None:
        super().__init__(placement, cache)
        self._backend = backend
        # Without predictors, each side finds out which of its neurons a token reads.
        self.packs_bits = not any(layer.predict for layer in weights.spec.layers)
        num_layers, num_neurons = cache.residency.slot_LF.shape
        self._is_pinned = backend.is_pinned
        self._bits_LW = self._host(num_layers, -(-num_neurons // 32))  # exact: of cold neurons only
        self._all_1LW = torch.zeros_like(self._bits_LW, pin_memory=False)[None]
        self._layers: dict[int, dict[int, SlotLayer]] = {}  # by GPU, by layer
        self._gpu_bits: dict[int, _GpuBits] = {}
        for number in sorted(set(placement.numbers)):
            mine = [
                index
                for index, home in enumerate(placement.numbers[:-1])
                if home == number and cache.residency.num_slots_L[index]
            ]
            if not mine:
                continue
            self._layers[number] = {index: self._layer(weights, number, index) for index in mine}
            if self.packs_bits:
                take = backend.take(placement.gpu(number))
                self._gpu_bits[number] = _GpuBits(
                    device_LW=take(tuple(self._bits_LW.shape), torch.int32),
                    host_LW=self._host(*self._bits_LW.shape),
                    last=mine[-1],
                )

    def _host(self, num_layers: int, num_words: int) -> Tensor:
        return torch.zeros(num_layers, num_words, dtype=torch.int32, pin_memory=self._is_pinned)

    def _layer(self, weights: Weights, number: int, index: int) -> SlotLayer:
        hot, cold = by_role(weights.layers[index].ffn.blocks)
        assert hot is not None and cold is not None, index
        slot_F = None
        if self.packs_bits:
            slots = torch.from_numpy(self.cache.residency.slot_LF[index])
            take = self._backend.take(self._placement.gpu(number))
            slot_F = take((len(slots),), torch.int32).copy_(slots)
        return SlotLayer(hot=hot, cold=cold, hot_id_N=hot.id_N, slot_F=slot_F)

    def cold_bits(self, layer: int) -> Tensor:
        return self._bits_LW[layer]

    def hot_bits(self, layer: int) -> tuple[Tensor, Tensor] | None:
        number = self._placement.numbers[layer]
        slots = self._layers.get(number, {}).get(layer)
        if slots is None or slots.slot_F is None:
            return None
        return slots.slot_F, self._gpu_bits[number].device_LW[layer]

    def bits_of_gpu(self, layer: int) -> tuple[Tensor, Tensor] | None:
        bits = self._gpu_bits.get(self._placement.numbers[layer])
        return None if bits is None or bits.last != layer else (bits.device_LW, bits.host_LW)

    def connect(self, mains: Mapping[int, Stream]) -> None:
        residency, kernels = self.cache.residency, self._backend.slot_kernels
        devices = []
        for number, layers in self._layers.items():
            device = self._placement.gpu(number)
            copier = self._backend.stream(device)
            devices.append(
                SlotDevice(
                    layers,
                    residency,
                    kernels,
                    mains[number],
                    copier,
                    self._backend.take(device),
                    most_rows=self.cache.most_rows,
                    is_pinned=self._is_pinned,
                )  # fmt: skip
            )
        self.cache.use(DeviceSlots(devices, residency))
        self.cache.attach(self._all_1LW)

    def after_step(self) -> None:
        all_LW = self._all_1LW[0]
        all_LW.copy_(self._bits_LW)
        for bits in self._gpu_bits.values():
            all_LW.bitwise_or_(bits.host_LW)
        self.cache.after_step([True])
