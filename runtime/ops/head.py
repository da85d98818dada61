"""Logits from hidden states, in torch and on a GPU, where a norm comes before the product that caps
them.

Letters: T tokens, D model width, V vocabulary."""

from torch import Tensor

from hotsplit.model.spec import ModelSpec
from hotsplit.runtime.ops.device import Launcher
from hotsplit.runtime.weights.matrix import Linear


def logits_of(x_TD: Tensor, head: Linear, spec: ModelSpec) -> Tensor:
    """Logits f32 [T, V] of what the output norm gives."""
    logits_TV, cap = head.apply(x_TD), spec.logit_cap
    return logits_TV if cap is None else logits_TV.div_(cap).tanh_().mul_(cap)


def launch_head(on: Launcher, head: Linear, spec: ModelSpec, x_D: Tensor, logits_V: Tensor) -> None:
    on.dot(head, x_D, logits_V, cap=spec.logit_cap)
