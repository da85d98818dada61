"""A block of neurons, of experts, or of shared experts, as a GPU's kernels.

Letters: D model width, F neurons of the layer, or of an expert, N of the block, K experts of a row,
W words of F bits, S partial sums. Steps of several rows have an axis for them."""

import torch
from torch import Tensor

from hotsplit.model.spec import Route
from hotsplit.runtime.kernels.gate import Gate
from hotsplit.runtime.kernels.gpu.expert_pairs import Pairs
from hotsplit.runtime.ops.device import Launcher, Rounded, TileLauncher, tile_dtype
from hotsplit.runtime.ops.neurons.feed_forward import SharedNeurons
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
    ids in the layer; None: all, in order. `named_W`: only these are computed; None: all. `gate_N`:
    memory for the gates, if all of the layer are needed before the first activation."""
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
    """Writes the hidden values of the chosen experts of a block, and the partial sums of their
    weighted outputs; both are 0 of those that are elsewhere."""
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
    shared: SharedNeurons,
    x_D: Tensor,
    hidden_F: Tensor,
    logit_1: Tensor,
    weight_2: Tensor,
    parts_SD: Tensor,
) -> None:
    """Writes the partial sums of the output of the shared experts. `logit_1`, `weight_2`: memory
    for the logit and the weight of their gate."""
    block, gate, rule = shared.block, shared.gate, shared.rule
    down = block.down
    if gate is None and not block.is_by_output:
        launch_neurons(on, block, rule, None, None, x_D, hidden_F, parts_SD)
        return
    _launch_hidden(on, block, rule, None, None, x_D, hidden_F)
    if gate is None:
        on.dot(Linear(weight=down), hidden_F, parts_SD[0])
        return
    on.dot(gate, x_D, logit_1)
    launch_shared_weight(on, logit_1, weight_2)
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


# Flat f32 memory for gates and what they are multiplied by, and for hidden values.
Rooms = tuple[Tensor, Tensor]


def launch_neuron_tiles(
    on: TileLauncher,
    block: NeuronBlock,
    gate: Gate,
    x_TD: Tensor | Rounded,
    rooms: Rooms,
    out_TD: Tensor,
    *,
    named_TW: Tensor | None,
    id_N: Tensor | None,
    is_added: bool,
) -> None:
    """Writes the output of a block's neurons for the rows of a pass, or adds it."""
    hidden = _launch_hidden_of(on, block, gate, x_TD, rooms, named_TW, id_N)
    if block.is_by_output:
        assert not is_added
        on.multiply(Linear(weight=block.down), hidden, out_TD)
    else:
        on.multiply_down(block.down, hidden, out_TD, is_added=is_added)


def _launch_hidden_of(
    on: TileLauncher,
    block: NeuronBlock,
    gate: Gate,
    x_TD: Tensor | Rounded,
    rooms: Rooms,
    named_TW: Tensor | None,
    id_N: Tensor | None,
) -> Rounded:
    """The hidden values of a block's neurons for the rows of a pass."""
    number, num_rows = len(block.id_N), len(x_TD)
    gate_TN, up_TN = rooms[0][: 2 * num_rows * number].view(2, num_rows, number)
    linears = (block.gate,) if block.up is None else (block.gate, block.up)
    rounded = on.rounded(x_TD, linears[0].weight.kind)
    on.multiply(linears[0], rounded, gate_TN)
    if block.up is not None:
        if tile_dtype(block.up.weight.kind) != rounded.values_TD.dtype:
            rounded = on.rounded(x_TD, block.up.weight.kind)
        on.multiply(block.up, rounded, up_TN)
    up = None if block.up is None else up_TN
    return _launch_hidden_tiles(on, gate, gate_TN, up, block.down.kind, rooms[1], named_TW, id_N)


def _launch_hidden_tiles(
    on: TileLauncher,
    gate: Gate,
    gate_TN: Tensor,
    up_TN: Tensor | None,
    kind: str,
    room: Tensor,
    named_TW: Tensor | None = None,
    id_N: Tensor | None = None,
) -> Rounded:
    """The hidden values as a matrix of this kind takes them."""
    dtype = tile_dtype(kind)
    hidden_TN = room.view(dtype)[: gate_TN.numel()].view(gate_TN.shape)
    power_T = on.hidden_power_T[: len(gate_TN)] if dtype == torch.float16 else None
    on.launch(
        lambda: on.kernels.hidden_tokens(gate_TN, up_TN, named_TW, gate, hidden_TN, power_T, id_N),
        [gate_TN, up_TN, named_TW, id_N],
        [hidden_TN, power_T],
    )
    return Rounded(hidden_TN, power_T)


def launch_sort(
    on: Launcher,
    place_E: Tensor | None,
    num_experts: int,
    routed: Tensor,
    pairs: Pairs,
    weight_P: Tensor,
) -> None:
    """Sorts the pairs of rows and those of their experts that have a place."""
    on.launch(
        lambda: on.kernels.sort_pairs(
            routed,
            place_E,
            *pairs.tensors,
            weight_P,
            num_experts=num_experts,
            tile_size=pairs.tile_size,
        ),
        [routed, place_E],
        [*pairs.tensors, weight_P],
    )


def launch_shared_weight(on: Launcher, logit_1: Tensor, weight_2: Tensor) -> None:
    """Writes 0 and the weight of shared experts, from the logit of their gate."""
    on.launch(
        lambda: on.kernels.choose_experts(logit_1, None, _OUTPUT_GATE, weight_2),
        [logit_1],
        [weight_2],
    )


def launch_shared_tiles(
    on: TileLauncher,
    shared: SharedNeurons,
    pairs: Pairs,
    weight_P: Tensor,
    x_TD: Tensor,
    rooms: Rooms,
    out_TD: Tensor,
) -> None:
    """Writes the weighted output of shared experts for the rows of a pass."""
    block = shared.block
    hidden = _launch_hidden_of(on, block, shared.rule, x_TD, rooms, None, None)
    _launch_weighted(
        on, Linear(weight=block.down), hidden, pairs, weight_P, out_TD, block.is_by_output
    )


def launch_expert_tiles(
    on: TileLauncher,
    block: ExpertBlock,
    gate: Gate,
    pairs: Pairs,
    weight_P: Tensor,
    x_TD: Tensor,
    rooms: Rooms,
    parts_PD: Tensor,
) -> None:
    """Writes the weighted outputs of these pairs to their rows, k T + t."""
    num_pairs, number = pairs.row_3P.shape[1], len(block.id_F)
    down = block.down.flat
    gate_PF, up_PF = rooms[0][: 2 * num_pairs * number].view(2, num_pairs, number)

    def multiply(linear: Linear, x: Rounded, out_PN: Tensor) -> None:
        on.launch(
            lambda: on.kernels.multiply(
                linear.weight,
                linear.bias_N,
                x.values_TD,
                x.power_T,
                out_PN,
                tile_G3=pairs.tile_G3,
                row_2P=pairs.in_2P,
                tile_size=pairs.tile_size,
            ),
            [linear.weight.data, linear.bias_N, *x.tensors, *pairs.tensors],
            [out_PN],
        )

    rounded = on.rounded(x_TD, block.gate.kind)
    multiply(block.gate.flat, rounded, gate_PF)
    if block.up is not None:
        if tile_dtype(block.up.kind) != rounded.values_TD.dtype:
            rounded = on.rounded(x_TD, block.up.kind)
        multiply(block.up.flat, rounded, up_PF)
    hidden = _launch_hidden_tiles(
        on, gate, gate_PF, None if block.up is None else up_PF, block.down.kind, rooms[1]
    )
    _launch_weighted(on, down, hidden, pairs, weight_P, parts_PD, block.is_by_output)


def _launch_weighted(
    on: Launcher,
    down: Linear,
    hidden: Rounded,
    pairs: Pairs,
    weight_P: Tensor,
    out_PD: Tensor,
    is_by_output: bool,
) -> None:
    """Writes the outputs of pairs, from their hidden values, times their weights."""
    weight, bias = down.weight, down.bias_N

    def run() -> None:
        values_PN, power_P = hidden.values_TD, hidden.power_T
        if is_by_output:
            on.kernels.multiply(
                weight,
                bias,
                values_PN,
                power_P,
                out_PD,
                tile_G3=pairs.tile_G3,
                row_2P=pairs.out_2P,
                factor_P=weight_P,
                tile_size=pairs.tile_size,
            )
        else:
            on.kernels.multiply_down(
                weight,
                values_PN,
                power_P,
                out_PD,
                is_added=False,
                bias_D=bias,
                tile_G3=pairs.tile_G3,
                row_2P=pairs.out_2P,
                factor_P=weight_P,
                tile_size=pairs.tile_size,
            )

    on.launch(run, [weight.data, bias, *hidden.tensors, *pairs.tensors, weight_P], [out_PD])
