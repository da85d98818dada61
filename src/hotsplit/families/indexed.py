"""DeepSeek V3.2 and GLM 5 to 5.2: latent attention to the keys that an indexer chooses (DeepSeek
Sparse Attention, arXiv 2512.02556). As long as a text has no more tokens than the indexer chooses
(`index_topk`, 2,048), it chooses all, so these are DeepSeek V3's graph up to that length. Longer
texts are refused, and the indexer's tensors are left out."""

from dataclasses import replace

import gguf
import numpy as np

from hotsplit.families.blueprint import IGNORED, Sources
from hotsplit.families.config_reader import ConfigReader
from hotsplit.families.deepseek import DEEPSEEK2, V3, keys_with, of_keys, sources
from hotsplit.families.expert_keys import dense_layers_of_types
from hotsplit.families.family import Tensors
from hotsplit.families.key_reader import KeyReader
from hotsplit.families.latent_keys import derived, latents_apart
from hotsplit.files.gguf_file import Value
from hotsplit.model.spec import ModelSpec

TOP = "attention.indexer.top_k"
COUNTS = {
    "attention.indexer.head_count": "index_n_heads",
    "attention.indexer.key_length": "index_head_dim",
    TOP: "index_topk",
}
# Of each layer's indexer, in checkpoints.
TENSORS = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")


def derived_of_indexed(read: ConfigReader) -> dict[str, object]:
    num_dense = dense_layers_of_types(read, read.count("first_k_dense_replace", 0))
    return {**derived(read), "first_k_dense_replace": num_dense}


def keys(read: ConfigReader) -> dict[str, Value]:
    read.refuse("rope_interleave", True, why="transformers ignores it")
    counts: dict[str, Value] = {key: np.uint32(read.count(name)) for key, name in COUNTS.items()}
    read.check_layer_types("indexed")
    return keys_with(read.with_values({"layer_types": None})) | counts


def sources_of_indexed(spec: ModelSpec, read: ConfigReader) -> Sources:
    return replace(
        sources(spec, read), ignored=(*IGNORED, *(f".indexer.{name}" for name in TENSORS))
    )


def of_indexed_keys(read: KeyReader) -> ModelSpec:
    """DeepSeek V3's spec with a context of what the indexer chooses."""
    spec, top = of_keys(read), read.count(TOP)
    if top >= spec.context_length:
        return spec
    return replace(
        spec,
        context_length=top,
        context_limit=f"beyond {top:,} tokens an indexer chooses what is attended to (DSA), which"
        " is not supported; llama.cpp runs it",
    )


def without_indexer(spec: ModelSpec, tensors: Tensors) -> Tensors:
    kept = {name: entry for name, entry in tensors.items() if ".indexer." not in name}
    return latents_apart(spec, kept)


_V32 = replace(
    V3,
    classes=("DeepseekV32ForCausalLM",),
    title="DeepSeek V3.2",
    graph="deepseek32",
    names=gguf.MODEL_ARCH.DEEPSEEK2,
    model_types=("deepseek_v32",),
    defaults={
        **V3.defaults,
        "mlp_bias": False,
        "index_topk": 2048,
        "index_head_dim": 128,
        "index_n_heads": 64,
    },
    derived=derived_of_indexed,
    keys=keys,
    sources=sources_of_indexed,
)
FAMILIES = (
    _V32,
    replace(
        _V32,
        classes=("GlmMoeDsaForCausalLM",),
        title="GLM 5",
        graph="glm-dsa",
        model_types=("glm_moe_dsa",),
        defaults={
            **_V32.defaults,
            "rms_norm_eps": 1e-5,
            "n_group": 1,
            "topk_group": 1,
            "num_key_value_heads": 64,
            "index_n_heads": 32,
        },
    ),
)
GRAPHS = tuple(
    replace(
        DEEPSEEK2,
        name=name,
        of_keys=of_indexed_keys,
        known_keys=(*DEEPSEEK2.known_keys, *COUNTS, "attention.indexer.types"),
        not_in_stock=lambda spec: "has an indexer, which is left out here",
        apart=without_indexer,
    )
    for name in ("deepseek32", "glm-dsa")
)
