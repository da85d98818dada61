"""What a spec says, as rows for people."""

from collections.abc import Callable

from hotsplit.model.spec import Attention, DeltaNet, LayerSpec, ModelSpec


def spec_facts(spec: ModelSpec) -> list[tuple[str, str]]:
    """(name, value) of the numbers of a model; of numbers that differ between layers, each, with semicolons."""

    def each(text: Callable[[LayerSpec], str | None]) -> str:
        found = [value for layer in spec.layers if (value := text(layer)) is not None]
        return "; ".join(dict.fromkeys(found))

    rows = [
        ("layers", str(spec.num_layers)),
        ("hidden size", f"{spec.hidden_size:,}"),
        ("neurons a layer", each(lambda layer: f"{layer.neurons.number:,}")),
        ("experts", each(_experts)),
        ("shared experts", each(_shared)),
        ("heads", each(lambda layer: _heads(layer.attention))),
        ("keys and values", _storing(spec)),
        *(fact for block in (*spec.first, *spec.last) for fact in block.facts.items()),
        ("delta nets", each(lambda layer: _delta(spec, layer.delta))),
        ("vocabulary", f"{spec.vocab_size:,}"),
        ("context", f"{spec.context_length:,}"),
        ("window", each(lambda layer: _window(spec, layer.attention))),
        ("rotary base", each(lambda layer: _theta(layer.attention))),
        ("rotary scaling", spec.rotary.scaling.words if spec.rotary else ""),
        ("norm epsilon", each(lambda layer: f"{max(n.epsilon for n in layer.norms.values()):g}")),
    ]
    return [row for row in rows if row[1]]


def _experts(layer: LayerSpec) -> str | None:
    if layer.route is None:
        return None
    route = layer.route
    return (
        f"{route.num_used} of {route.num_experts} a token, of {layer.neurons.of_expert:,} neurons each"
        f" ({route.gating.replace('_', ' ')})"
    )


def _shared(layer: LayerSpec) -> str | None:
    return None if layer.shared is None else f"{layer.shared.number:,} neurons"


def _heads(attention: Attention | None) -> str | None:
    if attention is None:
        return None
    return (
        f"{attention.num_heads} of {attention.head_dim}, {attention.num_kv_heads} for keys and"
        " values"
    )


def _storing(spec: ModelSpec) -> str:
    count = len(spec.storing)
    return "" if count == spec.num_layers else f"of {count} of {spec.num_layers} layers"


def _delta(spec: ModelSpec, delta: DeltaNet | None) -> str | None:
    if delta is None:
        return None
    count = sum(layer.delta == delta for layer in spec.layers)
    return (
        f"{delta.num_value_heads} states of {delta.key_head_dim} x {delta.value_head_dim},"
        f" {delta.num_key_heads} for keys, in {count} layers"
    )


def _window(spec: ModelSpec, attention: Attention | None) -> str | None:
    if attention is None or attention.window is None:
        return None
    count = sum(each.window == attention.window for each in spec.attentions)
    return f"{attention.window:,} tokens in {count} layers"


def _theta(attention: Attention | None) -> str | None:
    if attention is None or attention.rotary is None:
        return None
    return f"{attention.rotary.theta:g}"
