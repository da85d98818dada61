"""The inputs that layers have of their own, and what a layer makes of its: in torch, as structs for
C++, and as a GPU's kernels. The formulas are in model/per_layer.py.

Letters: T tokens, D model width, L layers, P values of a layer's input, I of all, V vocabulary."""

from collections.abc import Iterator, Sequence
from ctypes import Structure, c_int32, c_int64
from dataclasses import dataclass

import torch
from torch import Tensor

from hotsplit.model import per_layer as blocks_of
from hotsplit.model.spec import Norm as NormSpec
from hotsplit.runtime.kernels.gate import Gate, GateStruct
from hotsplit.runtime.ops.device import Launcher
from hotsplit.runtime.ops.loaded_op import LoadedOp, carved, in_layer
from hotsplit.runtime.ops.norm import Norm, NormStruct, norm_struct
from hotsplit.runtime.ops.reader import Reader
from hotsplit.runtime.ops.structs import MatrixStruct, Structs, members
from hotsplit.runtime.weights.matrix import Linear, Matrix, matrix_of


class LayerInputsStruct(Structure):
    _fields_ = [*members(MatrixStruct, "table projection"), ("norm", NormStruct), ("size", c_int64)]


class PerLayerStruct(Structure):
    _fields_ = [*members(MatrixStruct, "gate output"), ("rule", GateStruct), ("index", c_int32)]


@dataclass(frozen=True, kw_only=True)
class LayerInputsOp(LoadedOp):
    """The inputs of all layers, on the host: a row of the table is read for each token."""

    block: blocks_of.LayerInputs
    table: Matrix  # [V, L P]
    projection: Linear  # [L P, D]
    norm: Norm  # of P values

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.projection,)

    def struct(self, structs: Structs) -> LayerInputsStruct:
        return LayerInputsStruct(
            table=structs.matrix(self.table),
            projection=structs.linear(self.projection),
            norm=norm_struct(structs, self.norm, self.block.size),
            size=self.block.size,
        )


@dataclass(frozen=True, kw_only=True)
class PerLayerOp(LoadedOp):
    """What a layer makes of its own input, which is the one at `index` of `num_inputs`, those of
    all layers."""

    block: blocks_of.PerLayer
    index: int
    num_inputs: int
    gate: Linear  # [P, D]
    output: Linear  # [D, P]
    rule: Gate  # the activation; all values are computed

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.gate, self.output

    def struct(self, structs: Structs) -> PerLayerStruct:
        return PerLayerStruct(
            gate=structs.linear(self.gate),
            output=structs.linear(self.output),
            rule=self.rule.struct,
            index=self.index,
        )

    def launch(
        self, on: Launcher, read: Sequence[Tensor], written: Sequence[Tensor], scratch: Tensor
    ) -> None:
        (x_D, per_layer), (y_D,) = read, written
        inner_P = carved(scratch, x_D, self.block.size)
        inner_TP = inner_P.view(-1, self.block.size)
        own_TP = per_layer.view(len(inner_TP), -1, self.block.size)[:, self.index]
        on.dot(self.gate, x_D, inner_P)
        on.run(on.kernels.hidden_tokens, inner_TP, own_TP, None, self.rule, inner_TP, None)
        on.dot(self.output, inner_P, y_D)


def load(
    load: Reader,
    blocks: Sequence[blocks_of.LayerInputs | blocks_of.PerLayer],
    layer: int | None,
    device: torch.device,
) -> Iterator[LayerInputsOp | PerLayerOp]:
    """The table stays in the file: a token reads one row of it."""
    for block in blocks:
        if isinstance(block, blocks_of.LayerInputs):
            name = blocks_of.INPUT_NORM
            norm = NormSpec(name=name, kind="rms", size=block.size, epsilon=block.epsilon)
            yield LayerInputsOp(
                block=block,
                table=matrix_of(load.model.tensors[f"{blocks_of.TABLE}.weight"], device),
                projection=load.linear(blocks_of.PROJECTION, device),
                norm=load.norm(norm, name, device),
            )
            continue
        assert layer is not None
        yield PerLayerOp(
            block=block,
            index=layer,
            num_inputs=load.model.spec.num_layers,
            gate=load.linear(in_layer(layer, blocks_of.GATE), device),
            output=load.linear(in_layer(layer, blocks_of.OUTPUT), device),
            rule=Gate(activation=block.activation, threshold=0.0, computes_all=True),
        )
