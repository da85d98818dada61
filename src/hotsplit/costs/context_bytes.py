"""What the context of a model with states or windows takes, in words: fixed and growing."""

from collections.abc import Iterator

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.costs.cache_layout import BLOCK_LENGTH, cache_layout, ring_blocks
from hotsplit.costs.part_bytes import cache_bytes, draft_bytes, kv_bytes, placed_units
from hotsplit.costs.state_bytes import num_slots, slots_bytes, state_bytes
from hotsplit.options.cache_types import CacheTypes
from hotsplit.system.sizes import format_bytes


def text_words(model: ModelFile) -> str | None:
    """What a text keeps in any context; None for the keys and values of all tokens."""
    windows = dict(_windows(model))
    if not model.spec.has_states and not windows:
        return None
    layers = [layer for layer in _storing(model) if layer not in windows]
    token = format_bytes(_token_bytes(model, layers))
    parts = []
    if model.spec.has_states:
        states = format_bytes(sum(state_bytes(model, layer) for layer in layers))
        with_states = sum(model.spec.layers[layer].recurrent is not None for layer in layers)
        layers = [layer for layer in layers if model.spec.layers[layer].attention is not None]
        parts.append(f"{states} of states in {with_states} layers, whatever its length")
    if layers:
        parts.append(f"{token} of keys and values a token in {len(layers)}")
    for window in sorted(set(windows.values())):
        inner = [layer for layer, own in windows.items() if own == window]
        parts.append(
            f"{format_bytes(_token_bytes(model, inner))} of keys and values for each of the latest"
            f" {ring_blocks(window) * BLOCK_LENGTH:,} tokens at most in {len(inner)}"
        )
    return ", and ".join(parts)


def draft_words(model: ModelFile) -> str:
    """What the draft block takes; "" without one."""
    sizes = draft_bytes(model, 1)
    if not sizes:
        return ""
    token, _ = sizes.pop("kv_cache"), sizes.pop("workspace")
    weights = format_bytes(sum(sizes.values()))
    return f"{weights} of weights and {format_bytes(token)} of keys and values a token"


def context_words(
    model: ModelFile, context_length: int, num_sequences: int, types: CacheTypes | None = None
) -> str | None:
    """What this context takes in all; None if it is the keys and values of all tokens."""
    rings = [
        layer
        for layer, window in _windows(model)
        if cache_layout(context_length, num_sequences, window).window is not None
    ]
    if not model.spec.has_states and not rings:
        return None
    layers = range(model.spec.num_layers)
    size_L = [cache_bytes(model, layer, context_length, num_sequences, types) for layer in layers]
    states = sum(slots_bytes(model, layer, num_sequences) for layer in layers)
    windows = sum(size_L[layer] for layer in rings)
    growing = [layer for layer in _storing(model) if layer not in rings]
    texts = f"{num_sequences} texts of " if num_sequences > 1 else ""
    parts = []
    if states:
        each = format_bytes(states // num_slots(num_sequences))
        parts.append(
            f"{format_bytes(states)} of recurrent states ({num_slots(1)} of {each} a text), which"
            " do not grow with it"
        )
    if rings:
        parts.append(
            f"{format_bytes(windows)} of keys and values in {len(rings)} layers with windows, which"
            " do not grow with it"
        )
    if sum(size_L) > windows:
        more = 1024 * _token_bytes(model, growing, types)
        what = "experts" if model.spec.has_experts else "neurons"
        number = max(1, round(more / max(placed_units(model, layer)[1] for layer in layers)))
        parts.append(
            f"{format_bytes(sum(size_L) - windows)} of keys and values, {format_bytes(more)} for"
            f" each further 1,024 tokens, as much as {number:,} {what}"
        )
    return (
        f"the context of {texts}{context_length:,} tokens takes"
        f" {format_bytes(sum(size_L) + states)}: {', and '.join(parts)}"
    )


def _storing(model: ModelFile) -> list[int]:
    """The layers that keep something of a text: keys and values, or a state."""
    with_state = (i for i, layer in enumerate(model.spec.layers) if layer.recurrent is not None)
    return sorted({*model.spec.storing, *with_state})


def _windows(model: ModelFile) -> Iterator[tuple[int, int]]:
    """The layers with a window that the model's own context exceeds, and the window."""
    for index in _storing(model):
        attention = model.spec.layers[index].attention
        window = attention.window if attention else None
        if window is not None and ring_blocks(window) * BLOCK_LENGTH < model.spec.context_length:
            yield index, window


def _token_bytes(model: ModelFile, layers: list[int], types: CacheTypes | None = None) -> int:
    return sum(kv_bytes(model, layer, 1, types) for layer in layers)
