"""Operations that compute values of a token from values of the same token, with tensors of their
own (position-wise, as Vaswani et al. 2017, arXiv 1706.03762, say of feed-forward layers).

A block says here all that the stages ask of it: its tensors, the sizes of the values that it
writes, what a GPU launches for it. The module `room` of runtime/ops loads and computes it, and its
C++ file registers it by its kind (kernels/cpu/operation.h). No other place names it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

Shapes = dict[str, tuple[int, ...]]
TOKEN = "token"  # the token itself, as a value that an operation outside the layers reads


class PositionWise(ABC):
    """The base of such blocks, which are frozen dataclasses. `kind`: its name in the step program;
    `room`: its module in runtime/ops; `num_kernels`: those that a GPU launches for it; `tables`: of
    its tensors, those of which a token reads one row, which notes on memory call `words`;
    `unquantised`: matrices that llama.cpp's quantiser leaves in 16 or 32 bits."""

    kind: ClassVar[str]
    room: ClassVar[str]
    num_kernels: ClassVar[int] = 0
    tables: ClassVar[tuple[str, ...]] = ()
    words: ClassVar[str] = ""
    unquantised: ClassVar[tuple[str, ...]] = ()

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

    def values(self, hidden_size: int) -> Mapping[str, int]:
        """f32 values of a token, for each value that it writes."""
        return dict.fromkeys(self.outputs, hidden_size)

    def scratch(self, hidden_size: int) -> int:
        """f32 values of a token that a GPU needs beside."""
        return 0

    @property
    def facts(self) -> Mapping[str, str]:
        """What `inspect` says of it."""
        return {}
