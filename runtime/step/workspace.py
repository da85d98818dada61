"""Upper bounds on the memory of temporaries, before weights are loaded.

The workspace of the C++ kernels and the buffers of steps and passes are counted by the code that
allocates them, for the shapes of the model's spec; for a native step, structs are built as for a
loaded model, from tensors in memory that nothing touches."""

import mmap
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch
from torch import Tensor

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.costs.cache_layout import BLOCK_LENGTH
from hotsplit.costs.part_bytes import FLOAT_BYTES, down_kind, placed_units
from hotsplit.costs.pass_length import LOGITS_CHUNK, PREFILL_CHUNK, SHORT_CHUNK
from hotsplit.files.gguf_file import TensorEntry
from hotsplit.model.modes import Mode
from hotsplit.model.operations import TOKEN
from hotsplit.model.spec import ModelSpec
from hotsplit.model.weight_types import TABLES
from hotsplit.runtime.cache.block_table import BlockTable, block_tables
from hotsplit.runtime.device.device_memory import (
    ALIGNMENT,
    BESIDE_BYTES,
    LEAST_BUDGET_BYTES,
    SEGMENT_BYTES,
    arena_bytes,
)
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.kernels.gpu.launch import ROWS
from hotsplit.runtime.model.loader import Builder
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.ops.structs import MAX_ROWS, NotNative
from hotsplit.runtime.step.hybrid_device import DeviceBuffers, hot_sizes, shared_parts
from hotsplit.runtime.step.native_step import StepBuilder
from hotsplit.runtime.step.pass_device import LayerPart, PassRoom
from hotsplit.runtime.weights.store import CPU


def hollow_builder(model: ModelFile, mode: Mode, *, is_divided: bool) -> Builder:
    """A builder of weights without values, with a cache of one position. `is_divided`: the first
    layer has two blocks of neurons, the others one; plans may have both."""
    layers, tensors = model.spec.layers, dict(model.tensors)
    for index, layer in enumerate(layers):
        is_whole = model.spec.computes_all(index, mode) or model.spec.has_experts
        is_transposed = model.layout == "stock" and (is_divided or not is_whole)
        if is_transposed and layer.neurons.number:
            kind, name = down_kind(model, index), f"blk.{index}.ffn_down"
            shape = layer.neurons.number, model.spec.hidden_size
            old = tensors.pop(f"{name}.weight")
            tensors[f"{name}_t.weight"] = replace(old, shape=shape, kind=kind)
    # Which nothing touches, and which may be larger than main memory.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    size = max(entry.num_bytes for entry in tensors.values())
    memory = np.frombuffer(mmap.mmap(-1, size, flags=flags), np.uint8)

    def hollow(entry: TensorEntry) -> TensorEntry:
        dtype = {"f32": np.float32, "f16": np.float16}.get(entry.kind, np.uint8)
        values = memory[: entry.num_bytes].view(dtype)
        values = values.reshape(*entry.shape[:-1], -1) if len(entry.shape) > 1 else values
        # A file's types with grids have kernels of tiles alone.
        kind = f"{entry.kind}_tiled" if entry.kind in TABLES else entry.kind
        return replace(entry, kind=kind, read_rows=lambda start, stop: values, packed_from=None)

    placement = Placement.on_one_device(len(layers), CPU)
    hot = tuple(np.arange(not index, dtype=np.int32) for index in range(len(layers)))
    found = {n: e if n.endswith(".limit") else hollow(e) for n, e in tensors.items()}
    placement = replace(placement, hot=hot) if is_divided else placement
    return Builder(replace(model, tensors=found), placement, mode, 1)


def step_bytes(
    hollow: Builder, context_length: int, num_sequences: int = 1, most_rows: int = MAX_ROWS
) -> int:
    """Workspace bytes of a native step of up to so many rows; 0 if the kernels do not cover it."""
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
    step.max_rows = min(most_rows, context_length * num_sequences)
    return max(0, library.step_bytes(step))


ROUNDED_TO = 64 << 10  # what a plan reserves is a multiple of it
ROWS_SHARE = 0.25  # the part of the workspace that the buffers of a step of several rows may take
MAP_NORESERVE = 0x4000  # of Linux; the module mmap of Python 3.11 lacks it
# Plans have room for the buffers of steps of so many rows, or as many as they have texts, and of
# more rows if those take at most STEP_BYTES.
LEAST_ROWS, STEP_BYTES = 8, 2 << 20
# What a plan reserves on a GPU: passes of the first of PLANNED_TOKENS that take at most
# PLANNED_SHARE of the model's file, or else of the last. Each pass copies all cold weights; twice
# as many tokens would take twice the memory from hot neurons.
PLANNED_TOKENS, PLANNED_SHARE = (256, 128, 64, 32), 0.02
ANY_BUDGET = 1 << 62  # of a GPU without one
# The least bytes of a piece of streamed weights beside passes of at least so many tokens. Each
# piece takes some twenty launches; layers that have fewer bytes are one piece.
PIECES = ((128, 16 << 20), (64, 8 << 20), (32, 4 << 20))
EXPERT_GAPS = 6 * 256  # between its matrices and biases in a piece


def _tables(model: ModelFile, context_length: int, num_sequences: int) -> list[BlockTable]:
    windows = [attention.window for attention in model.spec.attentions]
    return list(dict.fromkeys(block_tables(windows, num_sequences, context_length).values()))


def workspace_bytes(
    model: ModelFile,
    context_length: int,
    mode: Mode,
    num_sequences: int = 1,
    gpu_budget_bytes: int = 0,
) -> int:
    """What a plan, or an engine without one, reserves on each device that holds anything: on the
    CPU for native steps, and for the CPU's part of passes on a GPU; on a GPU of this budget, at
    least what `gpu_bytes` needs beyond the budget that is enforced at least. What observers on the
    CPU see is beside it."""
    most = host_bytes(model, context_length, mode, num_sequences)
    if gpu_budget_bytes:
        most = max(most, host_pass_bytes(model, context_length, mode))
        tokens = min(PREFILL_CHUNK, context_length)
        most = max(most, FLOAT_BYTES * tokens * _outside_values(model.spec))  # of passes on the GPU
        free = max(0, LEAST_BUDGET_BYTES - gpu_budget_bytes)
        most = max(most, gpu_bytes(model, context_length, num_sequences) - free)
    return -(-most // ROUNDED_TO) * ROUNDED_TO


def host_bytes(
    model: ModelFile,
    context_length: int,
    mode: Mode,
    num_sequences: int = 1,
    most_rows: int = MAX_ROWS,
) -> int:
    """Bytes of the workspace of native steps of up to so many rows, however neurons are divided."""
    is_divided = (False,) if model.spec.has_experts else (False, True)
    builders = [hollow_builder(model, mode, is_divided=each) for each in is_divided]
    return max(step_bytes(each, context_length, num_sequences, most_rows) for each in builders)


def host_pass_bytes(model: ModelFile, context_length: int, mode: Mode) -> int:
    """Upper bound on the bytes of a pass on a GPU that are on the CPU: the values of each row that
    operations hand over, with copies of those that later ones overwrite, and some logits."""
    spec, rows = model.spec.in_mode(mode), min(SHORT_CHUNK, context_length)
    outputs = 4 * spec.x_size + 12 * spec.hidden_size + 2 * sum(spec.value_sizes.values())
    heads = max(layer.query_size for layer in spec.layers)
    neurons = 0
    for layer in spec.layers:
        route, own = layer.route, layer.neurons
        number = own.number
        if route is not None:
            number = route.num_used * own.of_expert + 4 * route.num_experts
        shared = 0 if layer.shared is None else layer.shared.number
        neurons = max(neurons, (2 + (layer.predict is not None)) * number + shared)
    logits = 2 * min(rows, LOGITS_CHUNK) * spec.vocab_size
    return FLOAT_BYTES * (rows * (outputs + heads + neurons) + logits)


def _outside_values(spec: ModelSpec) -> int:
    """Values of a token of operations before the layers or after them, one after the other, and of
    what they leave to layers. What one reads and writes is there twice, in parts and whole, beside
    a product with a matrix as it is scaled, normed and added."""
    width, most = spec.hidden_size, 0
    for blocks in (spec.first, spec.last):
        kept = width
        for block in blocks:
            read = (spec.value_sizes.get(x, width) for x in block.inputs if x != TOKEN)
            made, shapes = block.values(width), block.shapes(width)
            products = (
                shapes[n][0] for n in shapes if len(shapes[n]) > 1 and n not in block.tables
            )
            values = 2 * (sum(made.values()) + sum(read)) + 3 * max(products, default=0)
            most = max(most, kept + values)
            kept += sum(size for name, size in made.items() if name != "x")
    return most


def gpu_bytes(model: ModelFile, context_length: int, num_sequences: int = 1) -> int:
    """Bytes that a plan reserves on a GPU beside weights and cache: for the longest of
    PLANNED_TOKENS that PLANNED_SHARE allows, the buffers of steps, what surrounds weights in the
    slab, and BESIDE_BYTES."""
    size = sum(entry.num_bytes for entry in model.tensors.values())
    rows, num_ids = planned_rows(num_sequences), sum(x.neurons.num_units for x in model.spec.layers)
    step = decode_bytes(model, context_length, rows, num_sequences)
    if model.draft is not None:
        step += decode_bytes(model.draft, context_length, rows, num_sequences)
    beside = BESIDE_BYTES + max(STEP_BYTES, step) + slab_extras(model, num_ids)
    (largest, least), found = streamed_bytes(model), 0
    for tokens in PLANNED_TOKENS:
        piece = least_piece_bytes(tokens, largest, least)
        size_of_pass = pass_bytes(model, context_length, tokens, num_sequences, piece)
        found = beside + arena_bytes(size_of_pass)
        if found <= PLANNED_SHARE * size:
            break
    return found


@dataclass
class Counted:
    """Counts the bytes of what is taken."""

    num_bytes: int = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self.num_bytes += -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        return torch.empty(shape, dtype=dtype, device="meta")


def pass_bytes(
    model: ModelFile,
    context_length: int,
    num_rows: int,
    num_sequences: int = 1,
    piece_bytes: int = 0,
) -> int:
    """Bytes of the memory of passes of up to so many rows on a GPU, whatever a plan puts there."""
    counted, is_stock, is_streamed = Counted(), model.layout == "stock", bool(piece_bytes)
    parts = [LayerPart(x, x.neurons.num_units, is_streamed, is_stock) for x in model.spec.layers]
    given = model.spec, parts, _tables(model, context_length, num_sequences), counted.take
    PassRoom.of(*given, num_rows=num_rows, has_cache=True, piece_bytes=piece_bytes)
    return counted.num_bytes


def least_piece_bytes(num_tokens: int, largest: int, least: int = 0) -> int:
    """The least bytes of a piece of streamed weights beside a pass, if the largest layer has so
    many, and an expert `least`; 0 for passes of too few tokens to stream any."""
    sizes = (max(least, min(size, largest)) for tokens, size in PIECES if num_tokens >= tokens)
    return next(sizes, 0)


def streamed_bytes(model: ModelFile) -> tuple[int, int]:
    """Bytes of the neurons or experts of the largest layer as streamed, and of the largest expert,
    at most; 0 without experts."""
    units = [placed_units(model, index) for index in range(model.spec.num_layers)]
    largest = SEGMENT_BYTES + max(number * size for number, size in units)
    layers = zip(model.spec.layers, units, strict=True)
    expert = max((size for x, (_, size) in layers if x.neurons.are_experts), default=-EXPERT_GAPS)
    return largest, expert + EXPERT_GAPS


def slab_extras(model: ModelFile, num_ids: int) -> int:
    """Bytes of a slab beside its items and the buffers of steps: vectors as f32, ids of hot
    neurons, and an alignment gap per tensor."""
    vectors = (entry for entry in model.tensors.values() if len(entry.shape) == 1)
    as_floats = sum(FLOAT_BYTES * entry.shape[0] - entry.num_bytes for entry in vectors)
    num_tensors = len(model.tensors) + 4 * model.spec.num_layers
    return as_floats + 4 * num_ids + ALIGNMENT * num_tensors


def planned_rows(num_sequences: int) -> int:
    """The most rows of a decode step that plans have room for."""
    return next((rows for rows in ROWS if rows >= max(LEAST_ROWS, num_sequences)), ROWS[-1])


def step_rows(model: ModelFile, context_length: int, workspace: int, num_sequences: int = 1) -> int:
    """Most rows of a decode step that plans have room for, and whose buffers fit into ROWS_SHARE of
    the workspace; at least 1."""
    planned, most = planned_rows(num_sequences), 1
    for rows in ROWS:
        taken = decode_bytes(model, context_length, rows, num_sequences)
        if taken <= ROWS_SHARE * workspace and (rows <= planned or taken <= STEP_BYTES):
            most = rows
    return most


def decode_bytes(
    model: ModelFile, context_length: int, num_rows: int = 1, num_sequences: int = 1
) -> int:
    """Bytes of a decode step's buffers on a GPU, and of the ids that layers share whose neurons are
    all hot."""
    counted = Counted()
    take = counted.take
    width, tables = model.spec.hidden_size, _tables(model, context_length, num_sequences)
    is_stock, layers = model.layout == "stock", model.spec.layers
    sizes = [hot_sizes(x, x.neurons.num_units, width, is_by_output=is_stock) for x in layers]
    shared = max(shared_parts(x, width, is_by_output=is_stock) for x in layers)
    DeviceBuffers.of(model.spec, sizes, tables, take, max_rows=num_rows, most_shared=shared)
    for number in {x.neurons.num_units for x in model.spec.layers}:
        take((number,), torch.int32)
    return counted.num_bytes
