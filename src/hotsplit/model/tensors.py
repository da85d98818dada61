"""The tensors of a model by their names in a file, with their shapes: folds over its spec.

Names are llama.cpp's where it has them. In the layout `stock` all are as llama.cpp loads them; in
`sparse` the down projection is transposed, so that each row of a feed-forward matrix is a neuron."""

from collections.abc import Iterable
from typing import Literal

from hotsplit.model.spec import Add, Attention, LayerSpec, ModelSpec, Neurons, Norm, Predict

Layout = Literal["sparse", "stock"]
Shapes = dict[str, tuple[int, ...]]
QUERY_NORM, KEY_NORM = "attn_q_norm", "attn_k_norm"


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
                shapes |= _predict(block, spec.hidden_size, layer.neurons.number)
            case Add():
                pass
    return dict(sorted(shapes.items(), key=lambda item: item[0].endswith(".bias")))


def optional_layer_shapes(layer: LayerSpec) -> Shapes:
    """The shapes of the tensors that a layer may have: biases of its predictor, limits of gates."""
    shapes: Shapes = {}
    if layer.predict is not None:
        if layer.predict.rank:
            shapes["ffn_pred_down.bias"] = (layer.predict.rank,)
        shapes["ffn_pred_up.bias"] = (layer.neurons.number,)
    return shapes


def outer_shapes(spec: ModelSpec) -> Shapes:
    """The shapes of the tensors outside the layers that a model must have."""
    shapes: Shapes = {"token_embd.weight": (spec.vocab_size, spec.hidden_size)}
    if spec.has_positions:
        shapes["position_embd.weight"] = (spec.context_length, spec.hidden_size)
    return shapes if spec.output_norm is None else shapes | _norm(spec.output_norm)


def optional_outer_shapes(spec: ModelSpec) -> Shapes:
    """The shapes of an output matrix, without which the head is the embedding, and of the divisors
    of rotary frequencies."""
    shapes: Shapes = {"output.weight": (spec.vocab_size, spec.hidden_size)}
    rotating = [layer.attention.head_dim for layer in spec.layers if layer.attention.rotary]
    return shapes | ({"rope_freqs.weight": (max(rotating) // 2,)} if rotating else {})


def layout_of(names: Iterable[str]) -> Layout:
    """The layout of a file with these tensors."""
    is_sparse = any(name.endswith(".ffn_down_t.weight") for name in names)
    return "sparse" if is_sparse else "stock"


def _norm(norm: Norm) -> Shapes:
    shapes: Shapes = {f"{norm.name}.weight": (norm.size,)}
    return shapes | ({f"{norm.name}.bias": (norm.size,)} if norm.kind == "layer" else {})


def _attention(block: Attention, hidden_size: int) -> Shapes:
    rows = block.projections
    shapes: Shapes = {f"{name}.weight": (count, hidden_size) for name, count in rows.items()}
    shapes["attn_output.weight"] = (hidden_size, block.query_size)
    if block.head_norm is not None:
        shapes |= {f"{name}.weight": (block.head_norm.size,) for name in (QUERY_NORM, KEY_NORM)}
    sizes = {"attn_output": hidden_size, **rows}
    return shapes | {f"{n}.bias": (size,) for n, size in sizes.items() if n in block.biases}


def _neurons(block: Neurons, hidden_size: int, layout: Layout) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (block.number, hidden_size) for name in block.matrices}
    if layout == "sparse":
        shapes["ffn_down_t.weight"] = (block.number, hidden_size)
    else:
        shapes["ffn_down.weight"] = (hidden_size, block.number)
    sizes = dict.fromkeys(block.matrices, block.number) | {"ffn_down": hidden_size}
    return shapes | {f"{n}.bias": (size,) for n, size in sizes.items() if n in block.biases}


def _predict(block: Predict, hidden_size: int, num_neurons: int) -> Shapes:
    if block.rank == 0:
        return {"ffn_pred_up.weight": (num_neurons, hidden_size)}
    return {
        "ffn_pred_down.weight": (block.rank, hidden_size),
        "ffn_pred_up.weight": (num_neurons, block.rank),
    }
