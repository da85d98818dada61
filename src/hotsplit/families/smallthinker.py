"""SmallThinker (arXiv 2507.20984): experts of ReLU neurons, so that most neurons of a chosen expert
are silent, too. The router reads the layer's input, before attention and without a norm."""

from hotsplit.errors import HotsplitError
from hotsplit.families.config_reader import ConfigReader
from hotsplit.families.expert_keys import KEYS, expert_keys, experts_of_keys
from hotsplit.families.family import Architecture, Family
from hotsplit.families.key_reader import KeyReader
from hotsplit.families.plain_decoder import decoder
from hotsplit.families.windows import KEYS as WINDOW_KEYS
from hotsplit.families.windows import Windows, window_keys, windows_of_keys
from hotsplit.files.gguf_file import Value
from hotsplit.files.typed import shown
from hotsplit.model.spec import ModelSpec

# What llama.cpp's graph has whatever a file says (src/models/smallthinker.cpp): a window of this
# length in all layers but the first of each period.
STOCK_WINDOW, PERIOD = 4096, 4


def keys(read: ConfigReader) -> dict[str, Value]:
    """transformers does not have it: its own code is for older versions."""
    for key in ("moe_enable_secondary_experts", "moe_shared_primary_experts"):
        read.refuse(key, False, 0, why="the published models have no such experts")
    if not all(_layout(read, "moe_layer_layout", default=1)):
        raise HotsplitError(
            f"{read.path}: moe_layer_layout is {shown(read.values['moe_layer_layout'])}: layers"
            " without experts are not supported"
        )
    has_window_L = _layout(read, "sliding_window_layout", default=0)
    rotates_L = _layout(read, "rope_layout", default=1)
    if rotates_L != has_window_L and not all(rotates_L):
        raise HotsplitError(
            f"{read.path}: rope_layout is {shown(read.values.get('rope_layout'))}, wanted rotary"
            " embeddings in all layers, or in those with a window; this checkpoint is not supported"
        )
    is_softmax = read.flag("moe_primary_router_apply_softmax")
    keys = expert_keys(
        read.with_values({"num_experts": read.values.get("moe_num_primary_experts")}),
        neurons="moe_ffn_hidden_size",
        used="moe_num_active_primary_experts",
        gating="softmax" if is_softmax else "sigmoid",
    )
    window = read.count("sliding_window_size") if any(has_window_L) else None
    return keys | window_keys([window if has else None for has in has_window_L])


def _layout(read: ConfigReader, key: str, *, default: int) -> list[bool]:
    """A 0 or 1 for each layer."""
    values, num_layers = read.values.get(key), read.count("num_hidden_layers")
    values = [default] * num_layers if values is None else values
    if not isinstance(values, list) or len(values) != num_layers or set(values) - {0, 1}:
        raise HotsplitError(f"{read.path}: {key} is {shown(values)}, wanted {num_layers} of 0 or 1")
    return [bool(value) for value in values]


def of_keys(read: KeyReader) -> ModelSpec:
    """Layers without a window do not rotate if others have one, as in llama.cpp."""
    num_layers = read.count("block_count")
    windows: Windows = windows_of_keys(read, num_layers)
    key = f"{read.graph.name}.{WINDOW_KEYS[1]}"
    if not isinstance(read.keys.get(key), list):
        windows = [window if i % PERIOD else None for i, window in enumerate(windows)]
    rotates_L = [window is not None for window in windows]
    experts = experts_of_keys(read, gating="softmax", reads="x")
    is_mixed = any(rotates_L)
    return decoder(read, experts=experts, windows=windows, rotates_L=rotates_L if is_mixed else ())


def not_in_stock(spec: ModelSpec) -> str | None:
    windows = [attention.window for attention in spec.attentions]
    if not any(windows):
        return None
    wanted = [STOCK_WINDOW if layer % PERIOD else None for layer in range(spec.num_layers)]
    if windows != wanted:
        return (
            f"has windows of {STOCK_WINDOW} in all layers but each {PERIOD}th from the first, this"
            " model others"
        )
    return None


FAMILIES = (
    Family(
        classes=("SmallThinkerForCausalLM",),
        title="SmallThinker",
        graph="smallthinker",
        model_types=(),
        defaults={
            "tie_word_embeddings": False,
            "moe_primary_router_apply_softmax": False,
            "hidden_act": "relu",
        },
        fields={"feed_forward_length": "moe_ffn_hidden_size"},
        activations={"relu": "relu"},
        keys=keys,
    ),
)
GRAPHS = (
    Architecture(
        name="smallthinker",
        of_keys=of_keys,
        known_keys=(*KEYS, *WINDOW_KEYS),
        stock_activations=("relu",),
        not_in_stock=not_in_stock,
    ),
)
