"""OPT (arXiv 2205.01068): layer norms, learned positions, no gates, embeddings tied by default.

llama.cpp has no graph for it; the names are PowerInfer's."""

import re

import numpy as np

from hotsplit.families.blueprint import Rows, Sources
from hotsplit.families.config_reader import ConfigReader
from hotsplit.families.family import ATTN_BIASES, UNGATED, UNGATED_BIASES, Architecture, Family
from hotsplit.families.key_reader import KeyReader
from hotsplit.families.plain_decoder import decoder
from hotsplit.files.gguf_file import Value
from hotsplit.model.arrangements import Arrangement
from hotsplit.model.spec import ModelSpec

# transformers' OPTLearnedPositionalEmbedding starts at this row. PowerInfer keeps those before it.
FIRST_POSITION = 2
NAME = re.compile(r"(?:model\.)?(?:decoder\.)?(?:layers\.(\d+)\.)?(.+)\.(weight|bias)")
OPTIONS = (*ATTN_BIASES, *UNGATED_BIASES)
IS_POST_NORM = "hotsplit.is_post_norm"
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


def derived(read: ConfigReader) -> dict[str, object]:
    return {"epsilon": 1e-5}  # torch.nn.LayerNorm's; the config has none


def keys(read: ConfigReader) -> dict[str, Value]:
    read.refuse(
        "word_embed_proj_dim",
        read.count("hidden_size"),
        why="embeddings of another width need two more matrices",
    )
    read.refuse("_remove_final_layer_norm", False, why="the graph always has a last norm")
    read.check_size(
        {"max_position_embeddings": read.count("max_position_embeddings") + FIRST_POSITION}
    )
    return {} if read.flag("do_layer_norm_before") else {IS_POST_NORM: True}


def of_keys(read: KeyReader) -> ModelSpec:
    """Norms may come after the residual sums (OPT 350M); then there is no last norm."""
    is_post_norm = read.flag(IS_POST_NORM)
    return decoder(
        read,
        norm="layer",
        arrange=Arrangement.post_norm if is_post_norm else Arrangement.pre_norm,
        is_gated=False,
        rotary=None,
        output_norm=not is_post_norm,
        has_positions=True,
    )


def sources(spec: ModelSpec, read: ConfigReader) -> Sources:
    """Files for OPT have rows of embeddings of positions before the first one's."""
    name, count = "position_embd.weight", FIRST_POSITION + spec.context_length
    is_affine = read.flag("layer_norm_elementwise_affine")
    return Sources(
        rows={name: Rows(source=name, order=np.arange(FIRST_POSITION, count), num_rows=count)},
        constants={} if is_affine else {"norm.weight": 1.0, "norm.bias": 0.0},
    )


def _name_of(source: str) -> str | None:
    match = NAME.fullmatch(source)
    if not match:
        return None
    layer, name, part = match.groups()
    if layer is None:
        return f"{OUTER[name]}.{part}" if name in OUTER else None
    return f"blk.{layer}.{INNER[name]}.{part}" if name in INNER else None


FAMILIES = (
    Family(
        classes=("OPTForCausalLM",),
        title="OPT",
        graph="opt",
        names=_name_of,
        defaults={
            "tie_word_embeddings": True,
            "do_layer_norm_before": True,
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
        },
        fields={
            "feed_forward_length": "ffn_dim",
            "attention.layer_norm_epsilon": "epsilon",
            "hotsplit.ffn.activation": "activation_function",
        },
        flags={"enable_bias": OPTIONS},
        activations=UNGATED,
        rope=None,
        derived=derived,
        keys=keys,
        sources=sources,
    ),
)
GRAPHS = (
    Architecture(
        name="opt",
        of_keys=of_keys,
        known_keys=(IS_POST_NORM,),
        options=OPTIONS,
        stock_activations=(),
    ),
)
