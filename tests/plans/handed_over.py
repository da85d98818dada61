"""Hand-overs of nothing but numbers to the CPU and back, by each kind of stream."""

import statistics
import time
from collections.abc import Callable, Sequence
from ctypes import CFUNCTYPE, c_void_p, cast
from functools import partial

import torch
from torch import Tensor

from hotsplit.runtime.device.streams import HostNode, Stream
from hotsplit.runtime.step.backend import Backend

VALUES = 4096
HANDOVERS, ROUNDS = 32, 15  # to time: one by callbacks takes up to 0.2 ms, so 0.1 s in all


def assert_echo(backend: Backend, device: torch.device) -> None:
    """Copies numbers to the host in a stream, lets the CPU add 1, and copies them back, three
    times."""
    main = backend.stream(device)
    seen, answer, back = (torch.zeros(VALUES, pin_memory=backend.is_pinned) for _ in range(3))
    there = torch.zeros(VALUES, device=device)
    mine, theirs = answer.numpy(), seen.numpy()

    def add(_: int) -> None:
        mine[:] = theirs + 1

    node = node_of(add, reads=(seen,), writes=(answer,))

    def submit() -> None:
        main.copy(seen, there)
        main.join(main.start(node))
        main.copy(there, answer)
        main.copy(back, there)

    run = backend.prepare(main, submit)
    for number in range(1, 4):
        there.fill_(number)
        main.follow()
        run()
        main.finish()
        assert (back == number + 1).all(), f"sent {number}, got {float(back[0]):g} back"


def hand_over_s(backends: Sequence[Backend], device: torch.device) -> list[float]:
    """Median seconds of a hand-over of nothing to the CPU and back with each of the backends, which
    take turns."""
    node = node_of(lambda argument: None)
    mains = [backend.stream(device) for backend in backends]

    def submit(main: Stream) -> None:
        for _ in range(HANDOVERS):
            main.join(main.start(node))

    runs = [
        each.prepare(main, partial(submit, main))
        for each, main in zip(backends, mains, strict=True)
    ]
    seconds: list[list[float]] = [[] for _ in backends]
    for _ in range(ROUNDS):
        for number, (main, run) in enumerate(zip(mains, runs, strict=True)):
            began = time.perf_counter()
            run()
            main.finish(sleeps=True)
            seconds[number].append((time.perf_counter() - began) / HANDOVERS)
    return [statistics.median(each) for each in seconds]


def node_of(
    function: Callable[[int], None], reads: tuple[Tensor, ...] = (), writes: tuple[Tensor, ...] = ()
) -> HostNode:
    """A hand-over to a Python function."""
    made = CFUNCTYPE(None, c_void_p)(function)
    address = cast(made, c_void_p).value
    assert address is not None
    return HostNode(function=address, argument=0, reads=reads, writes=writes, kept=(made,))
