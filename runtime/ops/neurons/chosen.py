"""Computes the experts of a layer that are in main memory and that a router has chosen, in one
native call: the CPU's part of a divided layer in hybrid steps, and experts on the CPU in passes
through torch. In a step the router's result is read from memory, where a GPU may have written it.
The reference is feed_forward.py.

Letters: T tokens, K experts of a token, D model width."""

from ctypes import Structure, addressof, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.kernels.gate import Gate, GateStruct
from hotsplit.runtime.ops.neurons.native import ExpertsStruct, SharedWorkspace, experts_struct
from hotsplit.runtime.ops.structs import MAX_ROWS, Structs, members
from hotsplit.runtime.weights.expert_block import ExpertBlock


class ChosenStruct(Structure):
    _fields_ = [
        ("experts", ExpertsStruct),
        *members(c_void_p, "x routed y workspace"),
        *members(c_int64, "width num_used num_tokens max_tokens gate_bytes up_bytes"),
        ("down_bytes", c_int64),
        ("gate", GateStruct),
    ]


@dataclass(frozen=True, kw_only=True)
class NativeExperts:
    """The native call of a block of experts. Reads `x_D` and `routed`, [T, 2 K], and writes `y_D`,
    which are buffers at fixed addresses; `struct.num_tokens` is the number of their rows in use."""

    struct: ChosenStruct
    reads: tuple[Tensor, ...]
    y_D: Tensor
    kept: tuple[Any, ...]  # keeps alive what the struct points to

    @classmethod
    def of(
        cls,
        block: ExpertBlock,
        gate: Gate,
        num_used: int,
        *,
        x_D: Tensor,
        routed: Tensor,
        y_D: Tensor,
        room: SharedWorkspace,
    ) -> "NativeExperts":
        """Prepares a call, which can run after `room.allocate()`; that checks the sizes. `routed`
        begins with the rows [2 K] of the layer. Raises NotNative if the kernels do not support the
        block."""
        structs = Structs()
        struct = ChosenStruct(
            experts=experts_struct(structs, block),
            x=x_D.data_ptr(),
            routed=routed.data_ptr(),
            y=y_D.data_ptr(),
            width=block.width,
            num_used=num_used,
            num_tokens=1,
            max_tokens=1 if x_D.dim() == 1 else min(MAX_ROWS, len(x_D)),
            gate=gate.struct,
        )
        room.add(struct, library.chosen_bytes)
        return cls(struct=struct, reads=(x_D, routed), y_D=y_D, kept=(*structs.kept, room))

    @property
    def writes(self) -> tuple[Tensor, ...]:
        return (self.y_D,)

    @property
    def node(self) -> tuple[int, int]:
        """(address of a C function, of its argument): a host function for a CUDA graph."""
        return library.chosen_function(), addressof(self.struct)
