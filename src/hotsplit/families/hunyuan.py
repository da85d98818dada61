"""Hunyuan, dense and the mixture A13B: a Qwen 3 whose heads are normed after they rotate."""

from dataclasses import replace

from hotsplit.errors import HotsplitError
from hotsplit.families.config_reader import ConfigReader
from hotsplit.families.expert_keys import (
    COUNTS,
    KEYS,
    expert_keys,
    experts_of_keys,
    plain_weights_in_stock,
)
from hotsplit.families.family import ATTN_BIASES, Architecture, Family
from hotsplit.families.key_reader import KeyReader
from hotsplit.families.llama import without_windows
from hotsplit.families.plain_decoder import decoder
from hotsplit.families.rope_scalings import Rope
from hotsplit.files.gguf_file import Value
from hotsplit.files.typed import shown
from hotsplit.model.spec import ModelSpec

LISTS = ("num_experts", "moe_topk", "num_shared_expert", "moe_intermediate_size")


def derived(read: ConfigReader) -> dict[str, object]:
    """The number that all layers share, where a config lists one for each. Experts and those that
    always fire have as many neurons as a layer."""
    found: dict[str, object] = {}
    for key in LISTS:
        values = read.values.get(key)
        if isinstance(values, list):
            if len(set(map(str, values))) != 1:
                raise HotsplitError(
                    f"{read.path}: {key} is {shown(values)}, wanted one number for all layers;"
                    " this checkpoint is not supported"
                )
            found[key] = values[0]
    own = read.with_values(found)
    own.refuse("num_shared_expert", 1)
    own.refuse("moe_intermediate_size", read.values.get("intermediate_size"))
    return found


def keys_of_mixture(read: ConfigReader) -> dict[str, Value]:
    length = read.count("intermediate_size")
    experts = expert_keys(read, neurons="intermediate_size", used="moe_topk", shared=length)
    return without_windows(read) | experts


def of_keys(read: KeyReader) -> ModelSpec:
    is_mixture = read.graph.name == "hunyuan-moe"
    return decoder(
        read,
        experts=experts_of_keys(read, has_shared=True) if is_mixture else None,
        has_head_norms=True,
        attention={"norms_rotated": True},
    )


DENSE = Family(
    classes=("HunYuanDenseV1ForCausalLM",),
    title="Hunyuan",
    graph="hunyuan-dense",
    model_types=("hunyuan_v1_dense",),
    defaults={
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
    },
    plain={"use_qk_norm": True, "use_cla": False, "mlp_bias": False},
    flags={"attention_bias": ATTN_BIASES},
    rope=Rope(kinds=("default", "linear", "dynamic")),
    keys=without_windows,
)
FAMILIES = (
    DENSE,
    replace(
        DENSE,
        classes=("HunYuanMoEV1ForCausalLM",),
        title="Hunyuan MoE",
        graph="hunyuan-moe",
        model_types=("hunyuan_v1_moe",),
        read_keys=COUNTS,
        defaults={**DENSE.defaults, "num_experts": 1, "moe_topk": 1},
        plain={**DENSE.plain, "use_mixed_mlp_moe": True, "moe_layer_num_skipped": 0},
        derived=derived,
        keys=keys_of_mixture,
    ),
)
GRAPHS = (
    Architecture(name="hunyuan-dense", of_keys=of_keys, options=ATTN_BIASES),
    Architecture(
        name="hunyuan-moe",
        of_keys=of_keys,
        known_keys=KEYS,
        options=ATTN_BIASES,
        not_in_stock=plain_weights_in_stock,
    ),
)
