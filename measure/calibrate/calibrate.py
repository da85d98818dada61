"""Calibrates this machine: measures memory bandwidth, drives, copy bandwidth and latencies.

Each operation is timed in several rounds. A figure has the median, with which plans are priced, the
other quartiles, which show how much the rounds differ, and the best round, for limits.

`cpu_bandwidth` measures how fast the CPU reads memory, `cpu_costs` the costs on the CPU that plans
are priced with, with the threads that the runtime uses beside a GPU if there is one, `gpu` the
devices, `step_costs` what only whole steps over both show, `drive` direct reads."""

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hotsplit.artifacts.data_sheets import load_machine
from hotsplit.artifacts.machine_file import CpuCosts, Drive, Machine
from hotsplit.errors import HotsplitError
from hotsplit.files.outputs import check_output
from hotsplit.measure.calibrate.cpu_bandwidth import buffer_bytes, measure_cpu
from hotsplit.measure.calibrate.cpu_costs import measure_costs
from hotsplit.measure.calibrate.drive import measure_drive
from hotsplit.measure.calibrate.drive import report as drive_lines
from hotsplit.measure.calibrate.gpu import measure_gpu
from hotsplit.runtime.kernels.threads import use_default_threads
from hotsplit.system.drives import drive_of
from hotsplit.system.processors import load_now, processor_name, processors
from hotsplit.system.system_memory import memory_bytes

# Of each part, all GPUs together; the minimum number of rounds is run even if it takes longer.
COSTS_LIMIT_S, GPU_LIMIT_S = 8.0, 10.0
# Processes for each processor, and the share of doubtful figures, above which other programs spoil
# the figures. The load average falls only slowly after they have ended.
BUSY_LOAD, BUSY_SHARE = 0.5, 0.25

Say = Callable[[str], None]
OnProbe = Callable[[float], None]


@dataclass(frozen=True, kw_only=True)
class CalibrateConfig:
    output: Path
    # A machine file, or a card of data_sheets, whose GPUs to plan for if there is none here.
    gpu_from: Path | None = None
    # Files or folders whose drives are measured; by default the folder of `output`.
    drives: tuple[Path, ...] = ()
    force: bool = False


def calibrate(
    config: CalibrateConfig, say: Say = lambda line: None, on_probe: OnProbe = lambda count: None
) -> Machine:
    """Measures and writes `output`; `say` gets the results as lines, `on_probe` is called after
    each timing. If there is no GPU here, the figures of `gpu_from`'s GPUs are taken. Raises
    HotsplitError for an output that exists unless `force`, and for a `gpu_from` that has no GPU."""
    inputs = () if config.gpu_from is None else (config.gpu_from,)
    check_output(config.output, force=config.force, inputs=inputs)
    borrowed = None if config.gpu_from is None else load_machine(config.gpu_from)
    if borrowed is not None and not borrowed.gpus:
        raise HotsplitError(f"{config.gpu_from}: has no GPU; give a file of a machine with one")
    (total, free), load = memory_bytes(), load_now()
    drives = measure_drives(config.drives or (config.output.absolute().parent,), say, on_probe)
    kernels, sums = measure_cpu(on_probe)
    num_gpus = torch.cuda.device_count()
    use_default_threads(beside_gpu=num_gpus > 0 or borrowed is not None)
    costs = measure_costs(buffer_bytes() // 2, COSTS_LIMIT_S, on_probe)
    gpus = tuple(
        measure_gpu(i, GPU_LIMIT_S / num_gpus, costs, free, on_probe) for i in range(num_gpus)
    )
    if not gpus and borrowed is not None:
        source = f"measured on {borrowed.cpu_name}"  # not here
        gpus = tuple(
            replace(gpu, source=source) if gpu.source == "measured" else gpu
            for gpu in borrowed.gpus
        )
        say(f"no GPU here; figures of {gpus[0].name} ({gpus[0].source}) from {config.gpu_from}")
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
        drives=drives,
    )
    for line in report(machine, load):
        say(line)
    machine.save(config.output)
    return machine


def measure_drives(
    paths: Sequence[Path], say: Say = lambda line: None, on_probe: OnProbe = lambda count: None
) -> tuple[Drive, ...]:
    """The drives of these files and folders, each measured once."""
    found: dict[str, Drive] = {}
    for path in paths:
        if path.exists() and drive_of(path).identity in found:
            continue
        drive = measure_drive(path, say, on_probe)
        if drive is not None:
            found[drive.identity] = drive
    return tuple(found.values())


def busy_words(machine: Machine, load: float | None) -> str:
    """What shows that other programs were running when a machine was measured, in words; "" if
    nothing does. `load`: the load average before."""
    figures = machine.figures.values()
    count = sum(figure.is_doubtful for figure in figures)
    is_torn = count > BUSY_SHARE * len(figures)
    torn = [f"{count} of {len(figures)} figures differ between rounds"] * is_torn
    return " and ".join([*_load_words(load), *torn])


def _load_words(load: float | None) -> list[str]:
    count = processors().in_machine
    if load is None or load <= BUSY_LOAD * count:
        return []
    return [f"{load:.1f} processes on {count} processors before the start"]


def report(machine: Machine, load: float | None = None) -> list[str]:
    """The measured figures as lines, with a note on doubtful ones. `load`: before the start."""
    lines = [
        f"CPU, {n} thread{'s' if n > 1 else ''}: {figure.best:.1f} GB/s (median"
        f" {figure.median:.1f})"
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
                f" {1e6 * gpu.copy_latency_s.median:.1f} us, a kernel"
                f" {1e6 * gpu.kernel_s.median:.1f} us or more, CPU and back"
                f" {1e6 * gpu.hand_over_s.median:.1f} us, a run of layers there"
                f" {1e6 * gpu.cpu_run_s.median:.1f} us, a token {1e6 * gpu.token_s.median:.0f} us"
            )
    lines += [line for drive in machine.drives for line in drive_lines(drive)]
    doubtful = {name: f for name, f in machine.figures.items() if f.is_doubtful and f.quartiles}
    seen = _load_words(load)
    if doubtful:
        worst = max(doubtful, key=lambda name: doubtful[name].spread)
        figure = doubtful[worst]
        low, _, high = figure.quartiles or (0.0, 0.0, 0.0)
        seen.insert(
            0,
            f"{len(doubtful)} of {len(machine.figures)} figures differ between rounds, most of all"
            f" {worst} ({figure.best:.3g} at best, half of {figure.rounds} rounds between {low:.3g}"
            f" and {high:.3g})",
        )
    if seen:
        more = "" if len(doubtful) <= 1 else "; hotsplit inspect lists all"
        lines.append(
            f"note: {'; '.join(seen)}: another process may be using the memory or the processors;"
            f" calibrate again when the machine is idle{more}"
        )
    return lines


def _costs_line(costs: CpuCosts) -> str:
    rates = ", ".join(
        f"{kind} {figure.median:.1f} ({costs.chosen_rows_gb_per_s[kind].median:.1f})"
        for kind, figure in costs.all_rows_gb_per_s.items()
    )
    return (
        f"CPU with all threads, all rows (chosen ones) in GB/s: {rates}; cache"
        f" {costs.kv_gb_per_s.median:.1f}; a layer {1e6 * costs.layer_s['exact'].median:.0f} us,"
        f" with predictor {1e6 * costs.layer_s['predicted'].median:.0f} us, a token"
        f" {1e6 * costs.token_s.median:.0f} us"
    )
