"""Runs the operations of a step one by one on the CPU, in random orders that their declared reads
and writes allow. Values are poisoned before a run, so that a wrong order, which a missing
declaration allows, shows in the logits."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from hotsplit.runtime.kernels.gpu.kernels import reference_kernels
from hotsplit.runtime.ops.neurons.feed_forward import Traffic
from hotsplit.runtime.step import hybrid_builder
from hotsplit.runtime.step.backend import plain_backend
from hotsplit.runtime.step.forms import host_form
from hotsplit.runtime.step.native_parts import HostBuffers, NativeParts
from hotsplit.runtime.step.native_step import overwritten
from hotsplit.runtime.step.pass_device import PassSetup
from hotsplit.runtime.step.program import HOST, edges, step_program

ORDERS = 3  # tried for each pair whose order is no longer enforced


@dataclass(frozen=True)
class Operation:
    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    run: Callable[[], None]

    def without(self, value: str, *, is_read: bool) -> "Operation":
        """The same work, with one read or write left out of its declaration."""
        if is_read:
            return replace(self, reads=tuple(v for v in self.reads if v != value))
        return replace(self, writes=tuple(v for v in self.writes if v != value))


@dataclass
class Replay:
    """The operations of a step, and the memory of the values that they exchange."""

    operations: list[Operation]
    host: HostBuffers
    memory: list[Tensor]  # poisoned before each run
    kept: object

    @classmethod
    def of_host(cls, weights):
        """The operations of the native step, each in a separate call."""
        program = step_program(host_form(weights))
        host = HostBuffers.of(weights.spec, is_pinned=False)
        (parts,) = NativeParts.of(weights, [program], host)
        operations = [
            Operation(op.kind, op.reads, (*op.writes, *overwritten(op)), parts.node([op]).run)
            for op in program
            if parts.ranges[op][0] < parts.ranges[op][1]
        ]
        memory = [t for t in parts.kept if isinstance(t, Tensor) and holds(t, parts.step.workspace)]
        assert len(memory) == 1
        return cls(operations, host, [*memory, *written(host)], parts)

    @classmethod
    def of_plan(cls, weights, placement):
        """The submissions of a hybrid step with both roles on the CPU, and what the host does
        before and after them."""
        builder = hybrid_builder._Builder(
            weights,
            placement,
            Traffic(),
            plain_backend(reference_kernels()),
            None,
            max_rows=1,
            passes=PassSetup(),
        )
        step = builder.step()
        operations = [
            Operation(s.name, s.reads, s.writes, getattr(s.work, "run", s.work))
            for s in builder.submissions[0]
        ]
        outside = [op for op in builder.programs["step"] if op.home == HOST]
        for op in outside:
            if op.part == "positions":
                run = partial(embed_position, builder.host, step.positions)
                operations.insert(0, Operation(op.kind, op.reads, op.writes, run))
        if step.before:
            (embed,) = (op for op in outside if op.kind == "embed")
            operations.insert(0, Operation("embed", embed.reads, embed.writes, step.before.run))
        if step.after:
            operations.append(Operation("head", ("x@host",), ("logits@host",), step.after.run))
        memory = written(builder.host)
        for device in step.kept[0].values():
            b = device.buffers
            memory += [*b.inputs.values(), *b.values.values(), b.room, b.hidden, b.sums]
        return cls(operations, builder.host, memory, step)

    def logits(self, order: Sequence[int]) -> Tensor:
        for tensor in self.memory:
            tensor.view(torch.uint8).fill_(255)  # NaN in floats; every neuron in bits
        for tensor in self.memory:
            if tensor.dtype == torch.int64:  # another token, another position
                tensor.fill_(1)
        for number in order:
            self.operations[number].run()
        return self.host.values["logits"][0].clone()

    def order(self, seed: int, among: Sequence[tuple[int, int]]) -> list[int]:
        """A random order in which the first operation of each pair comes before the second."""
        chooser, count = random.Random(seed), len(self.operations)
        waiting = [0] * count
        behind: list[list[int]] = [[] for _ in range(count)]
        for first, second in among:
            waiting[second] += 1
            behind[first].append(second)
        ready = [number for number in range(count) if not waiting[number]]
        found = []
        while ready:
            number = ready.pop(chooser.randrange(len(ready)))
            found.append(number)
            for other in behind[number]:
                waiting[other] -= 1
                if not waiting[other]:
                    ready.append(other)
        assert len(found) == count, "a cycle"
        return found

    @property
    def edges(self) -> list[tuple[int, int]]:
        return edges([(operation.reads, operation.writes) for operation in self.operations])

    def changes(self, number: int, value: str, want: Tensor, *, is_read: bool) -> bool | None:
        """Whether some order that is allowed once a read or write is not declared changes the
        logits; None if leaving it out allows no new order. Each pair whose order is lost is tried
        the other way round, in a few random orders."""
        right = self.edges
        was = self.operations[number]
        self.operations[number] = was.without(value, is_read=is_read)
        try:
            left = self.edges
        finally:
            self.operations[number] = was
        after = reachable(left, len(self.operations))
        lost = [(a, b) for a, b in right if b not in after[a]]
        for pair in lost:
            for seed in range(ORDERS):
                order = self.order(seed, [*left, pair[::-1]])
                if not torch.equal(self.logits(order), want):
                    return True
        return False if lost else None


def take(host: HostBuffers, token: int, position: int) -> None:
    """Makes this token, at this position, the input of a step."""
    host.count.value = 1
    host.structs[0].token = host.inputs["token"][0] = token
    host.structs[0].position = host.inputs["position"][0] = position


def embed_position(host: HostBuffers, positions: Tensor) -> None:
    host.values["x"][0].copy_(positions[host.inputs["position"][0]])


def written(host: HostBuffers) -> list[Tensor]:
    """The host's buffers, without the inputs of a step."""
    return list(host.values.values())


def holds(tensor: Tensor, address: int) -> bool:
    return 0 <= address - tensor.data_ptr() < tensor.nbytes


def reachable(pairs: Sequence[tuple[int, int]], count: int) -> list[set[int]]:
    """For each operation, those that the pairs put after it, directly or not."""
    found: list[set[int]] = [set() for _ in range(count)]
    for first, second in sorted(pairs, reverse=True):  # the first of a pair is the lower number
        found[first] |= {second} | found[second]
    return found
