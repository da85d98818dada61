"""A model with other thresholds, or with another scaling of its rotary embeddings: permanently in
convert (thresholds only), for one run in the engine."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.profile_file import Profile
from hotsplit.errors import HotsplitError
from hotsplit.model.neurons import SMOOTH
from hotsplit.model.rope import asked_scaling


def with_thresholds(model: ModelFile, path: Path) -> ModelFile:
    """The model with a profile's thresholds, at or below which |act(gate)| counts as zero.

    Raises HotsplitError for another model's profile, for a profile counted by limits, for a model
    with limits of gates, and like `replace_thresholds`."""
    profile = Profile.load(path)
    if profile.limits is not None:
        raise HotsplitError(
            f"{path}: firings were counted by the limits of a model file, so it has no thresholds"
            " to take; leave it out"
        )
    if any(layer.gate_F is not None for layer in model.limits.layers):
        raise HotsplitError(
            f"{path}: thresholds are for a model without limits of gates, but {model.path} has"
            " some; leave the profile out, or give the model that it was made from"
        )
    if profile.model_id != model.model_id:
        raise HotsplitError(
            f"{path}: a profile of model {profile.model_id[:12]}, this is {model.model_id[:12]};"
            " profile this model"
        )
    if profile.active_count_LF.shape != (model.spec.num_layers, model.spec.most_neurons):
        raise HotsplitError(
            f"{path}: counts are {list(profile.active_count_LF.shape)}, wanted"
            f" {[model.spec.num_layers, model.spec.most_neurons]}; profile this model"
        )
    changed = replace_thresholds(model, profile.threshold_L, str(path))
    # That of mode predicted is the model's only if its predictors are from the profile's run.
    own = model.quality.get("predicted")
    is_same = own is not None and own == profile.quality.get("predicted")
    quality = {mode: q for mode, q in profile.quality.items() if mode == "exact" or is_same}
    return replace(changed, quality=quality)


def replace_thresholds(model: ModelFile, threshold_L: Sequence[float], source: str) -> ModelFile:
    """The model with other thresholds, whose quality is unknown; errors quote `source`.

    Raises HotsplitError unless there is one finite number, at least 0, for each layer of a SiLU
    or GELU model; in other models the threshold is part of the activation."""
    if model.activation not in SMOOTH:
        raise HotsplitError(
            f"{source}: thresholds are for SiLU and GELU models; this one is {model.activation},"
            " which itself decides which neurons are zero; leave the thresholds out"
        )
    model.refuse_chosen("thresholds of gates are", "leave them out")
    is_valid = all(0 <= threshold < math.inf for threshold in threshold_L)
    if len(threshold_L) != model.spec.num_layers or not is_valid:
        raise HotsplitError(
            f"{source}: thresholds are {tuple(threshold_L)}, wanted {model.spec.num_layers} finite"
            " numbers, at least 0; profile this model again"
        )
    return replace(model, threshold_L=tuple(threshold_L), quality={})


def for_context(model: ModelFile, context_length: int) -> ModelFile:
    """The model for texts of up to `context_length` tokens, on which longrope's factors depend."""
    scaling = model.bare_spec.rope_scaling.for_context(context_length)
    if scaling == model.bare_spec.rope_scaling:
        return model
    return replace(model, bare_spec=model.bare_spec.with_scaling(scaling))


def with_rope_scaling(
    model: ModelFile, kind: str | None, factor: float | None, context_length: int | None
) -> ModelFile:
    """The model with this scaling instead of its own; unchanged if `kind` and `factor` are None.

    kind: "none", "linear" or "yarn"; None means "yarn" if there is a factor. factor: the ratio of
    the longest text to the training length; None takes what `context_length` needs.

    Raises HotsplitError for a model whose positions cannot be scaled, and like `asked_scaling`."""
    if kind is None and factor is None:
        return model
    spec, rotary = model.bare_spec, model.bare_spec.rotary
    why = None
    if rotary is None:
        why = "its positions are learned"
    elif rotary.scaling.kind == "linear":
        why = f"it was trained with positions divided by {rotary.scaling.factor:g}"
    elif rotary.factors is not None:
        why = f"its frequencies are scaled already ({rotary.factors})"
    if why is not None:
        raise HotsplitError(f"{model.path}: {why}; leave --rope-scaling and --rope-scale out")
    assert rotary is not None
    length = rotary.scaling.original_length or spec.context_length
    scaling = asked_scaling(kind, factor, context_length, length)
    longest = int(length * scaling.factor)
    return replace(model, bare_spec=replace(spec.with_scaling(scaling), context_length=longest))
