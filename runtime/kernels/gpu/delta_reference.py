"""The reference of the kernels of gated delta nets (see delta_kernels.py) in float64 with torch: token
by token, as the equations stand, with a state in f32 between them."""

import torch
from torch import Tensor

from hotsplit.runtime.kernels.gpu.delta_kernels import Sizes


def convolve(
    projected_TW: Tensor,
    taps_CJ: Tensor,
    step_bias_V: Tensor,
    rate_V: Tensor,
    conv_SJC: Tensor,
    run_R3: Tensor,
    writes_T: Tensor,
    mixed_TX: Tensor,
    num_key_heads: int,
) -> None:
    s = Sizes.of(projected_TW, taps_CJ, step_bias_V, num_key_heads)
    projected_TW, mixed_TX = projected_TW.view(-1, s.projected), mixed_TX.view(-1, s.mixed)
    num_taps, keys = taps_CJ.shape[1], s.key_heads * s.key_width
    for first, count, source in run_R3.tolist():
        if not count:
            continue
        row_TW = projected_TW[first : first + count].double()
        before_JC = torch.zeros_like(conv_SJC[0]) if source < 0 else conv_SJC[source]
        x_TC = torch.cat([before_JC.double(), row_TW[:, : s.channels]])
        taps = [x_TC[tap : tap + count] * taps_CJ[:, tap].double() for tap in range(num_taps)]
        u_TC = torch.nn.functional.silu(torch.stack(taps).sum(dim=0))
        query, key, value = u_TC.split([keys, keys, s.channels - 2 * keys], dim=1)
        query, key = (each.unflatten(1, (-1, s.key_width)) for each in (query, key))
        query, key = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (query, key))
        strength_TV, step_TV = row_TW[:, s.channels + s.value_heads * s.value_width :].chunk(2, 1)
        step_TV = (step_TV + step_bias_V).exp().log1p()
        parts = [
            query.flatten(1) / s.key_width**0.5,
            key.flatten(1),
            value,
            strength_TV.sigmoid(),
            (rate_V * step_TV).exp(),
        ]
        mixed_TX[first : first + count] = torch.cat(parts, dim=1).to(mixed_TX.dtype)
        for row, target in enumerate(writes_T[first : first + count].tolist(), start=1):
            if target >= 0:
                conv_SJC[target] = x_TC[row : row + num_taps - 1].to(conv_SJC.dtype)


def delta_rule(
    mixed_TX: Tensor,
    state_SVNM: Tensor,
    run_R3: Tensor,
    writes_T: Tensor,
    out_TVM: Tensor,
    num_key_heads: int,
    *,
    is_grouped: bool,
) -> None:
    _, value_heads, key_width, value_width = state_SVNM.shape
    keys, values = num_key_heads * key_width, value_heads * value_width
    mixed_TX = mixed_TX.view(-1, 2 * keys + values + 2 * value_heads)
    out_TVM = out_TVM.view(-1, value_heads, value_width)
    head_V = torch.arange(value_heads, device=mixed_TX.device)
    head_V = head_V // (value_heads // num_key_heads) if is_grouped else head_V % num_key_heads
    for first, count, source in run_R3.tolist():
        if not count:
            continue
        before = torch.zeros_like(state_SVNM[0]) if source < 0 else state_SVNM[source]
        state_VNM = before.double()
        for row in range(first, first + count):
            query, key, value, strength_V, decay_V = (
                mixed_TX[row].double().split([keys, keys, values, value_heads, value_heads])
            )
            query_VN, key_VN = (x.view(num_key_heads, -1)[head_V] for x in (query, key))
            state_VNM = state_VNM * decay_V[:, None, None]
            held_VM = torch.einsum("vnm,vn->vm", state_VNM, key_VN)
            delta_VM = strength_V[:, None] * (value.view(value_heads, -1) - held_VM)
            state_VNM = state_VNM + key_VN[:, :, None] * delta_VM[:, None]
            # A state is f32 after each row: a row's bits do not depend on its pass.
            state_VNM = state_VNM.to(state_SVNM.dtype).double()
            out_TVM[row] = torch.einsum("vnm,vn->vm", state_VNM, query_VN).to(out_TVM.dtype)
            if writes_T[row] >= 0:
                state_SVNM[int(writes_T[row])] = state_VNM.to(state_SVNM.dtype)


def gate_norm(out_TVM: Tensor, projected_TW: Tensor, weight_M: Tensor, epsilon: float) -> None:
    heads, width = out_TVM.shape[-2:]
    channels = projected_TW.shape[-1] - heads * (width + 2)
    gate = projected_TW[..., channels : channels + heads * width].double().view(out_TVM.shape)
    value = out_TVM.double()
    value = value * (value.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight_M
    out_TVM.copy_(value * torch.nn.functional.silu(gate))
