"""The weight bytes that a token reads: one function of a layer and of the shares of its neurons.

The solver's verifier has its own (solver/verify.py)."""

from collections.abc import Sequence

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.costs.part_bytes import head_bytes, layer_bytes, outside_read


def neurons_read(
    model: ModelFile, layer: int, named: float | None = None, fired: float | None = None
) -> float:
    """Bytes of a layer's neurons that a token reads on average. `named`: the share of them whose
    gates are computed; `fired`: the share whose up and down rows are used. None: all, of a mixture
    all of the experts that the router chooses."""
    sizes, spec = layer_bytes(model, layer), model.spec.layers[layer]
    chosen = 1.0 if spec.route is None else spec.route.num_used / spec.route.num_experts
    named, fired = (chosen if share is None else share for share in (named, fired))
    return spec.neurons.number * (named * sizes.gate_row + fired * (sizes.up_row + sizes.down_row))


def bytes_read(
    model: ModelFile,
    named_L: Sequence[float] | None = None,
    fired_L: Sequence[float] | None = None,
    *,
    has_predictor: bool = False,
) -> float:
    """Bytes of all weights that a token reads, by the shares of each layer (None: as
    `neurons_read`). `has_predictor`: predictors are run too."""
    count = model.spec.num_layers
    shares = zip(named_L or (None,) * count, fired_L or (None,) * count, strict=True)
    total = float(head_bytes(model) + outside_read(model))
    for layer, (named, fired) in enumerate(shares):
        sizes = layer_bytes(model, layer)
        total += sizes.attention + neurons_read(model, layer, named, fired)
        total += sizes.predictor if has_predictor else 0
    return total
