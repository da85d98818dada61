"""Computes the experts of a layer that are in main memory and that a router has chosen, in one native
call: the CPU's part of a divided layer in hybrid steps, and experts on the CPU in passes through torch. In
a step the router's result is read from memory, where a GPU may have written it. The reference is
feed_forward.py.

Letters: T tokens, K experts of a token, D model width."""

from ctypes import Structure, addressof, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.kernels.gate import Gate, GateStruct
from hotsplit.runtime.ops.neurons.native import ExpertsStruct, SharedWorkspace, experts_struct
from hotsplit.runtime.ops.route import Routed
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
    """The native call of a block of experts. Reads `x_D` and `routed`, [T, 2 K], and writes `y_D`, which
    are buffers at fixed addresses; `struct.num_tokens` is the number of their rows in use."""

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
        """Prepares a call, which can run after `room.allocate()`; that checks the sizes. `routed` begins
        with the rows [2 K] of the layer. Raises NotNative if the kernels do not support the block."""
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


def experts_on_cpu(
    block: ExpertBlock, gate: Gate, x_TD: Tensor, routed: Routed
) -> tuple[Tensor, tuple[int, int, int]]:
    """For each token, the weighted sum [T, D] of the outputs of its experts that are in a block on the CPU;
    and the bytes of gate, up and down of the rows that any token needed, each counted once per native call.

    A token's result is bit-identical whatever the other tokens are. Raises NotNative if the kernels do not
    support the block."""
    structs, num_tokens = Structs(), min(len(x_TD), MAX_ROWS)
    x_TD = x_TD.contiguous()
    routed_TR = torch.cat([routed.id_TK.float(), routed.weight_TK], dim=1).cpu()
    # In main memory, whatever the device is that these operations are tried on.
    y_TD = torch.from_numpy(np.empty(x_TD.shape, np.float32))
    struct = ChosenStruct(
        experts=experts_struct(structs, block),
        width=block.width,
        num_used=routed.id_TK.shape[1],
        max_tokens=num_tokens,
        gate=gate.struct,
    )
    struct.workspace = structs.workspace(library.chosen_bytes(struct))
    for start in range(0, len(x_TD), num_tokens):
        struct.num_tokens = min(num_tokens, len(x_TD) - start)
        struct.x, struct.y = x_TD[start:].data_ptr(), y_TD[start:].data_ptr()
        struct.routed = routed_TR[start:].data_ptr()
        library.run_chosen(struct)
    return y_TD, (struct.gate_bytes, struct.up_bytes, struct.down_bytes)
