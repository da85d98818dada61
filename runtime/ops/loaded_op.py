"""Loaded operations with rooms of their own (model/operations.py), in or outside the layers. The
module that a block names as its room has a function

    load(load: Reader, blocks: Sequence[Block], layer: int | None, device: torch.device) ->
    Iterable[LoadedOp]

for the blocks that name it of one layer or, without one, outside the layers, in order."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from ctypes import Structure
from dataclasses import dataclass
from importlib import import_module
from math import prod
from typing import Any

import torch
from torch import Tensor

from hotsplit.model.operations import BlockOp, Recurrent, Stateful, padded
from hotsplit.runtime.cache.state_slots import LayerState
from hotsplit.runtime.ops.device import Launcher
from hotsplit.runtime.ops.reader import Reader
from hotsplit.runtime.ops.structs import Structs
from hotsplit.runtime.weights.matrix import Linear


class LoadedOp(ABC):
    """A loaded operation on its device."""

    block: Any  # its BlockOp

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The matrices that it multiplies by."""
        return ()

    @abstractmethod
    def struct(self, structs: Structs) -> Structure:
        """Its weights for C++, as the struct that mirrors that of its C++ file."""

    def launch(
        self, on: Launcher, read: Sequence[Tensor], written: Sequence[Tensor], scratch: Tensor
    ) -> None:
        """Submits its kernels. `read`, `written`: buffers of its inputs and outputs, [T, size], or
        [size] for one row; `scratch`: flat memory for `block.scratch` values of each row."""
        raise NotImplementedError(f"{self.block.kind} on a GPU")


# The runs of a pass, int32 [R, 3], and the slots of its rows, int32 [T]: see kernels.gpu.delta.
Slots = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class StatefulOp(LoadedOp):
    """A loaded operation with a state."""

    block: Stateful
    state: LayerState


@dataclass(frozen=True, kw_only=True)
class RecurrentOp(StatefulOp):
    """A loaded mixer with a state: products with the same input, a recurrence, and a product."""

    block: Recurrent
    inputs: tuple[Linear, ...]
    output: Linear

    @property
    def linears(self) -> tuple[Linear, ...]:
        return *self.inputs, self.output

    def project(self, on: Launcher, x: Any, projected: Tensor, free: Tensor) -> None:
        """Submits the products with the input, to `projected` [T, W]. `free`: memory for
        `mixed_size` values of each row, which nothing else uses before `mix`."""
        on.project(self.inputs, x, projected)

    @abstractmethod
    def mix(
        self, on: Launcher, projected: Tensor, heads: Tensor, mixed: Tensor, slots: Slots
    ) -> None:
        """Submits the kernels between the products: from `projected` [T, W] to `heads` [T,
        query_size], with memory for `mixed_size` values of each row."""

    def launch_rows(
        self, on: Launcher, x: Any, y_TD: Tensor, scratch: Tensor, slots: Slots
    ) -> None:
        """`launch`, with the slots of the rows' states. In a pass x may be `tiles.Rounded`."""
        sizes = self.block.projected_size, self.block.query_size, self.block.mixed_size
        rooms = list[Tensor]()
        for size in sizes:
            rooms.append(carved(scratch, y_TD, size))
            scratch = scratch.flatten()[padded(rooms[-1].numel()) :]
        projected, heads, mixed = rooms
        self.project(on, x, projected, mixed)
        self.mix(on, projected, heads, mixed, slots)
        on.dot(self.output, heads, y_TD)


def load_all(
    load: Reader, blocks: Sequence[BlockOp], layer: int | None, device: torch.device
) -> Mapping[str, LoadedOp]:
    """The operations of a layer, or outside the layers, by kind, in order; each is of another
    kind."""
    assert len({block.kind for block in blocks}) == len(blocks), blocks
    found: dict[str, LoadedOp] = {}
    for room in dict.fromkeys(block.room for block in blocks):
        own = [block for block in blocks if block.room == room]
        module = import_module(f"hotsplit.runtime.ops.{room}")
        found |= {each.block.kind: each for each in module.load(load, own, layer, device)}
    return {block.kind: found[block.kind] for block in blocks}


def in_layer(layer: int | None, name: str) -> str:
    """The name in the model of what has this name within the layer; None: outside the layers."""
    return name if layer is None else f"blk.{layer}.{name}"


def carved(scratch: Tensor, like: Tensor, size: int) -> Tensor:
    """The beginning of flat memory as [T, size], or [size], with the rows of `like`."""
    shape = (*like.shape[:-1], size)
    return scratch.flatten()[: prod(shape)].view(shape)
