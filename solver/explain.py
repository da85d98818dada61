"""Explains what a plan's GPU memory is used for, by item and by layer, from the written plan and
its files; of a mixture, also what a faster link would bring and where an expert is.

E: experts of a layer."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.split_file import Split
from hotsplit.costs.part_bytes import (
    ITEMS,
    Items,
    cache_bytes,
    layer_bytes,
    placed_units,
)
from hotsplit.costs.state_bytes import slots_bytes
from hotsplit.errors import HotsplitError
from hotsplit.solver.assumed import profile_for
from hotsplit.solver.inputs import Workspace
from hotsplit.solver.mode_choice import find
from hotsplit.solver.prediction import Scales, inputs_for, scaled
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


@dataclass(frozen=True, kw_only=True)
class ExpertPlace:
    """Where one expert is, and why: `share` of the profile's tokens chose it, its `rank` among the
    `num_experts` of its layer by that, from 1."""

    layer: int
    expert: int
    is_on_gpu: bool
    share: float
    rank: int
    line: str


def explain(config: SolveConfig, workspace: Workspace) -> Explanation:
    """Explains the plan at the config's output."""
    split, model = Split.load(config.output), ModelFile.load(config.model)
    gpus, _ = split.items_of_gpus(model)
    gpus += [dict.fromkeys(ITEMS, 0)] * (len(split.budgets) - len(gpus))
    unused = tuple(
        limit - sum(items.values()) for items, limit in zip(gpus, split.budgets, strict=True)
    )
    layers = tuple(_layer_use(split, model, layer) for layer in range(len(split.hot)))
    shares = _shares(config, split) if split.num_experts else {}
    link = _link_lines(config, split, workspace) if split.num_experts else []
    return Explanation(
        items_of_gpus=tuple(gpus),
        unused_bytes=unused,
        layers=layers,
        lines=(*_layer_lines(layers, split, shares), *_unused_lines(unused, split), *link),
    )


def where_is(config: SolveConfig, layer: int, expert: int) -> ExpertPlace:
    """Where an expert is by the plan at the config's output, and what the layer's others are chosen.
    Raises HotsplitError if there is no such expert."""
    split, name = Split.load(config.output), f"expert {layer}:{expert}"
    if not split.num_experts:
        raise HotsplitError(f"{name}: {config.model} has no experts; ask for its layers: --explain")
    if not (0 <= layer < len(split.hot) and 0 <= expert < split.num_experts):
        raise HotsplitError(
            f"{name}: wanted LAYER:EXPERT, layers 0 to {len(split.hot) - 1} and experts 0 to"
            f" {split.num_experts - 1}"
        )
    found = _chosen(config, split)
    if layer not in found:
        raise HotsplitError(f"{name}: layer {layer} has no experts")
    share_E, is_hot_E = found[layer]
    rank = 1 + int((share_E > share_E[expert]).sum())
    line = (
        f"{name} is on the {'GPU' if is_hot_E[expert] else 'CPU'}: {share_E[expert]:.2%} of the profile's"
        f" tokens chose it, and {rank - 1} of the layer's {split.num_experts} experts more often;"
        f" {is_hot_E.sum()} are on the GPU"
    )
    if is_hot_E.any() and not is_hot_E.all():
        hot, cold = np.flatnonzero(is_hot_E), np.flatnonzero(~is_hot_E)
        last, first = hot[share_E[hot].argmin()], cold[share_E[cold].argmax()]
        line += (
            f", of which {last} is chosen least, by {share_E[last]:.2%}; on the CPU {first} is chosen most,"
            f" by {share_E[first]:.2%}"
        )
    return ExpertPlace(
        layer=layer, expert=expert, is_on_gpu=bool(is_hot_E[expert]), share=float(share_E[expert]),
        rank=rank, line=line,
    )  # fmt: skip


def _layer_use(split: Split, model: ModelFile, layer: int) -> LayerUse:
    sizes, num_hot = layer_bytes(split.held(model), layer), len(split.hot[layer])
    number, unit_bytes = placed_units(model, layer)
    is_there, is_offloaded = split.dense_on_gpu[layer], split.kv_offload is not None
    keys_bytes = cache_bytes(model, layer, split.context_length, split.num_sequences)
    return LayerUse(
        layer=layer,
        gpu=split.home[layer] if split.home else 0,
        dense_bytes=(sizes.attention + sizes.predictor - sizes.head_norms * is_offloaded)
        * is_there,
        kv_bytes=keys_bytes * (is_there and not is_offloaded)
        + slots_bytes(model, layer, split.num_sequences) * is_there,
        neuron_bytes=num_hot * unit_bytes,
        num_hot=num_hot,
        num_neurons=number,
    )


def _chosen(config: SolveConfig, split: Split) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """For each layer with experts: (shares of the tokens that chose each, whether it is on a GPU)."""
    profile = profile_for(ModelFile.load(config.model), config.profile, split.mode)
    assert profile.routing_LTK is not None
    found = {}
    for layer, (id_TK, ids) in enumerate(zip(profile.routing_LTK, split.hot, strict=True)):
        if not (id_TK < 0).any():
            share_E = np.bincount(id_TK.ravel(), minlength=split.num_experts) / len(id_TK)
            found[layer] = share_E, np.isin(np.arange(split.num_experts), ids)
    return found


def _shares(config: SolveConfig, split: Split) -> dict[int, str]:
    """Shares in words, for each layer with experts: of its choices, those of experts on the GPU and, if
    some are not there, of the tokens that chose the least chosen one there and the most chosen one
    on the CPU."""
    found = {}
    for layer, (share_E, is_hot_E) in _chosen(config, split).items():
        found[layer] = f" {share_E[is_hot_E].sum() / share_E.sum():>10.1%}"
        if is_hot_E.any() and not is_hot_E.all():
            last, first = share_E[is_hot_E].min(), share_E[~is_hot_E].max()
            found[layer] += f"  {last:>6.1%}  {first:>6.1%}"
    return found


def _link_lines(config: SolveConfig, split: Split, workspace: Workspace) -> list[str]:
    """What a faster link would bring: the plan for it, solved as this one."""
    inputs = inputs_for(split, config, workspace)
    if not any(inputs.budgets):
        return []
    faster = replace(inputs, machine=scaled(inputs.machine, Scales(hand_over=0.5)))
    found_s = find(faster, time_limit_s=config.time_limit_s).answer.objective_s
    seconds = min(found_s, split.objective_s)  # this plan would still be there
    gain = split.objective_s / seconds - 1
    return [
        f"  hand-overs between GPU and CPU in half the time would bring {1 / seconds:,.1f} tokens/s"
        f" ({gain:+.1%})"
    ]


def _layer_lines(
    layers: tuple[LayerUse, ...], split: Split, shares: Mapping[int, str]
) -> list[str]:
    """A table with one line for each layer."""
    lines = ["  layer   GPU  attn, predictor         KV    neurons  hot"]
    if shares:
        lines = [
            "  chosen: share of the profile's choices that are on the GPU; last: of the tokens that choose the",
            "  least chosen expert there; first: of those that choose the most chosen one on the CPU",
            "  layer   GPU   attn, router         KV    experts  on the GPU     chosen    last   first",
        ]
    for use in layers:
        sizes = [format_bytes(n) for n in (use.dense_bytes, use.kv_bytes, use.neuron_bytes)]
        lines.append(
            f"  {use.layer:5}   {use.gpu:3}  {sizes[0]:>15} {sizes[1]:>10} {sizes[2]:>10}"
            f"  {f'{use.num_hot:,} of {use.num_neurons:,}':{10 if shares else 0}}{shares.get(use.layer, '')}"
        )
    return lines


def _unused_lines(unused: tuple[int, ...], split: Split) -> list[str]:
    """A line for each GPU; the reasons are among the notes of `solve`."""
    return [
        f"  GPU {number}: {format_bytes(left)} of {format_bytes(limit)} left unused"
        for number, (left, limit) in enumerate(zip(unused, split.budgets, strict=True))
    ]
