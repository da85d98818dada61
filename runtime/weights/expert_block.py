"""The neurons of the experts of a layer, in the mapped file: a router chooses whole ranges of them, so
nothing but the chosen ones is read.

Letters: E experts, N rows of an expert's matrix, F neurons of an expert, D hidden size."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hotsplit.runtime.weights.matrix import Linear, Matrix
from hotsplit.runtime.weights.neuron_block import NeuronBlock


@dataclass(frozen=True, kw_only=True)
class ExpertMatrices:
    """One matrix of each expert. `data` is [E, N, D] in the type of a float kind, else uint8
    [E, N, row_bytes], and may be a view with gaps between experts."""

    data: Tensor
    kind: str
    width: int
    bias_EN: Tensor | None = None

    @property
    def row_bytes(self) -> int:
        return self.data.shape[2] * self.data.element_size()

    @property
    def expert_bytes(self) -> int:
        """Bytes from the start of an expert's matrix to that of the next."""
        return self.data.stride(0) * self.data.element_size()

    def linear(self, expert: int) -> Linear:
        bias_N = None if self.bias_EN is None else self.bias_EN[expert]
        matrix = Matrix(data=self.data[expert], kind=self.kind, width=self.width)
        return Linear(weight=matrix, bias_N=bias_N)


@dataclass(frozen=True, kw_only=True)
class ExpertBlock:
    """All experts of a layer. `down`: [E, F, D], or [E, D, F] if `is_by_output`, as llama.cpp's files
    have it; its bias is added to an expert's output, before the weight of the expert."""

    gate: ExpertMatrices
    up: ExpertMatrices | None  # None: the model has no gates, and `gate` is its up projection
    down: ExpertMatrices
    is_by_output: bool

    @property
    def num_experts(self) -> int:
        return self.gate.data.shape[0]

    @cached_property
    def id_F(self) -> Tensor:
        return torch.arange(self.gate.data.shape[1])

    def expert(self, number: int) -> NeuronBlock:
        """The neurons of one expert, as a view."""
        return NeuronBlock(
            role="hot",
            gate=self.gate.linear(number),
            up=None if self.up is None else self.up.linear(number),
            down=self.down.linear(number).weight,
            id_N=self.id_F,
            row_N=None,
            is_whole=True,
            is_by_output=self.is_by_output,
        )
