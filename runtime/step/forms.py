"""The form of a step: a model's spec, and the place of each part in a plan. `step_form` is the one
derivation, from loaded weights (`host_form`, `placed_form`) and from a file (`file_form`)."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hotsplit.model.spec import LayerSpec, ModelSpec
from hotsplit.runtime.step.program import HOST, Block, LayerPlace, StepForm, gpu

if TYPE_CHECKING:  # torch takes a second to import, and `inspect --graph` needs none
    from hotsplit.runtime.model.layers import Layer, Weights
    from hotsplit.runtime.model.placement import Placement
    from hotsplit.runtime.weights.neuron_block import Role


@dataclass(frozen=True, kw_only=True)
class PlannedSides:
    """What a plan puts where. By default everything is on the host."""

    roles_L: Sequence[tuple["Role", ...]]  # of the blocks of neurons that each layer has
    homes: Sequence[int] = ()  # the number of the GPU of each layer, then of the head; (): no GPU
    dense_on_gpu: Sequence[bool] = ()
    head_on_gpu: bool = False
    is_cache_on_host: bool = False  # keys and values are on the host, which attends
    is_tied: bool = False  # the head's matrix is the embedding too
    has_bits_L: Sequence[bool] = ()  # its GPU writes the bits of its hot neurons; (): none does
    streamed: Container[int] = ()  # layers whose cold neurons are streamed to their GPU


def step_form(
    spec: ModelSpec,
    sides: PlannedSides,
    *,
    layer_bytes: Sequence[Mapping[str, int]] = (),
    outer_bytes: Mapping[str, int] | None = None,
) -> StepForm:
    """The form of a step of a model, without the predictors that are not run. `layer_bytes` and
    `outer_bytes`: the bytes of weights by part, of each layer and outside the layers."""
    places = [_place(sides, layer, index) for index, layer in enumerate(spec.layers)]
    if layer_bytes:
        places = [
            replace(place, weight_bytes=parts)
            for place, parts in zip(places, layer_bytes, strict=True)
        ]
    head_home = gpu(sides.homes[-1]) if sides.homes else HOST
    head = head_home if sides.head_on_gpu else HOST
    return StepForm(
        spec=spec,
        places=_in_line(_copying_bits(places)),
        # Tied weights are on the head's device, unless operations on the host read the embedding
        # (loader).
        embedding=head if sides.is_tied and not spec.first else HOST,
        head=head,
        head_home=head_home,
        weight_bytes=outer_bytes or {},
    )


def _place(sides: PlannedSides, layer: LayerSpec, index: int) -> LayerPlace:
    """The place of a layer: attention, norms and predictor on one device, hot neurons on its GPU
    and cold ones on the host."""
    roles, home = sides.roles_L[index], HOST
    if sides.homes:
        home = gpu(sides.homes[index])
    is_on_gpu = bool(sides.homes) and sides.dense_on_gpu[index]

    is_streamed = index in sides.streamed

    def block(role: "Role") -> tuple[Block, str]:
        is_there = role == "hot" or is_streamed
        return role if len(roles) > 1 else "all", home if is_there else HOST

    if is_streamed and layer.route is not None:  # one operation for units of both sides
        roles = roles[:1]
    return LayerPlace(
        device=home if is_on_gpu else HOST,
        attends_on_host=is_on_gpu and sides.is_cache_on_host,
        home=home,
        blocks=tuple(map(block, roles)),
        has_bits=bool(sides.has_bits_L) and sides.has_bits_L[index],
    )


def _in_line(places: Iterable[LayerPlace]) -> tuple[LayerPlace, ...]:
    """Gives neighbouring layers that are wholly on the host the same home."""
    found: list[LayerPlace] = []
    for place in places:
        if found and found[-1].is_whole_on_host and place.is_whole_on_host:
            place = replace(place, home=found[-1].home)
        found.append(place)
    return tuple(found)


def _copying_bits(places: Sequence[LayerPlace]) -> list[LayerPlace]:
    """Sets `copies_bits` for the last layer of each GPU that writes bits."""
    last = {place.home: index for index, place in enumerate(places) if place.has_bits}
    return [
        replace(place, copies_bits=index in last.values()) for index, place in enumerate(places)
    ]


def roles_of(layer: "Layer") -> tuple["Role", ...]:
    return tuple(block.role for block in layer.ffn.blocks)


def host_form(weights: "Weights") -> StepForm:
    """The form of a step entirely on the host."""
    return step_form(
        weights.spec, PlannedSides(roles_L=[roles_of(layer) for layer in weights.layers])
    )


def placed_form(
    weights: "Weights",
    placement: "Placement",
    has_bits_L: Sequence[bool] = (),
    streamed: Container[int] = (),
) -> StepForm:
    """The form of a hybrid step, or of a pass with streamed layers."""
    sides = PlannedSides(
        roles_L=[roles_of(layer) for layer in weights.layers],
        homes=placement.numbers,
        dense_on_gpu=placement.dense_on_gpu,
        head_on_gpu=placement.head_on_gpu,
        is_cache_on_host=placement.is_cache_on_host,
        is_tied=weights.embedding is weights.head.weight,
        has_bits_L=has_bits_L,
        streamed=streamed,
    )
    return step_form(weights.spec, sides)
