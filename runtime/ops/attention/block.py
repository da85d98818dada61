"""A loaded block of attention, and its pass over a prompt's tokens on a GPU.

Letters: T tokens, H heads, W head width, D model width, Q values of queries, keys and values together."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from hotsplit.model.spec import Attention as AttentionSpec
from hotsplit.runtime.cache.kv_cache import LayerCache
from hotsplit.runtime.kernels.stored import Vectors
from hotsplit.runtime.ops.attention.gpu_pass import attend_tokens
from hotsplit.runtime.ops.attention.rotary import PassPlaces, Rotary
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
        places: PassPlaces,
        attend: Attend | None = None,
    ) -> Tensor:
        """Attention of T normed tokens of a sequence, [T, D]; appends to the cache, which must have room.
        `attend`, if given, appends and attends instead of the GPU's kernels, on the CPU, where the cache is
        then. `on_heads` receives the heads' output, [T, H * W]."""
        joined_TQ = side_by_side(self.inputs, x, is_small=self.is_input_small)
        if attend is None:
            heads_TH = attend_tokens(self, joined_TQ, sequence, places)
        else:
            heads_TH = attend(joined_TQ.cpu()).to(x.device)
        on_heads(heads_TH)
        return side_by_side((self.output,), heads_TH)
