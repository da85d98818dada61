"""ERNIE 4.5: a Llama whose rotary pairs are neighbours in checkpoints, too. Its mixtures choose
experts by softmax with a bias."""

from dataclasses import replace
from functools import partial

import numpy as np

from hotsplit.errors import HotsplitError
from hotsplit.families.blueprint import Sources
from hotsplit.families.config_reader import ConfigReader
from hotsplit.families.expert_keys import (
    COUNTS,
    KEYS,
    expert_keys,
    experts_of_keys,
    plain_weights_in_stock,
    with_choice_bias,
)
from hotsplit.families.family import QKV_BIASES, Architecture, Family, Tensors
from hotsplit.families.key_reader import KeyReader
from hotsplit.families.llama import OPTIONS, without_windows
from hotsplit.families.plain_decoder import decoder
from hotsplit.families.rope_scalings import Rope
from hotsplit.files.gguf_file import TensorEntry, Value
from hotsplit.model.route import CHOICE_BIAS
from hotsplit.model.spec import ModelSpec

STEP = "interleave_moe_layer_step"
# llama.cpp's graph reads no divisors of frequencies, as Llama 3's scaling has.
ROPE = Rope(kinds=("default", "linear", "yarn"), theta=500_000.0)


def derived(read: ConfigReader) -> dict[str, object]:
    """If all layers have experts, the neurons of a layer are an expert's."""
    is_mixed = not read.whole("moe_layer_start_index")
    return {"intermediate_size": read.count("moe_intermediate_size")} if is_mixed else {}


def keys_of_mixture(read: ConfigReader) -> dict[str, Value]:
    last = read.count("num_hidden_layers") - 1
    why = "layers without experts are supported only before all others"
    read.refuse("moe_layer_end_index", -1, last, why=why)
    read.refuse("moe_layer_interval", 1, why=why)
    length = read.count("moe_intermediate_size")
    experts = expert_keys(
        read,
        used="moe_k",
        shared=length * read.whole("moe_num_shared_experts"),
        num_dense=read.whole("moe_layer_start_index"),
    )
    return without_windows(read) | experts | {STEP: np.uint32(1)}


def of_mixture(read: KeyReader) -> ModelSpec:
    if read.count(STEP, 1) != 1:
        raise HotsplitError(
            f"{read.path}: {read.graph.name}.{STEP} is {read.count(STEP)}: layers without experts"
            " between others are not supported"
        )
    return decoder(read, pairing="adjacent", experts=experts_of_keys(read, has_shared=True))


def bias_apart(spec: ModelSpec, tensors: Tensors) -> Tensors:
    """The tensors, with the router's biases, which llama.cpp's files have as matrices of a row, as
    vectors."""
    found = dict(tensors)
    for name, entry in tensors.items():
        if name.endswith(CHOICE_BIAS) and len(entry.shape) == 2 and entry.shape[0] == 1:
            found[name] = replace(entry, shape=entry.shape[1:], read_rows=partial(_row, entry))
    return found


def _row(entry: TensorEntry, start: int, stop: int) -> np.ndarray:
    found: np.ndarray = entry.read_rows(0, 1)[0][start:stop]
    return found


FAMILIES = (
    Family(
        classes=("Ernie4_5ForCausalLM",),
        title="ERNIE 4.5",
        graph="ernie4_5",
        defaults={
            "tie_word_embeddings": True,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "use_bias": False,
            "num_key_value_heads": 2,
            "head_dim": 128,
        },
        flags={"use_bias": OPTIONS},
        rope=ROPE,
        keys=without_windows,
    ),
    Family(
        classes=("Ernie4_5_MoeForCausalLM",),
        title="ERNIE 4.5 MoE",
        graph="ernie4_5-moe",
        model_types=("ernie4_5_moe",),
        read_keys=COUNTS,
        defaults={
            "tie_word_embeddings": True,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "use_bias": False,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 1536,
            "moe_k": 6,
            "moe_num_experts": 64,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
        },
        plain={"use_bias": False, "moe_norm_min": 1e-12},
        rope=ROPE,
        derived=derived,
        keys=keys_of_mixture,
        tensors=lambda read: {CHOICE_BIAS: ()},
        sources=lambda spec, read: Sources(
            renamed=with_choice_bias, ignored_prefixes=("model.mtp_",)
        ),
    ),
)
GRAPHS = (
    Architecture(
        name="ernie4_5",
        of_keys=partial(decoder, pairing="adjacent"),
        options=OPTIONS,
        stock_options=QKV_BIASES,
    ),
    Architecture(
        name="ernie4_5-moe",
        of_keys=of_mixture,
        known_keys=(*KEYS, STEP),
        not_in_stock=plain_weights_in_stock,
        apart=bias_apart,
    ),
)
