"""Loads layers' own inputs, and what a layer makes of its."""

import torch
from torch import Tensor

from hotsplit.model.per_layer import GATE, INPUT_NORM, OUTPUT, PROJECTION, TABLE
from hotsplit.model.per_layer import PerLayer as PerLayerSpec
from hotsplit.model.per_layer import PerLayerInputs as InputsSpec
from hotsplit.model.spec import Norm as NormSpec
from hotsplit.runtime.model.delta_loader import Reader
from hotsplit.runtime.ops.embed import embed
from hotsplit.runtime.ops.per_layer import PerLayer, PerLayerInputs
from hotsplit.runtime.weights.matrix import Linear, matrix_of
from hotsplit.runtime.weights.neuron_block import Gate
from hotsplit.runtime.weights.store import CPU


def load_inputs(load: Reader, spec: InputsSpec | None) -> PerLayerInputs | None:
    """The table stays in the file: a token reads one row of it."""
    if spec is None:
        return None
    norm = NormSpec(name=INPUT_NORM, kind="rms", size=spec.size, epsilon=spec.epsilon)
    tensors = load.model.tensors
    return PerLayerInputs(
        table=matrix_of(tensors[f"{TABLE}.weight"], CPU),
        projection=Linear(weight=load.matrix(tensors[f"{PROJECTION}.weight"], CPU)),
        norm=load.norm(norm, INPUT_NORM, CPU),
    )


def own_input(load: Reader, index: int, ids_T: Tensor) -> Tensor | None:
    """The input of one layer for these tokens, f32 [1, T, P], if it has its own."""
    spec = load.model.spec
    inputs = load_inputs(load, spec.per_layer)
    if inputs is None:
        return None
    embedding = matrix_of(load.model.tensors["token_embd.weight"], CPU)
    x_TD = embed(embedding, None, ids_T, 0, scale=spec.embedding_scale)
    return inputs.of_layer(index).forward(ids_T, x_TD)


def load_per_layer(
    load: Reader, index: int, block: PerLayerSpec | None, device: torch.device
) -> PerLayer | None:
    if block is None:
        return None
    return PerLayer(
        index=index,
        num_inputs=load.model.spec.num_layers,
        gate=load.linear(index, GATE, device),
        output=load.linear(index, OUTPUT, device),
        rule=Gate(activation=block.activation, threshold=0.0, computes_all=True),
        on_bytes=load.count_attention,
    )
