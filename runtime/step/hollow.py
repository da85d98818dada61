"""Workspace bytes of a native step before weights are loaded, counted by the code that allocates:
structs are built as for a loaded model, from tensors in memory that nothing touches."""

from dataclasses import replace

import numpy as np

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.costs.cache_layout import BLOCK_LENGTH
from hotsplit.costs.part_bytes import down_kind
from hotsplit.files.gguf_file import TensorEntry
from hotsplit.model.modes import Mode
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.model.loader import Builder
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.ops.structs import MAX_ROWS, NotNative
from hotsplit.runtime.step.native_step import StepBuilder
from hotsplit.runtime.weights.store import CPU


def hollow_builder(model: ModelFile, mode: Mode, *, is_divided: bool) -> Builder:
    """A builder of weights without values, with a cache of one position. `is_divided`: the first
    layer has two blocks of neurons, the others one; plans may have both."""
    layers, tensors = model.spec.layers, dict(model.tensors)
    for index, layer in enumerate(layers):
        is_whole = model.spec.computes_all(index, mode) or model.spec.has_experts
        if model.layout == "stock" and (is_divided or not is_whole):  # is transposed
            kind, name = down_kind(model, index), f"blk.{index}.ffn_down"
            shape = layer.neurons.number, model.spec.hidden_size
            old = tensors.pop(f"{name}.weight")
            tensors[f"{name}_t.weight"] = replace(old, shape=shape, kind=kind)
    memory = np.empty(max(entry.num_bytes for entry in tensors.values()), np.uint8)

    def hollow(entry: TensorEntry) -> TensorEntry:
        dtype = {"f32": np.float32, "f16": np.float16}.get(entry.kind, np.uint8)
        values = memory[: entry.num_bytes].view(dtype)
        values = values.reshape(*entry.shape[:-1], -1) if len(entry.shape) > 1 else values
        return replace(entry, read_rows=lambda start, stop: values)

    placement = Placement.on_one_device(len(layers), CPU)
    hot = tuple(np.arange(not index, dtype=np.int32) for index in range(len(layers)))
    found = {n: e if n.endswith(".limit") else hollow(e) for n, e in tensors.items()}
    placement = replace(placement, hot=hot) if is_divided else placement
    return Builder(replace(model, tensors=found), placement, mode, 1)


def step_bytes(hollow: Builder, context_length: int, num_sequences: int = 1) -> int:
    """Workspace bytes of a native step; 0 if the kernels do not cover it."""
    weights = hollow.weights()
    try:
        builder = StepBuilder(weights.spec.value_sizes)  # keeps the structs' memory alive
        step, _ = builder.without_workspace(weights)
    except NotNative:
        return 0
    length = context_length if num_sequences == 1 else BLOCK_LENGTH
    (table,) = step.table[: step.num_tables]  # for one position there are no rings
    table.num_sequences, table.block_length = num_sequences, length
    table.blocks_per_sequence = -(-context_length // length)
    step.context_length = context_length
    step.max_rows = min(MAX_ROWS, context_length * num_sequences)
    return max(0, library.step_bytes(step))
