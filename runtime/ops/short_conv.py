"""A gated short convolution: loaded, as a struct for C++ (kernels/cpu/short_conv.cpp), as kernels
of a GPU; model/short_conv.py has the formula.

Letters: T tokens, D hidden size, J taps."""

from collections.abc import Iterator, Sequence
from ctypes import Structure, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from hotsplit.model.short_conv import CONV, INPUT, OUTPUT
from hotsplit.model.short_conv import ShortConv as Block
from hotsplit.runtime.ops.device import Launcher
from hotsplit.runtime.ops.loaded_op import RecurrentOp, Slots, in_layer
from hotsplit.runtime.ops.reader import Reader
from hotsplit.runtime.ops.structs import MatrixStruct, Structs, members


class ShortConvStruct(Structure):
    _fields_ = [
        *members(MatrixStruct, "input output"),
        *members(c_void_p, "conv state kept"),
        *members(c_int64, "num_taps num_slots num_kept"),
    ]


@dataclass(frozen=True, kw_only=True)
class ShortConvOp(RecurrentOp):
    block: Block
    conv_DJ: Tensor  # f32

    def struct(self, structs: Structs) -> ShortConvStruct:
        """Has a copy of the convolution's weights, tap by tap."""
        block, (state,) = self.block, self.state.tensors
        return ShortConvStruct(
            input=structs.linear(self.inputs[0]),
            output=structs.linear(self.output),
            conv=structs.vector(self.conv_DJ.t().contiguous(), block.num_taps, block.size),
            state=structs.pointer(state, torch.float32),
            kept=structs.pointer(self.state.kept_RX, torch.float32),
            num_taps=block.num_taps,
            num_slots=len(state),
            num_kept=len(self.state.kept_RX),
        )

    def mix(
        self, on: Launcher, projected: Tensor, heads: Tensor, mixed: Tensor, slots: Slots
    ) -> None:
        (state,) = self.state.tensors
        on.run(on.kernels.convolve_gated, projected, self.conv_DJ, state, *slots, heads)


def load(
    load: Reader, blocks: Sequence[Block], layer: int | None, device: torch.device
) -> Iterator[ShortConvOp]:
    for block in blocks:
        yield ShortConvOp(
            block=block,
            inputs=(load.linear(in_layer(layer, INPUT), device),),
            output=load.linear(in_layer(layer, OUTPUT), device),
            conv_DJ=load.own_vector(in_layer(layer, CONV), device),
            state=load.state(block, device),
        )
