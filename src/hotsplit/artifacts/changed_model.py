"""A model with another scaling of its rotary embeddings, for one run in the engine."""

from dataclasses import replace

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.errors import HotsplitError
from hotsplit.model.rope import asked_scaling


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
    the longest text to the training length; None takes what `context_length` needs. Raises
    HotsplitError for a model whose positions cannot be scaled, and like `asked_scaling`."""
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
