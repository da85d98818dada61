"""Explains a plan in words: what each GPU holds, which layers are where, a faster link."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.profile_file import Profile
from hotsplit.artifacts.split_file import Split
from hotsplit.costs.part_bytes import ITEMS, Items, placed_units
from hotsplit.solver.assumed import profile_for
from hotsplit.solver.inputs import Workspace
from hotsplit.solver.mode_choice import find
from hotsplit.solver.prediction import inputs_for
from hotsplit.solver.scales import Scales, scaled
from hotsplit.solver.solve import COMPARED_S, SolveConfig
from hotsplit.system.sizes import format_bytes

MEANINGS = {
    "attention": "attention and norms",
    "predictor": "predictors",
    "kv_cache": "keys, values, states",
    "head": "output head",
    "embedding": "embedding",
    "neurons": "neurons",
    "neuron_cache": "neuron cache",
    "workspace": "workspace",
}


def meanings_of(*, has_experts: bool) -> dict[str, str]:
    """What the items of a plan are called."""
    own = {"neurons": "experts", "attention": "attention, router"} if has_experts else {}
    return MEANINGS | own


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The items of each GPU, the bytes of its budget that the plan leaves unused, and the page."""

    items_of_gpus: tuple[Items, ...]
    unused_bytes: tuple[int, ...]
    lines: tuple[str, ...]


def explain(config: SolveConfig, workspace: Workspace) -> Explanation:
    """Explains the plan at the config's output."""
    split, model = Split.load(config.output), ModelFile.load(config.model)
    gpus, cpu = split.items_of_gpus(model)
    gpus += [dict.fromkeys(ITEMS, 0)] * (len(split.budgets) - len(gpus))
    unused = tuple(
        limit - sum(items.values()) for items, limit in zip(gpus, split.budgets, strict=True)
    )
    lines = [
        f"GPU {number} holds {_held(items, split)}; {format_bytes(left)} of its"
        f" {format_bytes(limit)} are left."
        for number, (items, left, limit) in enumerate(zip(gpus, unused, split.budgets, strict=True))
        if sum(items.values())
    ]
    lines += [f"Main memory holds {_held(cpu, split)}."]
    if count := sum(split.num_on_drive_L):
        lines += [f"{count:,} experts are on the drive, read when a token chooses them."]
    lines += [*_layer_lines(config, split, model)]
    lines += _link_lines(config, split, workspace)
    return Explanation(items_of_gpus=tuple(gpus), unused_bytes=unused, lines=tuple(lines))


def _held(items: Items, split: Split) -> str:
    meanings = meanings_of(has_experts=split.units == "experts")
    there = sorted((item for item in items if items[item]), key=lambda item: -items[item])
    named = [f"{meanings[item]} ({format_bytes(items[item])})" for item in there]
    return (
        f"{', '.join(named[:-1])} and {named[-1]}"
        if len(named) > 1
        else "".join(named) or "nothing"
    )


def _layer_lines(config: SolveConfig, split: Split, model: ModelFile) -> Iterator[str]:
    profile = profile_for(model, config.profile, split.mode)
    share_L, units = firings_on_gpu(split, profile), units_of(split, profile)
    home, counts_L = split.home or (0,) * len(split.hot), [len(ids) for ids in split.hot]
    number_L = [placed_units(model, layer)[0] for layer in range(len(split.hot))]

    def kind(layer: int) -> tuple[object, ...]:
        count, number = counts_L[layer], number_L[layer]
        return home[layer], split.dense_on_gpu[layer], 0 < count < number or count, number

    for _, run in groupby(range(len(split.hot)), kind):
        layers = list(run)
        first, last, is_one = layers[0], layers[-1], len(layers) == 1
        gpu, number = f"GPU {home[first]}", number_L[first]
        side = gpu if split.dense_on_gpu[first] else "the CPU"
        line = f"Layer {first}" if is_one else f"Layers {first} to {last}"
        line = f"{line}: the attention is on {side}"
        counts = sorted({counts_L[layer] for layer in layers})
        if counts in ([0], [number]):
            other = gpu if counts[0] else "the CPU"
            same = f"{line}, and so are all {units.name}."
            yield same if other == side else f"{line}, {other} has all {units.name}."
            continue
        hot = f"{counts[0]:,} to {counts[-1]:,}" if len(counts) > 1 else f"{counts[0]:,}"
        yield (
            f"{line}, {gpu} has {hot} of {number:,}"
            f" {units.name}{'' if is_one else ' of each layer'}, from which"
            f" {np.mean(share_L[layers]):.0%} of the {units.events} come; the CPU computes the"
            " others at the same time."
        )


def _link_lines(config: SolveConfig, split: Split, workspace: Workspace) -> list[str]:
    inputs = inputs_for(split, config, workspace)
    if not any(inputs.budgets):
        return []
    faster = replace(inputs, machine=scaled(inputs.machine, Scales(hand_over=0.5)))
    found_s = find(faster, time_limit_s=COMPARED_S).answer.objective_s
    seconds = min(found_s, split.objective_s)  # this plan would still be there
    return [
        "With hand-overs between GPU and CPU in half the time, a plan would reach"
        f" {1 / seconds:,.1f} tokens/s ({split.objective_s / seconds - 1:+.1%})."
    ]


NUM_COLUMNS = 200  # maximum columns of ranks


@dataclass(frozen=True, kw_only=True)
class Units:
    """What a plan places, by layer: neurons and how often they fired, or the experts of a mixture
    and how often they were chosen. `hot`: the ids of those on a GPU."""

    name: str
    events: str
    count_LF: np.ndarray
    hot: tuple[np.ndarray, ...]


def units_of(split: Split, profile: Profile) -> Units:
    """The units of a plan; a layer without experts counts as equal parts on one side."""
    if not split.num_experts:
        return Units(
            name="neurons", events="firings", count_LF=profile.active_count_LF, hot=split.hot
        )
    assert profile.expert_count_LE is not None
    count_LE = profile.expert_count_LE.copy()
    is_dense_L = count_LE.sum(axis=1) == 0
    count_LE[is_dense_L] = profile.num_tokens
    hot = tuple(
        np.arange(split.num_experts if len(ids) else 0) if is_dense else ids
        for ids, is_dense in zip(split.hot, is_dense_L.tolist(), strict=True)
    )
    return Units(name="experts", events="choices", count_LF=count_LE, hot=hot)


def firings_on_gpu(split: Split, profile: Profile) -> np.ndarray:
    """Share of a layer's firings that come from hot neurons, or of its choices that are of hot
    experts, f64 [L]; 0 if nothing fires."""
    units = units_of(split, profile)
    pairs = zip(units.count_LF, units.hot, strict=True)
    hot_L = np.array([row_F[ids].sum() for row_F, ids in pairs])
    return hot_L / np.maximum(1, units.count_LF.sum(axis=1))


def device_of_ranks(split: Split, profile: Profile) -> np.ndarray:
    """The device of most units in each column of ranks, int [L, R]: 0 the CPU, k + 1 GPU k."""
    units = units_of(split, profile)
    num_layers, num_neurons = units.count_LF.shape
    num_columns = min(NUM_COLUMNS, num_neurons)
    column_F = np.arange(num_neurons) * num_columns // num_neurons
    sizes_R = np.bincount(column_F)
    device_LR = np.zeros((num_layers, num_columns), np.int64)
    for layer, ids in enumerate(units.hot):
        order_F = np.argsort(-units.count_LF[layer], kind="stable")
        rank_F = np.empty(num_neurons, np.int64)
        rank_F[order_F] = np.arange(num_neurons)
        hot_R = np.bincount(column_F[rank_F[ids]], minlength=num_columns)
        home = split.home[layer] if split.home else 0
        device_LR[layer] = np.where(2 * hot_R >= sizes_R, home + 1, 0) * (hot_R > 0)
    return device_LR
