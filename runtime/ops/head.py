"""Logits from hidden states, in torch. A GPU computes them by a norm and a product, which caps them.

Letters: T tokens, D model width, V vocabulary."""

import torch
from torch import Tensor

from hotsplit.costs.pass_length import LOGITS_CHUNK
from hotsplit.runtime.ops.attention.attend import capped
from hotsplit.runtime.ops.norm import Norm
from hotsplit.runtime.ops.observers import Observers
from hotsplit.runtime.weights.matrix import Linear


def logits(
    hidden_TD: Tensor, norm: Norm | None, head: Linear, observers: Observers,
    cap: float | None = None,
) -> Tensor:  # fmt: skip
    """Logits f32 [T, V] on the CPU, LOGITS_CHUNK tokens at a time. `cap`: see ModelSpec."""
    pieces = []
    for piece_TD in hidden_TD.split(LOGITS_CHUNK):
        if norm is not None:
            piece_TD = norm.apply(piece_TD)
        observers.show("output_norm", None, piece_TD)
        logits_TV = capped(head.apply(piece_TD), cap).cpu()
        observers.show("logits", None, logits_TV)
        pieces.append(logits_TV)
    return torch.cat(pieces)
