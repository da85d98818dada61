"""A gated delta net: loaded, as a struct for C++ (kernels/cpu/delta.cpp), and as a GPU's kernels;
model/delta_net.py has the formula.

Letters: T tokens, V value heads, M value width, W values of the projections, X of the recurrence's
inputs, C channels, J taps."""

from collections.abc import Iterator, Sequence
from ctypes import Structure, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hotsplit.files.gguf_file import chosen_rows
from hotsplit.model.blocks import Norm as NormSpec
from hotsplit.model.delta_net import CONV, DECAY, DECAY_BIAS, DELTA_NORM
from hotsplit.model.delta_net import DeltaNet as Block
from hotsplit.runtime.ops.device import Launcher
from hotsplit.runtime.ops.loaded_op import RecurrentOp, Slots, in_layer
from hotsplit.runtime.ops.norm import Norm, NormStruct, norm_struct
from hotsplit.runtime.ops.reader import Reader
from hotsplit.runtime.ops.structs import MatrixStruct, Structs, members
from hotsplit.runtime.weights.matrix import Linear


class DeltaStruct(Structure):
    _fields_ = [
        ("input", MatrixStruct * 4),
        ("output", MatrixStruct),
        ("norm", NormStruct),
        *members(c_void_p, "conv decay step_bias state inputs kept"),
        *members(c_int64, "num_key_heads num_value_heads key_width value_width num_taps"),
        *members(c_int64, "num_slots num_kept"),
        *members(c_int32, "is_grouped unused"),
    ]


@dataclass(frozen=True, kw_only=True)
class DeltaOp(RecurrentOp):
    """The inputs of the matrices are the channels, the output's gates, beta and alpha; the last two
    have a row for each value head, in order."""

    block: Block
    conv_CJ: Tensor  # f32, as are the others
    decay_V: Tensor  # ssm_a: below zero
    decay_bias_V: Tensor
    norm: Norm  # of each head's output

    def struct(self, structs: Structs) -> DeltaStruct:
        """Has a copy of the convolution's weights, tap by tap."""
        block, (state, inputs) = self.block, self.state.tensors
        return DeltaStruct(
            input=(MatrixStruct * 4)(*map(structs.linear, self.inputs)),
            output=structs.linear(self.output),
            norm=norm_struct(structs, self.norm, block.value_head_dim),
            conv=structs.vector(self.conv_CJ.t().contiguous(), block.num_taps, block.num_channels),
            decay=structs.vector(self.decay_V, block.num_value_heads),
            step_bias=structs.vector(self.decay_bias_V, block.num_value_heads),
            state=structs.pointer(state, torch.float32),
            inputs=structs.pointer(inputs, torch.float32),
            kept=structs.pointer(self.state.kept_RX, torch.float32),
            num_key_heads=block.num_key_heads,
            num_value_heads=block.num_value_heads,
            key_width=block.key_head_dim,
            value_width=block.value_head_dim,
            num_taps=block.num_taps,
            num_slots=len(state),
            num_kept=len(self.state.kept_RX),
            is_grouped=block.is_grouped,
        )

    def mix(
        self, on: Launcher, projected: Tensor, heads: Tensor, mixed: Tensor, slots: Slots
    ) -> None:
        block, kernels, (state, conv) = self.block, on.kernels, self.state.tensors
        weights, key_heads = (self.conv_CJ, self.decay_bias_V, self.decay_V), block.num_key_heads
        out_TVM = heads.unflatten(-1, (block.num_value_heads, block.value_head_dim))
        delta = mixed, state, *slots, out_TVM, key_heads
        on.run(kernels.convolve, projected, *weights, conv, *slots, mixed, key_heads)
        on.run(kernels.delta_rule, *delta, is_grouped=block.is_grouped)
        on.run(kernels.gate_norm, out_TVM, projected, self.norm.weight_D, self.norm.epsilon)


def load(
    load: Reader, blocks: Sequence[Block], layer: int | None, device: torch.device
) -> Iterator[DeltaOp]:
    for block in blocks:
        names = ("attn_qkv", "attn_gate", *(() if block.is_grouped else ("ssm_beta", "ssm_alpha")))
        inputs = [load.linear(in_layer(layer, name), device) for name in names]
        if block.is_grouped:
            inputs += _gates(load, block, in_layer(layer, "ssm_ba.weight"), device)
        conv_CJ, decay_V, bias_V = (
            load.own_vector(in_layer(layer, name), device) for name in (CONV, DECAY, DECAY_BIAS)
        )
        norm = NormSpec(
            name=DELTA_NORM, kind="rms", size=block.value_head_dim, epsilon=block.epsilon
        )
        yield DeltaOp(
            block=block,
            inputs=tuple(inputs),
            output=load.linear(in_layer(layer, "ssm_out"), device),
            conv_CJ=conv_CJ,
            decay_V=decay_V,
            decay_bias_V=bias_V,
            norm=load.norm(norm, in_layer(layer, DELTA_NORM), device),
            state=load.state(block, device),
        )


def _gates(load: Reader, block: Block, name: str, device: torch.device) -> Iterator[Linear]:
    """The matrices of beta and alpha, of rows of the one that has both."""
    both = load.model.tensors[name]
    rows_G2R = np.arange(both.shape[0]).reshape(block.num_key_heads, 2, -1)
    for part in range(2):
        yield Linear(weight=load.matrix(chosen_rows(both, rows_G2R[:, part].flatten()), device))
