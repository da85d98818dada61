"""OPT (arXiv 2205.01068): layer norms, learned positions, no gates, embeddings tied by default.

llama.cpp has no graph for it; the names are PowerInfer's."""

import re
from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np

from hotsplit.families.blueprint import IGNORED, Blueprint
from hotsplit.families.config_reader import UNGATED, ConfigReader
from hotsplit.families.family import PROJECTION_BIASES, Architecture, Family
from hotsplit.families.row_order import Rows
from hotsplit.families.sizes import Sizes
from hotsplit.model.spec import Activation, ModelSpec

if TYPE_CHECKING:
    from hotsplit.families.key_reader import KeyReader

# transformers' OPTLearnedPositionalEmbedding starts at this row. PowerInfer keeps those before it.
FIRST_POSITION = 2
NAME = re.compile(r"(?:model\.)?(?:decoder\.)?(?:layers\.(\d+)\.)?(.+)\.(weight|bias)")
OPTIONS = (*PROJECTION_BIASES, "ffn_up.bias", "ffn_down.bias")
OUTER = {
    "embed_tokens": "token_embd",
    "embed_positions": "position_embd",
    "final_layer_norm": "output_norm",
    "lm_head": "output",
}
INNER = {
    "self_attn_layer_norm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_output",
    "final_layer_norm": "ffn_norm",
    "fc1": "ffn_up",
    "fc2": "ffn_down",
}


def opt(read: ConfigReader) -> Blueprint:
    """OPTForCausalLM."""
    width = read.count("hidden_size")
    read.refuse(
        "word_embed_proj_dim", width, why="embeddings of another width need two more matrices"
    )
    read.refuse("_remove_final_layer_norm", False, why="the graph always has a last norm")
    heads, kv_heads, head_dim = read.heads("num_attention_heads")
    context = read.count("max_position_embeddings")
    sizes = Sizes(
        num_layers=read.count("num_hidden_layers"),
        hidden_size=width,
        num_neurons=read.count("ffn_dim"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=read.count("vocab_size"),
        context_length=context,
        epsilon=1e-5,  # torch.nn.LayerNorm's; the config has none
    )
    read.check_size(sizes, FIRST_POSITION + context)
    activation = read.activation("activation_function", UNGATED)
    has_biases = read.flag("enable_bias")
    is_affine = read.flag("layer_norm_elementwise_affine")
    positions = Rows(
        source="position_embd.weight",
        order=np.arange(FIRST_POSITION, FIRST_POSITION + context),
        num_rows=FIRST_POSITION + context,
    )
    return Blueprint(
        spec=opt_spec(
            sizes,
            activation,
            OPTIONS if has_biases else (),
            is_post_norm=not read.flag("do_layer_norm_before"),
        ),
        name_of=_name_of,
        rows={"position_embd.weight": positions},
        constants={} if is_affine else {"norm.weight": 1.0, "norm.bias": 0.0},
        ignored=IGNORED,
    )


def opt_spec(
    sizes: Sizes,
    activation: Activation,
    options: Collection[str] = (),
    *,
    is_post_norm: bool = False,
) -> ModelSpec:
    """`is_post_norm`: norms come after the residual sums (OPT 350M), and there is no last norm."""
    attention = sizes.attention(None, options)
    neurons = sizes.neurons(activation, options, is_gated=False)
    arrange = sizes.arrangement("layer")
    layer = (arrange.post_norm if is_post_norm else arrange.pre_norm)(attention, neurons)
    return sizes.model(
        "opt", sizes.alike(layer), output_norm=None if is_post_norm else "layer", has_positions=True
    )


def of_keys(read: "KeyReader") -> ModelSpec:
    sizes, is_post_norm = read.sizes("layer"), read.flag("hotsplit.is_post_norm")
    options = read.options(sizes.num_layers)
    return opt_spec(sizes, read.activation(), options, is_post_norm=is_post_norm)


def _name_of(source: str) -> str | None:
    match = NAME.fullmatch(source)
    if not match:
        return None
    layer, name, part = match.groups()
    if layer is None:
        return f"{OUTER[name]}.{part}" if name in OUTER else None
    return f"blk.{layer}.{INNER[name]}.{part}" if name in INNER else None


OPT = Family(
    title="OPT",
    model_types=("opt",),
    blueprint=opt,
    defaults={
        "tie_word_embeddings": True,
        "do_layer_norm_before": True,
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
    },
)
GRAPH = Architecture(
    name="opt", of_keys=of_keys, known_keys=("hotsplit.is_post_norm",), options=OPTIONS
)
