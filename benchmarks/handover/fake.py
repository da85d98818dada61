"""A GPU that is a thread, for `gpu_handover.py --fake`: what was captured runs in its order. Shows
that the control flow works; its times mean nothing."""

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from handover.handover_gpu import WIDTH, HandoverGpu

Work = Callable[[], object]


class FakeGpu(HandoverGpu):
    def __init__(self) -> None:
        self.memops = "direct"
        self.graph: list[Work] | None = None

    def facts(self) -> dict[str, object]:
        return {"device": "fake"}

    def submit(self, work: Work) -> None:
        assert self.graph is not None, "nothing is captured"
        self.graph.append(work)

    def busy(self, us: float, stamp: int = 0) -> None:
        self.submit(lambda: _pass(us))

    def put(self, x_D: torch.Tensor, address: int, flag: int = 0) -> None:
        def run() -> None:
            ctypes.memmove(address, x_D.data_ptr(), 4 * WIDTH)
            if flag:
                ctypes.c_uint32.from_address(flag).value = 1

        self.submit(run)

    def add(self, x_D: torch.Tensor, address: int, flag: int = 0) -> None:
        self.submit(lambda: flag and _await(flag, 1))

    def copy(self, target: int, source: int, num_bytes: int, *, on_side: bool = False) -> None:
        self.submit(lambda: ctypes.memmove(target, source, num_bytes))

    def host(self, function: int, argument: int, *, on_side: bool = False) -> None:
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
        self.submit(lambda: call(argument))

    def write(self, address: int, value: int) -> None:
        self.submit(lambda: setattr(ctypes.c_uint32.from_address(address), "value", value))

    def wait(self, address: int, value: int) -> None:
        self.submit(lambda: _await(address, value))

    def fork(self) -> None:
        pass

    def join(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype)

    def zeros(self, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype)

    def captured(self, submit: Callable[[], Any]) -> list[Work]:
        self.graph = graph = list[Work]()
        try:
            submit()
        finally:
            self.graph = None
        return graph

    def timed(
        self, graph: Any, serve: Callable[[], Any] | None = None, *, sleeps: bool = False
    ) -> tuple[float, float]:
        began = time.perf_counter()
        thread = threading.Thread(target=lambda: [work() for work in graph])
        thread.start()
        if serve is not None:
            serve()
        thread.join()
        us = 1e6 * (time.perf_counter() - began)
        return us, us

    def warm_up(self, x_D: torch.Tensor, pinned_D: torch.Tensor, flags: torch.Tensor) -> None:
        pass


def _pass(us: float) -> None:
    end = time.perf_counter() + 1e-6 * us
    while time.perf_counter() < end:
        pass


def _await(address: int, value: int) -> None:
    end = time.perf_counter() + 1
    while ctypes.c_uint32.from_address(address).value < value and time.perf_counter() < end:
        time.sleep(0)
