"""The text model of a checkpoint that has models for images or sound beside it."""

from dataclasses import replace

from hotsplit.families.blueprint import Blueprint, NameOf

# Prefixes of its tensors, in which it is a "model." or has a head beside one.
_WITH_MODEL, _WITHOUT = ("language_model.model.", "model.language_model."), "language_model."
_BESIDE = (
    "vision_tower.",
    "multi_modal_projector.",
    "visual.",
    "embed_vision.",
    "audio_tower.",
    "embed_audio.",
)


def text_model(whole: Blueprint) -> Blueprint:
    """The plan of a text model's conversion, from where its tensors are."""
    beside = (*_BESIDE, *(f"model.{prefix}" for prefix in _BESIDE))
    return replace(
        whole, name_of=_of_text(whole.name_of), ignored_prefixes=(*whole.ignored_prefixes, *beside)
    )


def _of_text(name_of: NameOf) -> NameOf:
    def name(source: str) -> str | None:
        for prefix in _WITH_MODEL:
            if source.startswith(prefix):
                return name_of("model." + source.removeprefix(prefix))
        return name_of(source.removeprefix(_WITHOUT))

    return name
