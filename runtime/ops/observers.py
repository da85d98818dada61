"""Observers of named tensors while the model runs.

Profiles, evaluations and tests see tensors inside the model through observers; NAMES lists the
tensors. Without observers, a tensor costs one test of an empty list. As in llama.cpp's eval
callback, an observer is asked whether it wants a tensor, and called with it if so."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

# Letters: T tokens, D model width, Z values of a latent, H heads, W head width, F neurons, V
# vocabulary, K experts of a token. Values that a sparse mode does not compute are NaN in `ffn_gate`
# and zero in `ffn_hidden`. In a layer with a router both are [T, K * F], with the F neurons of each
# chosen expert in the order of `ffn_experts`.
NAMES = {
    "embedding": "[T, D] token embeddings",
    "attn_norm": "[T, D] input of attention",
    "attn_heads": "[T, H * W] output of the heads, input of attention's output projection",
    "attn_out": "[T, D] output of attention",
    "ffn_norm": "[T, D] input of the feed-forward layer",
    "ffn_latent": "[T, Z] input of experts that read a latent",
    "ffn_predicted": "[T, F] scores of the predictor",
    "ffn_experts": "[T, K] numbers of the experts that the router has chosen, the first choice"
    " first",
    "ffn_gate": "[T, F] gate pre-activations",
    "ffn_hidden": "[T, F] act(gate) * up, input of the down projection",
    "ffn_shared_hidden": "[T, F] ffn_hidden of the experts that all tokens share",
    "ffn_out": "[T, D] output of the feed-forward layer without shared experts; [T, Z] of experts"
    " that read a latent",
    "layer_out": "[T, D] hidden state after the layer, or wider, if operations widen it",
    "output_norm": "[T, D] input of the head, only of the tokens whose logits are wanted",
    "logits": "[T, V] logits, only of the tokens for which they are wanted",
}

Observe = Callable[[str, int | None, Tensor], None]
Wants = Callable[[str, int | None], bool]


@dataclass(frozen=True, eq=False)
class Observation:
    """A registered observer. `remove` unregisters it, as does the end of its `with` block."""

    observe: Observe
    wants: Wants
    routes_in_torch: bool  # of passes on the CPU that it sees
    registry: "Observers"

    def remove(self) -> None:
        if self in self.registry.active:
            self.registry.active.remove(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


class Observers:
    def __init__(self) -> None:
        self.active: list[Observation] = []

    def add(
        self, observe: Observe, wants: Wants | None, *, routes_in_torch: bool = False
    ) -> Observation:
        wants = wants or (lambda name, layer: True)
        observation = Observation(observe, wants, routes_in_torch, self)
        self.active.append(observation)
        return observation

    def want(self, name: str, layer: int | None) -> bool:
        """True if any observer wants the tensor."""
        return any(observation.wants(name, layer) for observation in self.active)

    def show(self, name: str, layer: int | None, tensor: Tensor) -> None:
        """Passes a tensor to the observers that want it."""
        if self.active:
            tensor = tensor.float() if tensor.dtype == torch.float16 else tensor
            for observation in list(self.active):
                if observation.wants(name, layer):
                    observation.observe(name, layer, tensor)
