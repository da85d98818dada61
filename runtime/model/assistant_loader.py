"""Loads an assistant (model/assistant.py), on the CPU, so that its layers read the keys and values
of its main model."""

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.model.assistant import SOURCES, AssistantInput, has_assistants
from hotsplit.runtime.cache.kv_cache import LayerCache
from hotsplit.runtime.model.layers import Weights
from hotsplit.runtime.model.loader import Builder
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.weights.store import CPU


def why_not_beside(file: ModelFile, main: Weights) -> str:
    """Why an assistant cannot read what this model keeps; "" if it can."""
    (reads,) = (block for block in file.spec.first if isinstance(block, AssistantInput))
    if not has_assistants(main.spec):
        return "is an assistant for Gemma 4, which this model is not"
    if reads.main_size != main.spec.hidden_size:
        return (
            f"is an assistant for a model with hidden states of {reads.main_size} values, and this"
            f" one's have {main.spec.hidden_size}"
        )
    if file.spec.vocab_size > main.spec.vocab_size:
        return f"has {file.spec.vocab_size} tokens, and this model {main.spec.vocab_size}"
    if main.cache.types.selection is not None or any(
        cache.device != CPU for cache in main.cache.layers
    ):
        return "reads keys and values on the CPU, where this model's are not (--device cpu)"
    caches = _last_caches(main)
    for attention in file.spec.attentions:
        assert attention.source is not None
        cache, shape = caches.get(attention.source), (attention.num_kv_heads, attention.head_dim)
        kind = "with a window" if attention.source == SOURCES[True] else "without a window"
        if cache is None:
            return f"reads a layer {kind}, of which this model has none"
        if cache[1] != shape:
            return (
                f"reads {shape[0]} heads of {shape[1]} values of a layer {kind}, where this model"
                f" has {cache[1][0]} of {cache[1][1]}"
            )
    return ""


def load_assistant(file: ModelFile, main: Weights) -> Weights:
    """`file` must be one that can run beside the model (`why_not_beside`)."""
    builder = Builder(
        file,
        Placement.on_one_device(file.spec.num_layers, CPU),
        "dense",
        main.cache.context_length,
        num_sequences=main.cache.num_sequences,
        cache_types=main.cache.types,
    )
    caches = _last_caches(main)
    for index, attention in enumerate(file.spec.attentions):
        assert attention.source is not None
        builder.caches[attention.kept(index).name] = caches[attention.source][0]
    return builder.weights()


def _last_caches(main: Weights) -> dict[int, tuple[LayerCache, tuple[int, int]]]:
    """The cache of the main model's last layer of each kind, by what SOURCES calls it, with the
    number of its heads and their width."""
    found = {}
    for layer in main.layers:
        if layer.attending is not None:
            spec = layer.attending.spec
            shape = spec.num_kv_heads, spec.head_dim
            found[SOURCES[spec.window is not None]] = layer.attending.cache, shape
    return found
