"""Explains what a plan's GPU memory is used for, by item and by layer, from the written plan and
its model file."""

from dataclasses import dataclass

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.split_file import Split
from hotsplit.costs.part_bytes import (
    ITEMS,
    Items,
    kv_bytes,
    kv_positions,
    layer_bytes,
    placed_units,
)
from hotsplit.costs.state_bytes import slots_bytes
from hotsplit.solver.solve import SolveConfig
from hotsplit.system.sizes import format_bytes


@dataclass(frozen=True, kw_only=True)
class LayerUse:
    """One layer's bytes on its GPU, all 0 for a layer entirely on the CPU."""

    layer: int
    gpu: int
    dense_bytes: int  # attention, norms, predictor
    kv_bytes: int  # of keys and values, or of recurrent states
    neuron_bytes: int  # or of experts, which are counted below
    num_hot: int
    num_neurons: int


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The items of each GPU, and the bytes of its budget that the plan leaves unused."""

    items_of_gpus: tuple[Items, ...]
    unused_bytes: tuple[int, ...]
    layers: tuple[LayerUse, ...]
    lines: tuple[str, ...]


def explain(config: SolveConfig) -> Explanation:
    """Explains the plan at the config's output."""
    split, model = Split.load(config.output), ModelFile.load(config.model)
    gpus, _ = split.items_of_gpus(model)
    gpus += [dict.fromkeys(ITEMS, 0)] * (len(split.budgets) - len(gpus))
    unused = tuple(
        limit - sum(items.values()) for items, limit in zip(gpus, split.budgets, strict=True)
    )
    layers = tuple(_layer_use(split, model, layer) for layer in range(len(split.hot)))
    return Explanation(
        items_of_gpus=tuple(gpus),
        unused_bytes=unused,
        layers=layers,
        lines=(*_layer_lines(layers), *_unused_lines(unused, split)),
    )


def _layer_use(split: Split, model: ModelFile, layer: int) -> LayerUse:
    sizes, num_hot = layer_bytes(split.held(model), layer), len(split.hot[layer])
    number, unit_bytes = placed_units(model, layer)
    is_there, is_offloaded = split.dense_on_gpu[layer], split.kv_offload is not None
    positions = kv_positions(split.context_length, split.num_sequences)
    return LayerUse(
        layer=layer,
        gpu=split.home[layer] if split.home else 0,
        dense_bytes=(sizes.attention + sizes.predictor - sizes.head_norms * is_offloaded)
        * is_there,
        kv_bytes=kv_bytes(model, layer, positions) * (is_there and not is_offloaded)
        + slots_bytes(model, layer, split.num_sequences) * is_there,
        neuron_bytes=num_hot * unit_bytes,
        num_hot=num_hot,
        num_neurons=number,
    )


def _layer_lines(layers: tuple[LayerUse, ...]) -> list[str]:
    """A table with one line for each layer."""
    lines = ["  layer   GPU  attn, predictor         KV    neurons  hot"]
    for use in layers:
        sizes = [format_bytes(n) for n in (use.dense_bytes, use.kv_bytes, use.neuron_bytes)]
        lines.append(
            f"  {use.layer:5}   {use.gpu:3}  {sizes[0]:>15} {sizes[1]:>10} {sizes[2]:>10}"
            f"  {use.num_hot:,} of {use.num_neurons:,}"
        )
    return lines


def _unused_lines(unused: tuple[int, ...], split: Split) -> list[str]:
    """A line for each GPU; the reasons are among the notes of `solve`."""
    return [
        f"  GPU {number}: {format_bytes(left)} of {format_bytes(limit)} left unused"
        for number, (left, limit) in enumerate(zip(unused, split.budgets, strict=True))
    ]
