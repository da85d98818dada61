"""Computes the units of one block, neurons or the experts that a router has chosen, from the normed
input to their output, for one or several tokens per native call: the CPU's part of a divided layer
in hybrid steps and passes.

If neurons are named, a call reads one bit per neuron and token, in the layout that a predictor on a
GPU writes; the router's result is read from memory, too. Any thread may make a call. The reference
is feed_forward.py.

Letters: T tokens, D model width, F neurons of the layer, N of the block, W words of F bits, K
experts of a token."""

from collections.abc import Sequence
from ctypes import POINTER, Structure, addressof, c_int32, c_int64, c_void_p, pointer
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hotsplit.runtime.device.streams import HostNode
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.kernels.gate import Gate, GateStruct
from hotsplit.runtime.ops.structs import MAX_ROWS, MatrixStruct, Structs, members
from hotsplit.runtime.weights.drive import Arriving, DriveStruct
from hotsplit.runtime.weights.expert_block import ExpertBlock, UnitBlock
from hotsplit.runtime.weights.neuron_block import NeuronBlock


class BlockStruct(Structure):
    _fields_ = [
        *members(MatrixStruct, "gate up down"),
        *members(c_void_p, "id row"),
        ("num_neurons", c_int64),
        ("is_by_output", c_int32),
    ]


class StackStruct(Structure):
    _fields_ = [
        ("matrix", MatrixStruct),
        *members(c_int64, "offset stride"),
        *members(c_int32, "file unused"),
    ]


class ArrivingStruct(Structure):
    _fields_ = [
        ("drive", POINTER(DriveStruct)),
        *members(StackStruct, "gate up down"),
        *members(c_void_p, "place expert worth"),
        *members(c_int64, "num_slots layer"),
    ]


class ExpertsStruct(Structure):
    _fields_ = [
        ("first", BlockStruct),
        *members(c_void_p, "down_bias place"),
        *members(c_int64, "gate_bytes up_bytes down_bytes num_experts"),
        ("arriving", POINTER(ArrivingStruct)),
    ]


class FeedForwardStruct(Structure):
    """The neurons of a layer in a step."""

    _fields_ = [
        ("down_bias", c_void_p),
        ("block", POINTER(BlockStruct)),
        ("experts", POINTER(ExpertsStruct)),
        *members(c_int64, "num_blocks num_neurons"),
        ("gate", GateStruct),
        ("unused", c_int32),
    ]


def block_struct(structs: Structs, block: NeuronBlock) -> BlockStruct:
    return BlockStruct(
        gate=structs.linear(block.gate),
        up=MatrixStruct() if block.up is None else structs.linear(block.up),
        down=structs.matrix(block.down),
        id=None if block.is_whole else structs.indices(block.id_N),
        row=None if block.row_N is None else structs.indices(block.row_N),
        num_neurons=len(block.id_N),
        is_by_output=block.is_by_output,
    )


def _experts_struct(structs: Structs, block: ExpertBlock) -> ExpertsStruct:
    """The struct of a block of experts."""
    stacks = (block.gate, block.up, block.down)
    gate_bytes, up_bytes, down_bytes = (0 if m is None else m.expert_bytes for m in stacks)
    structs.kept.append([None if m is None else m.data for m in stacks])
    num_biases = len(block.down.data) if block.arriving is None else block.num_experts
    return ExpertsStruct(
        first=block_struct(structs, block.expert(0)),
        down_bias=structs.vector(block.down.bias_PN, num_biases, block.width),
        place=None if block.place_E is None else structs.pointer(block.place_E, torch.int32),
        gate_bytes=gate_bytes,
        up_bytes=up_bytes,
        down_bytes=down_bytes,
        num_experts=block.num_experts,
        arriving=None if block.arriving is None else _arriving_struct(structs, block.arriving),
    )


def _arriving_struct(structs: Structs, arriving: Arriving) -> Any:
    """A pointer to the struct of a layer's slots."""
    gate, *up, down = (
        StackStruct(
            matrix=MatrixStruct(
                num_rows=stack.num_rows,
                num_columns=stack.width,
                stride=stack.row_bytes,
                kind=library.kind_code(stack.kind),
            ),
            offset=stack.offset,
            stride=stack.stride,
            file=stack.file,
        )
        for stack in arriving.stacks
    )
    own = ArrivingStruct(
        drive=pointer(arriving.drive.struct),
        gate=gate,
        up=up[0] if up else StackStruct(),
        down=down,
        place=structs.pointer(arriving.place_E, torch.int32),
        expert=structs.pointer(arriving.expert_S, torch.int32),
        worth=structs.pointer(arriving.worth_E, torch.float32),
        num_slots=len(arriving.expert_S),
        layer=arriving.layer,
    )
    structs.kept.append((own, arriving.drive))
    return pointer(own)


def feed_forward_struct(
    structs: Structs, gate: Gate, num_neurons: int, blocks: Sequence[UnitBlock]
) -> FeedForwardStruct:
    """The struct of a layer with these blocks, without the bias of down. `num_neurons`: of the
    layer, or of one of its experts."""
    neurons = [block_struct(structs, each) for each in blocks if isinstance(each, NeuronBlock)]
    experts = [_experts_struct(structs, each) for each in blocks if isinstance(each, ExpertBlock)]
    return FeedForwardStruct(
        block=structs.array(BlockStruct, neurons) if neurons else None,
        experts=structs.array(ExpertsStruct, experts) if experts else None,
        num_blocks=len(blocks),
        num_neurons=num_neurons,
        gate=gate.struct,
    )


class NeuronsStruct(Structure):
    _fields_ = [
        ("block", BlockStruct),
        *members(c_void_p, "experts x named routed y fired workspace"),
        *members(c_int64, "width num_neurons num_used num_tokens max_tokens"),
        *members(c_int64, "gate_bytes up_bytes down_bytes"),
        ("gate", GateStruct),
    ]


class SharedWorkspace:
    """Scratch memory shared by blocks that never run concurrently."""

    def __init__(self) -> None:
        self._structs: list[NeuronsStruct] = []
        self._kept = Structs()

    def add(self, struct: NeuronsStruct) -> None:
        self._structs.append(struct)

    def allocate(self) -> None:
        """Allocates the memory; call it after the last `add`. Raises NotNative if a block is
        inconsistent."""
        sizes = [library.neurons_bytes(struct) for struct in self._structs]
        if not sizes:
            return
        start = self._kept.workspace(max(sizes) if min(sizes) >= 0 else -1)
        for struct in self._structs:
            struct.workspace = start


@dataclass(frozen=True, kw_only=True)
class NativeNeurons:
    """One block's native call, which `node` makes. Reads `x_D` and the bits of `named_W`, or the
    router's result, and writes `y_D`, which are buffers at fixed addresses; `struct.num_tokens` is
    the number of their rows in use. `struct` also counts the bytes of the rows needed in all calls
    so far; a row counts once per call."""

    struct: NeuronsStruct
    node: HostNode
    x_D: Tensor
    y_D: Tensor
    named_W: Tensor | None = None  # int32 [ceil(F / 32)], bit j % 32 of word j / 32 for neuron j

    @classmethod
    def of(
        cls,
        block: UnitBlock,
        gate: Gate,
        count: int,
        *,
        x_D: Tensor | None = None,
        named_W: Tensor | None = None,
        is_named: bool = False,
        routed: Tensor | None = None,
        y_D: Tensor | None = None,
        room: SharedWorkspace | None = None,
        fired_W: Tensor | None = None,
    ) -> "NativeNeurons":
        """Prepares a call. `count` is the layer's F, or of experts K. `named_W`: the bits of the
        neurons that are computed; None: all, or, if the neurons are named, bits that are allocated,
        as are `x_D` and `y_D` if not given. `routed`, of experts: begins with the rows [2 K] of the
        layer. `fired_W`: int32, takes the bits of the neurons whose row of `down` is used. Raises
        NotNative if the kernels do not support the block, and ImportError if they are not built.

        With a `room`, the call can run only after `room.allocate()`, which then checks the block's
        sizes and that the kernels are built."""
        structs = Structs()
        x_D = torch.zeros(block.width) if x_D is None else x_D
        y_D = torch.zeros(block.width) if y_D is None else y_D
        if is_named and named_W is None:
            named_W = torch.zeros(-(-count // 32), dtype=torch.int32)
        struct = NeuronsStruct(
            x=x_D.data_ptr(),
            named=None if named_W is None else named_W.data_ptr(),
            routed=None if routed is None else routed.data_ptr(),
            y=y_D.data_ptr(),
            fired=None if fired_W is None else fired_W.data_ptr(),
            width=block.width,
            num_tokens=1,
            max_tokens=1 if x_D.dim() == 1 else min(MAX_ROWS, len(x_D)),
            gate=gate.struct,
        )
        if isinstance(block, ExpertBlock):
            struct.experts = structs.address(_experts_struct(structs, block))
            struct.num_used = count
        else:
            struct.block, struct.num_neurons = block_struct(structs, block), count
        if room is None:
            struct.workspace = structs.workspace(library.neurons_bytes(struct))
        else:
            room.add(struct)
        node = HostNode(
            function=library.address_of("hs_neurons"),
            argument=addressof(struct),
            reads=tuple(each for each in (x_D, named_W, routed) if each is not None),
            writes=(y_D,) if fired_W is None else (y_D, fired_W),
            kept=(struct, *structs.kept, room),
        )
        return cls(struct=struct, node=node, x_D=x_D, y_D=y_D, named_W=named_W)
