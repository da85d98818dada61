"""Checks a whole decode step on a device: a host function's round trip, the submitted step against
the model layer by layer, and the captured step against the submitted one."""

from collections.abc import Callable
from ctypes import CFUNCTYPE, c_void_p, cast

import torch
from torch import Tensor

from hotsplit.runtime.check.kernels import Wrong
from hotsplit.runtime.device.streams import HostNode
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


def echo(backend: Backend, device: torch.device) -> None:
    """Copies numbers to the host in a stream, adds 1 in a host function, and copies them back."""
    main, _ = backend.streams(device)
    seen, answer, back = (torch.zeros(_VALUES, pin_memory=backend.is_pinned) for _ in range(3))
    there = torch.zeros(_VALUES, device=device)
    mine, theirs = answer.numpy(), seen.numpy()

    def add(_: int) -> None:
        mine[:] = theirs + 1

    function = CFUNCTYPE(None, c_void_p)(add)
    address = cast(function, c_void_p).value
    assert address is not None
    node = HostNode(function=address, argument=0, reads=(seen,), writes=(answer,), kept=(function,))
    for number in range(1, 4):
        there.fill_(number)
        main.follow()
        main.copy(seen, there)
        main.host(node)
        main.copy(there, answer)
        main.copy(back, there)
        main.finish()
        if not bool((back == number + 1).all()):
            raise Wrong(f"sent {number}, wanted {number + 1} back, got {float(back[0]):g}")


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
    got = _logits(step)
    count = int(((got != want) & ~(got.isnan() & want.isnan())).sum())
    if count:
        raise Wrong(f"{count:,} of {want.numel():,} logits differ from the submitted step's")


def _logits(step: DecodeStep) -> Tensor:
    """The logits f32 [T, V] of a short text."""
    return torch.stack([step.run(token, at).clone() for at, token in enumerate(_TOKENS)])
