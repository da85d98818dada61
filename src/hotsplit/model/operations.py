"""Operations with tensors of their own, each in a room of its own: a block here says all that the
stages ask of it, the module `room` of runtime/ops loads and computes it, and its C++ file registers
it by its kind (kernels/cpu/operation.h). No other place names it.

A position-wise one (Vaswani et al. 2017, arXiv 1706.03762, say so of feed-forward layers) computes
values of a token from values of the same token. One with a state reads earlier tokens through that,
which has a fixed size; a recurrent one stands in attention's place."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import prod
from typing import ClassVar

from hotsplit.model.blocks import Kept, Shapes

TOKEN = "token"  # the token itself, as a value that an operation outside the layers reads


def padded(size: int) -> int:
    """Values up to where another array of a GPU's scratch may begin."""
    return -(-size // 64) * 64


class BlockOp(ABC):
    """The base of such blocks, which are frozen dataclasses. `kind`: its name in the step program;
    `room`: its module in runtime/ops; `num_kernels`: those that a GPU launches for it; `tables`: of
    its tensors, those of which a token reads one row, which notes on memory call `words`;
    `unquantised`: matrices that llama.cpp's quantiser leaves in 16 or 32 bits; `only_on_cpu`: what
    people call an operation of layers without kernels for a GPU."""

    kind: ClassVar[str]
    room: ClassVar[str]
    num_kernels: ClassVar[int] = 0
    tables: ClassVar[tuple[str, ...]] = ()
    words: ClassVar[str] = ""
    unquantised: ClassVar[tuple[str, ...]] = ()
    only_on_cpu: ClassVar[str] = ""

    @classmethod
    def part(cls) -> str:
        """The name of its weights in the step program."""
        return cls.kind.replace(" ", "_")

    @property
    @abstractmethod
    def inputs(self) -> tuple[str, ...]:
        """The values that it reads, in order."""

    @property
    @abstractmethod
    def outputs(self) -> tuple[str, ...]:
        """The values that it writes, in order; one that is an input, too, is changed in place."""

    def shapes(self, hidden_size: int) -> Shapes:
        """The shapes of its tensors, by name within the layer or, outside the layers, in the
        model."""
        return {}

    def scratch(self, hidden_size: int) -> int:
        """f32 values of a token that a GPU needs beside."""
        return 0

    def values(self, hidden_size: int) -> Mapping[str, int]:
        """f32 values of a token, for each value that it writes."""
        return dict.fromkeys(self.outputs, hidden_size)

    @property
    def facts(self) -> Mapping[str, str]:
        """What `inspect` says of it."""
        return {}


class PositionWise(BlockOp):
    """An operation on values of one token."""


class Stateful(BlockOp):
    """An operation that reads earlier tokens through a state."""

    @property
    @abstractmethod
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the f32 tensors that are the state after a token."""

    @property
    @abstractmethod
    def kept_size(self) -> int:
        """Values of a token that its state after the token is made from, besides that before."""

    @property
    def num_state_values(self) -> int:
        return sum(map(prod, self.state_shapes))

    @abstractmethod
    def kept(self, index: int) -> Kept:
        """What layer `index` with this operation keeps of a text."""


class Recurrent(Stateful):
    """A mixer with a state. `output`: the matrix that its last product is with; all others multiply
    its input."""

    output: ClassVar[str]
    reads: str
    writes: str

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.reads,)

    @property
    def outputs(self) -> tuple[str, ...]:
        return (self.writes,)

    @property
    @abstractmethod
    def query_size(self) -> int:
        """Values of a token that the last product reads, as the heads' outputs in attention."""

    @property
    @abstractmethod
    def projected_size(self) -> int:
        """Values of a token's input projections."""

    @property
    def mixed_size(self) -> int:
        """Further values of a token that its kernels on a GPU need."""
        return 0

    def scratch(self, hidden_size: int) -> int:
        sizes = self.projected_size, self.query_size, self.mixed_size
        return sum(map(padded, sizes))

    def kept(self, index: int) -> Kept:
        return Kept(name=f"state.{index}", what="a state")
