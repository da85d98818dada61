"""Second moments of a layer's activity, and the untrained predictor derived from them.

A predictor imitates a map G: the gate matrix if it reads the layer's own input, the linear
regression of the gates on the input of the layer before if it reads that. The truncated SVD of
G M^(1/2), with M = E[x x^T], gives the map of rank R whose output is closest to G's in mean square
over the text (whitened SVD, as in ASVD and SVD-LLM, arXiv 2403.07378).

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
        """Root mean square of each gate's error with the map of this rank, at least 1 % of the
        gate's own. An estimate if the input is that of the layer before, since the regression has
        another bias."""
        kept_F = self.left_FR[:, :rank].square().sum(dim=1)
        floor_F = 1e-4 * self.gate_square_F + 1e-12
        return (self.gate_square_F - kept_F).clamp(min=floor_F).sqrt()


class Moments:
    """Sums over tokens, in float64."""

    def __init__(self, gate_FD: Tensor, gate_bias_F: Tensor | None, *, is_own_input: bool) -> None:
        neurons, width = gate_FD.shape
        self.gate_FD, self.is_own_input = gate_FD, is_own_input
        self.gate_bias_F = gate_FD.new_zeros(neurons) if gate_bias_F is None else gate_bias_F

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=gate_FD.device)

        self.input_DD, self.input_D = zeros(width, width), zeros(width)
        self.gate_square_F, self.gate_F = zeros(neurons), zeros(neurons)
        self.cross_FD = None if is_own_input else zeros(neurons, width)
        self.num_tokens = zeros()

    def sums(self) -> dict[str, Tensor]:
        """The tensors themselves, which are updated in place."""
        found = {
            "input_DD": self.input_DD,
            "input_D": self.input_D,
            "num_tokens": self.num_tokens,
            "gate_square_F": self.gate_square_F,
            "gate_F": self.gate_F,
        }
        return found if self.cross_FD is None else {**found, "cross_FD": self.cross_FD}

    def add(self, x_TD: Tensor, gate_TF: Tensor) -> None:
        gate_TF = gate_TF - self.gate_bias_F
        self.input_DD += (x_TD.T @ x_TD).double()
        self.input_D += x_TD.sum(dim=0).double()
        self.gate_square_F += gate_TF.square().sum(dim=0).double()
        self.gate_F += gate_TF.sum(dim=0).double()
        if self.cross_FD is not None:
            self.cross_FD += (gate_TF.T @ x_TD).double()
        self.num_tokens += len(x_TD)

    def start(self) -> Start:
        count = max(1, int(self.num_tokens))
        moment_DD = self.input_DD / count
        value_D, vector_DD = torch.linalg.eigh(moment_DD)
        root_D = value_D.clamp(min=RIDGE * value_D.max().item() + 1e-30).sqrt()
        map_FD, bias_F = self._map(count)
        u_FR, s_R, right_RD = torch.linalg.svd(map_FD @ (vector_DD * root_D), full_matrices=False)
        return Start(
            map_FD=map_FD.float().contiguous(),
            bias_F=bias_F.float(),
            moment_DD=moment_DD.float().contiguous(),
            whiten_DD=(vector_DD / root_D).float().contiguous(),
            left_FR=(u_FR * s_R).float().contiguous(),
            right_RD=right_RD.float().contiguous(),
            gate_square_F=(self.gate_square_F / count).float(),
        )

    def _map(self, count: int) -> tuple[Tensor, Tensor]:
        """(matrix, bias) in float64: the gate, or its regression on the input."""
        if self.cross_FD is None:
            return self.gate_FD.double(), self.gate_bias_F.double()
        x_D, gate_F = self.input_D / count, self.gate_F / count
        centred_DD = self.input_DD / count - torch.outer(x_D, x_D)
        ridge = 1e-4 * centred_DD.diagonal().mean().clamp(min=1e-30)
        centred_DD = centred_DD + ridge * torch.eye(len(x_D), dtype=x_D.dtype, device=x_D.device)
        cross_FD = self.cross_FD / count - torch.outer(gate_F, x_D)
        map_FD = torch.linalg.solve(centred_DD, cross_FD.T).T
        return map_FD, gate_F - map_FD @ x_D + self.gate_bias_F
