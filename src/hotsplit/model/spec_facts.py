"""What a spec says, as rows for people."""

from collections import Counter
from collections.abc import Iterable

from hotsplit.model.spec import LayerSpec, ModelSpec


def spec_facts(spec: ModelSpec) -> list[tuple[str, str]]:
    """(name, value) of a model's numbers; those that differ between layers with semicolons."""
    layers, attentions = spec.layers, spec.attentions
    windows = [a.window for a in attentions if a.window is not None]
    num_with = sum(layer.neurons.number > 0 for layer in layers)
    is_whole = len(spec.storing) == spec.num_layers
    stored = "" if is_whole else f"of {len(spec.storing)} of {spec.num_layers} layers"
    limit = spec.context_limit and f"; {spec.context_limit}"
    rows = [
        ("layers", str(spec.num_layers)),
        ("hidden size", f"{spec.hidden_size:,}"),
        (
            "neurons a layer",
            _each(f"{x.neurons.number:,}" for x in layers if x.neurons.number)
            + (f", in {num_with:,} of {len(layers):,}" if num_with < len(layers) else ""),
        ),
        (
            "experts",
            _each(
                f"{layer.route.num_used} of {layer.route.num_experts} a token, of"
                f" {layer.neurons.of_expert:,} neurons each"
                f"{_of_latent(layer.neurons.latent_size)}"
                f" ({layer.route.gating.replace('_', ' ')})"
                for layer in layers
                if layer.route is not None
            ),
        ),
        ("shared experts", _each(f"{x.shared.number:,} neurons" for x in layers if x.shared)),
        (
            "heads",
            _each(
                f"{a.num_heads} of {a.head_dim}, {a.num_kv_heads} for keys and values"
                if a.latent is None
                else f"{a.num_heads} of {a.latent.of_query}, one row of {a.head_dim} values a token"
                " for their keys and values"
                for a in attentions
            ),
        ),
        ("keys and values", stored),
        *(fact for block in (*spec.first, *spec.last) for fact in block.facts.items()),
        *_of_recurrent(layers),
        ("draft block", "one layer, which guesses the token after the next" if spec.draft else ""),
        ("vocabulary", f"{spec.vocab_size:,}"),
        ("context", f"{spec.context_length:,}{limit}"),
        ("window", _each(f"{w:,} tokens in {windows.count(w)} layers" for w in windows)),
        ("rotary base", _each(f"{a.rotary.theta:g}" for a in attentions if a.rotary)),
        ("rotary scaling", spec.rotary.scaling.words if spec.rotary else ""),
        (
            "norm epsilon",
            _each(f"{max(n.epsilon for n in x.norms.values()):g}" for x in layers if x.norms),
        ),
    ]
    return [row for row in rows if row[1]]


def _of_latent(size: int | None) -> str:
    return "" if size is None else f" that read a latent of {size:,} values"


def _of_recurrent(layers: Iterable[LayerSpec]) -> Iterable[tuple[str, str]]:
    """The facts of blocks with a state, with the number of layers."""
    counts = Counter(layer.recurrent for layer in layers if layer.recurrent is not None)
    rows = [
        (name, f"{value}, in {count} layers")
        for block, count in counts.items()
        for name, value in block.facts.items()
    ]
    return [(name, _each(v for n, v in rows if n == name)) for name in dict(rows)]


def _each(values: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(values))
