"""Measures what this machine can do: how fast memory is read, copied and waited for.

Each figure is the best of several rounds, since what a plan needs is what the machine can do
undisturbed. What this does not know: models.

The CPU figure is that of a plain sum over f32 values, which every thread reads its share of."""

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from sparkinfer.errors import SparkinferError
from sparkinfer.files import check_output
from sparkinfer.machine_file import Gpu, Machine

BUFFER_BYTES = 256 << 20
ROUNDS = 7


@dataclass(frozen=True, kw_only=True)
class CalibrateConfig:
    output: Path
    gpu_from: Path | None = None  # a machine file whose GPU is to be planned for
    force: bool = False


def calibrate(config: CalibrateConfig, say: Callable[[str], None] = lambda line: None) -> Machine:
    """Measures and writes machine.json; `say` hears what is measured.

    Where there is no GPU, and only then, `gpu_from` gives the figures of another machine's."""
    inputs = () if config.gpu_from is None else (config.gpu_from,)
    check_output(config.output, force=config.force, inputs=inputs)
    borrowed = None if config.gpu_from is None else Machine.load(config.gpu_from)
    if borrowed is not None and not borrowed.gpus:
        raise SparkinferError(
            f"{config.gpu_from}: has no GPU either; give the file of one that has"
        )
    total, free = _memory()
    gpus = tuple(measure_gpu(index, say) for index in range(torch.cuda.device_count()))
    if not gpus and borrowed is not None:
        gpus = tuple(
            gpu
            if gpu.source != "measured"
            else replace(gpu, source=f"measured on {borrowed.cpu_name}")
            for gpu in borrowed.gpus
        )
        say(f"no GPU here; figures of {gpus[0].name} ({gpus[0].source}) from {config.gpu_from}")
    machine = Machine(
        cpu_name=_cpu_name(),
        num_threads=torch.get_num_threads(),
        memory_bytes=total,
        free_bytes=free,
        cpu_bandwidth_gb_per_s=measure_cpu(say),
        gpus=gpus,
        versions={"python": platform.python_version(), "torch": torch.__version__},
    )
    machine.save(config.output)
    return machine


def measure_cpu(say: Callable[[str], None]) -> dict[int, float]:
    """GB/s read by one thread, by half of them, and by all."""
    values = torch.ones(BUFFER_BYTES // 4)
    before = torch.get_num_threads()
    result = {}
    try:
        for threads in sorted({1, max(1, before // 2), before}):
            torch.set_num_threads(threads)
            result[threads] = BUFFER_BYTES / best_seconds(lambda: values.sum()) / 1e9
            say(f"CPU, {threads} threads: {result[threads]:.1f} GB/s")
    finally:
        torch.set_num_threads(before)
    return result


def best_seconds(run: Callable[[], object], rounds: int = ROUNDS) -> float:
    """The shortest of several rounds, after one that is not counted."""
    run()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


def measure_gpu(index: int, say: Callable[[str], None]) -> Gpu:
    """One CUDA device; every timed call waits for the device."""
    device = torch.device("cuda", index)
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    size = min(BUFFER_BYTES, free // 4)
    on_gpu = torch.ones(size // 4, device=device)
    pageable = torch.ones(size // 4)
    pinned = pageable.pin_memory()
    small, small_host = on_gpu[:1], pinned[:1]

    def timed(run: Callable[[], object]) -> float:
        def wait() -> None:
            run()
            torch.cuda.synchronize(device)

        return best_seconds(wait)

    idle = timed(lambda: None)
    many = 200
    launch = timed(lambda: [small.add_(0) for _ in range(many)]) / many
    gpu = Gpu(
        name=properties.name,
        source="measured",
        memory_bytes=total,
        free_bytes=free,
        bandwidth_gb_per_s=size / (timed(lambda: on_gpu.sum()) - idle) / 1e9,
        host_to_device_gb_per_s=size / timed(lambda: on_gpu.copy_(pinned, non_blocking=True)) / 1e9,
        host_to_device_pageable_gb_per_s=size / timed(lambda: on_gpu.copy_(pageable)) / 1e9,
        copy_latency_s=timed(lambda: small.copy_(small_host, non_blocking=True)),
        launch_s=launch,
        round_trip_s=timed(lambda: small.copy_(small_host.copy_(small))),
    )
    say(f"GPU {index}, {gpu.name}: {gpu.bandwidth_gb_per_s:.0f} GB/s")
    return gpu


def free_memory_bytes() -> int:
    return _memory()[1]


def _memory() -> tuple[int, int]:
    """(all, available) bytes of main memory."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return total, int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return total, os.sysconf("SC_AVPHYS_PAGES") * page


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
