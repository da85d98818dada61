"""Profiles a model that does not fit into memory, by streaming its weights. Such a run cannot be
resumed."""

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from hotsplit.errors import HotsplitError
from hotsplit.profile.config import ProfileConfig
from hotsplit.profile.count.counting import Counter, gates_of
from hotsplit.profile.predictors.train import Trained, train_streamed
from hotsplit.profile.sparsity.thresholds import thresholds_for
from hotsplit.profile.stream.streaming import LayerStream
from hotsplit.runtime.weights.neuron_block import Gate

OnTokens = Callable[[float], None]


def collect_streamed(
    stream: LayerStream, windows: Sequence[Tensor], config: ProfileConfig, on_tokens: OnTokens
) -> tuple[tuple[Gate, ...], Counter, Trained | None]:
    """(gates with the thresholds that firings were counted with, counts, predictors if asked for).

    Raises HotsplitError for a perplexity budget, and if the model gives NaN."""
    model = stream.model
    if config.perplexity_budget is not None:
        raise HotsplitError(
            f"{config.model}: a perplexity budget is measured on the whole model, which does not"
            " fit into the memory; give --target-sparsity, or more memory"
        )
    gates = gates_of(model, model.threshold_L)
    first = config.num_for_thresholds(len(windows))
    if config.target_sparsity is not None:
        silent = gates_of(model, (0.0,) * len(gates))
        histogram_LB = _histogram(stream, silent, windows[:first], on_tokens)
        gates = gates_of(model, thresholds_for(histogram_LB, config.target_sparsity))
    counter = Counter(gates, model.spec.most_neurons, model.limits.layers)
    trained = None
    with stream.observe(counter.observe, counter.wants):
        if config.train_predictors:
            trained = train_streamed(stream, gates, windows[first:], config, on_tokens)
        else:
            stream.run(windows[first:], on_tokens)
    counter.check()
    return gates, counter, trained


def _histogram(
    stream: LayerStream, gates: tuple[Gate, ...], windows: Sequence[Tensor], on_tokens: OnTokens
) -> np.ndarray:
    """int64 [L, B], counted in a separate pass over the weights."""
    counter = Counter(gates, stream.model.spec.most_neurons)
    with stream.observe(counter.observe, counter.wants):
        stream.run(windows, on_tokens)
    counter.check()
    return counter.arrays()["gate_histogram_LB"].numpy()
