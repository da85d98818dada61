"""Gated delta nets as a block of a layer (hotsplit.model.spec)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from hotsplit.model.blocks import Shapes
from hotsplit.model.operations import Recurrent

# llama.cpp's names.
CONV, DECAY, DECAY_BIAS, DELTA_NORM = "ssm_conv1d.weight", "ssm_a", "ssm_dt.bias", "ssm_norm"
CONVS = tuple(f"ssm_conv1d_{which}.weight" for which in "qkv")


@dataclass(frozen=True, kw_only=True)
class DeltaNet(Recurrent):
    """A gated delta net (Yang et al. 2024, arXiv 2412.06464) as in Qwen3-Next and Qwen 3.5: a state
    S_NM of each value head, which a token changes and reads, instead of keys and values of all
    tokens.

        u_C = silu(sum over taps j of conv_CJ[j] * (attn_qkv x)_C of the token J - 1 - j before)
        q_GN, k_GN, v_VM = u_C;  q = q / |q| / sqrt(N);  k = k / |k|, |q| = sqrt(sum q^2 + 1e-6)
        beta_V = sigmoid(ssm_beta x);  decay_V = exp(ssm_a * softplus(ssm_alpha x + ssm_dt.bias))
        S = decay * S;  S = S + k (beta * (v - S^T k))^T;  o_VM = S^T q, of each value head
        y_D = ssm_out (RMSnorm_M(o; ssm_norm, epsilon) * silu(attn_gate x))

    With `has_sigmoid_gates`, sigmoid(attn_gate x) is the factor (Qwen3.8-Flash-Next).
    Inputs before the first token, and the first state, are zeros. Value head h reads key head h % G
    or, if `is_grouped`, h // (V / G); the latter files (Qwen3-Next's) have one matrix ssm_ba
    instead of ssm_beta and ssm_alpha, with of each key head in turn the rows of beta, then those of
    alpha.

    Letters: G key heads, V value heads, N key width, M value width, C channels, J taps."""

    kind: ClassVar[str] = "delta"
    room: ClassVar[str] = "delta"
    output: ClassVar[str] = "ssm_out"
    # Matrices that multiply the input, and those that multiply what the last of these give.
    matrices: ClassVar[tuple[str, ...]] = ("attn_qkv", "ssm_beta", "ssm_alpha", "attn_gate")
    high: ClassVar[tuple[str, ...]] = ()
    # Five products; the convolution with the norms of queries and keys; the states; the gated norm.
    num_kernels: ClassVar[int] = 8
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    epsilon: float  # of the norm of the output
    num_taps: int = 4
    is_grouped: bool = False
    has_sigmoid_gates: bool = False
    reads: str = "attn_in"
    writes: str = "attn_out"

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_head_dim

    @property
    def query_size(self) -> int:
        return self.value_size

    @property
    def num_channels(self) -> int:
        """Values of queries, keys and values of a token, which the convolution mixes."""
        return 2 * self.key_size + self.value_size

    @property
    def num_decays(self) -> int:
        return self.num_value_heads

    @property
    def projected_size(self) -> int:
        return self.kept_size + self.value_size

    @property
    def mixed_size(self) -> int:
        """A token's values that the recurrence reads: channels, beta and decays of value heads."""
        return self.kept_size

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The state, and the inputs of the convolution that later tokens read."""
        state = self.num_value_heads, self.key_head_dim, self.value_head_dim
        return state, (self.num_taps - 1, self.num_channels)

    @property
    def kept_size(self) -> int:
        """The convolution's inputs, beta and alpha."""
        return self.num_channels + self.num_value_heads + self.num_decays

    def shapes(self, hidden_size: int) -> Shapes:
        count = self.num_value_heads
        gates = (
            {"ssm_ba": 2 * count} if self.is_grouped else {"ssm_beta": count, "ssm_alpha": count}
        )
        rows = {"attn_qkv": self.num_channels, "attn_gate": self.value_size} | gates
        return {f"{name}.weight": (size, hidden_size) for name, size in rows.items()} | {
            "ssm_out.weight": (hidden_size, self.value_size),
            CONV: (self.num_channels, self.num_taps),
            DECAY: (self.num_value_heads,),
            DECAY_BIAS: (self.num_value_heads,),
            f"{DELTA_NORM}.weight": (self.value_head_dim,),
        }

    @property
    def facts(self) -> Mapping[str, str]:
        states = f"{self.num_value_heads} states of {self.key_head_dim} x {self.value_head_dim}"
        return {"delta nets": f"{states}, {self.num_key_heads} for keys"}


@dataclass(frozen=True, kw_only=True)
class KimiDelta(DeltaNet):
    """Kimi Delta Attention (arXiv 2510.26692): a gated delta net with a decay of each row of a
    state, and a query and a key of each head.

        u_C = attn_q x, attn_k x, attn_v x, with a convolution each
        decay_VN = exp(ssm_a_V * softplus(ssm_f_b ssm_f_a x + ssm_dt.bias));  S = diag(decay_N) S
        y_D = attn_output (RMSnorm_M(o; ssm_norm, epsilon) * sigmoid(ssm_g_b ssm_g_a x))

    and the rest as above. The rank of the last two products is N."""

    output: ClassVar[str] = "attn_output"
    matrices: ClassVar[tuple[str, ...]] = (
        *("attn_q", "attn_k", "attn_v", "ssm_beta"),
        *("ssm_f_a", "ssm_g_a"),
    )
    high: ClassVar[tuple[str, ...]] = ("ssm_f_b", "ssm_g_b")
    num_kernels: ClassVar[int] = 12  # nine products
    has_sigmoid_gates: bool = True

    @property
    def num_decays(self) -> int:
        return self.num_value_heads * self.key_head_dim

    def shapes(self, hidden_size: int) -> Shapes:
        """Decays have a second dimension in llama.cpp's files."""
        keys, values, rank = self.key_size, self.value_size, self.key_head_dim
        rows = (keys, keys, values, self.num_value_heads, rank, rank)
        shapes: Shapes = {
            f"{name}.weight": (size, hidden_size)
            for name, size in zip(self.matrices, rows, strict=True)
        }
        for name, size in zip(CONVS, rows, strict=False):
            shapes[name] = (size, self.num_taps)
        for name, size in zip(self.high, (self.num_decays, values), strict=True):
            shapes[f"{name}.weight"] = (size, rank)
        return shapes | {
            f"{self.output}.weight": (hidden_size, values),
            DECAY: (self.num_value_heads, 1),
            DECAY_BIAS: (self.num_decays,),
            f"{DELTA_NORM}.weight": (self.value_head_dim,),
        }

    @property
    def facts(self) -> Mapping[str, str]:
        states = f"{self.num_value_heads} states of {self.key_head_dim} x {self.value_head_dim}"
        return {"Kimi delta attention": states}
