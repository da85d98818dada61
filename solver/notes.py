"""Notes on a plan: the figures, memories and assumptions it rests on, and other budgets."""

from dataclasses import replace

import numpy as np

from hotsplit.artifacts.changed_model import for_context
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.split_file import Split
from hotsplit.costs.context_bytes import context_words
from hotsplit.costs.default_mode import choose_mode, loss_line
from hotsplit.costs.part_bytes import (
    all_neuron_bytes,
    block_read,
    entries_of,
    outside_of,
    placed_units,
)
from hotsplit.model.modes import Mode
from hotsplit.solver.advice import Advice, room_notes
from hotsplit.solver.inputs import NO_GPU, Inputs
from hotsplit.solver.units import counted_layers
from hotsplit.system.sizes import format_bytes


def _doubts(inputs: Inputs) -> list[str]:
    """Warns if a quarter or more of the CPU's rates varied when they were measured."""
    costs = inputs.machine.costs
    rates = [*costs.all_rows_gb_per_s.values(), *costs.chosen_rows_gb_per_s.values()]
    doubtful = sum(figure.is_doubtful for figure in rates)
    if 4 * doubtful < len(rates):
        return []
    return [
        f"{doubtful} of {len(rates)} rates of the CPU in {inputs.paths[2]} varied while they were"
        " measured: predicted speeds may be far off; calibrate again when the machine is idle"
    ]


def notes_of(inputs: Inputs, advice: Advice, split: Split) -> list[str]:
    """Notes on the figures, memories and assumptions that the plan rests on, and on other
    budgets."""
    model, notes = inputs.model, []
    if not inputs.machine.gpus:
        notes.append("the machine file has no GPU: the plan is for the CPU alone")
    for gpu in inputs.gpus:
        if gpu.source not in ("measured", NO_GPU.source):
            line = f"the figures of {gpu.name} were not measured here: {gpu.source}"
            notes += [] if line in notes else [line]
    scaling = for_context(model, split.context_length).spec.rope_scaling
    if scaling.has_contexts:
        notes.append(f"rotary embeddings: {scaling.words}")
    notes += _transposed_notes(model) + _table_notes(model) + _context_notes(inputs, split)
    notes += _memory_notes(inputs, split) + _offload_notes(inputs, split) + _doubts(inputs)
    unused = len(inputs.machine.gpus) - len(inputs.budgets)
    if unused > 0:
        notes.append(
            f"{len(inputs.machine.gpus)} GPUs: the plan uses the first {len(inputs.budgets)}; give"
            " --vram-budget once per GPU for more"
        )
    if inputs.mode == "predicted" and model.predictor and not model.predictor.density_L:
        notes.append(
            "how many neurons the predictors name is unknown: the plan assumes as many as fire"
        )
    silent = np.flatnonzero(~inputs.profile.active_count_LF.any(axis=1)).tolist()
    if silent:
        some = ", ".join(map(str, silent[:4])) + (", ..." if len(silent) > 4 else "")
        notes.append(f"no neuron of {len(silent)} layers ({some}) fired in the profile")
    if not np.allclose(inputs.profile.threshold_L, model.threshold_L, rtol=1e-6):
        notes.append("the profile was taken with other activation thresholds than the model has")
    if inputs.machine.gpus:
        notes += room_notes(advice, split, inputs.model)
    return notes


def _transposed_notes(model: ModelFile) -> list[str]:
    """What it takes that a plan's neurons have rows of the down projection, which a stock file lacks."""
    more = all_neuron_bytes(model) - all_neuron_bytes(replace(model, runs_as_it_is=True))
    if model.layout != "stock" or more <= 0:
        return []
    return [
        f"down projections of this file are transposed to f16 at load, which takes {format_bytes(more)}"
        " more; hotsplit convert repacks them by neurons, in q8_0"
    ]


def _table_notes(model: ModelFile) -> list[str]:
    """What the host holds for operations outside the layers of which a token reads a row."""
    notes = []
    for block in outside_of(model):
        if not block.tables:
            continue
        held = sum(entry.num_bytes for entry in entries_of(model, block).values())
        notes.append(
            f"{block.words}, {format_bytes(held)}, stay in main memory: a token reads"
            f" {format_bytes(block_read(model, block))} of them"
        )
    return notes


def _context_notes(inputs: Inputs, split: Split) -> list[str]:
    """What the context of a model with recurrent states takes, and what that leaves."""
    model, types = inputs.model, split.cache_types(inputs.model)
    words = context_words(model, split.context_length, split.num_sequences, types)
    if words is None:
        return []
    left = format_bytes(split.gpu_bytes["neurons"])
    layers, what = counted_layers(model), split.units
    number = sum(placed_units(model, layer)[0] for layer in layers)
    placed = f"{sum(len(split.hot[layer]) for layer in layers):,} of {number:,}"
    there = f"; the budget leaves {left} to {what}, {placed}" if any(split.budgets) else ""
    return [words + there]


def _memory_notes(inputs: Inputs, split: Split) -> list[str]:
    """Notes on budgets above a GPU's memory, or above what was free when it was measured, and on a
    plan that takes more main memory than was free."""
    notes = []
    for gpu, budget in zip(inputs.machine.gpus, inputs.budgets, strict=False):
        if budget > gpu.memory_bytes:
            notes.append(f"the budget is above the {format_bytes(gpu.memory_bytes)} of {gpu.name}")
        elif budget > gpu.free_bytes:
            free = format_bytes(gpu.free_bytes)
            notes.append(f"the budget is above the {free} of {gpu.name} that were free")
    held, free_bytes = sum(split.cpu_bytes.values()), inputs.machine.free_bytes
    if held > free_bytes:
        notes.append(
            f"the plan takes {format_bytes(held)} of main memory; {format_bytes(free_bytes)} were"
            " free when this machine was measured"
        )
    return notes


def _offload_notes(inputs: Inputs, split: Split) -> list[str]:
    rule = split.kv_offload
    if rule is None:
        return []
    return [
        f"keys and values take {format_bytes(inputs.all_kv_bytes)} of main memory and none of the"
        f" GPU's; a token reads at most {min(rule.longest, inputs.context_length):,} positions, on the"
        " CPU"
    ]


def mode_notes(
    asked: Mode | None, max_loss: float, split: Split, advice: Advice, model: ModelFile
) -> tuple[str, ...]:
    """Notes for a user who asked for this mode (None: for none) and allowed this loss."""
    notes = []
    if asked is None:
        line = choose_mode(model, max_loss).line
        if line is not None and split.mode == "dense":
            notes.append(line)
        return tuple(notes)
    line = loss_line(model, asked, max_loss)
    notes += [] if line is None else [line]
    if advice.layer_split_s < split.objective_s and any(split.budgets):
        notes.append(
            f"a split by whole layers, all weights read, takes"
            f" {1e3 * advice.layer_split_s:.3g} ms a token on this machine, and this plan"
            f" {1e3 * split.objective_s:.3g} ms: without --mode the fastest is planned"
        )
    return tuple(notes)
