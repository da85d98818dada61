"""Calibrates this machine: measures memory bandwidth, copy bandwidth and latencies.

Each operation is timed in several rounds. A figure has the best round, the one that other load
disturbed least, and the quartiles, which show how much the rounds differ.

CPU bandwidth is measured for several numbers of threads, with the runtime's own row products over
an f16 matrix and with torch's sum; both read one buffer (`buffer_bytes`). The CPU costs that plans
are priced with are measured in `cpu`, with the threads that the runtime uses beside a GPU if there
is one."""

import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hotsplit.artifacts.machine_file import CpuCosts, Figure, Gpu, Machine
from hotsplit.errors import HotsplitError
from hotsplit.files.outputs import check_output
from hotsplit.measure.calibrate.cpu import measure_costs
from hotsplit.measure.calibrate.gpu import measure_gpu
from hotsplit.measure.timing.interleave import Probe, run_rounds, seconds_of
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.kernels.threads import use_default_threads
from hotsplit.system.processors import processor_name, processors
from hotsplit.system.system_memory import free_memory_bytes, memory_bytes

BUFFER_BYTES = 256 << 20  # or twice the third-level caches, if they are known and larger
MAX_BUFFER_BYTES = 1 << 30
ROW_VALUES = 4096
CPU_LIMIT_S, COSTS_LIMIT_S, GPU_LIMIT_S = (
    8.0,
    8.0,
    10.0,
)  # of each part, all GPUs together; the minimum number of rounds is run even if it takes longer

Say = Callable[[str], None]
OnProbe = Callable[[float], None]


@dataclass(frozen=True, kw_only=True)
class CalibrateConfig:
    output: Path
    gpu_from: Path | None = None  # a machine file whose GPUs to plan for if there is none here
    force: bool = False
    is_verbose: bool = False  # a note for each doubtful figure, besides the summary


def calibrate(
    config: CalibrateConfig, say: Say = lambda line: None, on_probe: OnProbe = lambda count: None
) -> Machine:
    """Measures and writes `output`; `say` gets the results as lines, `on_probe` is called after
    each timing. If there is no GPU here, the figures of `gpu_from`'s GPUs are taken.

    Raises HotsplitError for an output that exists unless `force`, and for a `gpu_from` that has
    no GPU."""
    inputs = () if config.gpu_from is None else (config.gpu_from,)
    check_output(config.output, force=config.force, inputs=inputs)
    borrowed = None if config.gpu_from is None else Machine.load(config.gpu_from)
    if borrowed is not None and not borrowed.gpus:
        raise HotsplitError(
            f"{config.gpu_from}: has no GPU; give the file of a machine that has one"
        )
    total, free = memory_bytes()
    num_gpus = torch.cuda.device_count()
    gpus = tuple(measure_gpu(i, GPU_LIMIT_S / num_gpus, on_probe) for i in range(num_gpus))
    if not gpus and borrowed is not None:
        gpus = _of_another_machine(borrowed)
        say(f"no GPU here; figures of {gpus[0].name} ({gpus[0].source}) from {config.gpu_from}")
    kernels, sums = measure_cpu(say, on_probe)
    use_default_threads(beside_gpu=bool(gpus))
    costs = measure_costs(buffer_bytes() // 2, COSTS_LIMIT_S, on_probe)
    machine = Machine(
        cpu_name=processor_name(),
        num_threads=processors().usable,
        memory_bytes=total,
        free_bytes=free,
        cpu_bandwidth_gb_per_s=kernels,
        cpu_sum_gb_per_s=sums,
        cpu_costs=costs,
        gpus=gpus,
        versions={"python": platform.python_version(), "torch": torch.__version__},
    )
    for line in report(machine, is_verbose=config.is_verbose):
        say(line)
    machine.save(config.output)
    return machine


def _of_another_machine(borrowed: Machine) -> tuple[Gpu, ...]:
    """The other machine's GPU figures, marked as not measured here."""
    return tuple(
        replace(gpu, source=f"measured on {borrowed.cpu_name}") if gpu.source == "measured" else gpu
        for gpu in borrowed.gpus
    )


def report(machine: Machine, *, is_verbose: bool = False) -> list[str]:
    """The measured figures as lines for the user, with a note on doubtful ones."""
    lines = [
        f"CPU, {n} thread{'s' if n > 1 else ''}: {figure.best:.1f} GB/s (median {_median(figure):.1f})"
        + (f", torch's sum {sums.best:.1f}" if (sums := machine.cpu_sum_gb_per_s.get(n)) else "")
        for n, figure in machine.cpu_bandwidth_gb_per_s.items()
    ]
    lines += [] if machine.cpu_costs is None else [_costs_line(machine.cpu_costs)]
    for gpu in machine.gpus:
        if gpu.source == "measured":
            lines.append(
                f"{gpu.name}: {gpu.bandwidth_gb_per_s.best:.0f} GB/s, copies to it"
                f" {gpu.host_to_device_gb_per_s.best:.1f} GB/s (pageable"
                f" {gpu.host_to_device_pageable_gb_per_s.best:.1f}), a copy"
                f" {1e6 * gpu.copy_latency_s.best:.1f} us, a kernel"
                f" {1e6 * gpu.launch_s.best:.1f} us, CPU and back"
                f" {1e6 * gpu.round_trip_s.best:.1f} us"
            )
    return lines + _doubts(machine, is_verbose=is_verbose)


def _doubts(machine: Machine, *, is_verbose: bool) -> list[str]:
    """One line about all doubtful figures (see Figure.is_doubtful), if there are any; `is_verbose`
    adds a line for each."""
    doubtful = {name: f for name, f in machine.figures.items() if f.is_doubtful and f.quartiles}
    if not doubtful:
        return []
    ranges = {name: _range(figure) for name, figure in doubtful.items()}
    worst = max(doubtful, key=lambda name: doubtful[name].spread)
    lines = [f"note: {name}: {told}" for name, told in ranges.items()] if is_verbose else []
    more = "" if is_verbose or len(doubtful) == 1 else "; -v lists all"
    return [
        *lines,
        f"note: {len(doubtful)} of {len(machine.figures)} figures differ between rounds, most of all"
        f" {worst} ({ranges[worst]}): another process may be using the memory or the processors;"
        f" calibrate again when the machine is idle{more}",
    ]


def _range(figure: Figure) -> str:
    assert figure.quartiles is not None
    low, _, high = figure.quartiles
    return f"{figure.best:.3g} at best, half of {figure.rounds} rounds between {low:.3g} and {high:.3g}"


def _costs_line(costs: CpuCosts) -> str:
    rates = ", ".join(
        f"{kind} {figure.best:.1f} ({costs.chosen_rows_gb_per_s[kind].best:.1f})"
        for kind, figure in costs.all_rows_gb_per_s.items()
    )
    return (
        f"CPU with all threads, all rows (chosen ones) in GB/s: {rates}; cache {costs.kv_gb_per_s.best:.1f};"
        f" a layer {1e6 * costs.layer_s['exact'].best:.0f} us, with predictor"
        f" {1e6 * costs.layer_s['predicted'].best:.0f} us, a token"
        f" {1e6 * costs.token_s.best:.0f} us"
    )


def _median(figure: Figure) -> float:
    return figure.best if figure.quartiles is None else figure.quartiles[1]


def measure_cpu(
    say: Say = lambda line: None, on_probe: OnProbe = lambda count: None
) -> tuple[dict[int, Figure], dict[int, Figure]]:
    """GB/s read by our row products and by torch's sum, for each number of threads.

    Without the C++ kernels, both figures are those of torch's sum."""
    counts, torch_before = thread_counts(processors().usable), torch.get_num_threads()
    values = torch.ones(buffer_bytes() // (4 * ROW_VALUES) * ROW_VALUES)
    probes = {("sum", n): _sum_probe(values, n) for n in counts}
    has_kernels = library.is_available()
    if has_kernels:
        kernel_before = library.num_threads()
        probes |= {("kernel", n): _kernel_probe(values, n) for n in counts}
    else:
        say("note: the C++ kernels are not built; CPU bandwidth is that of torch's sum")
    try:
        found = run_rounds(list(probes.values()), CPU_LIMIT_S, on_probe)
    finally:
        torch.set_num_threads(torch_before)
        if has_kernels:
            library.set_threads(kernel_before)
    sums = {n: found[probes["sum", n].name] for n in counts}
    kernels = {n: found[probes["kernel", n].name] for n in counts} if has_kernels else sums
    return kernels, sums


def _sum_probe(values: torch.Tensor, threads: int) -> Probe:
    def seconds() -> float:
        torch.set_num_threads(threads)
        values[: len(values) // 64].sum()  # wakes the threads
        return seconds_of(values.sum)

    return Probe(name=f"torch's sum, {threads} threads", seconds=seconds, num_bytes=values.nbytes)


def _kernel_probe(values: torch.Tensor, threads: int) -> Probe:
    """The same bytes read as an f16 matrix that is multiplied by a vector."""
    matrix = values.view(torch.float16).view(-1, ROW_VALUES)  # halves of ones: 1.875 and 0
    x_D = torch.ones(ROW_VALUES)

    def seconds() -> float:
        library.set_threads(threads)
        library.dot_rows(matrix[: len(matrix) // 64], "f16", x_D)  # starts the threads
        return seconds_of(lambda: library.dot_rows(matrix, "f16", x_D))

    return Probe(name=f"row products, {threads} threads", seconds=seconds, num_bytes=values.nbytes)


def thread_counts(most: int) -> list[int]:
    """Every count up to `most`, or with more than eight the powers of two, half and all."""
    if most <= 8:
        return list(range(1, most + 1))
    powers = {1 << bit for bit in range(most.bit_length()) if 1 << bit <= most}
    return sorted(powers | {most // 2, most})


def buffer_bytes() -> int:
    """Twice the third-level caches, but at least BUFFER_BYTES and at most MAX_BUFFER_BYTES. No more
    than an eighth of the free memory unless that is less than 8 MiB: then 8 MiB."""
    wanted = min(max(BUFFER_BYTES, 2 * last_cache_bytes()), MAX_BUFFER_BYTES)
    return max(8 << 20, min(wanted, free_memory_bytes() // 8))


def last_cache_bytes() -> int:
    """Bytes of all third-level caches; 0 if the system does not report them."""
    sizes: dict[str, int] = {}
    for folder in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index3"):
        try:
            shared = (folder / "shared_cpu_list").read_text()
            sizes[shared] = 1024 * int((folder / "size").read_text().strip().removesuffix("K"))
        except (OSError, ValueError):
            return 0
    return sum(sizes.values())
