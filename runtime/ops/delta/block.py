"""A loaded gated delta net, and its pass over a prompt's tokens on a GPU.

Letters: T tokens, D model width, V value heads, M value width, C channels, J taps."""

from dataclasses import dataclass

from torch import Tensor

from hotsplit.model.spec import DeltaNet as DeltaSpec
from hotsplit.runtime.cache.state_slots import LayerState
from hotsplit.runtime.ops.norm import Norm
from hotsplit.runtime.weights.matrix import Linear


@dataclass(frozen=True, kw_only=True)
class DeltaNet:
    """A loaded delta net. The matrices of beta and alpha have a row for each value head, in
    order."""

    spec: DeltaSpec
    qkv: Linear
    gate: Linear
    beta: Linear
    alpha: Linear
    output: Linear
    conv_CJ: Tensor  # f32, as are the others
    decay_V: Tensor  # ssm_a: below zero
    decay_bias_V: Tensor
    norm: Norm  # of each head's output
    state: LayerState

    @property
    def inputs(self) -> tuple[Linear, ...]:
        return self.qkv, self.gate, self.beta, self.alpha

    @property
    def widths(self) -> tuple[int, int]:
        """Numbers of values per token: of the input projections together, and of the outputs of the
        heads."""
        return sum(linear.weight.num_rows for linear in self.inputs), self.spec.value_size
