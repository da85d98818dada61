"""Windows of attention: from a config, and as a GGUF's keys."""

from collections.abc import Sequence

import numpy as np

from hotsplit.families.config_reader import ConfigReader
from hotsplit.families.decoder_sizes import MAX_COUNT
from hotsplit.families.key_reader import KeyReader
from hotsplit.files.gguf_file import Value
from hotsplit.model.spec import ModelSpec

KEYS = ("attention.sliding_window", "attention.sliding_window_pattern")
Windows = Sequence[int | None]  # of each layer


def windows_of_config(
    read: ConfigReader, *, is_used: bool = True, has_window_L: Sequence[bool] = ()
) -> Windows:
    """The window in the layers that `layer_types` names, without that key in those of
    `has_window_L`, by default in all; none if it is null or not used."""
    num_layers = read.count("num_hidden_layers")
    if not is_used or read.values.get("sliding_window") is None:
        read.check_layer_types("full", why="there is no window")
        return [None] * num_layers
    window, has_window_L = read.count("sliding_window"), has_window_L or [True] * num_layers
    if read.values.get("layer_types") is not None:
        has_window_L = read.layers_with_window(1)
    return [window if has_window else None for has_window in has_window_L]


def in_all_layers(read: ConfigReader, *, is_used: bool = True) -> Windows:
    """The windows of a model that has them in all layers, whatever `layer_types` says."""
    has_windows = is_used and read.values.get("sliding_window") is not None
    read.check_layer_types("sliding" if has_windows else "full", why="transformers ignores the key")
    return windows_of_config(read, is_used=is_used)


def window_keys(windows: Windows) -> dict[str, Value]:
    """The keys that `windows_of_keys` reads; {} for a model without windows."""
    window = next((each for each in windows if each is not None), None)
    if window is None:
        return {}
    return {KEYS[0]: np.uint32(window), KEYS[1]: [each is not None for each in windows]}


def config_window_keys(read: ConfigReader) -> dict[str, Value]:
    return window_keys(windows_of_config(read))


def local_window_keys(read: ConfigReader, period: int) -> dict[str, Value]:
    """The keys of a model whose layers without a window, by default the last of a period, are other
    ones, too: both are there in a model without windows."""
    has_window_L = read.layers_with_window(period)
    window = read.count("sliding_window" if any(has_window_L) else "max_position_embeddings")
    return {KEYS[0]: np.uint32(window), KEYS[1]: has_window_L}


def windows_of_keys(
    read: KeyReader, num_layers: int, *, period: int = MAX_COUNT, window: int | None = 0
) -> Windows:
    """The window in the layers of the pattern, without one in all but the last of a period;
    `window`: without a key; 0 for none, None if there must be one."""
    own = read.whole(KEYS[0], window)
    if not own:
        return [None] * num_layers
    return [own if has else None for has in read.layers_with_window(num_layers, period)]


def no_windows_in_stock(spec: ModelSpec) -> str | None:
    """What llama.cpp's graph without windows would compute otherwise."""
    windows = [attention.window for attention in spec.attentions]
    window = min((each for each in windows if each is not None), default=spec.context_length)
    if window >= spec.context_length:
        return None
    return f"attends to all tokens, this model to the latest {window:,}"


def periodic_in_stock(spec: ModelSpec, period: int) -> str | None:
    """What llama.cpp's graph, with windows in all but a period's last layer, would change."""
    has_window_L = [attention.window is not None for attention in spec.attentions]
    if has_window_L == [(layer + 1) % period != 0 for layer in range(spec.num_layers)]:
        return None
    return f"has windows in all layers but each {period}th, this model in others"


def other_head_size(spec: ModelSpec) -> str | None:
    """What llama.cpp's graph, whose heads are together as wide as the state, would change."""
    width = spec.attentions[0].query_size
    if width == spec.hidden_size:
        return None
    return f"has heads of {spec.hidden_size} values together, this model of {width}"
