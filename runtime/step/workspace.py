"""Upper bounds on the memory of temporaries, before weights are loaded.

A pass of torch over several tokens is a fold over the operations of each layer (step.program), with
its own sizes: a value lives from the operation that writes it to the last that reads it, and each
operation takes memory of its own while it runs (step.scratch). The buffers of decode steps are
counted by the code that allocates them, for the shapes of the model's spec."""

from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.costs.part_bytes import FLOAT_BYTES, tile_rows
from hotsplit.costs.pass_length import PREFILL_CHUNK, SHORT_CHUNK
from hotsplit.model.modes import Mode
from hotsplit.runtime.cache.block_table import BlockTable
from hotsplit.runtime.device.device_memory import ALIGNMENT, SMALL_BYTES
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.kernels.gpu.kernels import ROWS
from hotsplit.runtime.kernels.stored import FLOATS
from hotsplit.runtime.step.decoder import plain_ops
from hotsplit.runtime.step.hollow import hollow_builder, step_bytes
from hotsplit.runtime.step.hybrid_device import DeviceBuffers
from hotsplit.runtime.step.program import name_of
from hotsplit.runtime.step.scratch import SCRATCH, Pass, head, kept_norm, written_bytes

ROUNDED_TO = 64 << 10  # what a plan reserves is a multiple of it
ROWS_SHARE = 0.25  # the part of the workspace that the buffers of a step of several rows may take
# What a plan reserves on a GPU, if that is at most PLANNED_SHARE of the model's file: a pass of
# PLANNED_TOKENS, two pieces of streamed weights, and the workspace of matrix products. Each pass
# copies all cold weights; twice as many tokens would take twice the memory from hot neurons.
PLANNED_TOKENS, PLANNED_PIECE_BYTES, PLANNED_SHARE, PLANNED_ROWS = 256, 16 << 20, 0.02, 8
_PRODUCT_BYTES = 8 << 20  # of cuBLAS and cuBLASLt: device_memory._warm_up
GAPS = 0.1  # the share of the memory for temporaries that may be lost to gaps between them


def pass_bytes(p: Pass) -> int:
    """Bytes at the peak of a pass."""
    spec, width = p.spec, p.floats(p.spec.hidden_size)
    turned = {(a.rotary, a.num_rotated) for a in (x.attention for x in spec.layers) if a.rotary}
    tables = 0 if p.is_on_gpu else p.floats(sum(head_dim for _, head_dim in turned))
    # An embedding's rows as stored, unpacked, scaled, with positions.
    embedding = p.model.tensors["token_embd.weight"].kind
    most = max((4 if embedding in FLOATS else 6) * width, width + head(p))
    for index, layer in enumerate(spec.layers):
        # The caller holds the layer's input, and the previous layer's if the predictor reads it.
        has_before = bool(index and layer.predict and layer.predict.input_layer_offset)
        inputs = width * (1 + has_before) + (kept_norm(p, index - 1) if has_before else 0)
        alive = {"x": 0}
        for op, last in zip(*plain_ops(index, layer), strict=True):
            taken = SCRATCH[op.kind](p, index)
            most = max(most, tables + inputs + sum(alive.values()) + taken)
            held = alive.get(name_of(op.reads[0]), 0)
            alive = {name: size for name, size in alive.items() if name not in last}
            alive |= written_bytes(p, index, op, held)
    if not p.is_on_gpu and not library.is_available():  # torch unpacks every matrix, in tiles
        widest = max(spec.hidden_size, spec.most_query_size)
        most += 4 * FLOAT_BYTES * widest * tile_rows(widest)
    return most + 4096 + 64 * p.num_tokens  # positions, ids, scalars


def workspace_bytes(
    model: ModelFile, context_length: int, mode: Mode, num_sequences: int = 1
) -> int:
    """What a plan, or an engine without one, reserves on each device that holds anything: on the CPU
    for passes, watched by observers or not, and native steps, however neurons are divided; on a GPU
    `planned_bytes`."""
    tokens = min(SHORT_CHUNK if library.is_available() else PREFILL_CHUNK, context_length)
    watched = Pass(model=model, mode=mode, num_tokens=tokens, context_length=context_length,
                   way="watched", num_sequences=num_sequences)  # fmt: skip
    most = max(map(pass_bytes, (watched, replace(watched, way="unwatched"))))
    for is_divided in (False,) if model.spec.has_experts else (False, True):
        builder = hollow_builder(model, mode, is_divided=is_divided)
        most = max(most, step_bytes(builder, context_length, num_sequences))
    return -(-max(most, planned_bytes(model, context_length, mode)) // ROUNDED_TO) * ROUNDED_TO


def planned_bytes(model: ModelFile, context_length: int, mode: Mode) -> int:
    """The workspace that a plan should reserve on a GPU; 0 for a small model, whose plans can't
    afford it, and for a mixture of experts, which has no plans."""
    if model.spec.has_experts:
        return 0
    tokens = min(PLANNED_TOKENS, context_length)
    p = Pass(model=model, mode=mode, num_tokens=tokens, context_length=context_length, way="flash")
    beside = _PRODUCT_BYTES + SMALL_BYTES + decode_bytes(model, context_length, PLANNED_ROWS)
    wanted = int((pass_bytes(p) + 2 * PLANNED_PIECE_BYTES) / (1 - GAPS)) + beside
    size = sum(entry.num_bytes for entry in model.tensors.values())
    return wanted if wanted <= PLANNED_SHARE * size else 0


def step_rows(model: ModelFile, context_length: int, workspace: int, num_sequences: int = 1) -> int:
    """Most rows of a decode step whose buffers fit into ROWS_SHARE of the workspace; at least 1."""
    taken = {rows: decode_bytes(model, context_length, rows, num_sequences) for rows in ROWS}
    return max((rows for rows in ROWS if taken[rows] <= ROWS_SHARE * workspace), default=1)


def decode_bytes(
    model: ModelFile, context_length: int, num_rows: int = 1, num_sequences: int = 1
) -> int:
    """Bytes of a decode step's buffers on a GPU, and of the ids that layers share whose neurons are
    all hot."""
    taken = []

    def take(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        taken.append(-(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT)
        return torch.empty(shape, dtype=dtype, device="meta")

    numbers, table = (
        [x.neurons.number for x in model.spec.layers],
        BlockTable(num_sequences, context_length),
    )
    DeviceBuffers.of(model.spec, numbers, table, take, max_rows=num_rows)
    for number in set(numbers):
        take((number,), torch.int32)
    return sum(taken)
