"""The weight bytes that a token reads: one function of a layer and of the shares of its neurons.

The solver's verifier has its own (solver/verify.py)."""

from collections.abc import Sequence

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.costs.part_bytes import head_bytes, layer_bytes


def neurons_read(model: ModelFile, layer: int, named: float = 1.0, fired: float = 1.0) -> float:
    """Bytes of a layer's neurons, those of the experts that a router chooses, that a token reads on
    average. `named`: the share whose gates are
    computed; `fired`: the share whose up and down rows are used."""
    sizes, spec = layer_bytes(model, layer), model.spec.layers[layer]
    number = spec.neurons.of_expert * (1 if spec.route is None else spec.route.num_used)
    return number * (named * sizes.gate_row + fired * (sizes.up_row + sizes.down_row))


def bytes_read(
    model: ModelFile,
    named_L: Sequence[float] | None = None,
    fired_L: Sequence[float] | None = None,
    *,
    has_predictor: bool = False,
) -> float:
    """Bytes of all weights that a token reads, by the shares of each layer (None: all neurons).
    `has_predictor`: predictors are run too."""
    count = model.spec.num_layers
    shares = zip(named_L or (1.0,) * count, fired_L or (1.0,) * count, strict=True)
    total = float(head_bytes(model))
    for layer, (named, fired) in enumerate(shares):
        sizes = layer_bytes(model, layer)
        total += sizes.attention + neurons_read(model, layer, named, fired)
        total += sizes.predictor if has_predictor else 0
    return total
