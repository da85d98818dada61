"""Hand-overs by flags on a real device: values, submitted and in a graph; what they take beside
host functions; and that a server that stops leaves no stream waiting. `-s` prints the times."""

import pytest
import torch
from handed_over import assert_echo, hand_over_s, node_of

from hotsplit.runtime.device.cuda_runtime import NOT_READY, DeviceLost
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.step.backend import cuda_backend

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("has_doorbells", [True, False])
@pytest.mark.parametrize("has_graph", [False, True])
def test_values_go_to_the_cpu_and_back(cuda, has_graph, has_doorbells):
    assert_echo(cuda_backend(has_graph=has_graph, has_doorbells=has_doorbells), GPU)


def test_flags_take_less_than_callbacks(cuda):
    backends = [cuda_backend(has_graph=True, has_doorbells=has) for has in (True, False)]
    flags, calls = hand_over_s(backends, GPU)
    print(f"a hand-over of nothing: {1e6 * flags:.1f} us by flags, {1e6 * calls:.1f} by callbacks")
    assert flags < calls


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
