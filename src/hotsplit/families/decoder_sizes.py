"""The numbers that the layers of most models share, and the blocks that they make."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import cast

import numpy as np

from hotsplit.files.gguf_file import Value
from hotsplit.model.arrangements import Arrangement
from hotsplit.model.blocks import NormKind
from hotsplit.model.spec import Activation, Attention, LayerSpec, ModelSpec, Neurons, Norm, Rotary

# The largest counts accepted from a file, so that a damaged one causes no huge loop or allocation.
MAX_COUNT = (1 << 31) - 1
MAX_LAYERS = 1 << 12


@dataclass(frozen=True, kw_only=True)
class Sizes:
    num_layers: int
    hidden_size: int
    num_neurons: int  # of a layer
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    epsilon: float = 1e-5

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def key_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def attention(
        self,
        rotary: Rotary | None,
        options: Collection[str] = (),
        *,
        window: int | None = None,
        has_head_norms: bool = False,
        head_norm: NormKind = "rms",
    ) -> Attention:
        """The numbers that several families have; others are replaced. `options`: names of optional
        tensors, of which the biases are used."""
        norm = Norm(name="attn_q_norm", kind=head_norm, size=self.head_dim, epsilon=self.epsilon)
        return Attention(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rotary=rotary,
            window=window,
            head_norm=norm if has_head_norms else None,
            biases=_biased(("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output"), options),
        )

    def neurons(
        self, activation: Activation, options: Collection[str] = (), *, is_gated: bool = True
    ) -> Neurons:
        """`options`: names of optional tensors, of which the biases are used."""
        return Neurons(
            number=self.num_neurons,
            activation=activation,
            is_gated=is_gated,
            biases=_biased(("ffn_gate", "ffn_up", "ffn_down"), options),
        )

    def arrangement(self, norm: NormKind = "rms") -> Arrangement:
        return Arrangement(norm=norm, hidden_size=self.hidden_size, epsilon=self.epsilon)

    def model(
        self, architecture: str, layers: Iterable[LayerSpec], output_norm: NormKind | None = "rms"
    ) -> ModelSpec:
        norm = self.arrangement(output_norm or "rms").make_norm("output_norm", "x", "x")
        return ModelSpec(
            architecture=architecture,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            context_length=self.context_length,
            layers=tuple(layers),
            output_norm=norm if output_norm else None,
        )


def by_layer(values: list[int]) -> Value:
    """The number that all layers share, or a list with each layer's, as in a GGUF."""
    return np.uint32(values[0]) if len(set(values)) == 1 else cast(Value, values)


def _biased(names: Iterable[str], options: Collection[str]) -> frozenset[str]:
    return frozenset(name for name in names if f"{name}.bias" in options)
