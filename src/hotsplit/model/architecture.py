"""The supported architectures: the graph and the tensors of each.

Architectures and tensors have llama.cpp's names where it has them. Optional parts of a
model (biases, a second norm) are detected from the tensors of its file.

Letters: D model width, F feed-forward neurons of a layer."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from hotsplit.model.rope import NO_SCALING, RopeScaling
from hotsplit.model.spec import (
    SMOOTH as SMOOTH,
)
from hotsplit.model.spec import (
    Activation,
    Arrangement,
    Attention,
    LayerSpec,
    ModelSpec,
    Neurons,
    Norm,
    Rotary,
)
from hotsplit.model.spec import (
    PredictorKind as PredictorKind,
)

Layout = Literal["sparse", "stock"]
PROJECTION_BIASES = ("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias")
GATED_BIASES = ("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias")


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One graph. `rotary` says which values of a head rotate together: adjacent ones, or those
    half a head apart; None means learned positions (`position_embd`)."""

    name: str
    norm: Literal["rms", "layer"] = "rms"
    rotary: Literal["adjacent", "halves"] | None
    is_gated: bool = True
    has_fused_qkv: bool = False
    has_head_norms: bool = False  # queries and keys are normed per head
    is_parallel: bool = False  # attention and feed-forward take the same input
    # The activations that llama.cpp's graph of this name computes, and the optional tensors that
    # it loads.
    stock_activations: tuple[Activation, ...] = ()
    stock_options: frozenset[str] = field(default=frozenset())


ARCHITECTURES = {
    graph.name: graph
    for graph in (
        Architecture(
            name="llama",
            rotary="adjacent",
            stock_activations=("silu",),
            stock_options=frozenset((*PROJECTION_BIASES, *GATED_BIASES)),
        ),
        Architecture(
            name="qwen2",
            rotary="halves",
            stock_activations=("silu",),
            stock_options=frozenset(PROJECTION_BIASES[:3]),
        ),
        Architecture(
            name="qwen3", rotary="halves", has_head_norms=True, stock_activations=("silu",)
        ),
        Architecture(
            name="falcon",
            norm="layer",
            rotary="halves",
            is_gated=False,
            has_fused_qkv=True,
            is_parallel=True,
            # llama.cpp computes the tanh form for both; transformers computes gelu exactly.
            stock_activations=("gelu", "gelu_tanh"),
            stock_options=frozenset(("attn_norm_2.weight", "attn_norm_2.bias")),
        ),
        Architecture(name="opt", norm="layer", rotary=None, is_gated=False),
    )
}


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes and constants of a decoder."""

    num_layers: int
    width: int  # D
    num_neurons: int  # F
    num_heads: int
    num_kv_heads: int
    head_width: int
    vocab_size: int
    context_length: int
    norm_epsilon: float
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = NO_SCALING
    is_post_norm: bool = False  # norms come after the residual sum (OPT 350M), not before a block


def layer_shapes(
    graph: Architecture, shape: ModelShape, layout: Layout, rank: int | None
) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors that every layer must have, by name within the layer; `rank` is the
    predictor's rank: 0 for a single matrix, None for no predictor."""
    d, f = shape.width, shape.num_neurons
    q, kv = shape.num_heads * shape.head_width, shape.num_kv_heads * shape.head_width
    shapes: dict[str, tuple[int, ...]] = {"attn_norm.weight": (d,)}
    if graph.has_fused_qkv:
        shapes["attn_qkv.weight"] = (q + 2 * kv, d)
    else:
        shapes |= {"attn_q.weight": (q, d), "attn_k.weight": (kv, d), "attn_v.weight": (kv, d)}
    shapes["attn_output.weight"] = (d, q)
    if graph.has_head_norms:
        shapes |= {
            name: (shape.head_width,) for name in ("attn_q_norm.weight", "attn_k_norm.weight")
        }
    if not graph.is_parallel:
        shapes["ffn_norm.weight"] = (d,)
    if graph.is_gated:
        shapes["ffn_gate.weight"] = (f, d)
    shapes["ffn_up.weight"] = (f, d)
    shapes |= {"ffn_down_t.weight": (f, d)} if layout == "sparse" else {"ffn_down.weight": (d, f)}
    if rank:
        shapes |= {"ffn_pred_down.weight": (rank, d), "ffn_pred_up.weight": (f, rank)}
    elif rank == 0:
        shapes["ffn_pred_up.weight"] = (f, d)
    return _with_norm_biases(graph, shapes)


def optional_layer_shapes(
    graph: Architecture, shape: ModelShape, rank: int | None
) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors that either all layers have or none has, except predictors' biases,
    which each layer may have or lack."""
    d, f = shape.width, shape.num_neurons
    q, kv = shape.num_heads * shape.head_width, shape.num_kv_heads * shape.head_width
    shapes: dict[str, tuple[int, ...]] = {
        "attn_output.bias": (d,),
        "ffn_up.bias": (f,),
        "ffn_down.bias": (d,),
    }
    if graph.has_fused_qkv:
        shapes["attn_qkv.bias"] = (q + 2 * kv,)
    else:
        shapes |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
    if graph.is_gated:
        shapes["ffn_gate.bias"] = (f,)
    if graph.is_parallel:  # attention's own norm, or the feed-forward's if blocks are sequential
        norms: dict[str, tuple[int, ...]] = {"attn_norm_2.weight": (d,), "ffn_norm.weight": (d,)}
        shapes |= _with_norm_biases(graph, norms)
    if rank:
        shapes["ffn_pred_down.bias"] = (rank,)
    if rank is not None:
        shapes["ffn_pred_up.bias"] = (f,)
    return shapes


def outer_shapes(graph: Architecture, shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors outside the layers that a model must have."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (shape.vocab_size, shape.width)}
    if graph.rotary is None:
        shapes["position_embd.weight"] = (shape.context_length, shape.width)
    norm: dict[str, tuple[int, ...]] = {"output_norm.weight": (shape.width,)}
    return shapes if shape.is_post_norm else shapes | _with_norm_biases(graph, norm)


def optional_outer_shapes(graph: Architecture, shape: ModelShape) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"output.weight": (shape.vocab_size, shape.width)}
    if graph.rotary:
        shapes["rope_freqs.weight"] = (shape.head_width // 2,)
    return shapes


def _with_norm_biases(
    graph: Architecture, shapes: dict[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """The shapes with the biases of layer norms (Ba et al. 2016); RMS norms have none."""
    if graph.norm == "rms":
        return shapes
    norms = {n: s for n, s in shapes.items() if n.endswith(("norm.weight", "norm_2.weight"))}
    return shapes | {name.replace(".weight", ".bias"): dims for name, dims in norms.items()}


def model_spec(
    graph: Architecture, shape: ModelShape, activation: Activation, options: Collection[str],
    *, has_rope_factors: bool,
) -> ModelSpec:  # fmt: skip
    """The spec of a model without predictors; `options`: the optional tensors of its layers."""
    rotary, head_norm = None, None
    if graph.rotary is not None:
        rotary = Rotary(
            theta=shape.rope_theta, pairing=graph.rotary, scaling=shape.rope_scaling,
            has_factors=has_rope_factors,
        )  # fmt: skip
    if graph.has_head_norms:
        head_norm = Norm(
            name="attn_q_norm", kind="rms", size=shape.head_width, epsilon=shape.norm_epsilon
        )
    biases = {name.removesuffix(".bias") for name in options if name.endswith(".bias")}
    attention = Attention(
        num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_width,
        rotary=rotary, head_norm=head_norm, is_fused=graph.has_fused_qkv,
        biases=frozenset(b for b in biases if b.startswith("attn_") and "norm" not in b),
    )  # fmt: skip
    neurons = Neurons(
        number=shape.num_neurons, activation=activation, is_gated=graph.is_gated,
        biases=frozenset(biases & {"ffn_gate", "ffn_up", "ffn_down"}),
    )  # fmt: skip
    arrange = Arrangement(norm=graph.norm, hidden_size=shape.width, epsilon=shape.norm_epsilon)
    layer: LayerSpec
    if graph.is_parallel and "ffn_norm.weight" not in options:
        num_norms = 1 + ("attn_norm_2.weight" in options)
        layer = arrange.parallel(attention, neurons, num_norms=num_norms)
    elif shape.is_post_norm:
        layer = arrange.post_norm(attention, neurons)
    else:
        layer = arrange.pre_norm(attention, neurons)
    output_norm = Norm(
        name="output_norm", kind=graph.norm, size=shape.width, epsilon=shape.norm_epsilon
    )
    return ModelSpec(
        architecture=graph.name, hidden_size=shape.width, vocab_size=shape.vocab_size,
        context_length=shape.context_length, layers=(layer,) * shape.num_layers,
        output_norm=None if shape.is_post_norm else output_norm,
        has_positions=graph.rotary is None,
    )  # fmt: skip
