"""The experts that fire for every token, beside those that a router chooses.

Letters: T tokens, D hidden size."""

from dataclasses import dataclass

from torch import Tensor

from hotsplit.runtime.ops.neurons.feed_forward import FeedForward
from hotsplit.runtime.ops.observers import Observers
from hotsplit.runtime.weights.matrix import Linear


@dataclass(frozen=True, kw_only=True)
class SharedExperts:
    """Neurons whose output is multiplied by sigmoid(gate . x), if there is a gate."""

    ffn: FeedForward
    gate: Linear | None

    def forward(self, x_TD: Tensor, observers: Observers) -> Tensor:
        """Output [T, D] for the input of T tokens."""
        own = Observers()
        if observers.want("ffn_shared_hidden", self.ffn.layer):
            own.add(
                lambda _, layer, hidden_TF: observers.show("ffn_shared_hidden", layer, hidden_TF),
                lambda name, _: name == "ffn_hidden",
            )
        y_TD = self.ffn.forward(x_TD, observers=own)
        return y_TD if self.gate is None else y_TD * self.gate.apply(x_TD).sigmoid()
