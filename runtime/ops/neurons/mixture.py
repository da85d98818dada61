"""The experts of a layer over the tokens that have chosen them: on a GPU in one pass (expert_pass.py), on the
CPU in one native call (chosen.py); for observers, and on a GPU without tensor cores, one expert after another.

Letters: T tokens, D model width, K experts of a token, F neurons of an expert, N tokens of an expert."""

from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor

from hotsplit.runtime.ops.neurons import expert_pass
from hotsplit.runtime.ops.neurons.chosen import experts_on_cpu
from hotsplit.runtime.ops.neurons.feed_forward import SHOWN, FeedForward
from hotsplit.runtime.ops.observers import Observers
from hotsplit.runtime.ops.route import Routed
from hotsplit.runtime.weights import gpu_products
from hotsplit.runtime.weights.expert_block import ExpertBlock


def run_mixture(ffn: FeedForward, x_TD: Tensor, routed: Routed, *, observers: Observers) -> Tensor:
    """Output [T, D] of the experts that each token's router has chosen."""
    observers.show("ffn_experts", ffn.layer, routed.id_TK)
    is_watched = ffn.is_watched(observers)
    streams = None if observers.active else ffn.cold_experts
    device = expert_pass.device_of(ffn.experts, streams, len(x_TD))
    if device is not None and not is_watched and gpu_products.multiplies_blocks(device):
        experts = expert_pass.ExpertPass(
            layer=ffn.layer,
            blocks=ffn.experts,
            gate=ffn.gate,
            cold=streams,
            device=device,
            is_input_small=ffn.is_input_small,
            run_on_cpu=partial(_of_blocks, ffn, seen_TKF={}),
        )
        return experts.run(x_TD, routed).to(x_TD.device)
    shape = *routed.id_TK.shape, len(ffn.experts[0].id_F)
    seen_TKF = {n: x_TD.new_empty(shape) for n in SHOWN if observers.want(n, ffn.layer)}
    y_TD = _of_blocks(ffn, ffn.experts, x_TD, routed, seen_TKF=seen_TKF)
    for name, values_TKF in seen_TKF.items():
        observers.show(name, ffn.layer, values_TKF.flatten(1))
    return y_TD


def _of_blocks(
    ffn: FeedForward,
    blocks: Sequence[ExpertBlock],
    x_TD: Tensor,
    routed: Routed,
    *,
    seen_TKF: Mapping[str, Tensor],
) -> Tensor:
    """The weighted sum [T, D] of the chosen experts that are in one block or two."""
    total: Tensor | None = None
    for block in blocks:
        if seen_TKF or gpu_products.is_gpu(block.device):
            y_TD = _one_by_one(ffn, block, x_TD, routed, seen_TKF)
        else:
            host_TD, read = experts_on_cpu(block, ffn.gate, x_TD.cpu(), routed)
            ffn.traffic.add(read)
            y_TD = host_TD.to(x_TD.device)
        total = y_TD if total is None else total + y_TD
    assert total is not None
    return total


def _one_by_one(
    ffn: FeedForward,
    block: ExpertBlock,
    x_TD: Tensor,
    routed: Routed,
    seen_TKF: Mapping[str, Tensor],
) -> Tensor:
    y_TKD = x_TD.new_zeros(*routed.id_TK.shape, x_TD.shape[1])
    for expert in routed.id_TK.unique().tolist():
        if block.place_of(expert) < 0:
            continue
        token_N, number_N = (routed.id_TK == expert).nonzero(as_tuple=True)
        x_ND = x_TD[token_N].to(block.device)
        place, bias_PD = block.place_of(expert), block.down.bias_PN
        result = ffn.run_block(block.expert(place), x_ND, None, is_watched=bool(seen_TKF))
        y_ND = result.y_TD if bias_PD is None else result.y_TD + bias_PD[place]
        y_TKD[token_N, number_N] = y_ND.to(x_TD.device)
        for name, values_TKF in seen_TKF.items():
            part = result.gate_TN if name == "ffn_gate" else result.hidden_TN
            assert part is not None
            values_TKF[token_N, number_N] = part.to(x_TD.device)
    return (routed.weight_TK[..., None] * y_TKD).sum(dim=1)
