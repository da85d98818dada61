"""Logits from hidden states, in torch and on a GPU, where a norm comes before the product that caps them.

Letters: T tokens, D model width, V vocabulary."""

import torch
from torch import Tensor

from hotsplit.costs.pass_length import LOGITS_CHUNK
from hotsplit.model.spec import ModelSpec
from hotsplit.runtime.ops.device import Launcher
from hotsplit.runtime.ops.norm import Norm
from hotsplit.runtime.ops.observers import Observers
from hotsplit.runtime.weights.matrix import Linear


def logits(
    hidden_TD: Tensor, norm: Norm | None, head: Linear, observers: Observers, spec: ModelSpec
) -> Tensor:
    """Logits f32 [T, V] on the CPU, LOGITS_CHUNK tokens at a time."""
    pieces = []
    for piece_TD in hidden_TD.split(LOGITS_CHUNK):
        if norm is not None:
            piece_TD = norm.apply(piece_TD)
        observers.show("output_norm", None, piece_TD)
        logits_TV = logits_of(piece_TD, head, spec).cpu()
        observers.show("logits", None, logits_TV)
        pieces.append(logits_TV)
    return torch.cat(pieces)


def logits_of(x_TD: Tensor, head: Linear, spec: ModelSpec) -> Tensor:
    """Logits f32 [T, V] of what the output norm gives."""
    logits_TV, cap = head.apply(x_TD), spec.logit_cap
    return logits_TV if cap is None else logits_TV.div_(cap).tanh_().mul_(cap)


def launch_head(on: Launcher, head: Linear, spec: ModelSpec, x_D: Tensor, logits_V: Tensor) -> None:
    on.dot(head, x_D, logits_V, cap=spec.logit_cap)
