"""Chooses how a token is decoded: in one native call, by one captured graph per GPU, or, if neither
is possible, layer by layer in torch."""

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
    """A decode step of the first sequence."""

    def run(self, token: int, position: int) -> Tensor:
        """Logits f32 [V] after one token, on the CPU, valid until the next step."""


def decode_step(
    weights: Weights,
    placement: Placement,
    input_layer_offset: int,
    traffic: Traffic,
    *,
    has_graph: bool,
    take: Callable[[torch.device], Take] | None = None,
) -> DecodeStep | str:
    """The decode step for a model placed like this, or in a few words why there is none.

    `take` and `has_graph` are those of cuda_backend."""
    if all(home.type == "cpu" for home in placement.homes):
        return native_step.build(weights, input_layer_offset, traffic)
    try:
        backend = cuda_backend(take, has_graph=has_graph)
        return hybrid_builder.build(weights, placement, input_layer_offset, traffic, backend)
    except (NotNative, ImportError) as reason:
        return str(reason)
