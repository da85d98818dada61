"""What a plan assumes of the neurons of a model without a profile.

Where every neuron is computed for every token (mode dense, or a model that has no other), nothing
remains to be counted."""

from pathlib import Path

import numpy as np

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.profile_file import NUM_BINS, Profile
from hotsplit.costs.default_mode import computes_every_neuron
from hotsplit.errors import HotsplitError
from hotsplit.model.modes import Mode


def profile_for(model: ModelFile, path: Path | None, mode: Mode | None) -> Profile:
    """The profile at `path`; without one, that every neuron fires. Raises HotsplitError like
    Profile.load, and without a path for a model of which that is not known."""
    if path is not None:
        return Profile.load(path)
    if computes_every_neuron(model, mode):
        return every_neuron(model)
    if model.spec.has_experts:
        unknown = "which experts its tokens choose is known only from a profile"
        raise HotsplitError(f"{model.path}: {unknown}; give --profile (hotsplit profile)")
    raise HotsplitError(
        f"{model.path}: which neurons of this {model.activation} model fire is known only from a"
        " profile; give --profile (hotsplit profile), or --mode dense, which computes all of them"
    )


def every_neuron(model: ModelFile) -> Profile:
    """The profile of one token, for which every neuron fires; layers with fewer neurons than the
    largest have zeros behind theirs, as counted profiles do."""
    num_layers, most = model.spec.num_layers, model.spec.most_neurons
    number_L1 = np.array([layer.neurons.number for layer in model.spec.layers])[:, None]
    histogram_LB = np.zeros((num_layers, NUM_BINS), np.int64)
    histogram_LB[:, -1] = most
    return Profile(
        model_id=model.model_id,
        num_tokens=1,
        threshold_L=tuple(model.threshold_L),
        corpora=(),
        active_count_LF=(np.arange(most) < number_L1).astype(np.int64),
        gate_histogram_LB=histogram_LB,
        limits=model.limits.sha256,
    )
