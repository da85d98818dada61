"""Mamba-2: loaded, as a struct for C++ (kernels/cpu/mamba2.cpp), and as a GPU's kernels;
model/mamba2.py has the formula.

Letters: T tokens, H heads, W values of the projections, X of the recurrence's inputs, I values of
all heads, C channels, J taps."""

from collections.abc import Iterator, Sequence
from ctypes import Structure, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from hotsplit.model.mamba2 import CONV, DECAY, GROUP_NORM, INPUT, OUTPUT, SKIP, STEP_BIAS
from hotsplit.model.mamba2 import Mamba2 as Block
from hotsplit.runtime.ops.device import Launcher
from hotsplit.runtime.ops.loaded_op import RecurrentOp, Slots, in_layer
from hotsplit.runtime.ops.norm import Norm, NormStruct, norm_struct
from hotsplit.runtime.ops.reader import Reader
from hotsplit.runtime.ops.structs import MatrixStruct, Structs, members


class Mamba2Struct(Structure):
    _fields_ = [
        *members(MatrixStruct, "input output"),
        ("norm", NormStruct),
        *members(c_void_p, "conv conv_bias decay step_bias skip state inputs kept"),
        *members(c_int64, "num_heads head_width num_groups state_width num_taps"),
        *members(c_int64, "num_slots num_kept"),
    ]


@dataclass(frozen=True, kw_only=True)
class Mamba2Op(RecurrentOp):
    block: Block
    conv_CJ: Tensor  # f32, as are the others
    conv_bias_C: Tensor
    decay_H: Tensor  # ssm_a: below zero
    step_bias_H: Tensor
    skip_H: Tensor
    norm: Norm | None  # of the values of each group; with the weights of all groups, [I]

    def struct(self, structs: Structs) -> Mamba2Struct:
        """Has a copy of the convolution's weights, tap by tap."""
        block, (state, inputs) = self.block, self.state.tensors
        return Mamba2Struct(
            input=structs.linear(self.inputs[0]),
            output=structs.linear(self.output),
            norm=norm_struct(structs, self.norm, block.query_size),
            conv=structs.vector(self.conv_CJ.t().contiguous(), block.num_taps, block.num_channels),
            conv_bias=structs.vector(self.conv_bias_C, block.num_channels),
            decay=structs.vector(self.decay_H, block.num_heads),
            step_bias=structs.vector(self.step_bias_H, block.num_heads),
            skip=structs.vector(self.skip_H, block.num_heads),
            state=structs.pointer(state, torch.float32),
            inputs=structs.pointer(inputs, torch.float32),
            kept=structs.pointer(self.state.kept_RX, torch.float32),
            num_heads=block.num_heads,
            head_width=block.head_dim,
            num_groups=block.num_groups,
            state_width=block.state_size,
            num_taps=block.num_taps,
            num_slots=len(state),
            num_kept=len(self.state.kept_RX),
        )

    def mix(
        self, on: Launcher, projected: Tensor, heads: Tensor, mixed: Tensor, slots: Slots
    ) -> None:
        block, kernels, (state, conv) = self.block, on.kernels, self.state.tensors
        weights = self.conv_CJ, self.conv_bias_C, self.step_bias_H, self.decay_H
        out_THP = heads.unflatten(-1, (block.num_heads, block.head_dim))
        on.run(kernels.convolve_channels, projected, *weights, conv, *slots, mixed)
        on.run(kernels.scan_states, mixed, self.skip_H, state, *slots, out_THP, block.num_groups)
        norm = self.norm
        weight_I, epsilon = (None, 0.0) if norm is None else (norm.weight_D, norm.epsilon)
        on.run(kernels.gate_groups, heads, projected, weight_I, epsilon, block.num_groups)


def load(
    load: Reader, blocks: Sequence[Block], layer: int | None, device: torch.device
) -> Iterator[Mamba2Op]:
    for block in blocks:
        names = (f"{CONV}.weight", f"{CONV}.bias", DECAY, STEP_BIAS, SKIP)
        conv_CJ, conv_bias_C, decay_H1, step_bias_H, skip_H1 = (
            load.own_vector(in_layer(layer, name), device) for name in names
        )
        norm = None
        if block.epsilon is not None:
            weight_GM = load.own_vector(in_layer(layer, f"{GROUP_NORM}.weight"), device)
            norm = Norm(weight_D=weight_GM.flatten(), bias_D=None, epsilon=block.epsilon)
        yield Mamba2Op(
            block=block,
            inputs=(load.linear(in_layer(layer, INPUT), device),),
            output=load.linear(in_layer(layer, OUTPUT), device),
            conv_CJ=conv_CJ,
            conv_bias_C=conv_bias_C,
            decay_H=decay_H1.flatten(),
            step_bias_H=step_bias_H,
            skip_H=skip_H1.flatten(),
            norm=norm,
            state=load.state(block, device),
        )
