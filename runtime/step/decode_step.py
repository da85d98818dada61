"""Which way a token goes through a model: all of it in one native call, one captured graph a GPU, or
for want of these layer by layer through torch.

What this module does not know: text, sampling."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from sparkinfer.runtime.model.feed_forward import Traffic
from sparkinfer.runtime.model.loader import Placement, Weights
from sparkinfer.runtime.model.native_structs import NotNative
from sparkinfer.runtime.step import hybrid_builder, native_step
from sparkinfer.runtime.step.cuda_backend import cuda_backend
from sparkinfer.runtime.step.hybrid_device import Take


class DecodeStep(Protocol):
    def run(self, token: int, position: int) -> Tensor:
        """f32 [V] on the CPU: the logits behind one token, good until the next step."""


def decode_step(
    weights: Weights,
    placement: Placement,
    input_layer_offset: int,
    traffic: Traffic,
    *,
    has_graph: bool,
    take: Callable[[torch.device], Take] | None = None,
) -> DecodeStep | str:
    """The step of this model where its weights are, or in a few words why there is none.

    `take` as cuda_backend has it.
    Without `has_graph` nothing is captured: for debugging, with the same numbers."""
    if all(home.type == "cpu" for home in placement.homes):
        return native_step.build(weights, input_layer_offset, traffic)
    try:
        backend = cuda_backend(take, has_graph=has_graph)
        return hybrid_builder.build(weights, placement, input_layer_offset, traffic, backend)
    except (NotNative, ImportError) as reason:
        return str(reason)
