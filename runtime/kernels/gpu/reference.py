"""Parts of the GPU kernels' references in float64 with torch: slow and plain.

Letters: see kernels.py."""

import torch
from torch import Tensor

from hotsplit.model.neurons import SMOOTH
from hotsplit.model.spec import Activation
from hotsplit.runtime.kernels import stored
from hotsplit.runtime.kernels.gate import Gate
from hotsplit.runtime.kernels.stored import StoredMatrix


def positions_of(cache_BPKW: Tensor, block_N: Tensor, count: int) -> Tensor:
    """At least the first `count` positions [C, K, W] of a sequence with these blocks."""
    used = -(-count // cache_BPKW.shape[1])
    return cache_BPKW[block_N[:used].long()].flatten(0, 1)


def rows_of(matrix: StoredMatrix, index_A: Tensor | None = None) -> Tensor:
    """f64 [A, D]."""
    if index_A is None:
        return stored.unpack(matrix.data, matrix.kind).double()
    return stored.unpack_chosen(matrix.data, matrix.kind, index_A.long()).double()


def product(matrix: StoredMatrix, bias_N: Tensor | None, x_D: Tensor) -> Tensor:
    """f64 [N]: W x + bias."""
    y_N = rows_of(matrix) @ x_D.double()
    return y_N if bias_N is None else y_N + bias_N


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x * (x.square().mean(dim=-1, keepdim=True) + epsilon).rsqrt() * weight


def soft_capped(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)


def activated(gate_N: Tensor, rule: Gate) -> tuple[Tensor, Tensor]:
    """(value, whether it fires)."""
    if rule.activation in SMOOTH:
        value_N = _smooth(gate_N, rule.activation)
        return value_N, value_N != 0
    fires_N = ~(gate_N <= (rule.threshold if rule.activation == "fatrelu" else 0.0))
    value_N = torch.where(fires_N, gate_N, 0.0)
    return value_N**2 if rule.activation == "relu2" else value_N, fires_N


def up_factor(up: Tensor, activation: Activation) -> Tensor:
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
