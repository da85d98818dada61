"""The tensors of a model by their names in a file, with their shapes: folds over its spec.

Names are llama.cpp's where it has them. In the layout `stock` all are as llama.cpp loads them; in
`sparse` the down projection is transposed, so that each row of a feed-forward matrix is a
neuron."""

import re
from collections.abc import Iterable
from typing import Literal

from hotsplit.model.blocks import Shapes
from hotsplit.model.delta_net import CONVS
from hotsplit.model.draft_block import OWN
from hotsplit.model.operations import BlockOp
from hotsplit.model.route import ROUTER, Route
from hotsplit.model.spec import Add, Attention, LayerSpec, ModelSpec, Neurons, Norm, Predict

Layout = Literal["sparse", "stock"]
CONVOLUTIONS = ("conv1d.weight", ".conv.weight", *CONVS)  # the ends of their names
OF_HEADS = ("ssm_a", "ssm_d")  # of states, with a second dimension of 1 in some files
OUTPUT_GATE = "ffn_gate_inp_shexp.weight"


def layer_shapes(spec: ModelSpec, layer: LayerSpec, layout: Layout) -> Shapes:
    """The shapes of the tensors that a layer must have, by name within the layer."""
    shapes: Shapes = {}
    for block in layer.blocks:
        match block:
            case Norm():
                shapes |= _norm(block)
            case Attention():
                shapes |= _attention(block, spec.hidden_size)
            case Neurons():
                shapes |= _neurons(block, spec.hidden_size, layout)
            case Predict():
                rank, number = block.rank, layer.neurons.number
                down = {"ffn_pred_down.weight": (rank, spec.hidden_size)} if rank else {}
                shapes |= down | {"ffn_pred_up.weight": (number, rank or spec.hidden_size)}
            case Route() | Add() | BlockOp():
                shapes |= block.shapes(spec.hidden_size)
    return dict(sorted(shapes.items(), key=lambda item: item[0].endswith(".bias")))


def optional_layer_shapes(layer: LayerSpec) -> Shapes:
    """The shapes of the tensors that a layer may have: biases of its predictor."""
    shapes: Shapes = {}
    if layer.predict is not None:
        if layer.predict.rank:
            shapes["ffn_pred_down.bias"] = (layer.predict.rank,)
        shapes["ffn_pred_up.bias"] = (layer.neurons.number,)
    return shapes


HEAD_BIAS = "output.bias"


def outer_shapes(spec: ModelSpec) -> Shapes:
    """The shapes of the tensors outside the layers that a model must have."""
    shapes: Shapes = {"token_embd.weight": (spec.vocab_size, spec.hidden_size)}
    if spec.has_positions:
        shapes["position_embd.weight"] = (spec.context_length, spec.hidden_size)
    if spec.has_head_bias:
        shapes[HEAD_BIAS] = (spec.vocab_size,)
    for block in (*spec.first, *spec.last):
        shapes |= block.shapes(spec.hidden_size)
    return shapes if spec.output_norm is None else shapes | _norm(spec.output_norm)


def optional_outer_shapes(spec: ModelSpec) -> Shapes:
    """The shape of an output matrix, without which the head is the embedding."""
    return {"output.weight": (spec.vocab_size, spec.hidden_size)}


def draft_shapes(spec: ModelSpec, layout: Layout) -> tuple[Shapes, Shapes]:
    """The shapes of the tensors that the draft block must have, and of those that it may have, by
    name in the model; none without a block."""
    block = spec.draft
    if block is None:
        return {}, {}
    outer = outer_shapes(block)
    embedding = outer.pop("token_embd.weight")
    required = outer | layer_shapes(block, block.layers[0], layout)
    both = required, dict.fromkeys(OWN, embedding)
    first, second = ({f"blk.{spec.num_layers}.{n}": s for n, s in x.items()} for x in both)
    return first, second


def divisor_shapes(spec: ModelSpec) -> Shapes:
    """The shapes of the divisors of rotary frequencies, which no checkpoint has."""
    rotated = sorted((a.num_rotated, a.rotary.tensors) for a in spec.attentions if a.rotary)
    return {name: (count // 2,) for count, names in rotated for name in names}


def layout_of(names: Iterable[str]) -> Layout:
    """The layout of a file with these tensors."""
    return "sparse" if any(is_neuron_major(name) for name in names) else "stock"


_DOWN = re.compile(r"(?:^|\.)ffn_down(?:_exps|_shexp)?(_t)?\.weight$")


def is_down(name: str) -> bool:
    """True for a down projection, of any neurons and in any layout."""
    return _DOWN.search(name) is not None


def is_neuron_major(name: str) -> bool:
    """True for a down projection with a row for each neuron."""
    match = _DOWN.search(name)
    return match is not None and match.group(1) is not None


def is_router(name: str) -> bool:
    """True for the matrix of a router, which decides in f32."""
    return name.endswith((f"{ROUTER}.weight", "_router.weight"))


def is_vector(name: str, shape: tuple[int, ...]) -> bool:
    """True for what is kept in f32: all that is no matrix, or several vectors, such as the biases
    of experts [E, N], the norms of heads [H, W], and what injects into streams [S, S D]."""
    return len(shape) == 1 or name.endswith(
        (".bias", "_norm.weight", "_coef.weight", "_inject.weight", *CONVOLUTIONS, *OF_HEADS)
    )


def in_layout(name: str, layout: Layout) -> str:
    """The name in this layout of a tensor that has one in the other."""
    if not is_down(name) or is_neuron_major(name) == (layout == "sparse"):
        return name
    stem = name.removesuffix(".weight")
    return (f"{stem}_t" if layout == "sparse" else stem.removesuffix("_t")) + ".weight"


def transposed_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a matrix, or of one for each expert, with rows and columns exchanged."""
    return *shape[:-2], shape[-1], shape[-2]


def _norm(norm: Norm) -> Shapes:
    shapes: Shapes = {f"{norm.name}.{norm.part}": (norm.size,)} if norm.part else {}
    return shapes | ({f"{norm.name}.bias": (norm.size,)} if norm.kind == "layer" else {})


def _attention(block: Attention, hidden_size: int) -> Shapes:
    rows = block.projections
    shapes: Shapes = {f"{name}.weight": (count, hidden_size) for name, count in rows.items()}
    shapes["attn_output.weight"] = (hidden_size, block.output_size)
    if block.latent is not None:
        shapes |= block.latent.shapes(block.num_heads)
    if block.indexer is not None:
        shapes |= block.indexer.shapes(hidden_size)
    shapes |= {f"{name}.weight": shape for name, shape in block.normed.items()}
    shapes |= {vector.name: (block.num_heads,) for vector in block.vectors.values()}
    sizes = {"attn_output": hidden_size, **rows}
    return shapes | {f"{n}.bias": (size,) for n, size in sizes.items() if n in block.biases}


def _neurons(block: Neurons, hidden_size: int, layout: Layout) -> Shapes:
    """Experts are the first dimension of each tensor."""
    first, width = (block.num_experts,) if block.are_experts else (), block.width(hidden_size)
    rows = (*first, block.of_expert, width)
    shapes: Shapes = {f"{name}.weight": rows for name in block.matrices}
    down = in_layout(f"{block.down_name}.weight", layout)
    shapes[down] = rows if layout == "sparse" else transposed_shape(rows)
    sizes = dict.fromkeys(block.matrices, block.of_expert) | {block.down_name: width}
    if block.has_output_gate:
        shapes[OUTPUT_GATE] = (hidden_size,)
    biases = {f"{n}.bias": (*first, size) for n, size in sizes.items() if n in block.biases}
    return shapes | biases
