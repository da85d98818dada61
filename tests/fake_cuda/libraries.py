"""What cuBLAS and torch's random numbers take from torch's allocator, as in
aten/src/ATen/cuda/CublasHandlePool.cpp and CUDAGeneratorImpl.cpp (before torch 2.13)."""

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fake_cuda.devices import FakeCuda

HOPPER_WORKSPACE = 4096 * 8 << 10  # cuBLAS's default on compute capability 9.0
PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_"}
_Held = tuple[int, Callable[[], None]]  # address, function that frees it


def workspace_bytes() -> int:
    """Bytes of a workspace by CUBLAS_WORKSPACE_CONFIG: pairs of KiB and a count."""
    numbers = [int(n) for n in os.environ.get("CUBLAS_WORKSPACE_CONFIG", "").split(":") if n]
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    return sum(size * count << 10 for size, count in pairs) or HOPPER_WORKSPACE


class Workspaces:
    """cuBLAS's workspaces: one for each handle and stream, until they are cleared. A thread takes
    a handle that no other uses, or a new one, and keeps it until it ends."""

    def __init__(self, cuda: "FakeCuda") -> None:
        self._cuda = cuda
        self._of_thread: dict[threading.Thread, int] = {}
        self._held: dict[tuple[int, int, int], _Held] = {}  # by handle, device and stream

    def use(self, device: int, stream: int) -> None:
        key = (self._handle(), device, stream)
        if key not in self._held:
            self._held[key] = self._cuda.allocate(device, workspace_bytes())

    def clear(self) -> None:
        held, self._held = self._held, {}
        for _, free in held.values():
            free()

    def _handle(self) -> int:
        thread = threading.current_thread()
        self._of_thread = {t: h for t, h in self._of_thread.items() if t is thread or t.is_alive()}
        taken = set(self._of_thread.values())
        free = next(number for number in range(len(taken) + 1) if number not in taken)
        return self._of_thread.setdefault(thread, free)


class Seeds:
    """The two numbers that torch's generator holds on the device while graphs exist, allocated on
    the stream of the first capture."""

    def __init__(self, cuda: "FakeCuda") -> None:
        self._cuda = cuda
        self._graphs: dict[int, set[int]] = {}  # by device
        self._held: dict[int, list[_Held]] = {}

    def register(self, device: int, graph: int) -> None:
        if not self._graphs.get(device):
            self._held[device] = [self._cuda.allocate(device, 8) for _ in range(2)]
        self._graphs.setdefault(device, set()).add(graph)

    def forget(self, device: int, graph: int) -> None:
        self._graphs.get(device, set()).discard(graph)
        if not self._graphs.get(device):
            for _, free in self._held.pop(device, []):
                free()
