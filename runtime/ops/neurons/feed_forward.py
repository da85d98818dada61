"""The loaded feed-forward layer, of one or two blocks of neurons or experts.

    h_j = act(gate_j . x) * (up_j . x),   y = sum_j h_j * down_j

(plus biases, if a model has them). Without gates (OPT, Falcon) h_j = act(up_j . x), and `gate` is
the up projection.

Letters: D model width, F neurons of the layer."""

from dataclasses import dataclass

from torch import Tensor

from hotsplit.runtime.kernels.gate import Gate
from hotsplit.runtime.ops.predict import Predictor
from hotsplit.runtime.weights.expert_block import UnitBlock
from hotsplit.runtime.weights.matrix import Linear
from hotsplit.runtime.weights.neuron_block import NeuronBlock


@dataclass
class Traffic:
    """Weight bytes read so far. `attention`: query, key, value and output projections on the CPU;
    the others: the feed-forward layers. Hybrid steps count only the neurons that the CPU reads.
    Where the C++ kernels compute several tokens together, rows of the same groups that no token
    needs may be read too, and are not counted."""

    gate: int = 0
    up: int = 0
    down: int = 0
    predictor: int = 0
    attention: int = 0

    @property
    def total(self) -> int:
        """Bytes of the feed-forward layers."""
        return self.gate + self.up + self.down + self.predictor


@dataclass(frozen=True, kw_only=True)
class FeedForward:
    layer: int
    num_neurons: int  # F
    gate: Gate
    blocks: tuple[UnitBlock, ...]  # hot before cold; every neuron, or expert, is in exactly one
    down_bias_D: Tensor | None
    predictor: Predictor | None


@dataclass(frozen=True, kw_only=True)
class SharedNeurons:
    """Neurons that every token reads beside the experts that a router chooses. Their output is
    multiplied by sigmoid(gate . x), if there is a gate."""

    block: NeuronBlock
    rule: Gate
    gate: Linear | None
