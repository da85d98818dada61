"""Mamba-2 as a block of a layer (hotsplit.model.spec)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from hotsplit.model.blocks import Shapes
from hotsplit.model.operations import Recurrent

# llama.cpp's names.
INPUT, CONV, DECAY, STEP_BIAS = "ssm_in", "ssm_conv1d", "ssm_a", "ssm_dt.bias"
SKIP, GROUP_NORM, OUTPUT = "ssm_d", "ssm_norm", "ssm_out"


@dataclass(frozen=True, kw_only=True)
class Mamba2(Recurrent):
    """Mamba-2 (Dao and Gu 2024, arXiv 2405.21060): a state S_NP of each head, which decays, to
    which a token adds and which it reads, instead of keys and values of all tokens.

        z_HP, u_C, s_H = ssm_in x
        u_C = silu(bias_C + sum over taps j of conv_CJ[j] * u_C of the token J - 1 - j before)
        x_HP, b_GN, c_GN = u_C;  step_H = softplus(s + ssm_dt.bias)
        S = exp(ssm_a * step) S + b (step * x)^T;  y_P = S^T c + ssm_d * x, of each head
        y_D = ssm_out norm(y_HP * silu(z)), an RMS norm of the values of each group

    Inputs before the first token, and the first state, are zeros. Head h reads group h // (H / G).
    Without an `epsilon` there is no norm (Falcon-H1).

    Letters: H heads, P head width, G groups, N state width, C channels, J taps."""

    kind: ClassVar[str] = "mamba2"
    room: ClassVar[str] = "mamba2"
    output: ClassVar[str] = OUTPUT
    # Two products; the convolution; the states; the gates with the norm.
    num_kernels: ClassVar[int] = 5
    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    num_taps: int = 4
    epsilon: float | None
    reads: str = "attn_in"
    writes: str = "attn_out"

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """Values of a token that the convolution mixes: x, b and c."""
        return self.query_size + 2 * self.num_groups * self.state_size

    @property
    def projected_size(self) -> int:
        return self.query_size + self.kept_size

    @property
    def mixed_size(self) -> int:
        """A token's values that the recurrence reads: channels, step and decay of each head."""
        return self.num_channels + 2 * self.num_heads

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The state, and the inputs of the convolution that later tokens read."""
        state = self.num_heads, self.state_size, self.head_dim
        return state, (self.num_taps - 1, self.num_channels)

    @property
    def kept_size(self) -> int:
        """The convolution's inputs and the steps."""
        return self.num_channels + self.num_heads

    def shapes(self, hidden_size: int) -> Shapes:
        """Vectors of heads have a second dimension in llama.cpp's files, the norm one of groups."""
        norm = (self.num_groups, self.query_size // self.num_groups)
        return {
            f"{INPUT}.weight": (self.projected_size, hidden_size),
            f"{CONV}.weight": (self.num_channels, self.num_taps),
            f"{CONV}.bias": (self.num_channels,),
            STEP_BIAS: (self.num_heads,),
            DECAY: (self.num_heads, 1),
            SKIP: (self.num_heads, 1),
            **({} if self.epsilon is None else {f"{GROUP_NORM}.weight": norm}),
            f"{OUTPUT}.weight": (hidden_size, self.query_size),
        }

    @property
    def facts(self) -> Mapping[str, str]:
        states = f"{self.num_heads} states of {self.state_size} x {self.head_dim}"
        groups = f"{self.num_groups} group{'s' if self.num_groups > 1 else ''}"
        return {"Mamba-2": f"{states}, {groups}"}
