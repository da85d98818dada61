"""Connects the neuron cache to a hybrid step of a mixture: the experts that routers choose, and the
slots on the GPU. A router on the GPU writes its choice to main memory, where the CPU reads it; here
each layer with slots has memory of its own for it, from which the step's bits are made.

Letters: L layers, E experts of a layer, K those of a token, W words of E bits."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from hotsplit.runtime.device.streams import Stream
from hotsplit.runtime.model.layers import Weights
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.neuron_cache.expert_slots import ExpertLayer, ExpertSlots
from hotsplit.runtime.neuron_cache.neuron_cache import NeuronCache
from hotsplit.runtime.neuron_cache.policy import packed
from hotsplit.runtime.step.hybrid_neuron_cache import HybridCache
from hotsplit.runtime.step.hybrid_step import Backend
from hotsplit.runtime.weights.neuron_block import by_role


class HybridExpertCache(HybridCache):
    """The cache of experts, on one GPU."""

    def __init__(
        self, weights: Weights, placement: Placement, backend: Backend, cache: NeuronCache
    ) -> None:
        super().__init__(placement, cache)
        self._backend, self._is_pinned = backend, backend.is_pinned
        self._layers: dict[int, ExpertLayer] = {}
        self._num_used: dict[int, int] = {}
        for index in np.flatnonzero(cache.residency.num_slots_L).tolist():
            layer = weights.layers[index]
            hot, cold = by_role(layer.ffn.experts)
            assert hot is not None and cold is not None and layer.router is not None, index
            self._layers[index] = ExpertLayer(hot=hot, cold=cold)
            self._num_used[index] = layer.router.spec.num_used
        num_layers, num_experts = cache.residency.slot_LF.shape
        self._routed_LR = torch.zeros(
            num_layers, 2 * max(self._num_used.values()), pin_memory=self._is_pinned
        )
        self._is_read_1LE = np.zeros((1, num_layers, num_experts), bool)
        words = packed(self._is_read_1LE).view(np.int32)
        self._bits_1LW = torch.from_numpy(words.copy())

    def routed(self, layer: int) -> Tensor | None:
        """[2 K], the numbers of experts and their weights."""
        if layer not in self._layers:
            return None
        return self._routed_LR[layer, : 2 * self._num_used[layer]]

    def connect(self, mains: Mapping[int, Stream]) -> None:
        ((number, main),) = mains.items()
        device = self._placement.gpu(number)
        slots = ExpertSlots(
            self._layers, self.cache.residency, main, self._backend.stream(device),
            self._backend.take(device), most_rows=self.cache.most_rows, is_pinned=self._is_pinned,
        )  # fmt: skip
        self.cache.use(slots)
        self.cache.attach(self._bits_1LW)

    def after_step(self) -> None:
        self._is_read_1LE[:] = False
        for layer, num_used in self._num_used.items():
            id_K = self._routed_LR[layer, :num_used].numpy().astype(np.int64)
            self._is_read_1LE[0, layer, id_K] = True
        self._bits_1LW.numpy().view(np.uint32)[:] = packed(self._is_read_1LE)
        self.cache.after_step([True])
