"""A block of neurons of a layer on one device.

Letters: T tokens, A active neurons, N neurons of a block, or slots, F neurons of a layer, C cold
neurons."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from hotsplit.runtime.weights.matrix import Linear, Matrix

# "hot": the plan's hot neurons, and all neurons of undivided layers; "cold": on the CPU, while the
# rest of the layer may be elsewhere.
Role = Literal["hot", "cold"]


@dataclass(frozen=True, kw_only=True)
class NeuronBlock:
    """Some neurons of a layer on one device.

    `row_N`: their rows in the matrices; None if the block has matrices of its own, in the order of
    `id_N`."""

    role: Role
    gate: Linear
    up: Linear | None  # None: the model has no gates, and `gate` is its up projection
    # Neuron-major: row j is what neuron j adds. If `is_by_output`, [D, N] as in llama.cpp's files,
    # of a layer that computes all neurons.
    down: Matrix
    # On the device of the block. int32 in a GPU's slab, and for the cold neurons of a layer with
    # slots there; otherwise int64.
    id_N: Tensor
    row_N: Tensor | None
    is_whole: bool = False  # all neurons of the layer, in order
    is_by_output: bool = False

    @property
    def num_units(self) -> int:
        """N."""
        return len(self.id_N)

    @property
    def device(self) -> torch.device:
        return self.gate.weight.data.device

    @property
    def matrices(self) -> list[Matrix]:
        """Gate, up (if there is one) and down."""
        up = [] if self.up is None else [self.up.weight]
        return [self.gate.weight, *up, self.down]

    @property
    def tensors(self) -> list[Tensor]:
        """The data of its matrices and its biases, with a row or a value per neuron."""
        linears = [self.gate] if self.up is None else [self.gate, self.up]
        biases = [linear.bias_N for linear in linears if linear.bias_N is not None]
        return [*(matrix.data for matrix in self.matrices), *biases]

    @property
    def width(self) -> int:
        """D."""
        return self.down.num_rows if self.is_by_output else self.down.width

    def part(self, start: int, stop: int) -> "NeuronBlock":
        """A range of consecutive neurons, as a view."""
        assert not self.is_by_output
        block = replace(self, id_N=self.id_N[start:stop], is_whole=False)
        if self.row_N is not None:
            return replace(block, row_N=self.row_N[start:stop])
        return replace(
            block,
            gate=self.gate.part(start, stop),
            up=None if self.up is None else self.up.part(start, stop),
            down=self.down.part(start, stop),
        )


class HasRole(Protocol):
    """A block of units."""

    @property
    def role(self) -> Role: ...


B = TypeVar("B", bound=HasRole)


def by_role(blocks: Sequence[B]) -> tuple[B | None, B | None]:
    """The hot and the cold block of a layer; None for one that it does not have."""
    found = {block.role: block for block in blocks}
    assert len(found) == len(blocks), [block.role for block in blocks]
    return found.get("hot"), found.get("cold")


def apart(hot: NeuronBlock, cold: NeuronBlock, cold_C: np.ndarray) -> tuple[NeuronBlock, ...]:
    """The hot block, whose rows are the slots on a GPU, and the cold one, which refers to rows of
    the whole layer. Ids are int32; the cold block's ids and rows are one tensor, which swaps change
    in place."""
    id_C = torch.from_numpy(cold_C.astype(np.int32))
    hot_id_N = hot.id_N.to(torch.int32)
    return replace(hot, id_N=hot_id_N), replace(cold, id_N=id_C, row_N=id_C)
