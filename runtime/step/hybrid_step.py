"""A decode step over GPUs and the CPU, built by hybrid_builder.py: segments that run in sequence,
one for the consecutive work of each GPU and one for each copy between GPUs.

Each number of rows in ROWS, up to `max_rows`, has segments of its own; those for several rows are
made at first use. Other numbers are rounded up: GPUs repeat the last row, the CPU does not compute
the copies. More rows than `max_rows` are divided among several steps.

Letters: T rows, R rows with logits, V vocabulary, C positions of a context, D model width, S
sequences, N blocks of a sequence."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from hotsplit.runtime.cache.kv_cache import KVCache
from hotsplit.runtime.cache.state_slots import NO_SLOT, StateSlots
from hotsplit.runtime.device.cuda_runtime import DeviceLost
from hotsplit.runtime.device.device_memory import out_of_memory_as_error
from hotsplit.runtime.device.streams import HostNode, Stream
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.kernels.gpu.launch import ROWS
from hotsplit.runtime.ops.neurons.feed_forward import Traffic
from hotsplit.runtime.ops.neurons.native import NeuronsStruct
from hotsplit.runtime.prefill.cold_stream import WeightStream
from hotsplit.runtime.step.batch import LogitsMemory, Row, prepared, runs_of
from hotsplit.runtime.step.hybrid_neuron_cache import HybridCache
from hotsplit.runtime.step.native_parts import HostBuffers
from hotsplit.runtime.step.native_step import StepStruct

# Microseconds that the CPU's idle threads wait for their part of the next layer, about as long as
# the GPU's part may take: to wake them takes as long as their work. Engine.close() undoes it.
GPU_SPIN_TIME = 1000
Each = TypeVar("Each")


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive work on one GPU."""

    main: Stream
    run: Callable[[], None]
    is_graph: bool


# A whole step; a pass up to the last layer, without or with streamed weights; what comes after the
# last layer of a pass, for as many rows with logits at a time as a step has.
Work = Literal["step", "pass", "streamed pass", "tail"]


@dataclass(kw_only=True)
class Passes:
    """Steps of many rows of one sequence: passes over a prompt. `gather(numbers, num_rows,
    length)`: copies the hidden states of rows of a pass of that length to where a tail reads
    them."""

    lengths: tuple[int, ...]
    streams: Mapping[int, WeightStream]  # by layer
    # The fewest tokens of a pass that streams cold weights; None: none does.
    least_streamed: int | None
    gather: Callable[[Sequence[int], int, int], None]


@dataclass(kw_only=True)
class HybridStep:
    """A decode step over GPUs and the CPU."""

    host: HostBuffers
    cache: KVCache
    logits: LogitsMemory
    segments: dict[tuple[Work, int], tuple[Segment, ...]]  # by number of rows, too
    before: HostNode | None  # the embedding, if it is on the host
    after: HostNode | None  # the head, if it is on the host
    positions: Tensor | None  # learned ones, f32 [C, D] on the host, if the embedding is on a GPU
    meter: "Meter"
    passes: Passes
    kept: tuple[object, ...]  # keeps alive what graphs refer to by address
    neuron_cache: HybridCache | None = None
    states: StateSlots | None = None  # of recurrent states, if the model has any
    # Makes the segments for a number of rows, the first of which are in `host`.
    prepare: Callable[[Work, int], tuple[Segment, ...]] | None = None
    # The CPU computes during the segments, with all cores: the waiting thread must not take one.
    has_host_work: bool = False
    has_equal_rows: bool = True  # a row's result is bit-identical to that of a single row
    # The last layer's output f32 [rows, D] of the latest step or pass of so many rows, and what is
    # told of it after each, with its rows.
    hidden: Callable[[Work, int], Tensor] | None = None
    on_hidden: Callable[[Sequence[Row], np.ndarray], None] | None = None
    lost: str = ""  # why a GPU no longer answers: its last step may still be running

    @property
    def max_rows(self) -> int:
        return len(self.host.values["logits"])

    @out_of_memory_as_error()
    @torch.inference_mode()
    def run(self, token: int, position: int, sequence: int = 0) -> Tensor:
        """Logits f32 [V] after one token, valid until the next step; appends to the cache."""
        self._step([Row(token=token, position=position, sequence=sequence, has_logits=True)], 1)
        return self.host.values["logits"][0]

    def run_rows(self, rows: Sequence[Row]) -> Tensor:
        """Logits f32 [R, V] of the rows that want them; appends all rows to the cache. No row may
        be a copy of another."""
        logits_RV, done = self.logits.take(sum(row.has_logits for row in rows)), 0
        for piece, num_rows in self._pieces(rows):
            self._step(piece, num_rows)
            wanted = [number for number, row in enumerate(piece) if row.has_logits]
            self._copy_logits(logits_RV[done : done + len(wanted)], wanted)
            done += len(wanted)
        return logits_RV

    def _pieces(self, rows: Sequence[Each]) -> Iterator[tuple[Sequence[Each], int]]:
        """The rows in steps of at most `max_rows`, each with the number of rows that it has."""
        for start in range(0, len(rows), self.max_rows):
            piece = rows[start : start + self.max_rows]
            yield piece, next(count for count in ROWS if count >= len(piece))

    def _copy_logits(self, target_RV: Tensor, numbers: Sequence[int]) -> None:
        """Copies the logits of some rows of a step. By numpy: a copy by torch wakes OpenMP's
        threads for a large vocabulary, and they then spin for milliseconds on the cores of the
        kernels' threads (2 to 3 times slower on two cores)."""
        source_TV = self.host.values["logits"].numpy()
        for target_V, number in zip(target_RV.numpy(), numbers, strict=True):
            np.copyto(target_V, source_TV[number])

    @property
    def most_tokens(self) -> int:
        """Most rows of a pass; 0 without passes."""
        return max(self.passes.lengths, default=0)

    def run_pass(self, rows: Sequence[Row]) -> Tensor:
        """Logits f32 [R, V] of the rows that want them, consecutive tokens of one sequence; appends
        all rows to the cache."""
        wanted = [number for number, row in enumerate(rows) if row.has_logits]
        logits_RV, passes, done = self.logits.take(len(wanted)), self.passes, 0
        length = next(each for each in passes.lengths if each >= len(rows))
        for piece, num_rows in self._pieces(wanted):
            # Before the pass, whose hidden states this overwrites.
            self._make_ready("tail", [rows[number] for number in piece], num_rows)
        with prepared(self.cache, self.states, rows) as slotted:
            least = passes.least_streamed
            is_streamed = least is not None and len(rows) >= least
            work: Work = "streamed pass" if is_streamed else "pass"
            self._compute(work, slotted, length)
            self.meter.read()
        self._tell_hidden(work, rows, length)
        for piece, num_rows in self._pieces(wanted):
            passes.gather(piece, num_rows, length)
            self._compute("tail", [rows[number] for number in piece], num_rows)
            if self.after:
                self.after.run()
            self._copy_logits(logits_RV[done : done + len(piece)], range(len(piece)))
            done += len(piece)
        return logits_RV

    def _step(self, rows: Sequence[Row], num_rows: int) -> None:
        with prepared(self.cache, self.states, rows) as slotted:
            self._compute("step", slotted, num_rows)
            if self.after:
                self.after.run()
            if self.neuron_cache is not None:
                self.neuron_cache.after_step()
            self.meter.read()
        self._tell_hidden("step", rows, num_rows)

    def _tell_hidden(self, work: Work, rows: Sequence[Row], num_rows: int) -> None:
        if self.on_hidden is not None:
            assert self.hidden is not None
            self.on_hidden(rows, self.hidden(work, num_rows)[: len(rows)].numpy())

    def _compute(self, work: Work, rows: Sequence[Row], num_rows: int) -> None:
        """Runs the work of the GPUs for these rows, and what the host computes before it."""
        self._make_ready(work, rows, num_rows)
        self._fill(rows, num_rows)
        if work != "tail":
            self._before(num_rows)
        self._submitted(self.segments[work, num_rows])

    def _make_ready(self, work: Work, rows: Sequence[Row], num_rows: int) -> None:
        """Prepares the work for a number of rows at its first use. It is captured behind a run into
        the same blocks and slots of states, which stores what it computes."""
        if (work, num_rows) in self.segments:
            return
        assert self.prepare is not None
        self._fill(rows, num_rows)
        if work != "tail":
            self._before(num_rows)
        with self._watched(self.segments["step", 1]):
            self.segments[work, num_rows] = self.prepare(work, num_rows)

    def _fill(self, rows: Sequence[Row], num_rows: int) -> None:
        """Writes the rows to the host's buffers for a step of `num_rows` rows; the last is repeated
        if there are fewer."""
        host = self.host
        host.count.value = len(rows)
        for struct, row in zip(host.structs, rows, strict=False):
            struct.token, struct.position, struct.sequence = row.token, row.position, row.sequence
            struct.has_logits, struct.source = True, -1
            struct.reads, struct.writes = row.reads, row.writes
        filled, inputs = [*rows, *[rows[-1]] * (num_rows - len(rows))], host.inputs
        for number, row in enumerate(filled):
            inputs["token"][number], inputs["position"][number] = row.token, row.position
            inputs["sequence"][number] = row.sequence
        if self.states is not None:
            run_T3, writes_T = inputs["runs"].zero_(), inputs["writes"].fill_(NO_SLOT)
            first = 0
            for number, run in enumerate(runs_of(rows)):  # repeated rows are in no run
                run_T3[number] = torch.tensor([first, len(run), run[0].reads])
                writes_T[first : first + len(run)] = torch.tensor([row.writes for row in run])
                first += len(run)
        for table, blocks_SN in host.tables.items():
            blocks_SN.copy_(table.block_SN)
        self.meter.set_rows(len(rows))

    def _before(self, num_rows: int) -> None:
        """Computes the host's operations before those of all GPUs."""
        host = self.host
        if self.before:
            self.before.run()
        elif self.positions is not None:
            host.values["x"][:num_rows] = self.positions[host.inputs["position"][:num_rows]]

    def _submitted(self, segments: Sequence[Segment]) -> None:
        """Runs segments and waits for them. Raises DeviceLost if the last ones may still run, and
        HotsplitError if a change of the neuron cache was interrupted."""
        with self._watched(segments):
            if self.neuron_cache is not None:
                self.neuron_cache.before_step()
            if self.has_host_work:
                library.set_spin_time(GPU_SPIN_TIME)
            self._submit(segments)

    def _submit(self, segments: Sequence[Segment]) -> None:
        event = None
        for segment in segments:
            segment.main.follow()  # wait for a prompt's keys and values
            if event is not None:
                segment.main.wait(event)
            segment.run()
            event = segment.main.record()

    @contextmanager
    def _watched(self, segments: Sequence[Segment]) -> Iterator[None]:
        """Waits for the segments' streams in the end. Raises DeviceLost for a GPU that is lost, and
        from then on."""
        if self.lost:
            raise DeviceLost(self.lost)
        try:
            try:
                yield
            except DeviceLost:  # to wait for it could take for ever
                raise
            except BaseException:  # even after an interrupt, nothing keeps running
                self._finish(segments)
                raise
            self._finish(segments)
        except DeviceLost as lost:
            self.lost = f"{lost}; start again, or use the CPU alone (--device cpu)"
            raise DeviceLost(self.lost) from None

    def _finish(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            segment.main.finish(sleeps=self.has_host_work)


@dataclass(frozen=True, kw_only=True)
class Meter:
    """Adds to `traffic` the bytes of neurons that the CPU reads; those that a GPU reads are not
    counted."""

    traffic: Traffic
    structs: Sequence[NeuronsStruct | StepStruct]

    def set_rows(self, num_rows: int) -> None:
        """Sets the number of rows for which cold neurons are computed."""
        for struct in self.structs:
            if isinstance(struct, NeuronsStruct):
                struct.num_tokens = num_rows

    def read(self) -> None:
        for struct in self.structs:
            self.traffic.gate += struct.gate_bytes
            self.traffic.up += struct.up_bytes
            self.traffic.down += struct.down_bytes
            struct.gate_bytes = struct.up_bytes = struct.down_bytes = 0
