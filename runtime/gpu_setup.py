"""Sets up the GPUs of an engine: memory as planned, prefill passes that fit into the rest of the
budget, and streams of cold weights.

    memories_of        before loading: a slab per GPU, and a limit at its budget
    uploading          while loading: uploaders that fill the slabs
    pass_setup         after loading: the memory of passes, and streams of cold weights

Without a GPU, these do nothing."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.split_file import Split
from hotsplit.costs.part_bytes import Items
from hotsplit.errors import HotsplitError
from hotsplit.options.prompt_rates import PromptRates
from hotsplit.runtime.device.device_memory import (
    ALIGNMENT,
    LEAST_BUDGET_BYTES,
    SEGMENT_BYTES,
    DeviceMemory,
)
from hotsplit.runtime.device.staging import Staging, copy_stream
from hotsplit.runtime.device.streams import Stream
from hotsplit.runtime.model.layers import Weights
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.prefill.cold_spans import ColdBlock
from hotsplit.runtime.prefill.cold_stream import ColdStream
from hotsplit.runtime.prefill.expert_stream import ColdExperts, ExpertStream
from hotsplit.runtime.step.hybrid_device import Take
from hotsplit.runtime.step.pass_device import PASS_ROWS, PassSetup
from hotsplit.runtime.step.workspace import (
    Counted,
    arena_bytes,
    decode_bytes,
    least_piece_bytes,
    slab_extras,
)
from hotsplit.runtime.weights.expert_block import ExpertBlock
from hotsplit.runtime.weights.neuron_block import by_role
from hotsplit.runtime.weights.resident import Residence
from hotsplit.runtime.weights.upload import Uploader
from hotsplit.system.progress import progress
from hotsplit.system.sizes import format_bytes

Memories = dict[torch.device, DeviceMemory]
Blocks = Mapping[int, ColdBlock | ColdExperts]  # by layer
# The most bytes of cold weights per copy, enough for copies to run at full speed.
MOST_PIECE_BYTES = 32 << 20
# Shorter copies are mostly fixed cost.
LEAST_PIECE_BYTES = 256 << 10


def memories_of(
    model: ModelFile,
    plan: Split | None,
    placement: Placement,
    bytes_by_role: dict[str, Items],
    context_length: int,
    notice: Callable[[str], None],
    *,
    max_rows: int = 1,
    num_sequences: int = 1,
) -> Memories:
    """A slab for each GPU of a placement, for everything permanent. `max_rows`: the most rows of a
    decode step.

    Raises HotsplitError if a GPU does not have enough memory."""
    if placement.homes[0].type != "cuda":
        return {}
    budgets: list[int | None]
    if plan is None:
        items, budgets = [bytes_by_role["gpu"]], [None]
    else:
        items, budgets = plan.items_of_gpus(model)[0], list(plan.budgets)
    found: Memories = {}
    for device, number in dict(zip(placement.homes, placement.numbers, strict=True)).items():
        budget = budgets[number]
        if budget is not None and budget < LEAST_BUDGET_BYTES:
            notice(
                f"torch's allocator cannot keep a budget of {format_bytes(budget)} on {device};"
                f" {format_bytes(LEAST_BUDGET_BYTES)} is enforced instead"
            )
        size = slab_bytes(
            model,
            items[number],
            1 if placement.is_cache_on_host else context_length,  # which the GPU attends to
            _num_ids(model, plan, device, placement),
            max_rows,
            num_sequences,
            has_block=plan is not None and plan.draft_on_gpu,
        )
        found[device] = DeviceMemory.of(device, size, budget)
    return found


def _num_ids(
    model: ModelFile, plan: Split | None, device: torch.device, placement: Placement
) -> int:
    """The number of hot neurons whose ids a GPU stores, and of experts whose places it stores."""
    if plan is None:
        return 0
    layers = zip(model.spec.layers, plan.hot, placement.homes, strict=False)
    return sum(
        layer.neurons.num_units if layer.route else len(ids)
        for layer, ids, home in layers
        if home == device
    )


def slab_bytes(
    model: ModelFile,
    items: Items,
    context_length: int,
    num_ids: int = 0,
    max_rows: int = 1,
    num_sequences: int = 1,
    *,
    has_block: bool = False,
) -> int:
    """Permanent bytes on a GPU: the weights (without the embedding) and the cache of `items`, the
    buffers of a decode step, the ids of hot neurons, and an alignment gap per tensor. `has_block`:
    with the buffers of a step of the draft block."""
    stays = sum(count for item, count in items.items() if item not in ("workspace", "embedding"))
    vectors_bytes = decode_bytes(model, context_length, max_rows, num_sequences)
    if has_block and model.draft is not None:
        vectors_bytes += decode_bytes(model.draft, context_length, max_rows, num_sequences)
    return stays + vectors_bytes + slab_extras(model, num_ids)


def step_takes(memories: Memories) -> Callable[[torch.device], Take] | None:
    """The slabs' allocators for a decode step's buffers; None (torch's allocator) without slabs."""
    return (lambda device: memories[device].take_for_step()) if memories else None


@contextmanager
def uploading(
    memories: Memories,
    residence: Residence | None,
    notice: Callable[[str], None] = lambda line: None,
) -> Iterator[dict]:
    """Yields uploaders that fill the slabs, by device; on exit, uploads are complete and
    `residence` is pinned if the system allows it."""
    if not memories:
        yield {}
        return
    total = sum(len(memory.slab) for memory in memories.values())
    with progress("load to GPU", total / 1e6, "MB") as advance:
        found = {
            device: Uploader(memory=memory, on_bytes=lambda num_bytes: advance(num_bytes / 1e6))
            for device, memory in memories.items()
        }
        yield found
        for uploader in found.values():
            uploader.finish()
    if any(device.type == "cuda" for device in memories):
        torch.cuda.empty_cache()  # the pieces' memory would otherwise count as used
        if residence is not None:
            pin(residence, notice)


def pin(residence: Residence, notice: Callable[[str], None]) -> None:
    """Pins the weights on the CPU; if the system refuses, they are copied through staging
    buffers."""
    try:
        residence.pin()
    except HotsplitError as error:
        notice(
            f"{error}; until then, prompts copy cold weights through staging buffers, more slowly"
        )


def pass_setup(
    weights: Weights,
    memories: Mapping[torch.device, DeviceMemory],
    placement: Placement,
    most_rows: int,
    notice: Callable[[str], None],
    rates: PromptRates | None = None,
) -> PassSetup:
    """Passes of up to `most_rows` rows, or of as many as leave room for pieces of streamed weights,
    and their memory, allocated once. `rates`: of a plan's experts.

    Raises HotsplitError if a GPU's budget leaves no room for the shortest pass."""
    cold = {device: cold_blocks(weights, placement, device) for device in memories}
    setup = PassSetup(
        num_rows=next((rows for rows in PASS_ROWS if rows >= most_rows), PASS_ROWS[-1]),
        streamed=frozenset(layer for blocks in cold.values() for layer in blocks),
        streams=lambda device, main, buffers: cold_streams(
            device, cold[device], main, buffers, rates
        ),
    )
    rooms = {  # in whole segments, as torch takes an arena
        device: memory.room_bytes // SEGMENT_BYTES * SEGMENT_BYTES
        for device, memory in memories.items()
    }
    for device in memories:
        setup = _fitting(setup, weights, placement, device, rooms[device], cold[device])
    if setup.streamed and not all(setup.piece_bytes.get(device) for device in cold if cold[device]):
        notice(
            f"a pass of {setup.num_rows} tokens leaves too little of"
            f" {format_bytes(min(rooms.values()))} to stream cold weights; the CPU computes them"
            " for prompts, too"
        )
        setup = replace(setup, piece_bytes={}, streamed=frozenset())
    for device, memory in memories.items():
        size = room_bytes(setup, weights, placement, device)
        memory.take_arena(size)
    return replace(setup, take=lambda device: memories[device].take_for_pass())


def _fitting(
    setup: PassSetup,
    weights: Weights,
    placement: Placement,
    device: torch.device,
    room: int,
    blocks: Blocks,
) -> PassSetup:
    """The setup with passes that fit into a GPU's memory, and with pieces for its streamed weights,
    if these fit beside any pass."""
    lengths = [rows for rows in reversed(PASS_ROWS) if rows <= setup.num_rows]
    largest = max((block.layout_bytes(block.number) for block in blocks.values()), default=0)
    least = max((block.least_piece_bytes for block in blocks.values()), default=0)
    for rows in lengths if blocks else ():
        piece = max(least, least_piece_bytes(rows, largest, least))
        tried = replace(setup, num_rows=rows, piece_bytes={**setup.piece_bytes, device: piece})
        size = arena_bytes(room_bytes(tried, weights, placement, device))
        if size <= room:
            piece = min(max(MOST_PIECE_BYTES, least), largest, piece + (room - size) // 2)
            piece = max(piece // ALIGNMENT * ALIGNMENT, least)
            return replace(tried, piece_bytes={**setup.piece_bytes, device: piece})
    for rows in lengths:
        tried = replace(setup, num_rows=rows)
        if arena_bytes(room_bytes(tried, weights, placement, device)) <= room:
            return tried
    needed = arena_bytes(
        room_bytes(replace(setup, num_rows=PASS_ROWS[0]), weights, placement, device)
    )
    raise HotsplitError(
        f"{device}: {format_bytes(room)} left after weights and cache, a pass of {PASS_ROWS[0]}"
        f" tokens takes {format_bytes(needed)}; run hotsplit solve with a larger --vram-budget or a"
        " smaller --context"
    )


def room_bytes(
    setup: PassSetup, weights: Weights, placement: Placement, device: torch.device
) -> int:
    """Bytes of the memory of passes on a GPU."""
    counted = Counted()
    number = next(
        n for home, n in zip(placement.homes, placement.numbers, strict=True) if home == device
    )
    replace(setup, take=lambda _: counted.take).room(weights, placement, number, is_pinned=False)
    return counted.num_bytes


def cold_blocks(
    weights: Weights, placement: Placement, device: torch.device
) -> dict[int, ColdBlock | ColdExperts]:
    """The neurons and experts on the CPU in layers whose home is the device, by layer: neurons in
    layers before the first with experts, so that one stream has ended when the other begins."""
    mine = [index for index, home in enumerate(placement.homes[:-1]) if home == device]
    found: dict[int, ColdBlock | ColdExperts] = {}
    has_experts = False
    for index in mine:
        _, cold = by_role(weights.layers[index].ffn.blocks)
        if isinstance(cold, ExpertBlock):
            found[index], has_experts = ColdExperts.of(cold), True
        elif cold is not None and not has_experts:
            found[index] = ColdBlock.of(cold)
    return found


def cold_streams(
    device: torch.device,
    blocks: Blocks,
    main: Stream,
    buffers: tuple[Tensor, Tensor],
    rates: PromptRates | None = None,
) -> dict[int, ColdStream | ExpertStream]:
    """The streams of these blocks, by layer: one of neurons, and one of experts. `main`: the stream
    whose kernels read the buffers."""
    is_cuda, copier = device.type == "cuda", copy_stream(device)
    is_pinned = all(block.can_be_copied for block in blocks.values())
    common: dict[str, Any] = {
        "device": device,
        "buffers": buffers,
        "copier": copier,
        "compute": main,
        "staging": None if is_pinned else Staging(len(buffers[0]), copier, is_pinned=is_cuda),
    }
    neurons = {layer: each for layer, each in blocks.items() if isinstance(each, ColdBlock)}
    experts = {layer: each for layer, each in blocks.items() if isinstance(each, ColdExperts)}
    found: dict[int, ColdStream | ExpertStream] = {}
    if neurons:
        found |= dict.fromkeys(neurons, ColdStream(blocks=neurons, **common))
    if experts:
        found |= dict.fromkeys(experts, ExpertStream(blocks=experts, rates=rates, **common))
    return found
