"""A block of neurons, of experts, or of shared experts, as a GPU's kernels.

Letters: D model width, F neurons of the layer, or of an expert, N of the block, K experts of a row,
W words of F bits, S partial sums. Steps of several rows have an axis for them."""

from typing import Any

import torch
from torch import Tensor

from hotsplit.model.spec import Route
from hotsplit.runtime.kernels.gate import Gate
from hotsplit.runtime.kernels.gpu.expert_pairs import Pairs
from hotsplit.runtime.ops.device import Launcher, Rounded, TileLauncher, tile_dtype
from hotsplit.runtime.ops.neurons.feed_forward import SharedNeurons
from hotsplit.runtime.weights.expert_block import ExpertBlock
from hotsplit.runtime.weights.matrix import Linear, Matrix
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
    if gate_N is None:
        _launch_hidden(on, block, gate, id_N, named_W, x_D, hidden_N)
    else:
        assert named_W is None
        on.dot(block.gate, x_D, gate_N)
        if block.up is not None:
            on.dot(block.up, x_D, hidden_N)
        gate_TN, hidden_TN = (each.view(-1, each.shape[-1]) for each in (gate_N, hidden_N))
        up_TN = None if block.up is None else hidden_TN
        on.run(on.kernels.hidden_tokens, gate_TN, up_TN, None, gate, hidden_TN, None)
    skips_zeros = not gate.computes_all
    on.run(on.kernels.down, block.down, hidden_N, parts_SD, skips_zeros=skips_zeros)


def _operands(linear: Linear | None) -> tuple[Matrix | None, Tensor | None]:
    return (None, None) if linear is None else (linear.weight, linear.bias_N)


def _launch_hidden(
    on: Launcher,
    block: NeuronBlock,
    gate: Gate,
    id_N: Tensor | None,
    named_W: Tensor | None,
    x_D: Tensor,
    hidden_N: Tensor,
) -> None:
    weights = block.gate.weight, block.gate.bias_N, *_operands(block.up)
    on.run(on.kernels.gate_up, *weights, id_N, named_W, x_D, gate, hidden_N)


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
    own, down, up = block.gate.flat, block.down.flat, None if block.up is None else block.up.flat
    weights = own.weight, own.bias_N, *_operands(up)
    on.run(on.kernels.expert_gate_up, *weights, block.place_E, routed, x_D, gate, hidden_KF)
    given = down.weight, down.bias_N, block.place_E, routed, hidden_KF, parts_PD
    is_by_output, skips_zeros = block.is_by_output, not gate.computes_all
    on.run(on.kernels.expert_down, *given, is_by_output=is_by_output, skips_zeros=skips_zeros)


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
    if gate is None and not block.is_by_output:
        launch_neurons(on, block, rule, None, None, x_D, hidden_F, parts_SD)
        return
    _launch_hidden(on, block, rule, None, None, x_D, hidden_F)
    if gate is None:
        on.dot(Linear(weight=block.down), hidden_F, parts_SD[0])
        return
    launch_shared_weight(on, gate, x_D, logit_1, weight_2)
    given = block.down, None, None, weight_2, hidden_F.unsqueeze(-2), parts_SD
    is_by_output, skips_zeros = block.is_by_output, not rule.computes_all
    on.run(on.kernels.expert_down, *given, is_by_output=is_by_output, skips_zeros=skips_zeros)


def launch_shared_weight(
    on: Launcher, gate: Linear, x_D: Tensor, logit_1: Tensor, weight_2: Tensor
) -> None:
    """Writes 0 and the weight of shared experts, by way of the logit of their gate."""
    on.dot(gate, x_D, logit_1)
    on.run(on.kernels.choose_experts, logit_1, None, _OUTPUT_GATE, weight_2)


def launch_sort(
    on: Launcher, place_E: Tensor | None, num_experts: int, routed: Tensor, pairs: Pairs
) -> None:
    """Sorts the pairs of rows and those of their experts that have a place."""
    given = routed, place_E, pairs.tile_G3, pairs.row_3P, pairs.weight_P
    size = pairs.tile_size
    on.run(on.kernels.sort_pairs, *given, num_experts=num_experts, tile_size=size)


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
    hidden = _launch_hidden_tiles(on, block, gate, x_TD, rooms, named_TW, id_N)
    if block.is_by_output:
        assert not is_added
        on.multiply(Linear(weight=block.down), hidden, out_TD)
    else:
        on.multiply_down(block.down, hidden, out_TD, is_added=is_added)


def launch_shared_tiles(
    on: TileLauncher,
    shared: SharedNeurons,
    pairs: Pairs,
    x_TD: Tensor,
    rooms: Rooms,
    out_TD: Tensor,
) -> None:
    """Writes the weighted output of shared experts for the rows of a pass."""
    block = shared.block
    hidden = _launch_hidden_tiles(on, block, shared.rule, x_TD, rooms)
    _launch_weighted(on, Linear(weight=block.down), hidden, pairs, out_TD, block.is_by_output)


def launch_expert_tiles(
    on: TileLauncher,
    block: ExpertBlock,
    gate: Gate,
    pairs: Pairs,
    x_TD: Tensor,
    rooms: Rooms,
    parts_PD: Tensor,
) -> None:
    """Writes the weighted outputs of these pairs to their rows, k T + t."""
    hidden = _launch_hidden_tiles(on, block, gate, x_TD, rooms, pairs=pairs)
    _launch_weighted(on, block.down.flat, hidden, pairs, parts_PD, block.is_by_output)


def _launch_hidden_tiles(
    on: TileLauncher,
    block: NeuronBlock | ExpertBlock,
    gate: Gate,
    x_TD: Tensor | Rounded,
    rooms: Rooms,
    named_TW: Tensor | None = None,
    id_N: Tensor | None = None,
    pairs: Pairs | None = None,
) -> Rounded:
    """The hidden values of the rows of a pass, or of pairs of a row and an expert, as the matrix
    `down` takes them."""
    if isinstance(block, ExpertBlock):
        own, up = block.gate.flat, None if block.up is None else block.up.flat
        number = len(block.id_F)
    else:
        own, up, number = block.gate, block.up, len(block.id_N)
    count = len(x_TD) if pairs is None else pairs.row_3P.shape[1]
    gate_TN, up_TN = rooms[0][: 2 * count * number].view(2, count, number)
    rounded = on.rounded(x_TD, own.weight.kind)
    on.multiply(own, rounded, gate_TN, pairs)
    if up is not None:
        if tile_dtype(up.weight.kind) != rounded.values_TD.dtype:
            rounded = on.rounded(x_TD, up.weight.kind)
        on.multiply(up, rounded, up_TN, pairs)
    dtype = tile_dtype(block.down.kind)
    hidden_TN = rooms[1].view(dtype)[: gate_TN.numel()].view(gate_TN.shape)
    hidden = Rounded(hidden_TN, on.hidden_power_T[:count] if dtype == torch.float16 else None)
    given = gate_TN, None if up is None else up_TN, named_TW, gate
    on.run(on.kernels.hidden_tokens, *given, *hidden.tensors, id_N)
    return hidden


def _launch_weighted(
    on: Launcher, down: Linear, hidden: Rounded, pairs: Pairs, out_PD: Tensor, is_by_output: bool
) -> None:
    """Writes the outputs of pairs, from their hidden values, times their weights."""
    weight, bias = down.weight, down.bias_N
    places: dict[str, Any] = {
        "tile_G3": pairs.tile_G3,
        "row_2P": pairs.out_2P,
        "factor_P": pairs.weight_P,
        "tile_size": pairs.tile_size,
    }
    given = *hidden.tensors, out_PD
    if is_by_output:
        on.run(on.kernels.multiply, weight, bias, *given, **places)
    else:
        multiply_down = on.kernels.multiply_down
        on.run(multiply_down, weight, *given, is_added=False, bias_D=bias, **places)
