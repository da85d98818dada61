"""Chooses how a token is decoded: in one native call, by one captured graph per GPU, or, if neither
is possible, layer by layer in torch."""

from typing import Protocol

from torch import Tensor

from sparkinfer.runtime.model.feed_forward import Traffic
from sparkinfer.runtime.model.layers import Weights
from sparkinfer.runtime.model.native_structs import NotNative
from sparkinfer.runtime.model.placement import Placement
from sparkinfer.runtime.neuron_cache.cycle import NeuronCache
from sparkinfer.runtime.step import hybrid_builder, native_step
from sparkinfer.runtime.step.hybrid_step import Backend


class DecodeStep(Protocol):
    """A decode step of the first sequence."""

    def run(self, token: int, position: int) -> Tensor:
        """Logits f32 [V] after one token, on the CPU, valid until the next step."""


def decode_step(
    weights: Weights,
    placement: Placement,
    input_layer_offset: int,
    traffic: Traffic,
    backend: Backend | str | None,
    neuron_cache: NeuronCache | None = None,
) -> DecodeStep | str:
    """The decode step for a model placed like this, or a few words on why there is none.

    `backend` is None without a GPU, and a reason where a GPU's step does not work."""
    if backend is None:
        return native_step.build(weights, input_layer_offset, traffic, neuron_cache)
    if isinstance(backend, str):
        return backend
    if weights.cache.table.num_sequences > 1:
        return "several sequences have no step on a GPU so far"
    try:
        return hybrid_builder.build(
            weights, placement, input_layer_offset, traffic, backend, neuron_cache
        )
    except NotNative as reason:
        return str(reason)
