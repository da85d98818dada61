"""The inputs that layers have of their own, and what a layer makes of its: in torch, as structs for C++,
and as a GPU's kernels. The formulas are in model/per_layer.py.

Letters: T tokens, D model width, L layers, P values of a layer's input, I of all, V vocabulary."""

import math
from collections.abc import Callable, Iterable
from ctypes import Structure, c_int32, c_int64
from dataclasses import dataclass, replace

from torch import Tensor

from hotsplit.runtime.ops.device import Launcher
from hotsplit.runtime.ops.neurons.native import ACTIVATIONS
from hotsplit.runtime.ops.norm import Norm, NormStruct, norm_struct
from hotsplit.runtime.ops.structs import MatrixStruct, Structs
from hotsplit.runtime.weights import gpu_products
from hotsplit.runtime.weights.matrix import Linear, Matrix
from hotsplit.runtime.weights.neuron_block import Gate


@dataclass(frozen=True, kw_only=True)
class PerLayerInputs:
    """The inputs of all layers, on the host: a row of the table is read for each token."""

    table: Matrix  # [V, L P]
    projection: Linear  # [L P, D]
    norm: Norm  # of P values
    first: int = 0  # the column of the table with which these layers' values begin

    def of_layer(self, index: int) -> "PerLayerInputs":
        """The input of one layer alone."""
        begin, end = (i * len(self.norm.weight_D) for i in (index, index + 1))
        return replace(self, projection=self.projection.part(begin, end), first=begin)

    def forward(self, ids_T: Tensor, x_TD: Tensor) -> Tensor:
        """f32 [L, T, P] on the CPU, from tokens and their embeddings."""
        x_TD, size = x_TD.cpu(), len(self.norm.weight_D)
        own_TLP = self.projection.apply(x_TD).unflatten(1, (-1, size)) / math.sqrt(x_TD.shape[1])
        row_TI = self.table.rows(ids_T.cpu())[:, self.first :][:, : self.projection.num_outputs]
        row_TLP = row_TI.unflatten(1, (-1, size)) * math.sqrt(size)
        sum_TLP = (self.norm.apply(own_TLP) + row_TLP) * math.sqrt(0.5)
        return sum_TLP.transpose(0, 1).contiguous()


@dataclass(frozen=True, kw_only=True)
class PerLayer:
    """What a layer makes of its own input, which is the one at `index` of `num_inputs`: those of all layers
    of the model, or its own alone."""

    index: int
    num_inputs: int
    gate: Linear  # [P, D]
    output: Linear  # [D, P]
    rule: Gate  # the activation; all values are computed
    on_bytes: Callable[[int], None]  # receives weight bytes read by the CPU

    @property
    def size(self) -> int:
        return self.gate.num_outputs

    @property
    def alone(self) -> "PerLayer":
        """The layer, which gets its own input alone."""
        return replace(self, index=0, num_inputs=1)

    def forward(self, x_TD: Tensor, per_layer_LTP: Tensor) -> Tensor:
        """f32 [T, D] from the hidden state and the inputs, which may be on another device."""
        if not gpu_products.is_gpu(x_TD.device):
            self.on_bytes(self.gate.num_bytes + self.output.num_bytes)
        own_TP = per_layer_LTP[self.index].to(x_TD.device)
        activated_TP, _ = self.rule.act(self.gate.apply(x_TD))
        return self.output.apply(self.rule.hidden(activated_TP, own_TP))


def launch_per_layer(
    on: Launcher, layer: PerLayer, x_D: Tensor, per_layer: Tensor, inner_P: Tensor, y_D: Tensor
) -> None:
    """`per_layer`: flat [L, T, P] of the rows of the step; `inner_P`: memory for [T, P]."""
    rule, inner_TP = layer.rule, inner_P.view(-1, layer.size)
    own_TP = per_layer.view(-1, *inner_TP.shape)[layer.index]
    on.dot(layer.gate, x_D, inner_P)
    on.launch(
        lambda: on.kernels.hidden_tokens(
            inner_TP, own_TP, None, rule.activation, rule.threshold, rule.computes_all, inner_TP,
            None,
        ),
        [inner_P, per_layer], [inner_P],
    )  # fmt: skip
    on.dot(layer.output, inner_P, y_D)


class LayerInputsStruct(Structure):
    _fields_ = [("table", MatrixStruct), ("projection", MatrixStruct), ("norm", NormStruct),
                ("size", c_int64)]  # fmt: skip


class PerLayerStruct(Structure):
    _fields_ = [("gate", MatrixStruct), ("output", MatrixStruct), ("activation", c_int32),
                ("index", c_int32)]  # fmt: skip


def inputs_struct(structs: Structs, inputs: PerLayerInputs | None) -> LayerInputsStruct:
    if inputs is None:
        return LayerInputsStruct()
    return LayerInputsStruct(
        table=structs.matrix(inputs.table),
        projection=structs.linear(inputs.projection),
        norm=norm_struct(structs, inputs.norm),
        size=len(inputs.norm.weight_D),
    )


def per_layer_struct(structs: Structs, layer: PerLayer | None) -> PerLayerStruct:
    if layer is None:
        return PerLayerStruct()
    return PerLayerStruct(
        gate=structs.linear(layer.gate),
        output=structs.linear(layer.output),
        activation=ACTIVATIONS.index(layer.rule.activation),
        index=layer.index,
    )


def inputs_size(layers: Iterable[PerLayer | None]) -> int:
    """Values of a token's inputs, those of all layers; 0 if these layers have none."""
    return max((each.num_inputs * each.size for each in layers if each is not None), default=0)
