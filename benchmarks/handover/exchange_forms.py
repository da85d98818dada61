"""Forms of a hand-over to the CPU and back, each captured for LAYERS layers, and their times.

A layer is a gap of GPU time (its dense part), the hand-over, HOT_US of GPU time beside it, and the
next kernel, which needs what the CPU wrote."""

from collections.abc import Callable
from statistics import median

import torch
from handover.handover_gpu import WIDTH, HandoverGpu
from handover.host import LIMIT_NS, Host, Job

LAYERS, HOT_US = 24, 20
BITS = 344  # int32 words of the bits of 11,008 neurons
LINE = 16  # int32 values between two flags: one cache line
WARM_UP, REPEATS = 3, 15

NO_HAND_OVER = "no hand-over"
COPIES = "copies only, side stream"
HOST_SIDE = "copies + host function, side stream"
HOST_ALONE = "host function alone, one stream"
HOST_MAPPED = "host function, mapped x and y"
FLAGS = "kernel flag, kernel polls, mapped"
MEMOPS_COPIES = "memory operations + copies"
MEMOPS = "memory operations, mapped x and y"
SERVED = {FLAGS, MEMOPS_COPIES, MEMOPS}  # by the thread that waits for the step


class Buffers:
    def __init__(self, gpu: HandoverGpu) -> None:
        self.x, self.back = gpu.zeros(WIDTH), gpu.zeros(WIDTH)
        self.bits = gpu.zeros(BITS, torch.int32)
        self.x_host, self.y_host = (gpu.pinned(WIDTH, torch.float32) for _ in range(2))
        self.bits_host = gpu.pinned(BITS, torch.int32)
        self.ready, self.done = (gpu.pinned(LAYERS * LINE, torch.int32) for _ in range(2))
        self.stamps = gpu.pinned(2 * LAYERS + 2, torch.int64)

    def flags(self, layer: int) -> tuple[int, int]:
        """The addresses of the layer's flags: ready, done."""
        offset = 4 * LINE * layer
        return self.ready.data_ptr() + offset, self.done.data_ptr() + offset


class Forms:
    """The forms by name; `submit` captures one."""

    def __init__(self, gpu: HandoverGpu, host: Host, buffers: Buffers, job: Job) -> None:
        self.gpu, self.host, self.buffers, self.job = gpu, host, buffers, job
        self.layers: dict[str, Callable[[int], None]] = {
            NO_HAND_OVER: self._none,
            COPIES: self._copies,
            HOST_SIDE: self._host_side,
            HOST_ALONE: self._host_alone,
            HOST_MAPPED: self._host_mapped,
            FLAGS: self._flags,
        }
        if gpu.memops != "none":
            self.layers |= {MEMOPS_COPIES: self._memops_copies, MEMOPS: self._memops}

    def added_us(
        self,
        name: str,
        gap_us: int,
        base_us: float,
        repeats: int = REPEATS,
        before: Callable[[], object] = lambda: None,
    ) -> list[float] | None:
        """Microseconds that a hand-over adds to a layer, for each replay; None if the CPU did not
        see a flag in time. `base_us`: a layer without one."""
        graph = self.gpu.captured(lambda: self._submit(name, gap_us))
        found = []
        for number in range(WARM_UP + repeats):
            before()
            us = self.replay_us(graph, is_served=name in SERVED)
            if us is None:
                return None
            if number >= WARM_UP:
                found.append(us / LAYERS - base_us)
        return found

    def base_us(self, gap_us: int) -> float:
        found = self.added_us(NO_HAND_OVER, gap_us, 0.0)
        assert found is not None
        return median(found)

    def replay_us(self, graph: object, *, is_served: bool) -> float | None:
        b = self.buffers
        b.ready.zero_()
        b.done.zero_()
        self.job.struct.count = 0
        served = LAYERS

        def serve() -> None:
            nonlocal served
            served = self.host.library.hb_serve(
                b.ready.data_ptr(), b.done.data_ptr(), LINE, LAYERS, self.job.address, LIMIT_NS
            )

        us, _ = self.gpu.timed(graph, serve if is_served else None, sleeps=not is_served)
        return us if served == LAYERS else None

    def _submit(self, name: str, gap_us: int) -> None:
        for layer in range(LAYERS):
            self.gpu.busy(gap_us)
            self.layers[name](layer)

    def _none(self, layer: int) -> None:
        gpu, b = self.gpu, self.buffers
        gpu.put(b.x, b.back.data_ptr())
        gpu.busy(HOT_US)
        gpu.add(b.x, b.back.data_ptr())

    def _copies(self, layer: int) -> None:
        self._beside(has_host=False)

    def _host_side(self, layer: int) -> None:
        self._beside(has_host=True)

    def _beside(self, *, has_host: bool) -> None:
        gpu, b = self.gpu, self.buffers
        gpu.put(b.x, b.back.data_ptr())
        gpu.fork()
        self._copy_out(on_side=True)
        if has_host:
            gpu.host(self.host.job_function, self.job.address, on_side=True)
        gpu.copy(b.back.data_ptr(), b.y_host.data_ptr(), 4 * WIDTH, on_side=True)
        gpu.busy(HOT_US)
        gpu.join()
        gpu.add(b.x, b.back.data_ptr())

    def _copy_out(self, *, on_side: bool = False) -> None:
        gpu, b = self.gpu, self.buffers
        gpu.copy(b.x_host.data_ptr(), b.x.data_ptr(), 4 * WIDTH, on_side=on_side)
        gpu.copy(b.bits_host.data_ptr(), b.bits.data_ptr(), 4 * BITS, on_side=on_side)

    def _host_alone(self, layer: int) -> None:
        self._in_line(self.buffers.back.data_ptr(), self.buffers.back.data_ptr())

    def _host_mapped(self, layer: int) -> None:
        self._in_line(self.buffers.x_host.data_ptr(), self.buffers.y_host.data_ptr())

    def _in_line(self, x: int, y: int) -> None:
        gpu, b = self.gpu, self.buffers
        gpu.put(b.x, x)
        gpu.host(self.host.job_function, self.job.address)
        gpu.busy(HOT_US)
        gpu.add(b.x, y)

    def _flags(self, layer: int) -> None:
        gpu, b = self.gpu, self.buffers
        ready, done = b.flags(layer)
        gpu.put(b.x, b.x_host.data_ptr(), ready)
        gpu.busy(HOT_US)
        gpu.add(b.x, b.y_host.data_ptr(), done)

    def _memops_copies(self, layer: int) -> None:
        gpu, b = self.gpu, self.buffers
        ready, done = b.flags(layer)
        gpu.put(b.x, b.back.data_ptr())
        self._copy_out()
        gpu.write(ready, 1)
        gpu.busy(HOT_US)
        gpu.wait(done, 1)
        gpu.copy(b.back.data_ptr(), b.y_host.data_ptr(), 4 * WIDTH)
        gpu.add(b.x, b.back.data_ptr())

    def _memops(self, layer: int) -> None:
        gpu, b = self.gpu, self.buffers
        ready, done = b.flags(layer)
        gpu.put(b.x, b.x_host.data_ptr())
        gpu.write(ready, 1)
        gpu.busy(HOT_US)
        gpu.wait(done, 1)
        gpu.add(b.x, b.y_host.data_ptr())
