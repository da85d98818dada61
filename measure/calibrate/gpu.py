"""Calibrates a CUDA device: memory bandwidth, copies to it, and the fixed costs of copies, kernels
and round trips.

Kernels and copies from pinned memory are timed by CUDA events, the others on the host. The fixed
cost of a copy is that of copying 4 bytes, the fixed cost of a kernel that of one on a single value;
both are means over a captured graph of NUM_NODES nodes in sequence, because the runtime captures
decode steps too.

The round trip is two captured graphs with the CPU between them: the first copies a hidden state to
pinned memory, and the CPU polls an event and launches the second graph, which copies the hidden
state back. The runtime has one graph with flags that the CPU looks at instead, so the measured time is
neither an upper nor a lower bound on its round trip."""

from collections.abc import Callable

import torch
from torch import Tensor

from hotsplit.artifacts.machine_file import Gpu
from hotsplit.measure.timing.interleave import Probe, run_rounds, seconds_of

READ_BYTES = 1 << 30  # far above any second-level cache
COPY_BYTES = 128 << 20
NUM_NODES = 100
HIDDEN_STATE_VALUES = 8192


def measure_gpu(
    index: int, time_limit_s: float, on_probe: Callable[[float], None] = lambda count: None
) -> Gpu:
    """The figures of one device; `on_probe` is called after each timing."""
    device = torch.device("cuda", index)
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    with torch.cuda.device(device):
        found = run_rounds(_probes(device, free), time_limit_s, on_probe)
    torch.cuda.empty_cache()
    return Gpu(
        name=properties.name,
        source="measured",
        memory_bytes=total,
        free_bytes=free,
        bandwidth_gb_per_s=found["bandwidth"],
        host_to_device_gb_per_s=found["pinned"],
        host_to_device_pageable_gb_per_s=found["pageable"],
        copy_latency_s=found["copy"],
        launch_s=found["launch"],
        round_trip_s=found["round trip"],
    )


def _probes(device: torch.device, free_bytes: int) -> list[Probe]:
    many = torch.ones(min(READ_BYTES, free_bytes // 4) // 4, device=device)
    into = many[: min(COPY_BYTES // 4, len(many))]
    pageable = torch.ones(len(into))
    pinned = _pinned(len(into))
    one, one_host = torch.ones(1, device=device), _pinned(1)

    def copy_one() -> object:
        return one.copy_(one_host, non_blocking=True)

    copies, launches = _captured(copy_one, NUM_NODES), _captured(lambda: one.mul_(1.0), NUM_NODES)
    return [
        Probe(name="bandwidth", seconds=lambda: event_seconds(many.sum), num_bytes=many.nbytes),
        Probe(
            name="pinned",
            seconds=lambda: event_seconds(lambda: into.copy_(pinned, non_blocking=True)),
            num_bytes=into.nbytes,
        ),
        Probe(
            name="pageable",
            seconds=lambda: seconds_of(lambda: _waited(lambda: into.copy_(pageable))),
            num_bytes=into.nbytes,
        ),
        Probe(name="copy", seconds=lambda: event_seconds(copies.replay) / NUM_NODES),
        Probe(name="launch", seconds=lambda: event_seconds(launches.replay) / NUM_NODES),
        Probe(name="round trip", seconds=_round_trip(device)),
    ]


def _round_trip(device: torch.device) -> Callable[[], float]:
    """A function that times NUM_NODES round trips in sequence and returns the seconds of one."""
    x, x_host = torch.ones(HIDDEN_STATE_VALUES, device=device), _pinned(HIDDEN_STATE_VALUES)
    there = _captured(lambda: x_host.copy_(x, non_blocking=True), 1)
    back = _captured(lambda: x.copy_(x_host, non_blocking=True), 1)
    is_there = torch.cuda.Event()

    def run() -> None:
        for _ in range(NUM_NODES):
            there.replay()
            is_there.record()
            while not is_there.query():
                pass
            back.replay()

    return lambda: seconds_of(lambda: _waited(run)) / NUM_NODES


def _captured(run: Callable[[], object], count: int) -> torch.cuda.CUDAGraph:
    """A graph of `count` runs in sequence."""
    _waited(run)  # loads the kernels' code, which may fail inside a capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            run()
    _waited(graph.replay)  # the first launch uploads the graph
    return graph


def event_seconds(run: Callable[[], object]) -> float:
    """Seconds between two events around the work that is submitted to the current device."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def _waited(run: Callable[[], object]) -> None:
    run()
    torch.cuda.synchronize()


def _pinned(count: int) -> Tensor:
    return torch.ones(count).pin_memory()
