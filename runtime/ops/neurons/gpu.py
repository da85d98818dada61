"""A block of neurons as a GPU's kernels.

Letters: D model width, F neurons of the layer, N of the block, W words of F bits, S partial sums.
Steps of several rows have an axis for them."""

from torch import Tensor

from hotsplit.runtime.ops.device import Launcher
from hotsplit.runtime.weights.neuron_block import Gate, NeuronBlock


def launch_neurons(
    on: Launcher, block: NeuronBlock, gate: Gate, id_N: Tensor | None, named_W: Tensor | None,
    x_D: Tensor, hidden_N: Tensor, parts_SD: Tensor,
) -> None:  # fmt: skip
    """Writes the hidden values of a block's neurons, and partial sums of its output. `id_N`: their
    ids in the layer; None: all, in order. `named_W`: only these are computed; None: all."""
    up_weight, up_bias_N = (block.up.weight, block.up.bias_N) if block.up else (None, None)
    weight, bias_N, down = block.gate.weight, block.gate.bias_N, block.down
    on.launch(
        lambda: on.kernels.gate_up(
            weight, bias_N, up_weight, up_bias_N, id_N, named_W, x_D, gate.activation,
            gate.threshold, gate.computes_all, hidden_N,
        ),
        [weight.data, bias_N, up_weight.data if up_weight else None, up_bias_N, id_N, named_W, x_D],
        [hidden_N],
    )  # fmt: skip
    on.launch(
        lambda: on.kernels.down(down, hidden_N, parts_SD, skips_zeros=not gate.computes_all),
        [down.data, hidden_N],
        [parts_SD],
    )
