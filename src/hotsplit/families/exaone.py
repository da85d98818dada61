"""EXAONE 4 (arXiv 2507.11407): norms of the outputs of attention and feed-forward, instead of their
inputs, and of each head of queries and keys. Where there are windows, all but each fourth layer
have one, and these alone rotate."""

from hotsplit.errors import HotsplitError
from hotsplit.families.config_reader import ConfigReader
from hotsplit.families.family import Architecture, Family
from hotsplit.families.key_reader import KeyReader
from hotsplit.families.plain_decoder import decoder
from hotsplit.families.windows import (
    KEYS,
    other_head_size,
    window_keys,
    windows_of_config,
    windows_of_keys,
)
from hotsplit.files.gguf_file import Value
from hotsplit.model.arrangements import Arrangement
from hotsplit.model.spec import ModelSpec

PERIOD = 4
# llama.cpp has windows in models of so many layers, by default of so many tokens
# (src/models/exaone4.cpp).
STOCK_LAYERS, STOCK_WINDOW = 64, 4096


def keys(read: ConfigReader) -> dict[str, Value]:
    window = read.values.get("sliding_window")
    has_window_L = [] if window is None else read.layers_with_window(PERIOD)
    windows = windows_of_config(read, has_window_L=has_window_L)
    if window is not None and not any(windows):
        raise HotsplitError(
            f"{read.path}: sliding_window is {window}, but no layer has it, so none would rotate;"
            " wanted null for a model without windows"
        )
    return window_keys(windows)


def of_keys(read: KeyReader) -> ModelSpec:
    num_layers = read.count("block_count")
    stock = STOCK_WINDOW if num_layers == STOCK_LAYERS else 0
    windows = windows_of_keys(read, num_layers, period=PERIOD, window=stock)
    return decoder(
        read,
        arrange=Arrangement.output_norms,
        windows=windows,
        rotates_L=[window is not None or not any(windows) for window in windows],
        has_head_norms=True,
    )


def not_in_stock(spec: ModelSpec) -> str | None:
    if (other := other_head_size(spec)) is not None:
        return other
    has_window_L, is_deep = (
        [a.window is not None for a in spec.attentions],
        spec.num_layers == STOCK_LAYERS,
    )
    if has_window_L != [is_deep and (i + 1) % PERIOD != 0 for i in range(spec.num_layers)]:
        return (
            f"has windows in models of {STOCK_LAYERS} layers, in all but each {PERIOD}th, and in"
            " no others"
        )
    return None


FAMILIES = (
    Family(
        classes=("Exaone4ForCausalLM",),
        title="EXAONE 4",
        graph="exaone4",
        defaults={
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
        },
        keys=keys,
    ),
)
GRAPHS = (
    Architecture(name="exaone4", of_keys=of_keys, known_keys=KEYS, not_in_stock=not_in_stock),
)
