"""Norm, rotary embedding and attention, in f32.

Letters: T tokens, C cached tokens, H heads, K key-value heads, W head width, D model width, Q
values of queries, keys and values together, G heads that share a key head, S tokens at a time, N
outputs of a projection."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn import functional as F

from hotsplit.model.spec import Rotary as RotarySpec
from hotsplit.runtime.cache.key_tables import KeyTables
from hotsplit.runtime.cache.kv_cache import LayerCache
from hotsplit.runtime.cache.stored_rows import turn_by_hadamard
from hotsplit.runtime.weights import gpu_products
from hotsplit.runtime.weights.matrix import Linear, side_by_side

# Takes queries, keys and values [T, Q]: appends keys and values to the cache, and returns the
# heads' output [T, H * W].
Attend = Callable[[Tensor], Tensor]
# Bytes of attention scores on a GPU at a time; they exist twice.
SCORE_BYTES = 4 << 20
LEAST_WEIGHT = 2.0**-6  # the largest weight of a norm whose outputs are rounded to f16 as they are
# Head widths that flash attention takes: up to this, and multiples of 8, because others are padded.
MOST_FLASH_WIDTH = 256


@dataclass(frozen=True, kw_only=True)
class Norm:
    """A layer norm if there is a bias (Ba et al. 2016): (x - mean) / sqrt(variance + epsilon) *
    weight + bias; else an RMS norm (Zhang and Sennrich 2019): x / sqrt(mean(x^2) + epsilon) *
    weight."""

    weight_D: Tensor
    bias_D: Tensor | None
    epsilon: float

    @cached_property
    def fits_f16(self) -> bool:
        """True if f16 takes the outputs as they are: none exceeds MOST_SMALL, because none exceeds
        sqrt(D) times the largest weight plus the largest bias, and the weights are not so small that
        whole rows would be subnormal. False with NaN."""
        largest = float(self.weight_D.abs().max())
        most = math.sqrt(len(self.weight_D)) * largest
        most += 0.0 if self.bias_D is None else float(self.bias_D.abs().max())
        return largest >= LEAST_WEIGHT and most <= gpu_products.MOST_SMALL

    def apply(self, x_TD: Tensor) -> Tensor:
        if self.bias_D is None:
            return F.rms_norm(x_TD, self.weight_D.shape, self.weight_D, self.epsilon)
        return F.layer_norm(x_TD, self.weight_D.shape, self.weight_D, self.bias_D, self.epsilon)


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Rotates pairs of a head's values by position times frequency (Su et al. 2021).

    The values of a pair are adjacent or half a head apart. For adjacent pairs, which llama.cpp uses
    for llama models, `convert` permutes the rows of q and k."""

    frequency_W: Tensor  # f64 [W / 2]
    is_adjacent: bool
    magnitude: float = 1.0  # factor of cos and sin; 1 except for YaRN

    @classmethod
    def of(
        cls, rotary: RotarySpec, width: int, factors: Tensor | None, device: torch.device
    ) -> "Rotary":
        """The rotary embedding of heads of a width; `factors` divide the frequencies elementwise
        (Llama 3's long-context scaling)."""
        theta, scaling = rotary.theta, rotary.scaling
        pairs = torch.arange(0, width, 2, dtype=torch.float64, device=device)
        divisors = torch.as_tensor(scaling.divisors(theta, width), device=device)
        frequency = theta ** (-pairs / width) / divisors
        frequency = frequency if factors is None else frequency / factors
        return cls(
            frequency_W=frequency,
            is_adjacent=rotary.pairing == "adjacent",
            magnitude=scaling.magnitude,
        )

    def turn(self, start: int, count: int) -> "Turn":
        """The rotation for positions start .. start + count - 1."""
        positions = torch.arange(start, start + count, device=self.frequency_W.device)
        angle = positions[:, None, None] * self.frequency_W
        cos, sin = angle.cos() * self.magnitude, angle.sin() * self.magnitude
        return Turn(cos=cos.float(), sin=sin.float(), rotary=self)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The rotation of T positions; `cos` and `sin` are f32 [T, 1, W / 2]."""

    cos: Tensor
    sin: Tensor
    rotary: Rotary

    def apply(self, x_THW: Tensor) -> Tensor:
        if self.rotary.is_adjacent:
            first, second = x_THW[..., 0::2], x_THW[..., 1::2]
        else:
            first, second = x_THW.chunk(2, dim=-1)
        turned = (first * self.cos - second * self.sin, first * self.sin + second * self.cos)
        if self.rotary.is_adjacent:
            return torch.stack(turned, dim=-1).flatten(-2)
        return torch.cat(turned, dim=-1)

    def apply_(self, x_THW: Tensor) -> None:
        """`apply` in place, with fewer launches and half of the memory."""
        if self.rotary.is_adjacent:
            first, second = x_THW[..., 0::2], x_THW[..., 1::2]
        else:
            first, second = x_THW.chunk(2, dim=-1)
        carried = first * self.sin
        first.mul_(self.cos).addcmul_(second, self.sin, value=-1.0)
        second.mul_(self.cos).add_(carried)


class Turns:
    """The rotations of positions start .. start + count - 1, made once for each rotary embedding."""

    def __init__(self, start: int, count: int) -> None:
        self._start, self._count = start, count
        self._made: dict[int, Turn] = {}  # by the id of the rotary embedding

    def of(self, rotary: Rotary | None) -> Turn | None:
        if rotary is None:
            return None
        if id(rotary) not in self._made:  # the turn keeps its rotary embedding, so ids stay unique
            self._made[id(rotary)] = rotary.turn(self._start, self._count)
        return self._made[id(rotary)]


def in_window(rows: Tensor, num_tokens: int, window: int | None) -> Tensor:
    """The keys or values [C, ...] without those before the windows of the last `num_tokens`
    positions."""
    return rows if window is None else rows[max(0, len(rows) - num_tokens + 1 - window) :]


def attend(
    query_THW: Tensor,
    key_CKW: Tensor,
    value_CKW: Tensor,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Causal grouped-query attention of the last T of C positions: f32 [T, H * W]. Scores are
    multiplied by `scale`; a token attends to the latest `window` positions."""
    num_tokens = len(query_THW)
    key_CKW, value_CKW = (in_window(rows, num_tokens, window) for rows in (key_CKW, value_CKW))
    num_cached = len(key_CKW)
    if num_tokens == 1:
        return _attend_one(query_THW[0], key_CKW, value_CKW, scale)
    mask, is_limited = None, window is not None and window < num_cached
    if num_tokens < num_cached or is_limited:
        mask = torch.ones(num_tokens, num_cached, dtype=torch.bool, device=query_THW.device)
        mask = mask.tril(num_cached - num_tokens)
    if mask is not None and window is not None and is_limited:
        mask = mask.triu(num_cached - num_tokens + 1 - window)
    out_HTW = F.scaled_dot_product_attention(
        query_THW.transpose(0, 1)[None],
        key_CKW.transpose(0, 1)[None],
        value_CKW.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query_THW.shape[1] != key_CKW.shape[1],
    )[0]
    return out_HTW.transpose(0, 1).flatten(1)


def attend_on_gpu(
    query_THW: Tensor,
    key_CKW: Tensor,
    value_CKW: Tensor,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Computes `attend` on a GPU: by torch's flash attention (Dao, arXiv 2307.08691) if it supports
    the heads and the card and no window ends between the keys, with queries rounded to the type of
    the keys; else by `attend_by_heads`.

    Flash attention stores no scores, and takes one launch instead of nine for each key-value head.
    Its result for several tokens has the type of the keys."""
    num_tokens, found = len(query_THW), None
    key_CKW, value_CKW = (in_window(rows, num_tokens, window) for rows in (key_CKW, value_CKW))
    if window is None or window >= len(key_CKW):
        window, found = None, _attend_with_flash(query_THW, key_CKW, value_CKW, scale)
    if found is not None:
        return found
    return attend_by_heads(query_THW, key_CKW, value_CKW, scale=scale, window=window)


def takes_flash(head_width: int) -> bool:
    """True if flash attention takes heads of this width without copies of the cache."""
    return head_width <= MOST_FLASH_WIDTH and head_width % 8 == 0


def has_flash(device: torch.device) -> bool:
    """True if torch has flash attention for a device: from compute capability 8.0 on."""
    is_built = device.type == "cuda" and torch.backends.cuda.is_flash_attention_available()
    return is_built and torch.cuda.get_device_properties(device).major >= 8


def _attend_with_flash(
    query_THW: Tensor, key_CKW: Tensor, value_CKW: Tensor, scale: float
) -> Tensor | None:
    """None if torch has no such kernel."""
    if key_CKW.dtype != torch.float16 or not takes_flash(query_THW.shape[-1]):
        return None
    query = torch.empty_like(query_THW, dtype=key_CKW.dtype)
    torch.mul(query_THW, scale, out=query)
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key_CKW, value_CKW))
    is_grouped = query.shape[1] != key.shape[1]
    is_square = query.shape[2] == key.shape[2]
    params = SDPAParams(query, key, value, None, 0.0, is_square, is_grouped)
    if not can_use_flash_attention(params):
        return None
    heads_TH = flash_attention(query, key, value)[0].transpose(0, 1).flatten(1)
    return heads_TH if len(heads_TH) > 1 else heads_TH.float()


def flash_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention [1, H, T, W] of the last T of C positions, for scaled queries [1, H, T, W] and keys
    and values [1, K, C, W] on a CUDA device.

    scaled_dot_product_attention would prefer cuDNN's attention on some cards, which plans anew for
    each length. Here, as in torch.nn.attention.bias, is_causal aligns the last positions."""
    found = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, is_causal=True, scale=1.0
    )
    return found[0]


def attend_by_heads(
    query_THW: Tensor,
    key_CKW: Tensor,
    value_CKW: Tensor,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Computes `attend` on a GPU, one key-value head and SCORE_BYTES of scores at a time. Keys and
    values may be of any float type.

    torch's f32 kernels for grouped heads would copy the keys for each query head and hold all
    scores at once."""
    num_tokens, num_heads, width = query_THW.shape
    num_cached, num_kv, _ = key_CKW.shape
    group = num_heads // num_kv
    out_THW = torch.empty_like(query_THW)
    step = max(1, SCORE_BYTES // (4 * group * num_cached))
    for head in range(num_kv):
        own = slice(head * group, (head + 1) * group)
        _attend_head(
            query_THW[:, own], key_CKW[:, head], value_CKW[:, head], out_THW[:, own], step,
            scale=scale, window=window,
        )  # fmt: skip
    return out_THW.flatten(1)


def _attend_head(
    query_TGW: Tensor, key_CW: Tensor, value_CW: Tensor, out_TGW: Tensor, step: int, *,
    scale: float, window: int | None,
) -> None:  # fmt: skip
    """Causal attention of the heads that share a key head, `step` tokens at a time, into
    `out_TGW`."""
    num_tokens, group, _ = query_TGW.shape
    key_WC, value_CW = key_CW.float().T, value_CW.float()
    position_C = torch.arange(len(value_CW), device=query_TGW.device)
    for start in range(0, num_tokens, step):
        query_SGW = query_TGW[start : start + step] / (1 / scale)
        last_S = position_C[start - num_tokens :][: len(query_SGW)]
        is_out_SC = position_C > last_S[:, None]
        if window is not None:
            is_out_SC |= position_C <= last_S[:, None] - window
        share_SGC = (query_SGW.flatten(0, 1) @ key_WC).unflatten(0, (-1, group))
        share_SGC = share_SGC.masked_fill_(is_out_SC[:, None], -math.inf).softmax(dim=-1)
        out_TGW[start : start + step] = (share_SGC.flatten(0, 1) @ value_CW).view_as(query_SGW)
        del share_SGC  # before the next one is allocated


def _attend_one(query_HW: Tensor, key_CKW: Tensor, value_CKW: Tensor, scale: float) -> Tensor:
    """Attention of the last position, f32 [1, H * W], by small products, which have less overhead
    than torch's attention. Dividing by the root of the head width, as here and in `_attend_head`,
    rounds differently from multiplying by its inverse."""
    grouped_KGW = query_HW.reshape(key_CKW.shape[1], -1, query_HW.shape[-1])
    scores_KGC = grouped_KGW @ key_CKW.permute(1, 2, 0) / (1 / scale)
    return (scores_KGC.softmax(dim=-1) @ value_CKW.transpose(0, 1)).reshape(1, -1)


def attend_to_chosen(
    query_THW: Tensor, key_CKW: Tensor, value_CKW: Tensor, tables: KeyTables, sequence: int, *,
    scale: float,
) -> Tensor:  # fmt: skip
    """Computes `attend` with each token restricted to its chosen positions: f32 [T, H * W]."""
    num_kv, outs = key_CKW.shape[1], []
    for query_HW, position in zip(
        query_THW, range(len(key_CKW) - len(query_THW), len(key_CKW)), strict=True
    ):
        if tables.takes_all(position):
            until = slice(0, position + 1)
            keys, values = key_CKW[until].float(), value_CKW[until].float()
        else:
            query_KGW = query_HW.unflatten(0, (num_kv, -1))
            index_KC = tables.choose(sequence, position, query_KGW, scale)
            head_K1 = torch.arange(num_kv)[:, None]
            keys = key_CKW[index_KC, head_K1].transpose(0, 1).float()
            values = value_CKW[index_KC, head_K1].transpose(0, 1).float()
        outs.append(_attend_one(query_HW, keys, values, scale))
    return torch.cat(outs)


def attend_capped(
    query_THW: Tensor, key_CKW: Tensor, value_CKW: Tensor, tables: KeyTables, sequence: int,
    rotary: Rotary, *, scale: float,
) -> Tensor:  # fmt: skip
    """Computes `attend_to_chosen` with capped positions (hotsplit.options.key_selection), from queries
    and keys before the rotary embedding."""
    num_kv, outs, rule = key_CKW.shape[1], [], tables.rule
    num_far = rule.sinks + rule.top
    for query_HW, position in zip(
        query_THW, range(len(key_CKW) - len(query_THW), len(key_CKW)), strict=True
    ):
        base = 0 if tables.takes_all(position) else tables.window_begin(position)
        near_keys = key_CKW[base : position + 1].float()
        near = rotary.turn(0, len(near_keys)).apply(near_keys)
        near_query = rotary.turn(position - base, 1).apply(query_HW[None])
        if not base:
            outs.append(_attend_one(near_query[0], near, value_CKW[: position + 1].float(), scale))
            continue
        far_query = rotary.turn(rule.window, 1).apply(query_HW[None])[0]
        query_KGW = far_query.unflatten(0, (num_kv, -1))
        index_KC = tables.choose(sequence, position, query_KGW, scale)
        head_K1 = torch.arange(num_kv)[:, None]
        values = value_CKW[index_KC, head_K1].transpose(0, 1).float()
        far = key_CKW[index_KC[:, :num_far], head_K1].transpose(0, 1).float()
        outs.append(_attend_two(far_query, far, near_query[0], near, values, scale))
    return torch.cat(outs)


def _attend_two(
    far_HW: Tensor, far_CKW: Tensor, near_HW: Tensor, near_CKW: Tensor, value_CKW: Tensor,
    scale: float,
) -> Tensor:  # fmt: skip
    """Computes `_attend_one` over far and near keys together; the query is given twice, rotated for
    the far and for the near ones."""
    scores = [
        query_HW.reshape(key_CKW.shape[1], -1, query_HW.shape[-1]) @ key_CKW.permute(1, 2, 0)
        for query_HW, key_CKW in ((far_HW, far_CKW), (near_HW, near_CKW))
    ]
    share_KGC = (torch.cat(scores, dim=-1) / (1 / scale)).softmax(dim=-1)
    return (share_KGC @ value_CKW.transpose(0, 1)).reshape(1, -1)


@dataclass(frozen=True, kw_only=True)
class Attention:
    """The attention block. `inputs`: the matrices of query, key and value, or one matrix for all."""

    inputs: tuple[Linear, ...]
    output: Linear
    query_norm: Norm | None  # of each head
    key_norm: Norm | None
    cache: LayerCache
    num_heads: int
    rotary: Rotary | None  # on the cache's device; layers with equal ones share the object
    window: int | None
    score_scale: float
    on_bytes: Callable[[int], None] = field(repr=False)  # receives weight bytes read by the CPU
    is_input_small: bool = False  # see gpu_products.Factor

    @property
    def widths(self) -> tuple[int, int]:
        """Numbers of values per token: of queries, keys and values together, and of queries
        alone."""
        of_heads = self.num_heads * self.cache.head_width
        return of_heads + 2 * self.cache.num_kv_heads * self.cache.head_width, of_heads

    def forward(
        self,
        x_TD: Tensor,
        sequence: int,
        start: int,
        turns: Turns,
        on_heads: Callable[[Tensor], None],
        attend: Attend | None = None,
    ) -> Tensor:
        """Attention of T normed tokens of a sequence at positions from `start`, [T, D]; appends to
        the cache, which must have room and may be on another device than the weights. `attend`, if
        given, appends and attends instead of torch. `on_heads` receives the heads' output,
        [T, H * W]."""
        joined_TQ = self._project(self.inputs, x_TD, is_small=self.is_input_small)
        joined_TQ = joined_TQ.to(self.cache.device)
        if attend is None:
            heads_TH = self._attend(joined_TQ, sequence, start, turns)
        else:
            heads_TH = attend(joined_TQ)
        heads_TH = heads_TH.to(x_TD.device)
        on_heads(heads_TH)
        return self._project((self.output,), heads_TH)

    def _attend(self, joined_TQ: Tensor, sequence: int, start: int, turns: Turns) -> Tensor:
        """The heads' output [T, H * W] for queries, keys and values [T, Q]; appends to the cache.
        On a GPU, the rotation overwrites queries and keys."""
        num_kv, width = self.cache.num_kv_heads, self.cache.head_width
        query, key, value = joined_TQ.unflatten(-1, (-1, width)).split(
            [self.num_heads, num_kv, num_kv], dim=1
        )
        if self.query_norm and self.key_norm:
            query, key = self.query_norm.apply(query), self.key_norm.apply(key)
        types, tables = self.cache.types, self.cache.tables
        is_capped = tables is not None and tables.rule.is_capped
        scale, window, turn = self.score_scale, self.window, turns.of(self.rotary)
        if turn and not is_capped:
            if not gpu_products.is_gpu(joined_TQ.device):
                query, key = turn.apply(query), turn.apply(key)
            elif self.query_norm:
                turn.apply_(query)
                turn.apply_(key)
            else:
                turn.apply_(joined_TQ.unflatten(-1, (-1, width))[:, : self.num_heads + num_kv])
        if types.key.is_rotated:  # as the cache rotates its keys
            query = turn_by_hadamard(query)
        keys, values = self.cache.append(sequence, start, key, value)
        if gpu_products.is_gpu(keys.device):
            heads_TH = attend_on_gpu(query, keys, values, scale=scale, window=window)
        elif tables is not None and is_capped:
            assert self.rotary is not None
            heads_TH = attend_capped(
                query, keys, values, tables, sequence, self.rotary, scale=scale
            )
        elif tables is not None and not tables.takes_all(start + len(query) - 1):
            heads_TH = attend_to_chosen(query, keys, values, tables, sequence, scale=scale)
        else:
            keys, values = (in_window(rows, len(query), window).float() for rows in (keys, values))
            heads_TH = attend(query, keys, values, scale=scale, window=window)
        if types.value.is_rotated:
            heads_TH = turn_by_hadamard(heads_TH.unflatten(-1, (-1, width))).flatten(-2)
        return heads_TH

    def _project(
        self, linears: tuple[Linear, ...], x_TD: Tensor, *, is_small: bool = False
    ) -> Tensor:
        """Concatenated outputs of matrices with the same input, f32 [T, N]."""
        if not gpu_products.is_gpu(x_TD.device):
            self.on_bytes(sum(linear.weight.num_bytes for linear in linears))
        return side_by_side(linears, x_TD, is_small=is_small)
