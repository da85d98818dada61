"""The form of a step: a model's spec, and the place of each part in a plan. `step_form` is the one
derivation, from loaded weights (`host_form`, `placed_form`) and from a file (`file_form`)."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hotsplit.model.spec import ModelSpec
from hotsplit.runtime.step.program import HOST, Block, LayerPlace, StepForm, gpu

if TYPE_CHECKING:  # torch takes a second to import, and `inspect --graph` needs none
    from hotsplit.runtime.model.layers import Layer, Weights
    from hotsplit.runtime.model.placement import Placement
    from hotsplit.runtime.weights.neuron_block import Role


def step_form(
    spec: ModelSpec,
    roles_L: Sequence[tuple["Role", ...]],
    *,
    homes: Sequence[int] = (),
    dense_on_gpu: Sequence[bool] = (),
    head_on_gpu: bool = False,
    is_cache_on_host: bool = False,
    is_tied: bool = False,
    has_bits_L: Sequence[bool] = (),
    streamed: Container[int] = (),
    layer_bytes: Sequence[Mapping[str, int]] = (),
    outer_bytes: Mapping[str, int] | None = None,
) -> StepForm:
    """The form of a step of a model, without the predictors that are not run. `roles_L`: of the
    blocks of neurons that each layer has. `homes`: the number of the GPU of each layer, then of the
    head; (): no GPU. `is_cache_on_host`: keys and values are there, which attends. `is_tied`: the
    head's matrix is the embedding, too. `has_bits_L`: the GPU writes the bits of a layer's hot
    neurons. `streamed`: layers whose cold neurons are streamed to their GPU. `layer_bytes` and
    `outer_bytes`: the bytes of weights by part, of each layer and outside the layers.

    Attention, norms and predictor of a layer are on one device, hot neurons on its GPU and cold
    ones on the host."""
    places = []
    for index, layer in enumerate(spec.layers):
        roles, home = roles_L[index], gpu(homes[index]) if homes else HOST
        is_on_gpu, is_streamed = bool(homes) and dense_on_gpu[index], index in streamed
        if is_streamed and layer.route is not None:  # one operation for units of both sides
            roles = roles[:1]
        blocks: list[tuple[Block, str]] = []
        for role in roles:
            block: Block = role if len(roles_L[index]) > 1 else "all"
            blocks.append((block, home if role == "hot" or is_streamed else HOST))
        place = LayerPlace(
            device=home if is_on_gpu else HOST,
            attends_on_host=is_on_gpu and is_cache_on_host,
            home=home,
            blocks=tuple(blocks),
            has_bits=bool(has_bits_L) and has_bits_L[index],
            weight_bytes=layer_bytes[index] if layer_bytes else {},
        )
        places.append(place)
    head_home = gpu(homes[-1]) if homes else HOST
    head = head_home if head_on_gpu else HOST
    return StepForm(
        spec=spec,
        places=_in_line(_copying_bits(places)),
        # Tied weights are on the head's device, unless operations on the host read the embedding
        # (loader).
        embedding=head if is_tied and not spec.first else HOST,
        head=head,
        head_home=head_home,
        weight_bytes=outer_bytes or {},
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
    return step_form(weights.spec, [roles_of(layer) for layer in weights.layers])


def placed_form(
    weights: "Weights",
    placement: "Placement",
    has_bits_L: Sequence[bool] = (),
    streamed: Container[int] = (),
) -> StepForm:
    """The form of a hybrid step, or of a pass with streamed layers."""
    return step_form(
        weights.spec,
        [roles_of(layer) for layer in weights.layers],
        homes=placement.numbers,
        dense_on_gpu=placement.dense_on_gpu,
        head_on_gpu=placement.head_on_gpu,
        is_cache_on_host=placement.is_cache_on_host,
        is_tied=weights.embedding is weights.head.weight,
        has_bits_L=has_bits_L,
        streamed=streamed,
    )
