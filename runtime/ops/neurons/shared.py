"""The experts that fire for every token, beside those that a router chooses.

Letters: T tokens, D hidden size."""

from dataclasses import dataclass

from hotsplit.runtime.ops.neurons.feed_forward import FeedForward
from hotsplit.runtime.weights.matrix import Linear


@dataclass(frozen=True, kw_only=True)
class SharedExperts:
    """Neurons whose output is multiplied by sigmoid(gate . x), if there is a gate."""

    ffn: FeedForward
    gate: Linear | None
