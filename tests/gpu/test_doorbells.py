"""Hand-overs by flags on a real device: values, submitted and in a graph; and a server that stops
leaves no stream waiting."""

from collections.abc import Callable
from ctypes import CFUNCTYPE, c_void_p, cast

import pytest
import torch
from torch import Tensor

from hotsplit.runtime.device.cuda_runtime import NOT_READY, DeviceLost
from hotsplit.runtime.device.streams import HostNode
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.step.backend import Backend, cuda_backend

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)


VALUES = 4096


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


def node_of(
    function: Callable[[int], None], reads: tuple[Tensor, ...] = (), writes: tuple[Tensor, ...] = ()
) -> HostNode:
    """A hand-over to a Python function."""
    made = CFUNCTYPE(None, c_void_p)(function)
    address = cast(made, c_void_p).value
    assert address is not None
    return HostNode(function=address, argument=0, reads=reads, writes=writes, kept=(made,))


@pytest.mark.parametrize(
    ("has_graph", "has_doorbells"), [(False, False), (False, True), (True, True)]
)
def test_values_go_to_the_cpu_and_back(cuda, has_graph, has_doorbells):
    assert_echo(cuda_backend(has_graph=has_graph, has_doorbells=has_doorbells), GPU)


def test_a_server_that_stops_releases_the_stream(cuda, monkeypatch):
    backend = cuda_backend(has_graph=True, has_doorbells=True)
    main, node = backend.stream(GPU), node_of(lambda argument: None)

    def submit() -> None:
        for _ in range(4):
            main.join(main.start(node))

    run = backend.prepare(main, submit)
    with monkeypatch.context() as patch:
        patch.setattr(library, "serve", lambda *arguments: (1, NOT_READY))
        with pytest.raises(DeviceLost, match="hand-over 2 of 4"):
            run()
    main.finish()  # which would wait for ever
    run()
    main.finish(sleeps=True)
