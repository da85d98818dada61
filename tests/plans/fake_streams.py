"""Streams that run submissions late, in any order that their events allow, and check from the
submissions alone that no two operations race."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from fake_cuda.tensors import span
from torch import Tensor

from hotsplit.runtime.device.streams import HostNode
from hotsplit.runtime.kernels.gpu.kernels import Kernels
from hotsplit.runtime.step.backend import Backend, plain_backend


class Race(AssertionError):
    """Two operations that no event orders touch the same memory, and one writes it."""


@dataclass(eq=False)
class Operation:
    name: str
    run: Callable[[], None]
    reads: list[tuple[int, int]]
    writes: list[tuple[int, int]]
    clock: dict[int, int]  # per stream, how many of its operations certainly come before
    stream: int
    number: int

    def is_before(self, other: "Operation") -> bool:
        return other.clock.get(self.stream, 0) > self.number


@dataclass
class FakeDevice:
    """Makes streams. Waiting for one runs only the operations that certainly come before its end.
    The others stay queued, and are checked for races with those that are submitted later."""

    seed: int = 0
    dropped: int | None = None  # the index of a wait that is ignored
    queues: list[list[Operation]] = field(default_factory=list)
    log: list[Operation] = field(default_factory=list)
    num_waits: int = 0
    has_steps: bool = False  # steps submit the work; each begins by following torch's stream

    def stream(self) -> "FakeStream":
        self.queues.append([])
        return FakeStream(self, len(self.queues) - 1)

    def backend(self, kernels: Kernels) -> Backend:
        plain = plain_backend(kernels)
        self.has_steps = True
        return Backend(
            kernels=kernels,
            stream=lambda device: self.stream(),
            take=plain.take,
            prepare=plain.prepare,
            is_pinned=False,
        )

    def drain(self, limits: dict[int, int] | None = None) -> None:
        """Checks all queued operations for races. Then runs those whose numbers are below their
        stream's limit (None: all), each time a random one of those that can run."""
        check_races([operation for queue in self.queues for operation in queue])
        queues = [
            [o for o in queue if limits is None or o.number < limits.get(stream, 0)]
            for stream, queue in enumerate(self.queues)
        ]
        chooser = random.Random(self.seed)
        self.seed += 1
        done = [queue[0].number if queue else 0 for queue in queues]
        heads = [0] * len(queues)
        while True:
            ready = [
                queue[head]
                for queue, head in zip(queues, heads, strict=True)
                if head < len(queue)
                and all(done[s] >= n for s, n in queue[head].clock.items() if queues[s])
            ]
            if not ready:
                break
            operation = chooser.choice(ready)
            operation.run()
            self.log.append(operation)
            heads[operation.stream] += 1
            done[operation.stream] = operation.number + 1
        assert all(h == len(q) for h, q in zip(heads, queues, strict=True)), "a deadlock"
        for queue, head in zip(self.queues, heads, strict=True):
            del queue[:head]


class FakeStream:
    def __init__(self, device: FakeDevice, number: int) -> None:
        self.device, self.number, self.count = device, number, 0
        self.clock: dict[int, int] = {}
        self.side: FakeStream | None = None  # of what is handed over to the CPU
        self.follows = False  # whether it follows torch's stream, on which weights and prompts are

    def launch(self, run, *, reads, writes) -> None:
        self._submit("kernel", run, reads, writes)

    def copy(self, target: Tensor, source: Tensor) -> None:
        assert target.shape == source.shape and target.dtype == source.dtype
        assert target.is_contiguous() and source.is_contiguous()
        self._submit("copy", lambda: target.copy_(source), [source], [target])

    def host(self, node: HostNode) -> None:
        self._submit("host", node.run, node.reads, node.writes)

    def start(self, node: HostNode) -> dict[int, int]:
        if self.side is None:
            self.side = self.device.stream()
        if any(
            self.side.clock.get(s, 0) < n for s, n in self.record().items() if s != self.side.number
        ):
            self.side.wait(self.record())  # nothing new would be waited for otherwise
        self.side.host(node)
        return self.side.record()

    def join(self, handed: dict[int, int]) -> None:
        self.wait(handed)

    def record(self) -> dict[int, int]:
        return {**self.clock, self.number: self.count}

    def wait(self, event: dict[int, int]) -> None:
        self.device.num_waits += 1
        if self.device.num_waits - 1 == self.device.dropped:
            return
        for stream, count in event.items():
            self.clock[stream] = max(self.clock.get(stream, 0), count)

    def follow(self) -> None:
        self.follows = True

    def finish(self, *, sleeps: bool = False) -> None:
        limits = {**self.clock, self.number: self.count}
        for operation in self.device.queues[self.number]:
            for stream, count in operation.clock.items():
                limits[stream] = max(limits.get(stream, 0), count)
        self.device.drain(limits)
        self.follows = False

    def _submit(self, name, run, reads, writes) -> None:
        is_ordered = self.follows or self.clock or not self.device.has_steps
        assert is_ordered, "no event orders this after weights and prompts"
        self.device.queues[self.number].append(
            Operation(
                name=name,
                run=run,
                reads=[span(tensor) for tensor in reads],
                writes=[span(tensor) for tensor in writes],
                clock={**self.clock, self.number: self.count},
                stream=self.number,
                number=self.count,
            )
        )
        self.count += 1


def check_races(operations: list[Operation]) -> None:
    for number, first in enumerate(operations):
        for second in operations[number + 1 :]:
            if first.stream == second.stream:
                continue
            if first.is_before(second) or second.is_before(first):
                continue
            if (
                overlap(first.writes, second.writes)
                or overlap(first.writes, second.reads)
                or overlap(first.reads, second.writes)
            ):
                raise Race(
                    f"{first.name} on stream {first.stream}, {second.name} on {second.stream}"
                )


def overlap(some: list[tuple[int, int]], others: list[tuple[int, int]]) -> bool:
    return any(a < d and c < b for a, b in some for c, d in others)
