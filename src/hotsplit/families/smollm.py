"""SmolLM3: a Llama in which every fourth layer has no rotary embedding (NoPE, arXiv 2501.18795)."""

from hotsplit.families.config_reader import ConfigReader
from hotsplit.families.family import Architecture, Family
from hotsplit.families.key_reader import KeyReader
from hotsplit.families.llama import BIASES, OPTIONS, adjacent
from hotsplit.families.plain_decoder import decoder
from hotsplit.families.rope_scalings import Rope
from hotsplit.families.windows import KEYS, no_windows_in_stock, window_keys, windows_of_config
from hotsplit.files.gguf_file import Value
from hotsplit.model.spec import ModelSpec

PERIOD = 4  # of the layers without rotary embeddings; llama.cpp knows no other


def rotates(num_layers: int) -> list[bool]:
    """Whether each layer has a rotary embedding."""
    return [(layer + 1) % PERIOD != 0 for layer in range(num_layers)]


def keys(read: ConfigReader) -> dict[str, Value]:
    rotates_L = rotates(read.count("num_hidden_layers"))
    read.refuse("no_rope_layer_interval", PERIOD)
    plain = list(map(int, rotates_L))
    read.refuse("no_rope_layers", plain, why="a model file has no key for other layers")
    is_used = read.flag("use_sliding_window")
    has_window_L = [not has for has in rotates_L]
    return window_keys(windows_of_config(read, is_used=is_used, has_window_L=has_window_L))


def of_keys(read: KeyReader) -> ModelSpec:
    return decoder(read, pairing="adjacent", rotates_L=rotates(read.count("block_count")))


FAMILIES = (
    Family(
        classes=("SmolLM3ForCausalLM",),
        title="SmolLM3",
        graph="smollm3",
        defaults={
            "tie_word_embeddings": True,
            "num_key_value_heads": 4,
            "attention_bias": False,
            "mlp_bias": False,
            "use_sliding_window": False,
            "rms_norm_eps": 1e-6,
        },
        flags=BIASES,
        rope=Rope(theta=2e6),
        keys=keys,
        sources=adjacent,
    ),
)
GRAPHS = (
    Architecture(
        name="smollm3",
        of_keys=of_keys,
        known_keys=KEYS,
        not_in_stock=no_windows_in_stock,
        options=OPTIONS,
    ),
)
