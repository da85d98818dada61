"""The attention block in torch: projections, head norms, rotation, the cache, attention.

Letters: T tokens, H heads, K key-value heads, W head width, D model width, Q values of queries,
keys and values together, N outputs of a projection."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from hotsplit.model.spec import Attention as AttentionSpec
from hotsplit.runtime.cache.kv_cache import LayerCache
from hotsplit.runtime.cache.stored_rows import turn_by_hadamard
from hotsplit.runtime.kernels.stored import Vectors
from hotsplit.runtime.ops.attention.attend import attend, in_window
from hotsplit.runtime.ops.attention.gpu_pass import attend_tokens
from hotsplit.runtime.ops.attention.rotary import Rotary, Turns
from hotsplit.runtime.ops.attention.selected import attend_to_chosen
from hotsplit.runtime.ops.norm import Norm
from hotsplit.runtime.weights import gpu_products
from hotsplit.runtime.weights.matrix import Linear, side_by_side

# Takes queries, keys and values [T, Q]: appends keys and values to the cache, and returns the
# heads' output [T, H * W].
Attend = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Attention:
    """A loaded block of attention: its spec has all numbers. `inputs`: the matrices of query, key and
    value, or one matrix for several."""

    spec: AttentionSpec
    inputs: tuple[Linear, ...]
    output: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    vectors: Vectors  # those of the spec's `vectors`, by its names
    cache: LayerCache
    rotary: Rotary | None  # on the cache's device; layers with equal ones share the object
    on_bytes: Callable[[int], None] = field(repr=False)  # receives weight bytes read by the CPU
    is_input_small: bool = False  # see gpu_products.Factor

    @property
    def widths(self) -> tuple[int, int]:
        """Numbers of values per token: of the input projections together (queries, their gates, keys
        and values), and of queries alone."""
        return self.spec.qkv_size + self.spec.gate_size, self.spec.query_size

    def forward(
        self,
        x: Tensor | gpu_products.Factor,
        on_heads: Callable[[Tensor], None],
        *,
        sequence: int,
        start: int,
        turns: Turns,
        attend: Attend | None = None,
    ) -> Tensor:
        """Attention of T normed tokens of a sequence at positions from `start`, [T, D]; appends to
        the cache, which must have room and may be on another device than the weights. `attend`, if
        given, appends and attends instead of torch. `on_heads` receives the heads' output,
        [T, H * W]."""
        joined_TQ = self._project(self.inputs, x, is_small=self.is_input_small)
        joined_TQ = joined_TQ.to(self.cache.device)
        if attend is None and gpu_products.is_gpu(self.cache.device):
            heads_TH = attend_tokens(self, joined_TQ, sequence, start, turns)
        elif attend is None:
            heads_TH = self._attend(joined_TQ, sequence, start, turns)
        else:
            heads_TH = attend(joined_TQ)
        heads_TH = heads_TH.to(x.device)
        on_heads(heads_TH)
        return self._project((self.output,), heads_TH)

    def _without_gate(self, projected: Tensor) -> tuple[Tensor, Tensor | None]:
        """Queries, keys and values [T, Q], and the gates of the heads' output [T, H * W], if any."""
        if not self.spec.is_gated:
            return projected, None
        size, width = self.spec.query_size, self.spec.head_dim
        of_heads = projected[:, : 2 * size].unflatten(1, (-1, 2, width))
        query, gate = (of_heads[:, :, part].flatten(1) for part in range(2))
        return torch.cat([query, projected[:, 2 * size :]], dim=1), gate

    def _attend(self, joined_TQ: Tensor, sequence: int, start: int, turns: Turns) -> Tensor:
        """The heads' output [T, H * W] for queries, keys and values [T, Q] on the CPU; appends to
        the cache."""
        spec, types, tables = self.spec, self.cache.types, self.cache.tables
        joined_TQ, gate_TH = self._without_gate(joined_TQ)
        query, *own = self._normed(joined_TQ)
        turn = turns.of(self.rotary)
        if turn:
            query = turn.apply(query)
            own = [turn.apply(heads) for heads in own[:1]] + own[1:]
        if spec.growth and spec.growth_length:
            query = query * growth_of(spec.growth, spec.growth_length, start, len(query))
        if types.key.is_rotated:  # as the cache rotates its keys
            query = turn_by_hadamard(query)
        if own:
            keys, values = self.cache.append(sequence, start, *own)
        else:
            keys, values = self.cache.seen(sequence, start, start + len(query))
        if tables is not None and not tables.takes_all(start + len(query) - 1):
            heads_TH = attend_to_chosen(query, keys, values, tables, sequence, spec)
        else:
            keys, values = (
                in_window(rows, len(query), spec.window).float() for rows in (keys, values)
            )
            heads_TH = attend(query, keys, values, spec, self.vectors)
        if types.value.is_rotated:
            heads_TH = turn_by_hadamard(heads_TH.unflatten(-1, (-1, spec.head_dim))).flatten(-2)
        return heads_TH if gate_TH is None else heads_TH * gate_TH.sigmoid()

    def _normed(self, joined_TQ: Tensor) -> list[Tensor]:
        """Queries and, unless they are another layer's, keys and values [T, H or K, W]; normed, if they
        have a norm."""
        spec = self.spec
        query, *own = joined_TQ.unflatten(-1, (-1, spec.head_dim)).split(spec.projected, dim=1)
        values = own[-1:]
        if spec.norms_values and spec.head_norm:
            values = [rms_norm(v, (spec.head_dim,), None, spec.head_norm.epsilon) for v in values]
        found = [
            heads
            if norm is None
            else norm.apply(heads.flatten(1)).view_as(heads)
            if spec.norms_all_heads
            else norm.apply(heads)
            for norm, heads in zip(
                (self.query_norm, self.key_norm), (query, *own[:1]), strict=False
            )
        ]
        return found + values

    def _project(
        self,
        linears: tuple[Linear, ...],
        x: Tensor | gpu_products.Factor,
        *,
        is_small: bool = False,
    ) -> Tensor:
        """Concatenated outputs of matrices with the same input, f32 [T, N]."""
        if not gpu_products.is_gpu(x.device):
            self.on_bytes(sum(linear.weight.num_bytes for linear in linears))
        return side_by_side(linears, x, is_small=is_small)


def growth_of(growth: float, length: int, start: int, count: int) -> Tensor:
    """The factors of the queries at positions start .. start + count - 1, f32 [T, 1, 1]."""
    steps_T = torch.arange(start, start + count) // length
    return (1.0 + growth * steps_T.double().log1p()).float()[:, None, None]
