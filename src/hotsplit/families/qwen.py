"""Qwen2, with biases on queries, keys and values, and Qwen3, with norms on queries and keys.
Seed-OSS is a Qwen2 whose second norm has another name."""

from collections.abc import Mapping
from functools import partial

from hotsplit.families.config_reader import ConfigReader
from hotsplit.families.family import ATTN_BIASES, QKV_BIASES, Architecture, Family
from hotsplit.families.llama import OPTIONS, without_windows
from hotsplit.families.plain_decoder import decoder
from hotsplit.families.windows import KEYS, no_windows_in_stock, window_keys, windows_of_config
from hotsplit.files.gguf_file import Value
from hotsplit.model.arrangements import Arrangement


def keys(read: ConfigReader) -> dict[str, Value]:
    """Windows in the layers behind the first `max_window_layers`."""
    is_used, num_layers = read.flag("use_sliding_window"), read.count("num_hidden_layers")
    first = read.whole("max_window_layers") if is_used else num_layers
    has_window_L = [layer >= first for layer in range(num_layers)]
    return window_keys(windows_of_config(read, is_used=is_used, has_window_L=has_window_L))


DEFAULTS = {
    "tie_word_embeddings": False,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
QWEN2 = Family(  # and sparse ones such as SparseQwen2 with `drelu`
    classes=("Qwen2ForCausalLM",),
    title="Qwen 2",
    graph="qwen2",
    defaults=DEFAULTS,
    tensors=lambda read: dict.fromkeys(QKV_BIASES, ()),
    keys=keys,
)
QWEN3 = Family(
    classes=("Qwen3ForCausalLM",),
    title="Qwen 3",
    graph="qwen3",
    defaults=DEFAULTS | {"head_dim": 128, "attention_bias": False},
    flags={"attention_bias": ATTN_BIASES},
    keys=keys,
)
SEED = Family(
    classes=("SeedOssForCausalLM",),
    title="Seed-OSS",
    graph="seed_oss",
    defaults={
        "tie_word_embeddings": False,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": True,
        "attention_out_bias": False,
        "mlp_bias": False,
    },
    plain={"mlp_bias": False},
    flags={"attention_bias": QKV_BIASES, "attention_out_bias": ATTN_BIASES[3:]},
    keys=without_windows,
)
FAMILIES = (QWEN2, QWEN3, SEED)
# By llama.cpp's name: the second norm, and the biases that its graph loads.
_OWN: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "qwen2": ("ffn_norm", QKV_BIASES),
    "qwen3": ("ffn_norm", ()),
    "seed_oss": ("post_attention_norm", QKV_BIASES),
}
GRAPHS = tuple(
    Architecture(
        name=name,
        of_keys=partial(
            decoder,
            arrange=partial(Arrangement.pre_norm, second=second),
            has_head_norms=name == "qwen3",
        ),
        known_keys=KEYS,
        not_in_stock=no_windows_in_stock,
        options=OPTIONS,
        stock_options=stock_options,
    )
    for name, (second, stock_options) in _OWN.items()
)
