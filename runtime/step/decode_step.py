"""Chooses how a token is decoded: in one native call on the CPU, or by a hybrid step on GPUs and the
CPU."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from hotsplit.runtime.model.layers import Weights
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.neuron_cache.neuron_cache import NeuronCache
from hotsplit.runtime.ops.neurons.feed_forward import Traffic
from hotsplit.runtime.step import hybrid_builder, native_step
from hotsplit.runtime.step.hybrid_step import Backend


class DecodeStep(Protocol):
    """A decode step."""

    def run(self, token: int, position: int, sequence: int = 0) -> Tensor:
        """Logits f32 [V] after one token, on the CPU, valid until the next step."""


def decode_step(
    weights: Weights,
    placement: Placement,
    traffic: Traffic,
    backend: Backend | None,
    neuron_cache: NeuronCache | None = None,
    max_rows: int = 1,
    on_capture: Callable[[], None] = lambda: None,
) -> DecodeStep:
    """The decode step for a model with this placement. `backend`: None without a GPU. The rest is for
    hybrid steps: see hybrid_builder.build.

    Raises NotNative for a model that the kernels do not cover."""
    if backend is None:
        return native_step.build(weights, traffic)
    return hybrid_builder.build(
        weights, placement, traffic, backend, neuron_cache, max_rows, on_capture
    )
