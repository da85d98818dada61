"""A loaded block of attention, and its pass over a prompt's tokens on a GPU.

Letters: T tokens, H heads, W head width, D model width, Q values of queries, keys and values
together."""

from dataclasses import dataclass

from hotsplit.model.spec import Attention as AttentionSpec
from hotsplit.runtime.cache.kv_cache import LayerCache
from hotsplit.runtime.kernels.stored import Vectors
from hotsplit.runtime.ops.attention.rotary import Rotary
from hotsplit.runtime.ops.norm import Norm
from hotsplit.runtime.weights.matrix import Linear


@dataclass(frozen=True, kw_only=True)
class LatentMatrices:
    """The second matrices of latent attention, those of all heads one after another, and its
    norms."""

    query: Linear | None
    key: Linear  # [H C, N]
    value: Linear  # [H V, C]
    query_norm: Norm | None
    key_norm: Norm


@dataclass(frozen=True, kw_only=True)
class Attention:
    """A loaded block of attention: its spec has all numbers. `inputs`: the matrices of query, key,
    value and gate, or one matrix for several; or the first ones of latent attention."""

    spec: AttentionSpec
    inputs: tuple[Linear, ...]
    output: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    vectors: Vectors  # those of the spec's `vectors`, by its names
    cache: LayerCache
    rotary: Rotary | None  # on the cache's device; layers with equal ones share the object
    latent: LatentMatrices | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The matrices that multiply a row as a whole."""
        query = None if self.latent is None else self.latent.query
        return (*self.inputs, *([] if query is None else [query]), self.output)

    @property
    def widths(self) -> tuple[int, int]:
        """Numbers of values per token: of queries, their gates, keys and values together, and of
        the heads' outputs."""
        return self.spec.qkv_size + self.spec.gate_size, self.spec.heads_size
