"""The kernels of gated delta nets: their contracts, for hotsplit.runtime.kernels.gpu.kernels.

A run is the consecutive rows of one sequence in a pass, run_R3 int32 on the device: first row, number of
rows (0: no run), and the slot of the state before them (-1: none, zeros). `writes_T`, int32: the slot
that takes the state after a row, or -1; no run reads it. Runs do not overlap; a row in none of them is
not computed. Triton takes a power of 2 of runs. A row's result has the same bits in every pass.

Letters: T rows, R runs, S slots, C channels of the convolution (queries, keys and values), J taps, W
values of a row's projections, X of its inputs of the recurrence, V value heads, N width of a key head,
M of a value head."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Sizes:
    key_heads: int
    value_heads: int
    key_width: int
    value_width: int

    @classmethod
    def of(
        cls, projected_TW: Tensor, taps_CJ: Tensor, step_bias_V: Tensor, key_heads: int
    ) -> "Sizes":
        channels, value_heads = len(taps_CJ), len(step_bias_V)
        value_width = (projected_TW.shape[-1] - channels) // value_heads - 2
        return cls(
            key_heads=key_heads,
            value_heads=value_heads,
            key_width=(channels - value_heads * value_width) // (2 * key_heads),
            value_width=value_width,
        )

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_width + self.value_heads * self.value_width

    @property
    def projected(self) -> int:
        """W: the channels, the gates of the output, then for each value head two numbers, of the
        strength of an update and of its step."""
        return self.channels + self.value_heads * (self.value_width + 2)

    @property
    def mixed(self) -> int:
        """X: queries, keys and values, then for each value head the strength and the decay."""
        return self.channels + 2 * self.value_heads


class Convolve(Protocol):
    def __call__(
        self,
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
        """For each row of a run: u = silu(the sum over taps j of taps_j x of the row J-1-j before);
        queries and keys divided by sqrt(|.|^2 + 1e-6) of their head, queries also by sqrt(N);
        strength = sigmoid(its number); decay = exp(rate softplus(its number + step_bias)). The x of
        rows before a run are in its slot of `conv_SJC` [S, J-1, C]; that of the last rows is a part
        of the state."""


class DeltaRule(Protocol):
    def __call__(
        self,
        mixed_TX: Tensor,
        state_SVNM: Tensor,
        run_R3: Tensor,
        writes_T: Tensor,
        out_TVM: Tensor,
        num_key_heads: int,
        *,
        is_grouped: bool,
    ) -> None:
        """For each row of a run, in order, and each value head h, which reads key head h % G or, if
        `is_grouped`, h // (V / G), with its state S: S *= decay; S += k (strength (v - S^T k))^T; out = S^T q."""


class GateNorm(Protocol):
    def __call__(
        self, out_TVM: Tensor, projected_TW: Tensor, weight_M: Tensor, epsilon: float
    ) -> None:
        """out = RMS norm of each head of out, times silu of its gates."""
