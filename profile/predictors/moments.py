"""Second moments of a layer's activity, and the untrained predictor derived from them.

A predictor imitates a map G, the gate matrix. The truncated SVD of G M^(1/2), with M = E[x x^T],
gives the map of rank R whose output is closest to G's in mean square over the text (whitened SVD,
as in ASVD and SVD-LLM, arXiv 2403.07378).

Letters: T tokens, D width of the input, F neurons, R rank."""

from dataclasses import dataclass

import torch
from torch import Tensor

RIDGE = 1e-6  # floor of M's eigenvalues, relative to the largest: for directions absent in the text


@dataclass(frozen=True, kw_only=True)
class Start:
    """z = map x + bias imitates the gate; `left_FR` and `right_RD` are the SVD of map M^(1/2)."""

    map_FD: Tensor
    bias_F: Tensor
    moment_DD: Tensor
    whiten_DD: Tensor  # M^(-1/2), applied first: x @ whiten_DD @ right_RD.T
    left_FR: Tensor  # U S
    right_RD: Tensor
    gate_square_F: Tensor  # E[(gate - b)^2] with the gate's own bias b

    def residual_F(self, rank: int) -> Tensor:
        """Root mean square of each gate's error at this rank, at least 1 % of its own."""
        kept_F = self.left_FR[:, :rank].square().sum(dim=1)
        floor_F = 1e-4 * self.gate_square_F + 1e-12
        return (self.gate_square_F - kept_F).clamp(min=floor_F).sqrt()


class Moments:
    """Sums over tokens, in float64."""

    def __init__(self, gate_FD: Tensor, gate_bias_F: Tensor | None) -> None:
        neurons, width = gate_FD.shape
        self.gate_FD = gate_FD
        self.gate_bias_F = gate_FD.new_zeros(neurons) if gate_bias_F is None else gate_bias_F

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=gate_FD.device)

        self.input_DD, self.gate_square_F = zeros(width, width), zeros(neurons)
        self.num_tokens = zeros()

    def sums(self) -> dict[str, Tensor]:
        """The tensors themselves, which are updated in place."""
        return {
            "input_DD": self.input_DD,
            "num_tokens": self.num_tokens,
            "gate_square_F": self.gate_square_F,
        }

    def add(self, x_TD: Tensor, gate_TF: Tensor) -> None:
        self.input_DD += (x_TD.T @ x_TD).double()
        self.gate_square_F += (gate_TF - self.gate_bias_F).square().sum(dim=0).double()
        self.num_tokens += len(x_TD)

    def start(self) -> Start:
        count = max(1, int(self.num_tokens))
        moment_DD = self.input_DD / count
        value_D, vector_DD = torch.linalg.eigh(moment_DD)
        root_D = value_D.clamp(min=RIDGE * value_D.max().item() + 1e-30).sqrt()
        map_FD = self.gate_FD.double()
        u_FR, s_R, right_RD = torch.linalg.svd(map_FD @ (vector_DD * root_D), full_matrices=False)
        return Start(
            map_FD=map_FD.float().contiguous(),
            bias_F=self.gate_bias_F.float(),
            moment_DD=moment_DD.float().contiguous(),
            whiten_DD=(vector_DD / root_D).float().contiguous(),
            left_FR=(u_FR * s_R).float().contiguous(),
            right_RD=right_RD.float().contiguous(),
            gate_square_F=(self.gate_square_F / count).float(),
        )
