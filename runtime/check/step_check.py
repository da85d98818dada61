"""Checks a whole decode step on a device: a hand-over to the CPU and back, the submitted step against
the model layer by layer, and the captured step against the submitted one."""

import statistics
import time
from collections.abc import Callable, Sequence
from ctypes import CFUNCTYPE, c_void_p, cast
from functools import partial

import torch
from torch import Tensor

from hotsplit.runtime.check.kernels import Wrong
from hotsplit.runtime.device.streams import HostNode, Stream
from hotsplit.runtime.step.decode_step import DecodeStep
from hotsplit.runtime.step.hybrid_step import Backend

# Logits f32 [V] after a token at a position, computed layer by layer.
Plain = Callable[[int, int], Tensor]
BuildStep = Callable[[Backend], DecodeStep | str]
# The largest |got - want| / |want| of a step's logits: the computation layer by layer rounds
# factors to 16 bits, and predictions and activations close to a threshold may differ. For unrelated
# logits the value is 1.4.
STEP_BOUND = 0.1
_TOKENS = (0, 1)
_VALUES = 4096
_HANDOVERS, _ROUNDS = 32, 15  # to time: one by callbacks takes up to 0.2 ms, so 0.1 s in all


def echo(backend: Backend, device: torch.device) -> None:
    """Copies numbers to the host in a stream, lets the CPU add 1, and copies them back, three
    times."""
    main = backend.stream(device)
    seen, answer, back = (torch.zeros(_VALUES, pin_memory=backend.is_pinned) for _ in range(3))
    there = torch.zeros(_VALUES, device=device)
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
        if not bool((back == number + 1).all()):
            raise Wrong(f"sent {number}, wanted {number + 1} back, got {float(back[0]):g}")


def hand_over_s(backends: Sequence[Backend], device: torch.device) -> list[float]:
    """Median seconds of a hand-over of nothing to the CPU and back with each of the backends, which
    take turns."""
    node = node_of(lambda argument: None)
    mains = [backend.stream(device) for backend in backends]

    def submit(main: Stream) -> None:
        for _ in range(_HANDOVERS):
            main.join(main.start(node))

    runs = [each.prepare(main, partial(submit, main))
            for each, main in zip(backends, mains, strict=True)]  # fmt: skip
    seconds: list[list[float]] = [[] for _ in backends]
    for _ in range(_ROUNDS):
        for number, (main, run) in enumerate(zip(mains, runs, strict=True)):
            began = time.perf_counter()
            run()
            main.finish(sleeps=True)
            seconds[number].append((time.perf_counter() - began) / _HANDOVERS)
    return [statistics.median(each) for each in seconds]


def node_of(
    function: Callable[[int], None],
    reads: tuple[Tensor, ...] = (),
    writes: tuple[Tensor, ...] = (),
) -> HostNode:
    """A hand-over to a Python function, for checks."""
    made = CFUNCTYPE(None, c_void_p)(function)
    address = cast(made, c_void_p).value
    assert address is not None
    return HostNode(function=address, argument=0, reads=reads, writes=writes, kept=(made,))


def submitted(build: BuildStep, backend: Backend, plain: Plain) -> None:
    """Raises Wrong unless the step's logits are close to those of `plain`."""
    step = build(backend)
    if isinstance(step, str):  # this model has no such step, which is not the device's fault
        return
    got = _logits(step)
    want = torch.stack([plain(token, at).double() for at, token in enumerate(_TOKENS)])
    error = float((got.double() - want).norm() / want.norm())
    if not error <= STEP_BOUND:
        raise Wrong(f"logits are off by {error:.2g}, at most {STEP_BOUND:g} wanted")


def captured(build: BuildStep, submitting: Backend, capturing: Backend) -> None:
    """Raises Wrong unless a captured step's logits equal the submitted step's, with NaN in the same
    places."""
    step = build(submitting)
    if isinstance(step, str):
        return
    want = _logits(step)
    del step  # the next step uses its buffers
    step = build(capturing)
    assert not isinstance(step, str), step
    _compare(_logits(step), want, "the submitted step's")


def overlapped(
    build: BuildStep,
    capturing: Backend,
    overlapping: Backend,
    seconds_of: Callable[[DecodeStep], float],
) -> None:
    """Raises Wrong unless a step whose kernels overlap has the bits of the other captured step, and
    takes no longer."""
    found: list[tuple[Tensor, float]] = []
    for backend in (capturing, overlapping):
        step = build(backend)
        if isinstance(step, str):
            return
        found.append((_logits(step), seconds_of(step)))
        del step  # the next step uses its buffers
    (want, without_s), (got, with_s) = found
    _compare(got, want, "the other captured step's")
    if with_s > without_s:
        raise Wrong(f"a token takes {1e3 * with_s:.3f} ms, without it {1e3 * without_s:.3f}")


def seconds_of(step: DecodeStep) -> float:
    """Median seconds of a token."""
    seconds = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        step.run(_TOKENS[0], 0)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _compare(got: Tensor, want: Tensor, whose: str) -> None:
    """Raises Wrong unless logits are equal, with NaN in the same places."""
    count = int(((got != want) & ~(got.isnan() & want.isnan())).sum())
    if count:
        raise Wrong(f"{count:,} of {want.numel():,} logits differ from {whose}")


def _logits(step: DecodeStep) -> Tensor:
    """The logits f32 [T, V] of a short text."""
    return torch.stack([step.run(token, at).clone() for at, token in enumerate(_TOKENS)])
