"""Windows of attention: from a config, from a GGUF's keys, and as keys."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hotsplit.families.config_reader import ConfigReader
from hotsplit.files.gguf_file import Value
from hotsplit.model.spec import ModelSpec

if TYPE_CHECKING:
    from hotsplit.families.key_reader import KeyReader

KEYS = ("attention.sliding_window", "attention.sliding_window_pattern")
Windows = Sequence[int | None]  # of each layer


def windows_of_config(
    read: ConfigReader,
    num_layers: int,
    *,
    is_used: bool = True,
    has_window_L: Sequence[bool] | None = None,
) -> Windows:
    """The window in the layers that `layer_types` names, without that key in those of `has_window_L`,
    by default in all; none if it is null or not used."""
    if not is_used or read.values.get("sliding_window") is None:
        read.check_layer_types("full", why="there is no window")
        return [None] * num_layers
    window, has_window_L = read.count("sliding_window"), has_window_L or [True] * num_layers
    if read.values.get("layer_types") is not None:
        has_window_L = read.layers_with_window(num_layers, 1)
    return [window if has_window else None for has_window in has_window_L]


def windows_of_keys(read: "KeyReader", num_layers: int) -> Windows:
    """The window in the layers of the pattern, in all without a pattern; none without a window."""
    window, has_window_L = read.whole(KEYS[0], 0) or None, [True] * num_layers
    if f"{read.graph.name}.{KEYS[1]}" in read.keys:
        has_window_L = read.layers_with_window(num_layers, 1)
    return [window if has_window else None for has_window in has_window_L]


def window_keys(spec: ModelSpec) -> dict[str, Value]:
    """The keys that `windows_of_keys` reads; {} for a model without windows."""
    windows = [attention.window for attention in spec.attentions]
    window = next((each for each in windows if each is not None), None)
    if window is None:
        return {}
    return {KEYS[0]: np.uint32(window), KEYS[1]: [each is not None for each in windows]}


def no_windows_in_stock(spec: ModelSpec) -> str | None:
    """What llama.cpp's graph without windows would compute otherwise."""
    windows = [attention.window for attention in spec.attentions]
    window = min((each for each in windows if each is not None), default=spec.context_length)
    if window >= spec.context_length:
        return None
    return f"attends to all tokens, this model to the latest {window:,}"
