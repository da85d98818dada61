"""The layers of a model that a plan must keep on one device, and the refusal of plans that do not."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hotsplit.errors import HotsplitError
from hotsplit.model.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Together:
    """Layers whose dense blocks are on one device. `reason`: what such layers do, in words."""

    layers: tuple[int, ...]
    reason: str


def layers_together(spec: ModelSpec, *, keys_on_host: bool = False) -> tuple[Together, ...]:
    """The groups of a model, each of two layers at least. `keys_on_host`: main memory has the keys and
    values of all layers."""
    groups: dict[int, list[int]] = {}  # by the layer that stores their keys and values
    for index, layer in enumerate(spec.layers):
        if layer.attention is not None and not keys_on_host:
            groups.setdefault(layer.attention.cache_of(index), []).append(index)
    return tuple(
        Together(layers=tuple(layers), reason="share keys and values")
        for layers in groups.values()
        if len(layers) > 1
    )


def refuse_apart(
    path: Path, spec: ModelSpec, dense_on_gpu: Sequence[bool], home: Sequence[int]
) -> None:
    """Raises HotsplitError for a plan that has the layers of a group on several devices. `dense_on_gpu`: ()
    if main memory has all keys and values; `home`: the number of each layer's GPU, () for one GPU."""
    for group in layers_together(spec, keys_on_host=not dense_on_gpu):
        place = {i: home[i] if home else 0 for i in group.layers if dense_on_gpu[i]}
        first, *others = group.layers
        for layer in others:
            if place.get(layer) != place.get(first):
                raise HotsplitError(
                    f"{path}: layers {first} and {layer} are on different devices, but"
                    f" {group.reason}; run hotsplit solve on this model"
                )
