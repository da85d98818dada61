"""Notes on a plan: the figures, memories and assumptions it rests on, and other budgets."""

from dataclasses import replace

import numpy as np

from hotsplit.artifacts.model_file import ModelFile, for_context
from hotsplit.artifacts.split_file import Split
from hotsplit.costs import part_bytes
from hotsplit.costs.context_bytes import context_words
from hotsplit.costs.default_mode import choose_mode, loss_line
from hotsplit.model.modes import Mode
from hotsplit.solver.advice import Advice, room_notes
from hotsplit.solver.inputs import NO_GPU, Inputs
from hotsplit.solver.units import counted_layers
from hotsplit.system.sizes import format_bytes


def notes_of(inputs: Inputs, advice: Advice, split: Split) -> list[str]:
    """Notes on figures, memories and assumptions of the plan, and on other budgets."""
    model, machine, notes = inputs.model, inputs.machine, []
    if not machine.gpus:
        notes.append("the machine file has no GPU: the plan is for the CPU alone")
    for gpu in inputs.gpus:
        if gpu.source not in ("measured", NO_GPU.source):
            line = f"the figures of {gpu.name} were not measured here: {gpu.source}"
            notes += [] if line in notes else [line]
    scaling = for_context(model, split.context_length).spec.rope_scaling
    if scaling.has_contexts:
        notes.append(f"rotary embeddings: {scaling.words}")
    notes += _model_notes(inputs, split) + _memory_notes(inputs, split)
    rates = [
        *machine.costs.all_rows_gb_per_s.values(),
        *machine.costs.chosen_rows_gb_per_s.values(),
    ]
    doubtful = sum(figure.is_doubtful for figure in rates)
    if 4 * doubtful >= len(rates):
        notes.append(
            f"{doubtful} of {len(rates)} rates of the CPU in {inputs.paths[2]} varied while they"
            " were measured: predicted speeds may be far off; calibrate again when the machine is"
            " idle"
        )
    if len(machine.gpus) > len(inputs.budgets):
        notes.append(
            f"{len(machine.gpus)} GPUs: the plan uses the first {len(inputs.budgets)}; give"
            " --vram-budget once per GPU for more"
        )
    if inputs.mode == "predicted" and model.predictor and not model.predictor.density_L:
        notes.append(
            "how many neurons the predictors name is unknown: the plan assumes as many as fire"
        )
    fires_L = inputs.profile.active_count_LF.any(axis=1)
    silent = np.flatnonzero(~fires_L & inputs.profile.has_neurons_L).tolist()
    if silent:
        some = ", ".join(map(str, silent[:4])) + (", ..." if len(silent) > 4 else "")
        notes.append(f"no neuron of {len(silent)} layers ({some}) fired in the profile")
    if not np.allclose(inputs.profile.threshold_L, model.threshold_L, rtol=1e-6):
        notes.append("the profile was taken with other activation thresholds than the model has")
    return notes + (room_notes(advice, split, model) if machine.gpus else [])


def _model_notes(inputs: Inputs, split: Split) -> list[str]:
    """Notes on transposed projections, tables on the host, and the context of recurrent states."""
    model, notes = inputs.model, []
    more = part_bytes.all_neuron_bytes(model) - part_bytes.all_neuron_bytes(
        replace(model, runs_as_it_is=True)
    )
    if model.layout == "stock" and more > 0:
        notes.append(
            "down projections of this file are transposed to f16 at load, which takes"
            f" {format_bytes(more)} more; hotsplit convert repacks them by neurons, in q8_0"
        )
    for block in part_bytes.outside_of(model):
        if block.tables:
            held = sum(entry.num_bytes for entry in part_bytes.entries_of(model, block).values())
            notes.append(
                f"{block.words}, {format_bytes(held)}, stay in main memory: a token reads"
                f" {format_bytes(part_bytes.block_read(model, block))} of them"
            )
    types = split.cache_types(model)
    words = context_words(model, split.context_length, split.num_sequences, types)
    if words is not None:
        left, layers = format_bytes(split.gpu_bytes["neurons"]), counted_layers(model)
        number = sum(part_bytes.placed_units(model, layer)[0] for layer in layers)
        placed = f"{sum(len(split.hot[layer]) for layer in layers):,} of {number:,}"
        there = f"; the budget leaves {left} to {split.units}, {placed}"
        notes.append(words + there * any(split.budgets))
    return notes


def _memory_notes(inputs: Inputs, split: Split) -> list[str]:
    """Notes on budgets above a GPU's memory, or above what was free when it was measured, on a plan
    that takes more main memory than was free, and on keys there."""
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
    if split.kv_offload is not None:
        positions = min(split.kv_offload.longest, inputs.context_length)
        notes.append(
            f"keys and values take {format_bytes(inputs.all_kv_bytes)} of main memory and none of"
            f" the GPU's; a token reads at most {positions:,} positions, on the CPU"
        )
    return notes


def mode_notes(
    asked: Mode | None, max_loss: float, split: Split, advice: Advice, model: ModelFile
) -> list[str]:
    """Notes for a user who asked for this mode (None: for none) and allowed this loss."""
    if asked is None:
        line = choose_mode(model, max_loss).line
        return [line] if line is not None and split.mode == "dense" else []
    line = loss_line(model, asked, max_loss)
    notes = [] if line is None else [line]
    if advice.layer_split_s < split.objective_s and any(split.budgets):
        notes.append(
            f"a split by whole layers, all weights read, takes"
            f" {1e3 * advice.layer_split_s:.3g} ms a token on this machine, and this plan"
            f" {1e3 * split.objective_s:.3g} ms: without --mode the fastest is planned"
        )
    return notes
