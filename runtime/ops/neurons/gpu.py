"""A block of neurons, of experts, or of shared experts, as a GPU's kernels.

Letters: D model width, F neurons of the layer, or of an expert, N of the block, K experts of a row, W
words of F bits, S partial sums. Steps of several rows have an axis for them."""

from torch import Tensor

from hotsplit.model.spec import Route
from hotsplit.runtime.kernels.gate import Gate
from hotsplit.runtime.ops.device import Launcher
from hotsplit.runtime.ops.neurons.shared import SharedExperts
from hotsplit.runtime.weights.expert_block import ExpertBlock
from hotsplit.runtime.weights.matrix import Linear
from hotsplit.runtime.weights.neuron_block import NeuronBlock

# A gate of shared experts is a router of one expert.
_OUTPUT_GATE = Route(num_experts=1, num_used=1, gating="sigmoid", renormalises=False)


def launch_neurons(
    on: Launcher,
    block: NeuronBlock,
    gate: Gate,
    id_N: Tensor | None,
    named_W: Tensor | None,
    x_D: Tensor,
    hidden_N: Tensor,
    parts_SD: Tensor,
    gate_N: Tensor | None = None,
) -> None:
    """Writes the hidden values of a block's neurons, and partial sums of its output. `id_N`: their
    ids in the layer; None: all, in order. `named_W`: only these are computed; None: all. `gate_N`: memory
    for the gates, if all of the layer are needed before the first activation."""
    down = block.down
    if gate_N is None:
        _launch_hidden(on, block, gate, id_N, named_W, x_D, hidden_N)
    else:
        assert named_W is None
        _launch_hidden_after_gates(on, block, gate, x_D, gate_N, hidden_N)
    on.launch(
        lambda: on.kernels.down(down, hidden_N, parts_SD, skips_zeros=not gate.computes_all),
        [down.data, hidden_N],
        [parts_SD],
    )


def _launch_hidden_after_gates(
    on: Launcher, block: NeuronBlock, gate: Gate, x_D: Tensor, gate_F: Tensor, hidden_F: Tensor
) -> None:
    up = block.up
    gate_TF, hidden_TF = (each.view(-1, each.shape[-1]) for each in (gate_F, hidden_F))
    up_TF = None if up is None else hidden_TF
    on.dot(block.gate, x_D, gate_F)
    if up is not None:
        on.dot(up, x_D, hidden_F)
    on.launch(
        lambda: on.kernels.hidden_tokens(gate_TF, up_TF, None, gate, hidden_TF, None),
        [gate_F, up_TF],
        [hidden_F],
    )


def _launch_hidden(
    on: Launcher,
    block: NeuronBlock,
    gate: Gate,
    id_N: Tensor | None,
    named_W: Tensor | None,
    x_D: Tensor,
    hidden_N: Tensor,
) -> None:
    up_weight, up_bias_N = (block.up.weight, block.up.bias_N) if block.up else (None, None)
    weight, bias_N = block.gate.weight, block.gate.bias_N
    on.launch(
        lambda: on.kernels.gate_up(
            weight, bias_N, up_weight, up_bias_N, id_N, named_W, x_D, gate, hidden_N
        ),
        [weight.data, bias_N, up_weight.data if up_weight else None, up_bias_N, id_N, named_W, x_D],
        [hidden_N],
    )


def launch_experts(
    on: Launcher,
    block: ExpertBlock,
    gate: Gate,
    routed: Tensor,
    x_D: Tensor,
    hidden_KF: Tensor,
    parts_PD: Tensor,
) -> None:
    """Writes the hidden values of the chosen experts of a block, and the partial sums of their weighted
    outputs; both are 0 of those that are elsewhere."""
    own, down, place_E = block.gate.flat, block.down.flat, block.place_E
    up = None if block.up is None else block.up.flat
    up_weight, up_bias_N = (None, None) if up is None else (up.weight, up.bias_N)
    on.launch(
        lambda: on.kernels.expert_gate_up(
            own.weight, own.bias_N, up_weight, up_bias_N, place_E, routed, x_D, gate, hidden_KF
        ),
        [
            own.weight.data,
            own.bias_N,
            up_weight.data if up_weight else None,
            up_bias_N,
            place_E,
            routed,
            x_D,
        ],
        [hidden_KF],
    )
    on.launch(
        lambda: on.kernels.expert_down(
            down.weight,
            down.bias_N,
            place_E,
            routed,
            hidden_KF,
            parts_PD,
            is_by_output=block.is_by_output,
            skips_zeros=not gate.computes_all,
        ),
        [down.weight.data, down.bias_N, place_E, routed, hidden_KF],
        [parts_PD],
    )


def launch_shared(
    on: Launcher,
    shared: SharedExperts,
    x_D: Tensor,
    hidden_F: Tensor,
    logit_1: Tensor,
    weight_2: Tensor,
    parts_SD: Tensor,
) -> None:
    """Writes the partial sums of the output of the shared experts. `logit_1`, `weight_2`: memory for
    the logit and the weight of their gate."""
    (block,) = shared.ffn.blocks
    down, gate, rule = block.down, shared.gate, shared.ffn.gate
    if gate is None and not block.is_by_output:
        launch_neurons(on, block, rule, None, None, x_D, hidden_F, parts_SD)
        return
    _launch_hidden(on, block, rule, None, None, x_D, hidden_F)
    if gate is None:
        on.dot(Linear(weight=down), hidden_F, parts_SD[0])
        return
    on.dot(gate, x_D, logit_1)
    on.launch(
        lambda: on.kernels.choose_experts(logit_1, None, _OUTPUT_GATE, weight_2),
        [logit_1],
        [weight_2],
    )
    hidden_1F = hidden_F.unsqueeze(-2)
    on.launch(
        lambda: on.kernels.expert_down(
            down,
            None,
            None,
            weight_2,
            hidden_1F,
            parts_SD,
            is_by_output=block.is_by_output,
            skips_zeros=not rule.computes_all,
        ),
        [down.data, weight_2, hidden_F],
        [parts_SD],
    )
