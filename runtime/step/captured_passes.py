"""Passes of prompts as CUDA graphs: for small models and short prompts, Python takes longer to launch
a pass's kernels than a card takes to run them.

A pass takes the shortest of LENGTHS that holds its tokens; the last token is repeated, and its copies
append nothing to the cache. Only models whose layers are all on one GPU, with matrices in blocks, have
such passes: their products compute a token alone, so a graph gives the bits of the pass that it replaces,
and need no workspace of cuBLAS. Streamed weights and neurons on the CPU take longer than launches.

At the first use of a length, the pass is launched kernel by kernel and timed. If the device had to wait
for its launches, it is captured, and the graph is used from then on.

The graphs share a pool of torch's allocator, reserved at load if the budget has room for it beside
the longest pass. They run one at a time, so they may use the same memory; only the inputs and the
output are kept between passes.

Letters: T tokens, D model width, S sequences, N blocks of a sequence."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hotsplit.runtime.cache.block_table import BlockTable
from hotsplit.runtime.device.pools import PoolBytes
from hotsplit.runtime.model.layers import Layer
from hotsplit.runtime.ops.attention.rotary import PassPlaces, Places
from hotsplit.runtime.ops.neurons.feed_forward import Traffic
from hotsplit.runtime.step.cuda_backend import without_collection

# Products have tiles of 32 tokens or 128 (kernels.gpu.products), so any length between two of these
# takes as long as the longer one. There are few, because each takes a graph of all kernels.
LENGTHS = (32, 128, 256, 384, 512)
# Most bytes of the graphs' pool. Long passes of wide models take more, and longer than their launches.
MOST_BYTES = 64 << 20
LEAST_SHARE = 0.8  # of a pass's time that its launches take, if it is to be captured

# Runs all layers over [T, D] with the tokens' places in the cache; returns the hidden state after them.
RunLayers = Callable[[Tensor, PassPlaces], Tensor]


def is_bound_by_launches(device: torch.device, run: Callable[[], None]) -> bool:
    """True if most of the time of a function's kernels is that of their launches."""
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    run()
    launched = time.perf_counter()
    torch.cuda.synchronize(device)
    return launched - began >= LEAST_SHARE * (time.perf_counter() - began)


def is_capturable(layers: Sequence[Layer], device: torch.device) -> bool:
    """True if passes over these layers launch kernels of our own on one device, and nothing else."""
    return all(_launches_only(layer, device) for layer in layers)


def _launches_only(layer: Layer, device: torch.device) -> bool:
    # The kernels of a delta net take the slots of states as they are launched; position-wise operations may
    # read what comes from the host.
    if layer.delta is not None or layer.own:
        return False
    attention, ffn, predictor = layer.attention, layer.ffn, layer.ffn.predictor
    linears = [*attention.inputs, attention.output]
    linears += [predictor.up] if predictor else []
    linears += [predictor.down] if predictor and predictor.down else []
    matrices = [linear.weight for linear in linears]
    for block in ffn.blocks:
        if block.is_by_output or block.row_N is not None:
            return False
        matrices += block.matrices
    has_experts = layer.router is not None or layer.shared is not None
    devices = {matrix.data.device for matrix in matrices} | {attention.cache.device}
    return (
        not has_experts
        and devices == {device}
        and all(matrix.is_multiplied_in_blocks for matrix in matrices)
    )


@dataclass(frozen=True, kw_only=True)
class PassMemory:
    """The pool of a device's graphs, with the inputs and the output of passes of up to T tokens."""

    pool: Any  # torch.cuda.MemPool
    stream: torch.cuda.Stream  # on which passes are captured: a stream has memory of its own
    x_TD: Tensor
    position_T: Tensor
    sequence_T: Tensor  # 0: the sequence is the only row of the tables
    tables: Mapping[BlockTable, Tensor | None]  # int32 [1, N]; None: the cache is one block
    out_TD: Tensor

    @classmethod
    def reserve(
        cls,
        pools: PoolBytes,
        shape: tuple[int, int],
        device: torch.device,
        tables: Sequence[BlockTable],
    ) -> "PassMemory | None":
        """Reserves the segments of `pools` (workspace.graph_pools) for passes of up to this shape
        [T, D]; None if memory is short, as beside other programs."""
        num_tokens, new = shape[0], partial(torch.empty, device=device)
        with torch.cuda.device(device):  # the pool's
            pool, stream = torch.cuda.MemPool(), torch.cuda.Stream(device)
        with (
            torch.cuda.device(device),
            torch.cuda.stream(stream),
            torch.cuda.use_mem_pool(pool, device),
        ):
            try:
                _ = [new(size, dtype=torch.uint8) for size in pools.tensors_of_segments]
            except torch.OutOfMemoryError:
                return None
            del _
            made = cls(
                pool=pool,
                stream=stream,
                x_TD=new(shape),
                position_T=new(num_tokens, dtype=torch.int64),
                sequence_T=new(num_tokens, dtype=torch.int32).zero_(),
                tables={
                    table: None
                    if table.is_whole
                    else new(table.block_SN[:1].shape, dtype=torch.int32)
                    for table in tables
                },
                out_TD=new(shape),
            )
            stream.synchronize()
        return made

    def fill(self, x_TD: Tensor, length: int, start: int, sequence: int) -> None:
        """Writes the inputs of a pass of `length` tokens; the last of those given is repeated."""
        count = len(x_TD)
        self.x_TD[:count].copy_(x_TD)
        if count < length:
            self.x_TD[count:length] = self.x_TD[count - 1]
        position_T = torch.arange(start, start + length).clamp_(max=start + count - 1)
        self.position_T[:length].copy_(position_T)
        for table, blocks_1N in self.tables.items():
            if blocks_1N is not None:
                blocks_1N[0].copy_(table.block_SN[sequence])

    def places(self, length: int) -> PassPlaces:
        position_T, device = self.position_T[:length], self.x_TD.device
        given = {
            (device, table): Places(position_T)
            if blocks_1N is None
            else Places(position_T, self.sequence_T[:length], blocks_1N)
            for table, blocks_1N in self.tables.items()
        }
        return PassPlaces(0, length, given)


@dataclass(eq=False, kw_only=True)
class CapturedPasses:
    memory: PassMemory
    lengths: tuple[int, ...]  # ascending
    traffic: Traffic
    on_capture: Callable[[], None]  # a capture empties the allocator's cache
    _graphs: dict[int, tuple[torch.cuda.CUDAGraph, Traffic]] = field(
        init=False, default_factory=dict
    )
    _launched: set[int] = field(init=False, default_factory=set)  # lengths without a graph

    def has_graph(self, num_tokens: int) -> bool:
        """True if passes of so many tokens have been captured."""
        return self._length(num_tokens) in self._graphs

    def _length(self, num_tokens: int) -> int | None:
        return next((each for each in self.lengths if each >= num_tokens), None)

    def run(self, x_TD: Tensor, sequence: int, start: int, run_layers: RunLayers) -> Tensor | None:
        """The hidden state [T, D] after all layers, valid until the next pass; appends to the cache.
        None for a pass that is to be launched."""
        length = self._length(len(x_TD))
        if length is None or length in self._launched or len(x_TD) == 1:
            return None  # a single token has kernels of its own
        self.memory.fill(x_TD, length, start, sequence)
        if length in self._graphs:
            graph, read = self._graphs[length]
            graph.replay()
            _add(self.traffic, read)
        else:
            self._first(length, partial(self._run, length, run_layers))
        return self.memory.out_TD[: len(x_TD)]

    @torch.inference_mode()
    def _run(self, length: int, run_layers: RunLayers) -> None:
        memory = self.memory
        memory.out_TD[:length].copy_(run_layers(memory.x_TD[:length], memory.places(length)))

    def _first(self, length: int, run: Callable[[], None]) -> None:
        """Runs a pass, and captures it if that pays."""
        before = replace(self.traffic)
        run()
        after = replace(self.traffic)
        read = _between(before, after)
        if is_bound_by_launches(self.memory.x_TD.device, run):
            self._capture(length, run, read)
        else:  # so are longer passes
            self._launched.update(each for each in self.lengths if each >= length)
        for each in fields(Traffic):  # the same pass several times
            setattr(self.traffic, each.name, getattr(after, each.name))

    def _capture(self, length: int, run: Callable[[], None], read: Traffic) -> None:
        memory, graph = self.memory, torch.cuda.CUDAGraph()
        with torch.cuda.device(memory.x_TD.device):
            torch.cuda.synchronize()
            with (
                without_collection(),
                torch.cuda.graph(
                    graph,
                    pool=memory.pool.id,
                    stream=memory.stream,
                    capture_error_mode="thread_local",
                ),
            ):
                run()
        self.on_capture()
        self._graphs[length] = graph, read


def _between(before: Traffic, after: Traffic) -> Traffic:
    names = [each.name for each in fields(Traffic)]
    return Traffic(**{name: getattr(after, name) - getattr(before, name) for name in names})


def _add(traffic: Traffic, read: Traffic) -> None:
    for each in fields(Traffic):
        setattr(traffic, each.name, getattr(traffic, each.name) + getattr(read, each.name))
