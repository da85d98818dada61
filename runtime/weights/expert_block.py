"""The experts of a layer on one device: a router chooses whole ranges of neurons, so nothing but
the chosen ones is read.

Letters: E experts of the layer, P experts of a block, N rows of an expert's matrix, F neurons of an
expert, D hidden size."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hotsplit.runtime.weights.drive import Arriving
from hotsplit.runtime.weights.matrix import Linear, Matrix
from hotsplit.runtime.weights.neuron_block import NeuronBlock, Role


@dataclass(frozen=True, kw_only=True)
class ExpertMatrices:
    """One matrix of each expert. `data` is [P, N, D] in the type of a float kind, else uint8
    [P, N, row_bytes], and may be a view with gaps between experts."""

    data: Tensor
    kind: str
    width: int
    bias_PN: Tensor | None = None

    @property
    def row_bytes(self) -> int:
        return self.data.shape[2] * self.data.element_size()

    @property
    def expert_bytes(self) -> int:
        """Bytes from the start of an expert's matrix to that of the next."""
        return self.data.stride(0) * self.data.element_size()

    def linear(self, place: int) -> Linear:
        bias_N = None if self.bias_PN is None else self.bias_PN[place]
        matrix = Matrix(data=self.data[place], kind=self.kind, width=self.width)
        return Linear(weight=matrix, bias_N=bias_N)

    @cached_property
    def flat(self) -> Linear:
        """All of them as one, with the rows of one expert after those of another."""
        bias_N = None if self.bias_PN is None else self.bias_PN.flatten()
        matrix = Matrix(data=self.data.flatten(0, 1), kind=self.kind, width=self.width)
        return Linear(weight=matrix, bias_N=bias_N)


@dataclass(frozen=True, kw_only=True)
class ExpertBlock:
    """Some experts of a layer. `down`: [P, F, D], or [P, D, F] if `is_by_output`, as llama.cpp's
    files have it; its bias is added to an expert's output, before the weight of the expert.

    `place_E`: int32 on the block's device, the place of each expert of the layer in the block, -1
    if it is in another; None: the block has all, in order. `arriving`: the matrices are slots,
    experts that are in none are read from a drive, and biases are those of all experts."""

    role: Role
    gate: ExpertMatrices
    up: ExpertMatrices | None  # None: the model has no gates, and `gate` is its up projection
    down: ExpertMatrices
    is_by_output: bool
    place_E: Tensor | None = None
    arriving: Arriving | None = None

    @property
    def num_units(self) -> int:
        """P."""
        return len(self.gate.data)

    @property
    def num_experts(self) -> int:
        """E."""
        return self.gate.data.shape[0] if self.place_E is None else len(self.place_E)

    @property
    def matrices(self) -> list[ExpertMatrices]:
        """Gate, up (if there is one) and down."""
        return [each for each in (self.gate, self.up, self.down) if each is not None]

    @property
    def device(self) -> torch.device:
        return self.gate.data.device

    @property
    def width(self) -> int:
        """D."""
        return self.down.data.shape[1] if self.is_by_output else self.down.width

    @cached_property
    def places(self) -> np.ndarray:
        """The place of each expert of the layer, on the host; below 0: it is not in the block. A
        copy, which a neuron cache changes together with `place_E`."""
        if self.place_E is None:
            return np.arange(self.num_experts)
        return self.place_E.cpu().numpy().copy()

    @cached_property
    def id_F(self) -> Tensor:
        return torch.arange(self.gate.data.shape[1])

    def expert(self, place: int) -> NeuronBlock:
        """The neurons of the expert at a place, as a view."""
        return NeuronBlock(
            role=self.role,
            gate=self.gate.linear(place),
            up=None if self.up is None else self.up.linear(place),
            down=self.down.linear(place).weight,
            id_N=self.id_F,
            row_N=None,
            is_whole=True,
            is_by_output=self.is_by_output,
        )


UnitBlock = NeuronBlock | ExpertBlock
