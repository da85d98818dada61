"""Machines that nobody measured here: common cards by their data sheets, beside a typical host.

    rtx-4060-8gb                the card, beside the host DEFAULT_HOST
    rtx-4060-8gb+ddr5-5600      beside another one, of two modules
    rtx-4060-8gb+ddr5-5600x4    of four, which reach far less than two; x1: of one

Bandwidths and memories are those of the makers' data sheets (NVIDIA's product pages, JEDEC's rates
of a module of 8 bytes), of which programs reach GPU_SHARE or one of CPU_SHARES: fitted to published
measurements of llama.cpp (benchmarks/public_cells.py). How fast memory is copied follows from the
slot. Everything else is an assumption, the same for all cards: each machine says so in `source`,
and `hotsplit calibrate` replaces it by what it measures."""

import re
from dataclasses import replace
from pathlib import Path

from hotsplit.artifacts.machine_file import CpuCosts, Drive, DriveReads, Figure, Gpu, Machine
from hotsplit.errors import HotsplitError
from hotsplit.model.weight_types import NAMES

GIB = 1 << 30
SOURCE = "data sheet, not measured"
# Shares of the bandwidth on the data sheet that are usual for reading large matrices: of a card, of
# main memory by its modules (of one, half of the bandwidth is there to be reached), and of that for
# chosen rows.
GPU_SHARE, CHOSEN_SHARE = 0.78, 0.5
CPU_SHARES = {1: 0.87, 2: 0.62, 4: 0.3}
# What a desktop and the driver leave of a card's memory, and of main memory.
FREE_SHARE = 0.94
# GB/s from pinned memory by generation and lanes of the slot, and from other memory.
LINKS = {"3x16": 12.0, "4x4": 6.5, "4x8": 13.0, "4x16": 25.0, "5x8": 25.0, "5x16": 50.0}
PAGEABLE = 6.0
# Seconds of a step by flags (docs/hybrid.md), none of them measured on these cards: kernels take
# what they took on the one card that ran them, and a hand-over what it took there by a host
# function (docs/gpu.md) and takes in a fork of llama.cpp that divides a layer's experts
# (docs/plan.md). FAST_HAND_OVER_S is what flags should take.
COPY_S, LAUNCH_S, KERNEL_S, GPU_TOKEN_S = 5e-6, 3.5e-6, 3.5e-6, 1e-4
HAND_OVER_S, FAST_HAND_OVER_S = 1.5e-4, 1e-5
CPU_LAYER_S, CPU_TOKEN_S, LOGIT_S = 3e-5, 5e-5, 5e-10
THREADS = 8
# An NVMe drive of four lanes of PCIe 4.0 by its data sheet (Samsung 980 PRO of 1 TB: 7,000 MB/s in
# sequence), of which direct reads of an expert's matrices, some at a time, reach DRIVE_SHARE:
# engines that read experts report 85 to 93 % at best, most of them far less.
DRIVE_GB_PER_S, DRIVE_SHARE = 7.0, 0.8
DRIVE_READ_BYTES, DRIVE_DEPTH, DRIVE_CPU_S_PER_GB = 1 << 20, 4, 0.05

# Name: (GiB of memory, GB/s, link, 1e12 operations a second of tensor cores in f16, sums in f32,
# without sparsity). A laptop's card is named as one; its power decides how much of both it has.
CARDS: dict[str, tuple[int, float, str, float]] = {
    "rtx-2060-6gb": (6, 336.0, "3x16", 25.8),
    "rtx-2060-super-8gb": (8, 448.0, "3x16", 28.7),
    "rtx-2070-8gb": (8, 448.0, "3x16", 29.9),
    "rtx-2070-super-8gb": (8, 448.0, "3x16", 36.3),
    "rtx-2080-8gb": (8, 448.0, "3x16", 40.3),
    "rtx-2080-ti-11gb": (11, 616.0, "3x16", 53.8),
    "rtx-3050-8gb": (8, 224.0, "4x8", 18.2),
    "rtx-3060-12gb": (12, 360.0, "4x16", 25.5),
    "rtx-3060-laptop-6gb": (6, 336.0, "4x8", 21.3),
    "rtx-3060-ti-8gb": (8, 448.0, "4x16", 32.4),
    "rtx-3070-8gb": (8, 448.0, "4x16", 40.6),
    "rtx-3070-ti-8gb": (8, 608.0, "4x16", 43.5),
    "rtx-3080-10gb": (10, 760.0, "4x16", 59.5),
    "rtx-3090-24gb": (24, 936.0, "4x16", 71.0),
    "rtx-4050-laptop-6gb": (6, 192.0, "4x8", 18.0),
    "rtx-4060-8gb": (8, 272.0, "4x8", 30.2),
    "rtx-4060-laptop-8gb": (8, 256.0, "4x8", 23.2),
    "rtx-4060-ti-8gb": (8, 288.0, "4x8", 44.1),
    "rtx-4060-ti-16gb": (16, 288.0, "4x8", 44.1),
    "rtx-4070-12gb": (12, 504.0, "4x16", 58.3),
    "rtx-4070-laptop-8gb": (8, 256.0, "4x8", 31.2),
    "rtx-4070-ti-super-16gb": (16, 672.0, "4x16", 88.2),
    "rtx-4080-16gb": (16, 717.0, "4x16", 97.5),
    "rtx-4080-laptop-12gb": (12, 432.0, "4x16", 49.5),
    "rtx-4090-24gb": (24, 1008.0, "4x16", 165.2),
    "rtx-4090-laptop-16gb": (16, 576.0, "4x16", 65.9),
    "rtx-5060-8gb": (8, 448.0, "5x8", 38.4),
    "rtx-5060-ti-16gb": (16, 448.0, "5x8", 47.4),
    "rtx-5070-12gb": (12, 672.0, "5x16", 61.7),
    "rtx-5070-ti-16gb": (16, 896.0, "5x16", 87.9),
    "rtx-5080-16gb": (16, 960.0, "5x16", 112.6),
    "rtx-5090-32gb": (32, 1792.0, "5x16", 209.5),
    "t4-16gb": (16, 320.0, "3x16", 32.5),
    "l4-24gb": (24, 300.0, "4x16", 60.5),
    "a10-24gb": (24, 600.0, "4x16", 62.5),
}

# Main memory beside a card: a kind, its transfers a second in millions, and perhaps its modules.
DEFAULT_HOST = "ddr4-3200"
_HOST = re.compile(r"ddr[45]-(?P<rate>\d{4})(x(?P<modules>[124]))?")
MEMORIES_GIB = (32, 64)  # usual sizes of it; the first is assumed unless a caller asks for another
_NAME = re.compile(r"(?P<card>[a-z0-9-]+?)(\+(?P<host>[a-z0-9-]+))?", re.IGNORECASE)


def is_named(given: Path) -> bool:
    """True if no such file exists and the text has the form of a name in this module."""
    return not given.exists() and _NAME.fullmatch(str(given)) is not None


def load_machine(given: Path) -> Machine:
    """The machine file at a path, or a machine of this module by its name. Raises HotsplitError
    like Machine.load, and for an unknown name."""
    if not is_named(given):
        return Machine.load(given)
    found = _NAME.fullmatch(str(given).lower())
    assert found is not None
    card, host = found["card"], found["host"] or DEFAULT_HOST
    if card not in CARDS or not _HOST.fullmatch(host):
        raise HotsplitError(
            f"{given}: no such machine file, and no card by data sheet: known are"
            f" {', '.join(CARDS)}; beside ddr4-RATE or ddr5-RATE, e.g. rtx-4060-8gb+ddr5-5600 or,"
            " with four modules, +ddr5-5600x4; hotsplit calibrate measures a machine"
        )
    return machine_of(card, host)


def has_assumed_memory(machine: Machine) -> bool:
    """True if the machine is one of this module, whose main memory is a guess."""
    return SOURCE in machine.cpu_name


def with_memory(machine: Machine, gib: int) -> Machine:
    """The machine with another assumed size of main memory."""
    return replace(machine, memory_bytes=gib * GIB, free_bytes=int(FREE_SHARE * gib * GIB))


def host_rate(host: str) -> float:
    """GB/s that programs reach of main memory by its name, two modules if it says none."""
    found = _HOST.fullmatch(host)
    assert found is not None
    modules = int(found["modules"] or 2)
    return CPU_SHARES[modules] * int(found["rate"]) * 8e-3 * min(modules, 2)


def tensor_tflops(card: str) -> float | None:
    """1e12 operations a second of a card of CARDS; None of any other."""
    return CARDS[card][3] if card in CARDS else None


def machine_of(card: str, host: str = DEFAULT_HOST) -> Machine:
    """A card of CARDS beside main memory by its name."""
    rate = host_rate(host)
    chosen = CHOSEN_SHARE * rate
    costs = CpuCosts(
        all_rows_gb_per_s=dict.fromkeys(NAMES, Figure(best=rate)),
        chosen_rows_gb_per_s=dict.fromkeys(NAMES, Figure(best=chosen)),
        kv_gb_per_s=Figure(best=rate),
        layer_s=dict.fromkeys(("exact", "predicted"), Figure(best=CPU_LAYER_S)),
        token_s=Figure(best=CPU_TOKEN_S),
        logit_s=Figure(best=LOGIT_S),
    )
    memory = MEMORIES_GIB[0] * GIB
    return Machine(
        cpu_name=f"a processor with {host.upper()} ({SOURCE})",
        num_threads=THREADS,
        memory_bytes=memory,
        free_bytes=int(FREE_SHARE * memory),
        cpu_bandwidth_gb_per_s={THREADS: Figure(best=rate)},
        cpu_sum_gb_per_s={},
        cpu_costs=costs,
        gpus=(_gpu(card),),
        versions={},
        drives=(_drive(),),
    )


def _drive() -> Drive:
    reads = DriveReads(
        size_bytes=DRIVE_READ_BYTES,
        depth=DRIVE_DEPTH,
        is_random=True,
        gb_per_s=Figure(best=DRIVE_SHARE * DRIVE_GB_PER_S),
        cpu_s_per_gb=DRIVE_CPU_S_PER_GB,
    )
    return Drive(
        name="an NVMe drive of PCIe 4.0",
        identity="data-sheet",
        kind="solid state",
        source=SOURCE,
        reads=(reads,),
    )


def _gpu(card: str) -> Gpu:
    gib, gb_per_s, link, _ = CARDS[card]
    return Gpu(
        name=card,
        source=SOURCE,
        memory_bytes=gib * GIB,
        free_bytes=int(FREE_SHARE * gib * GIB),
        bandwidth_gb_per_s=Figure(best=GPU_SHARE * gb_per_s),
        host_to_device_gb_per_s=Figure(best=LINKS[link]),
        host_to_device_pageable_gb_per_s=Figure(best=PAGEABLE),
        chosen_rows_gb_per_s=Figure(best=GPU_SHARE * CHOSEN_SHARE * gb_per_s),
        copy_latency_s=Figure(best=COPY_S),
        launch_s=Figure(best=LAUNCH_S),
        kernel_s=Figure(best=KERNEL_S),
        token_s=Figure(best=GPU_TOKEN_S),
        hand_over_s=Figure(best=HAND_OVER_S),
        cpu_run_s=Figure(best=HAND_OVER_S),
    )
