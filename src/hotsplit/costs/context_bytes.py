"""What the context of a model with recurrent states takes, in words: what is fixed and what grows."""

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.costs.part_bytes import kv_bytes, kv_positions, placed_units
from hotsplit.costs.state_bytes import num_slots, slots_bytes, state_bytes
from hotsplit.options.cache_types import CacheTypes
from hotsplit.system.sizes import format_bytes


def per_token_bytes(model: ModelFile, types: CacheTypes | None = None) -> int:
    """Bytes of the keys and values of a token in all layers."""
    return sum(kv_bytes(model, layer, 1, types) for layer in range(model.spec.num_layers))


def text_words(model: ModelFile) -> str | None:
    """What a text keeps, whatever the context; None without recurrent states."""
    if not model.spec.has_states:
        return None
    layers = range(model.spec.num_layers)
    states = format_bytes(sum(state_bytes(model, layer) for layer in layers))
    with_states = sum(model.spec.layers[layer].delta is not None for layer in layers)
    return (
        f"{states} of states in {with_states} layers, whatever its length, and"
        f" {format_bytes(per_token_bytes(model))} of keys and values a token in"
        f" {len(layers) - with_states}"
    )


def context_words(
    model: ModelFile, context_length: int, num_sequences: int, types: CacheTypes | None = None
) -> str | None:
    """What this context takes in all; None without recurrent states."""
    if not model.spec.has_states:
        return None
    layers = range(model.spec.num_layers)
    positions = kv_positions(context_length, num_sequences)
    keys = sum(kv_bytes(model, layer, positions, types) for layer in layers)
    states = sum(slots_bytes(model, layer, num_sequences) for layer in layers)
    texts = f"{num_sequences} texts of " if num_sequences > 1 else ""
    return (
        f"the context of {texts}{context_length:,} tokens takes {format_bytes(keys + states)}:"
        f" {format_bytes(states)} of recurrent states ({num_slots(1)} of"
        f" {format_bytes(states // num_slots(num_sequences))} a text), which do not grow with it, and"
        f" {format_bytes(keys)} of keys and values, {_grows(model, types)}"
    )


def _grows(model: ModelFile, types: CacheTypes | None) -> str:
    """What a longer context takes, in experts or in neurons."""
    more = 1024 * per_token_bytes(model, types)
    units = [placed_units(model, layer)[1] for layer in range(model.spec.num_layers)]
    what = "experts" if model.spec.has_experts else "neurons"
    return (
        f"{format_bytes(more)} for each further 1,024 tokens, as much as"
        f" {max(1, round(more / max(units))):,} {what}"
    )
