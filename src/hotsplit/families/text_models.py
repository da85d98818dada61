"""The text model of a checkpoint that has models for images or sound beside it."""

from dataclasses import replace

from hotsplit.families.blueprint import Blueprint

# Prefixes of its tensors, in which it is a "model." or has a head beside one.
_WITH_MODEL, _WITHOUT = ("language_model.model.", "model.language_model."), "language_model."
_BESIDE = (
    "vision_tower.",
    "multi_modal_projector.",
    "visual.",
    "vision_adapter.",
    "vision_projection.",
    "embed_vision.",
    "audio_tower.",
    "embed_audio.",
)


def text_model(whole: Blueprint) -> Blueprint:
    """The plan of a text model's conversion, from where its tensors are."""
    beside = (*_BESIDE, *(f"model.{prefix}" for prefix in _BESIDE))

    def name(source: str) -> str | None:
        for prefix in _WITH_MODEL:
            if source.startswith(prefix):
                return whole.name_of("model." + source.removeprefix(prefix))
        return whole.name_of(source.removeprefix(_WITHOUT))

    return replace(whole, name_of=name, ignored_prefixes=(*whole.ignored_prefixes, *beside))
