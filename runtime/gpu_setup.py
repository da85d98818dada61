"""Sets up the GPUs of an engine: memory as planned, prefill passes that fit into the rest of the
budget, and streams of cold weights.

    memories_of        before loading: a slab per GPU, and a limit at its budget
    uploading          while loading: uploaders that fill the slabs
    with_cold_streams  after loading: streams of cold weights, and the most tokens of a pass
    set_aside          after the capture of a decode step: memory for the temporaries of passes
    captured_passes    after that: passes as graphs, in what is left

Without a GPU, these do nothing."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.split_file import Split
from hotsplit.costs.part_bytes import Items
from hotsplit.costs.pass_length import SHORT_CHUNK
from hotsplit.errors import HotsplitError
from hotsplit.model.modes import Mode
from hotsplit.options.prompt_rates import PromptRates
from hotsplit.runtime.device.device_memory import LEAST_BUDGET_BYTES, DeviceMemory, free_workspaces
from hotsplit.runtime.device.pools import GAPS, SEGMENT_BYTES
from hotsplit.runtime.device.staging import Staging, copy_stream
from hotsplit.runtime.device.streams import PlainStream
from hotsplit.runtime.model.layers import Weights
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.ops.neurons.feed_forward import FeedForward, Traffic
from hotsplit.runtime.prefill.cold_experts import ColdExperts
from hotsplit.runtime.prefill.cold_spans import ColdBlock
from hotsplit.runtime.prefill.cold_stream import LEAST_TOKENS, ColdStream, CurrentStream
from hotsplit.runtime.prefill.expert_stream import ExpertStream
from hotsplit.runtime.step.captured_passes import (
    LENGTHS,
    MOST_BYTES,
    CapturedPasses,
    PassMemory,
    is_capturable,
)
from hotsplit.runtime.step.hybrid_device import Take
from hotsplit.runtime.step.passes import Pass, way_on
from hotsplit.runtime.step.workspace import (
    decode_bytes,
    graph_pools,
    least_piece_bytes,
    pass_pools,
    reserved_bytes,
    slab_extras,
    temporaries,
)
from hotsplit.runtime.weights import gpu_products
from hotsplit.runtime.weights.neuron_block import by_role
from hotsplit.runtime.weights.resident import Residence
from hotsplit.runtime.weights.upload import PIECE_BYTES as UPLOAD_PIECE_BYTES
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
            _attended(placement, context_length),
            _num_ids(model, plan, device, placement),
            max_rows,
            num_sequences,
        )
        found[device] = DeviceMemory.of(device, size, budget)
    return found


def _attended(placement: Placement, context_length: int) -> int:
    """The positions that a GPU's attention has buffers for; 1 if the cache is in main memory."""
    return 1 if placement.is_cache_on_host else context_length


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
) -> int:
    """Permanent bytes on a GPU: the weights (without the embedding) and the cache of `items`, the
    buffers of a decode step, the ids of hot neurons, and an alignment gap per tensor."""
    stays = sum(count for item, count in items.items() if item not in ("workspace", "embedding"))
    vectors_bytes = decode_bytes(model, context_length, max_rows, num_sequences)
    return stays + vectors_bytes + slab_extras(model, num_ids)


def step_takes(memories: Memories) -> Callable[[torch.device], Take] | None:
    """The slabs' allocators for a decode step's buffers; None (torch's allocator) without slabs."""
    return (lambda device: memories[device].take_for_step()) if memories else None


def set_aside(memories: Memories) -> None:
    """Reserves memory for temporaries; call it after anything that empties torch's cache."""
    if any(device.type == "cuda" for device in memories):
        free_workspaces()
    for memory in memories.values():
        memory.set_aside()


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
            device: Uploader(
                memory=memory,
                on_bytes=lambda num_bytes: advance(num_bytes / 1e6),
                piece_bytes=max(1 << 20, min(UPLOAD_PIECE_BYTES, memory.room_bytes // 8)),
            )
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


def with_cold_streams(
    model: ModelFile,
    weights: Weights,
    memories: Mapping[torch.device, DeviceMemory],
    placement: Placement,
    mode: Mode,
    context_length: int,
    chunk: int,
    notice: Callable[[str], None],
    rates: PromptRates | None = None,
) -> tuple[Weights, int]:
    """(weights with streams attached, maximum tokens per pass: `chunk`, or fewer if memory is
    short). `rates`: of a plan's experts.

    Raises HotsplitError if a GPU's budget leaves no room for a single token."""
    p = Pass(
        model=model,
        mode=mode,
        num_tokens=chunk,
        way="gpu",
        context_length=_attended(placement, context_length),
        num_sequences=weights.cache.num_sequences,
    )
    cold = {device: cold_blocks(weights, placement, device) for device in memories}
    for device, memory in memories.items():
        p = replace(p, way=way_on(device))
        p = replace(p, num_tokens=_most_tokens(p, memory, cold[device]))
    for device, memory in memories.items():
        p = replace(p, way=way_on(device))
        room, blocks = memory.room_bytes, cold[device]
        piece = _piece_bytes(p, room, blocks)
        memory.aside = temporaries(p, piece)
        if piece:
            for stream in cold_streams(device, blocks, piece, rates):
                weights = with_stream(weights, stream)
        elif blocks:
            notice(
                f"{format_bytes(room)} left after weights and cache on {device}, a pass of"
                f" {p.num_tokens} tokens takes {format_bytes(reserved_bytes(p))}: too little to"
                " stream cold weights; the CPU computes them for prompts, too"
            )
            p = replace(p, num_tokens=min(p.num_tokens, SHORT_CHUNK))  # the plan's, on the CPU
    return weights, p.num_tokens


def _most_tokens(p: Pass, memory: DeviceMemory, blocks: Blocks) -> int:
    """The most tokens of a pass, halved from those of `p`, that leave room for pieces as plans do;
    if none do, without pieces. Raises HotsplitError if there is no room for a single token."""
    room, largest = memory.room_bytes, _largest_piece(blocks)
    least = max((block.least_piece_bytes for block in blocks.values()), default=0)
    for tokens in halved(p.num_tokens):
        piece = least_piece_bytes(tokens, largest, least)
        if tokens >= LEAST_TOKENS and reserved_bytes(replace(p, num_tokens=tokens), piece) <= room:
            return tokens
    if _piece_bytes(replace(p, num_tokens=LEAST_TOKENS), room, blocks):  # short ones
        return LEAST_TOKENS
    for tokens in halved(min(p.num_tokens, SHORT_CHUNK)):
        if reserved_bytes(replace(p, num_tokens=tokens)) <= room:
            return tokens
    one = reserved_bytes(replace(p, num_tokens=1))
    raise HotsplitError(
        f"{memory.device}: {format_bytes(room)} left after weights and cache, one token takes"
        f" {format_bytes(one)}; run hotsplit solve with a larger --vram-budget or a smaller"
        " --context"
    )


def halved(tokens: int) -> Iterator[int]:
    """The tokens, half of them, and so on down to 1."""
    while True:
        yield tokens
        if tokens == 1:
            return
        tokens = -(-tokens // 2)


def _largest_piece(blocks: Blocks) -> int:
    sizes = [block.layout_bytes(block.number) for block in blocks.values()]
    return max(sizes) + SEGMENT_BYTES if sizes else 0


def _piece_bytes(p: Pass, room: int, blocks: Blocks) -> int:
    """Bytes of a piece of cold weights beside such passes; 0 if nothing is streamed."""
    if not blocks or p.num_tokens < LEAST_TOKENS:
        return 0
    least = max(LEAST_PIECE_BYTES, *(block.least_piece_bytes for block in blocks.values()))
    pools = pass_pools(p)
    large = int((room - pools.segments.small - SEGMENT_BYTES) * (1 - GAPS)) - pools.large
    piece = min(max(MOST_PIECE_BYTES, least), _largest_piece(blocks), large // 2)
    while piece >= least:
        if reserved_bytes(p, piece) <= room:
            return piece
        piece = piece * 3 // 4  # short pieces are taken from the pool of small tensors
    return 0


def captured_passes(
    p: Pass, weights: Weights, memories: Memories, traffic: Traffic
) -> CapturedPasses | None:
    """Passes of prompts as graphs, of up to as many tokens as `p` has and as leave room for the
    longest launched pass; None if there is no room, or if captured_passes does not cover the
    model."""
    device, *others = memories
    if others or device.type != "cuda" or not is_capturable(weights.layers, device):
        return None
    memory, tables = memories[device], weights.cache.tables
    room = min(MOST_BYTES, memory.room_bytes - memory.aside.segments.total)
    p = replace(p, way=way_on(device))
    for most in sorted((each for each in LENGTHS if each <= p.num_tokens), reverse=True):
        pools = graph_pools(replace(p, num_tokens=most))
        if pools.segments.total > room:
            continue
        reserved = PassMemory.reserve(pools, (most, p.spec.hidden_size), device, tables)
        if reserved is None:
            set_aside(memories)
            return None
        return CapturedPasses(
            memory=reserved,
            lengths=tuple(n for n in LENGTHS if n <= most),
            traffic=traffic,
            on_capture=partial(set_aside, memories),
        )
    return None


def cold_blocks(
    weights: Weights, placement: Placement, device: torch.device
) -> dict[int, ColdBlock | ColdExperts]:
    """The neurons and experts on the CPU in layers whose home is the device, by layer: experts if
    the device multiplies those of a layer together, and neurons in layers before the first with
    such experts, so that one stream has ended when the other begins."""
    mine = [index for index, home in enumerate(placement.homes[:-1]) if home == device]
    found: dict[int, ColdBlock | ColdExperts] = {}
    has_experts, streams_experts = False, gpu_products.multiplies_blocks(device)
    for index in mine:
        ffn = weights.layers[index].ffn
        _, experts = by_role(ffn.experts)
        if experts is not None and streams_experts:
            found[index], has_experts = ColdExperts.of(experts), True
        elif not has_experts and (block := by_role(ffn.blocks)[1]) is not None:
            found[index] = ColdBlock.of(block)
    return found


def cold_streams(
    device: torch.device, blocks: Blocks, piece_bytes: int, rates: PromptRates | None = None
) -> list[ColdStream | ExpertStream]:
    """A stream of neurons, and one of experts, with those of these blocks."""
    is_cuda, copier = device.type == "cuda", copy_stream(device)
    is_pinned = all(block.can_be_copied for block in blocks.values())
    common: dict[str, Any] = {
        "device": device,
        "piece_bytes": piece_bytes,
        "copier": copier,
        "compute": CurrentStream(device) if is_cuda else PlainStream(),
        "staging": None if is_pinned else Staging(piece_bytes, copier, is_pinned=is_cuda),
    }
    neurons = {layer: each for layer, each in blocks.items() if isinstance(each, ColdBlock)}
    experts = {layer: each for layer, each in blocks.items() if isinstance(each, ColdExperts)}
    found: list[ColdStream | ExpertStream] = []
    found += [ColdStream(blocks=neurons, **common)] if neurons else []
    found += [ExpertStream(blocks=experts, rates=rates, **common)] if experts else []
    return found


def with_stream(weights: Weights, stream: ColdStream | ExpertStream) -> Weights:
    """Weights with the stream attached to its layers."""

    def attached(ffn: FeedForward) -> FeedForward:
        if isinstance(stream, ColdStream):
            return replace(ffn, cold=stream)
        return replace(ffn, cold_experts=stream)

    layers = tuple(
        replace(layer, ffn=attached(layer.ffn)) if index in stream.blocks else layer
        for index, layer in enumerate(weights.layers)
    )
    return replace(weights, layers=layers)
