"""Gated delta nets: loaded, as a struct for C++ (kernels/cpu/delta.cpp), and as a GPU's kernels;
model/delta_net.py has the formulas.

Letters: T tokens, V value heads, M value width, A decays, R rank, W values of the projections, X of
the recurrence's inputs, C channels, J taps."""

from collections.abc import Iterator, Sequence
from ctypes import Structure, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotsplit.files.gguf_file import chosen_rows
from hotsplit.model.blocks import Norm as NormSpec
from hotsplit.model.delta_net import CONV, CONVS, DECAY, DECAY_BIAS, DELTA_NORM, DeltaNet, KimiDelta
from hotsplit.runtime.ops.device import Launcher
from hotsplit.runtime.ops.loaded_op import RecurrentOp, Slots, carved, in_layer
from hotsplit.runtime.ops.norm import Norm, NormStruct, norm_struct
from hotsplit.runtime.ops.reader import Reader
from hotsplit.runtime.ops.structs import MatrixStruct, Structs, members
from hotsplit.runtime.weights.matrix import Linear

PASSING_GATE = 32.0  # in delta.cpp


class DeltaStruct(Structure):
    _fields_ = [
        ("input", MatrixStruct * 4),
        *members(MatrixStruct * 2, "low high"),
        ("output", MatrixStruct),
        ("norm", NormStruct),
        *members(c_void_p, "conv decay step_bias state inputs kept"),
        *members(c_int64, "num_key_heads num_value_heads key_width value_width num_taps"),
        *members(c_int64, "num_slots num_kept"),
        *members(c_int32, "is_grouped is_by_row has_sigmoid_gates unused"),
    ]


@dataclass(frozen=True, kw_only=True)
class DeltaOp(RecurrentOp):
    """`inputs` make the channels, beta and alpha, which have a row for each value head in order,
    and the output's gates. In Kimi Delta Attention they make queries, keys, values, beta, and what
    `high` makes alpha and the gates from."""

    block: DeltaNet
    conv_CJ: Tensor  # f32, as are the others
    decay_V: Tensor  # ssm_a: below zero
    decay_bias_A: Tensor
    norm: Norm  # of each head's output
    high: tuple[Linear, ...]

    @property
    def linears(self) -> tuple[Linear, ...]:
        return *super().linears, *self.high

    @property
    def is_by_row(self) -> bool:
        """True if each row of a state has a decay."""
        return isinstance(self.block, KimiDelta)

    def struct(self, structs: Structs) -> DeltaStruct:
        """Has a copy of the convolution's weights, tap by tap."""
        block, (state, inputs) = self.block, self.state.tensors
        has_sigmoid_gates = block.has_sigmoid_gates and not self.is_by_row
        norm = self.norm.times(1 / PASSING_GATE) if has_sigmoid_gates else self.norm
        return DeltaStruct(
            input=(MatrixStruct * 4)(*map(structs.linear, self.inputs[:4])),
            low=(MatrixStruct * 2)(*map(structs.linear, self.inputs[4:])),
            high=(MatrixStruct * 2)(*map(structs.linear, self.high)),
            output=structs.linear(self.output),
            norm=norm_struct(structs, norm, block.value_head_dim),
            conv=structs.vector(self.conv_CJ.t().contiguous(), block.num_taps, block.num_channels),
            decay=structs.vector(self.decay_V, block.num_value_heads),
            step_bias=structs.vector(self.decay_bias_A, block.num_decays),
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
            is_by_row=self.is_by_row,
            has_sigmoid_gates=has_sigmoid_gates,
        )

    def project(self, on: Launcher, x: Any, projected: Tensor, free: Tensor) -> None:
        on.project(self.inputs[:4], x, projected)
        inner = list[Tensor]()
        for linear in self.inputs[4:]:  # before `high`, which may overwrite a rounded x
            inner.append(carved(free, projected, linear.num_outputs))
            free = free.flatten()[inner[-1].numel() :]
            on.project((linear,), x, inner[-1])
        stop = self.block.projected_size - sum(linear.num_outputs for linear in self.high)
        for linear, x_TR in zip(self.high, inner, strict=True):
            start, stop = stop, stop + linear.num_outputs
            on.dot(linear, x_TR, projected[..., start:stop])

    def mix(
        self, on: Launcher, projected: Tensor, heads: Tensor, mixed: Tensor, slots: Slots
    ) -> None:
        block, kernels, (state, conv) = self.block, on.kernels, self.state.tensors
        weights, key_heads = (self.conv_CJ, self.decay_bias_A, self.decay_V), block.num_key_heads
        out_TVM = heads.unflatten(-1, (block.num_value_heads, block.value_head_dim))
        delta = mixed, state, *slots, out_TVM, key_heads
        on.run(kernels.convolve, projected, *weights, conv, *slots, mixed, key_heads)
        by_row, norm = self.is_by_row, (self.norm.weight_D, self.norm.epsilon)
        on.run(kernels.delta_rule, *delta, is_grouped=block.is_grouped, is_by_row=by_row)
        is_sigmoid = block.has_sigmoid_gates
        on.run(kernels.gate_norm, out_TVM, projected, *norm, is_sigmoid=is_sigmoid)


def load(
    load: Reader, blocks: Sequence[DeltaNet], layer: int | None, device: torch.device
) -> Iterator[DeltaOp]:
    for block in blocks:
        inputs = {
            name: load.linear(in_layer(layer, name), device)
            for name in block.matrices
            if f"{name}.weight" in block.shapes(1)
        }
        if block.is_grouped:
            both = _gates(load, block, in_layer(layer, "ssm_ba.weight"), device)
            inputs |= zip(("ssm_beta", "ssm_alpha"), both, strict=True)
        convs = CONVS if isinstance(block, KimiDelta) else (CONV,)
        decay_V, bias_A, *convs_CJ = (
            load.own_vector(in_layer(layer, name), device) for name in (DECAY, DECAY_BIAS, *convs)
        )
        norm = NormSpec(
            name=DELTA_NORM, kind="rms", size=block.value_head_dim, epsilon=block.epsilon
        )
        yield DeltaOp(
            block=block,
            inputs=tuple(inputs[name] for name in block.matrices),
            high=tuple(load.linear(in_layer(layer, name), device) for name in block.high),
            output=load.linear(in_layer(layer, block.output), device),
            conv_CJ=torch.cat(convs_CJ),
            decay_V=decay_V.flatten(),
            decay_bias_A=bias_A,
            norm=load.norm(norm, in_layer(layer, DELTA_NORM), device),
            state=load.state(block, device),
        )


def _gates(load: Reader, block: DeltaNet, name: str, device: torch.device) -> Iterator[Linear]:
    """The matrices of beta and alpha, of rows of the one that has both."""
    both = load.model.tensors[name]
    rows_G2R = np.arange(both.shape[0]).reshape(block.num_key_heads, 2, -1)
    for part in range(2):
        yield Linear(weight=load.matrix(chosen_rows(both, rows_G2R[:, part].flatten()), device))
