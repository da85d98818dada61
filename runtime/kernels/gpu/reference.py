"""The reference of the GPU kernels in float64 with torch, which defines their results: slow and
plain. The rows of a step are computed one by one.

Letters and contracts: see kernels.py."""

import math

import torch
from torch import Tensor

from hotsplit.model.blocks import PLAIN_SUM, SumFactors
from hotsplit.model.neurons import SMOOTH
from hotsplit.model.spec import Activation, Attention, Norm, Rotary
from hotsplit.runtime.device.bits import pack_bits, unpack_bits
from hotsplit.runtime.kernels import stored
from hotsplit.runtime.kernels.gate import Gate
from hotsplit.runtime.kernels.gpu.ranges import range_of
from hotsplit.runtime.kernels.gpu.step_rows import by_rows
from hotsplit.runtime.kernels.stored import NO_VECTORS, StoredMatrix, Vectors


@by_rows
def dot(
    matrix: StoredMatrix,
    bias_N: Tensor | None,
    x_D: Tensor,
    out_N: Tensor,
    *,
    has_relu: bool = False,
    cap: float | None = None,
) -> None:
    y_N = _capped(product(matrix, bias_N, x_D), cap)
    out_N.copy_(y_N.relu() if has_relu else y_N)


@by_rows
def embed(
    matrix: StoredMatrix,
    index_1: Tensor,
    out_D: Tensor,
    *,
    is_added: bool = False,
    scale: float = 1.0,
) -> None:
    row_D = scale * _rows(matrix, index_1)[0]
    out_D.copy_(out_D + row_D if is_added else row_D)


def unpack(matrix: StoredMatrix, out_AD: Tensor, index_A: Tensor | None = None) -> None:
    out_AD.copy_(_rows(matrix, index_A))


@by_rows
def add_norm(
    x_D: Tensor,
    parts_PD: Tensor | None,
    weight_D: Tensor | None,
    bias_D: Tensor | None,
    epsilon: float,
    out_D: Tensor | None,
    x_out_D: Tensor | None,
    term_D: Tensor | None = None,
    copy_D: Tensor | None = None,
    factors: SumFactors = PLAIN_SUM,
) -> None:
    total_D = x_D.double()
    if parts_PD is not None:
        total_D = total_D + factors.factor * parts_PD.double().sum(dim=0)
    if term_D is not None:
        total_D = total_D + factors.factor * term_D.to(x_D.device).double()
    total_D = factors.times * total_D
    if out_D is not None:
        assert weight_D is not None
        centred_D = total_D if bias_D is None else total_D - total_D.mean()
        normed_D = _rms_norm(centred_D, weight_D, epsilon)
        out_D.copy_(normed_D if bias_D is None else normed_D + bias_D)
        if copy_D is not None:
            copy_D.copy_(out_D)
    if x_out_D is not None:
        x_out_D.copy_(total_D)


@by_rows
def rotate_append(
    qkv: Tensor,
    frequency_W2: Tensor | None,
    query_weight_W: Tensor | None,
    key_weight_W: Tensor | None,
    position_1: Tensor,
    key_CKW: Tensor,
    value_CKW: Tensor,
    spec: Attention,
    sequence_1: Tensor | None = None,
    table_SN: Tensor | None = None,
    query_THW: Tensor | None = None,
) -> None:
    num_kv, width = key_CKW.shape[-2:]
    of_heads, norm = spec.num_heads * (1 + spec.is_gated), spec.head_norm
    query, *own = (
        qkv.double().unflatten(0, (-1, width)).split([of_heads, *spec.projected[1:]], dim=0)
    )
    query, keys, values = query[:: 1 + spec.is_gated], own[:1], own[-1:]
    if norm and spec.norms_values:
        values = [_rms_norm(v, torch.ones(width, device=v.device), norm.epsilon) for v in values]
    if norm and query_weight_W is not None:
        query = _rms_norm(_centred(query, norm), query_weight_W, norm.epsilon)
    if norm and key_weight_W is not None:
        keys = [_rms_norm(_centred(key, norm), key_weight_W, norm.epsilon) for key in keys]
    if spec.rotary and frequency_W2 is not None:
        angle_W2 = position_1 * frequency_W2.double()
        query, *keys = (_turn(heads, angle_W2, spec.rotary) for heads in (query, *keys))
    if spec.growth and spec.growth_length:
        steps = int(position_1) // spec.growth_length
        query = query * (1.0 + spec.growth * math.log(1 + steps))
    if query_THW is None:
        qkv[: of_heads * width].view(-1, width)[:: 1 + spec.is_gated] = query.to(qkv.dtype)
    else:
        query_THW.copy_(query * spec.score_scale)
    for cache, row in zip((key_CKW, value_CKW), (*keys, *values), strict=False):
        place = int(position_1)
        if table_SN is not None and sequence_1 is not None:
            block, place = divmod(place, cache.shape[1])
            cache = cache[int(table_SN[int(sequence_1), block])]
        cache[place] = row.to(cache.dtype)


@by_rows
def attend(
    qkv: Tensor,
    key_CKW: Tensor,
    value_CKW: Tensor,
    position_1: Tensor,
    spec: Attention,
    scratch: Tensor,
    out_HW: Tensor,
    sequence_1: Tensor | None = None,
    table_SN: Tensor | None = None,
    *,
    vectors: Vectors = NO_VECTORS,
) -> None:
    if table_SN is not None and sequence_1 is not None:
        key_CKW, value_CKW = (
            _positions(cache, table_SN[int(sequence_1)], int(position_1) + 1)
            for cache in (key_CKW, value_CKW)
        )
    _, num_kv, width = key_CKW.shape
    count, gates = int(position_1) + 1, spec.is_gated
    read = slice(0 if spec.window is None else max(0, count - spec.window), count)
    head_HW = qkv[: spec.num_heads * width * (1 + gates)].double().view(-1, width)
    query_KGW = head_HW[:: 1 + gates].reshape(num_kv, -1, width)
    key_KWC = key_CKW[read].double().permute(1, 2, 0)
    score_KGC = _capped(query_KGW @ key_KWC * spec.score_scale, spec.score_cap)
    if spec.head_sinks:
        sink_KG1 = vectors["head_sinks"].double().view(num_kv, -1, 1)
        score_KGC = torch.cat([score_KGC, sink_KG1], dim=-1)
    share_KGC = score_KGC.softmax(dim=-1)[..., : key_KWC.shape[-1]]
    heads_HW = (share_KGC @ value_CKW[read].double().transpose(0, 1)).flatten(0, 1)
    out_HW.copy_((heads_HW * head_HW[1::2].sigmoid() if gates else heads_HW).view_as(out_HW))


def attend_tokens(
    query_THW: Tensor,
    key_CKW: Tensor,
    value_CKW: Tensor,
    position_T: Tensor,
    spec: Attention,
    out_THW: Tensor,
    sequence_1: Tensor | None = None,
    table_SN: Tensor | None = None,
    *,
    vectors: Vectors = NO_VECTORS,
    gated_TQ: Tensor | None = None,
) -> None:
    count, num_kv, window = int(position_T[-1]) + 1, key_CKW.shape[-2], spec.window
    if table_SN is not None and sequence_1 is not None:
        block_N = table_SN[int(sequence_1[0])]
        key_CKW, value_CKW = (_positions(each, block_N, count) for each in (key_CKW, value_CKW))
    first = 0 if window is None else max(0, int(position_T[0]) + 1 - window)
    key_CKW, value_CKW = (each[first:count].double() for each in (key_CKW, value_CKW))
    query_TKGW = query_THW.double().unflatten(1, (num_kv, -1))
    score_KGTC = _capped(torch.einsum("tkgw,ckw->kgtc", query_TKGW, key_CKW), spec.score_cap)
    at_C, at_T1 = torch.arange(first, count, device=position_T.device), position_T[:, None]
    is_unseen_TC = at_C > at_T1
    if window is not None:
        is_unseen_TC |= at_C <= at_T1 - window
    score_KGTC.masked_fill_(is_unseen_TC, -torch.inf)
    if spec.head_sinks:
        sink_KG11 = vectors["head_sinks"].double().view(num_kv, -1, 1, 1)
        sink_KGT1 = sink_KG11.expand(*score_KGTC.shape[:3], 1)
        score_KGTC = torch.cat([score_KGTC, sink_KGT1], dim=-1)
    share_KGTC = score_KGTC.softmax(dim=-1)[..., : len(key_CKW)]
    heads_THW = torch.einsum("kgtc,ckw->tkgw", share_KGTC, value_CKW).flatten(1, 2)
    if gated_TQ is not None:
        pairs = gated_TQ[:, : 2 * heads_THW[0].numel()].unflatten(1, (-1, 2, query_THW.shape[-1]))
        heads_THW = heads_THW * pairs[:, :, 1].double().sigmoid()
    out_THW.copy_(heads_THW)


@by_rows
def predict(
    up: StoredMatrix,
    bias_F: Tensor | None,
    inner_R: Tensor,
    threshold: float,
    named_B: Tensor,
    copy_B: Tensor | None = None,
) -> None:
    score_F = product(up, bias_F, inner_R)
    named_B.copy_(pack_bits(~(score_F <= threshold)))
    if copy_B is not None:
        copy_B.copy_(named_B)


@by_rows
def gate_up(
    gate: StoredMatrix,
    gate_bias_N: Tensor | None,
    up: StoredMatrix | None,
    up_bias_N: Tensor | None,
    id_N: Tensor | None,
    named_B: Tensor | None,
    x_D: Tensor,
    rule: Gate,
    hidden_N: Tensor,
) -> None:
    value_N, fires_N = _activate(product(gate, gate_bias_N, x_D), rule)
    if rule.computes_all:
        fires_N = torch.ones_like(fires_N)
    if named_B is not None:
        bits_F = unpack_bits(named_B)
        fires_N = fires_N & (bits_F[: len(fires_N)] if id_N is None else bits_F[id_N.long()])
    if up is not None:
        up_N = product(up, up_bias_N, x_D)
        value_N = value_N * _factor(up_N, rule.activation)
    hidden_N.copy_(torch.where(fires_N, value_N, 0.0))


@by_rows
def down(down: StoredMatrix, hidden_N: Tensor, parts_SD: Tensor, *, skips_zeros: bool) -> None:
    size = range_of(len(hidden_N), len(parts_SD))
    for part, parts_D in enumerate(parts_SD):
        index_A = torch.arange(part * size, part * size + size, device=hidden_N.device)
        index_A = index_A[index_A < len(hidden_N)]
        parts_D.copy_(weighted_sum(down, hidden_N, index_A, skips_zeros=skips_zeros))


def weighted_sum(
    down: StoredMatrix, hidden_N: Tensor, index_A: Tensor, *, skips_zeros: bool
) -> Tensor:
    """f64 [D]: the sum of hidden_j down_j over the neurons of a list."""
    if skips_zeros:
        index_A = index_A[hidden_N[index_A] != 0]
    return hidden_N[index_A].double() @ _rows(down, index_A)


def round_tokens(
    x_TD: Tensor,
    added_TD: Tensor | None,
    weight_D: Tensor | None,
    bias_D: Tensor | None,
    epsilon: float,
    out_TD: Tensor,
    power_T: Tensor | None,
    x_out_TD: Tensor | None,
) -> None:
    total_TD = x_TD.double() if added_TD is None else x_TD.double() + added_TD
    if x_out_TD is not None:
        x_out_TD.copy_(total_TD)
    if weight_D is not None:
        if bias_D is not None:
            total_TD = total_TD - total_TD.mean(dim=1, keepdim=True)
        total_TD = _rms_norm(total_TD, weight_D, epsilon)
        total_TD = total_TD if bias_D is None else total_TD + bias_D
    _round(total_TD, out_TD, power_T)


def hidden_tokens(
    gate_TN: Tensor,
    up_TN: Tensor | None,
    named_TN: Tensor | None,
    rule: Gate,
    out_TN: Tensor,
    power_T: Tensor | None,
) -> None:
    gate_TN = gate_TN.double()
    if rule.cutoff is not None:
        deviation_T1, mean_T1 = torch.std_mean(gate_TN, dim=1, correction=0, keepdim=True)
        gate_TN = (gate_TN - mean_T1 - rule.cutoff * deviation_T1).relu()
    value_TN, fires_TN = _activate(gate_TN, rule)
    if up_TN is not None:
        value_TN = value_TN * _factor(up_TN, rule.activation)
    if not rule.computes_all:
        value_TN = torch.where(fires_TN, value_TN, 0.0)
    if named_TN is not None:
        value_TN = torch.where(named_TN, value_TN, 0.0)
    _round(value_TN, out_TN, power_T)


def _round(value_TK: Tensor, out_TK: Tensor, power_T: Tensor | None) -> None:
    """Writes values divided by a power of two for each token: that of the largest magnitude,
    limited to those with a normal inverse; NaN and infinity have the largest one."""
    if power_T is not None:
        largest_T = value_TK.abs().amax(dim=1).nan_to_num(nan=torch.inf).float()
        exponent_T = torch.frexp(largest_T.clamp(2.0**-126, 2.0**126))[1] - 1
        power_T.copy_(torch.ldexp(torch.ones_like(power_T), exponent_T))
        value_TK = value_TK / power_T[:, None]
    out_TK.copy_(value_TK)


def _positions(cache_BPKW: Tensor, block_N: Tensor, count: int) -> Tensor:
    """At least the first `count` positions [C, K, W] of a sequence with these blocks."""
    used = -(-count // cache_BPKW.shape[1])
    return cache_BPKW[block_N[:used].long()].flatten(0, 1)


def _rows(matrix: StoredMatrix, index_A: Tensor | None = None) -> Tensor:
    """f64 [A, D]."""
    if index_A is None:
        return stored.unpack(matrix.data, matrix.kind).double()
    return stored.unpack_chosen(matrix.data, matrix.kind, index_A.long()).double()


def product(matrix: StoredMatrix, bias_N: Tensor | None, x_D: Tensor) -> Tensor:
    """f64 [N]: W x + bias."""
    y_N = _rows(matrix) @ x_D.double()
    return y_N if bias_N is None else y_N + bias_N


def _rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x * (x.square().mean(dim=-1, keepdim=True) + epsilon).rsqrt() * weight


def _capped(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)


def _turn(x_HW: Tensor, angle_W2: Tensor, rotary: Rotary) -> Tensor:
    """Rotates each pair of the first values, adjacent or half of these apart, as a complex number
    times magnitude e^(i angle)."""
    x_HW, rest_HW = x_HW.tensor_split([2 * len(angle_W2)], dim=-1)
    is_adjacent, magnitude = rotary.pairing == "adjacent", rotary.scaling.magnitude
    pairs = x_HW.unflatten(-1, (-1, 2) if is_adjacent else (2, -1))
    first, second = pairs.unbind(-1 if is_adjacent else -2)
    turned = torch.complex(first, second) * torch.polar(magnitude + 0 * angle_W2, angle_W2)
    turned_HW = torch.stack([turned.real, turned.imag], -1 if is_adjacent else -2).flatten(-2)
    return torch.cat([turned_HW, rest_HW], dim=-1)


def _centred(x_HW: Tensor, norm: Norm) -> Tensor:
    return x_HW if norm.kind == "rms" else x_HW - x_HW.mean(dim=-1, keepdim=True)


def _activate(gate_N: Tensor, rule: Gate) -> tuple[Tensor, Tensor]:
    """(value, whether it fires)."""
    if rule.activation in SMOOTH:
        value_N = _smooth(gate_N, rule.activation)
        return value_N, value_N != 0
    fires_N = ~(gate_N <= (rule.threshold if rule.activation == "fatrelu" else 0.0))
    value_N = torch.where(fires_N, gate_N, 0.0)
    return value_N**2 if rule.activation == "relu2" else value_N, fires_N


def _factor(up: Tensor, activation: Activation) -> Tensor:
    """What an activated gate is multiplied by."""
    if activation == "swiglu_oai":
        return up.clamp(-7.0, 7.0) + 1.0
    return up.relu() if activation == "drelu" else up


def _smooth(x: Tensor, activation: Activation) -> Tensor:
    if activation == "silu":
        return x * torch.sigmoid(x)
    if activation == "swiglu_oai":
        x = x.clamp(max=7.0)
        return x * torch.sigmoid(1.702 * x)
    if activation == "gelu":
        return x * (1 + torch.erf(x / 2**0.5)) / 2
    return x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2
