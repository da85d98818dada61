"""Layers that a plan must keep on one device (`ModelSpec.together`), or it is refused."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hotsplit.errors import HotsplitError


@dataclass(frozen=True, kw_only=True)
class Together:
    """Layers whose dense blocks are on one device. `reason`: what such layers do, in words."""

    layers: tuple[int, ...]
    reason: str


def refuse_apart(
    path: Path, groups: Sequence[Together], dense_on_gpu: Sequence[bool], home: Sequence[int]
) -> None:
    """Raises HotsplitError for a plan that has the layers of a group on several devices. `home`:
    the number of each layer's GPU, () for one GPU."""
    for group in groups:
        place = {i: home[i] if home else 0 for i in group.layers if dense_on_gpu[i]}
        first, *others = group.layers
        for layer in others:
            if place.get(layer) != place.get(first):
                raise HotsplitError(
                    f"{path}: layers {first} and {layer} are on different devices, but"
                    f" {group.reason}; run hotsplit solve on this model"
                )
