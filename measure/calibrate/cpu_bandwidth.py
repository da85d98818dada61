"""How fast the CPU reads memory, for several numbers of threads: with the runtime's own row
products over an f16 matrix, and with torch's sum. Both read one buffer (`buffer_bytes`)."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from hotsplit.artifacts.machine_file import Figure
from hotsplit.measure.timing.interleave import Probe, run_rounds, seconds_of
from hotsplit.runtime.kernels.cpu import library
from hotsplit.system.processors import processors
from hotsplit.system.system_memory import free_memory_bytes

BUFFER_BYTES = 256 << 20  # or twice the third-level caches, if they are known and larger
MAX_BUFFER_BYTES = 1 << 30
ROW_VALUES = 4096
CPU_LIMIT_S = 8.0  # the minimum number of rounds is run even if it takes longer


def measure_cpu(
    on_probe: Callable[[float], None] = lambda count: None,
) -> tuple[dict[int, Figure], dict[int, Figure]]:
    """GB/s of our row products, on an f16 matrix, and of torch's sum, by number of threads."""
    counts = thread_counts(processors().usable)
    before, torch_before = library.num_threads(), torch.get_num_threads()
    values = torch.ones(buffer_bytes() // (4 * ROW_VALUES) * ROW_VALUES)
    matrix = values.view(torch.float16).view(-1, ROW_VALUES)  # halves of ones: 1.875 and 0
    x_D = torch.ones(ROW_VALUES)

    def sum_seconds(threads: int) -> float:
        torch.set_num_threads(threads)
        values[: len(values) // 64].sum()  # wakes the threads
        return seconds_of(values.sum)

    def product_seconds(threads: int) -> float:
        library.set_threads(threads)
        library.dot_rows(matrix[: len(matrix) // 64], "f16", x_D)  # starts the threads
        return seconds_of(lambda: library.dot_rows(matrix, "f16", x_D))

    probes = [
        Probe(name=f"{name}, {n}", seconds=partial(seconds, n), num_bytes=values.nbytes)
        for name, seconds in (("sum", sum_seconds), ("product", product_seconds))
        for n in counts
    ]
    try:
        found = run_rounds(probes, CPU_LIMIT_S, on_probe)
    finally:
        torch.set_num_threads(torch_before)
        library.set_threads(before)
    products, sums = ({n: found[f"{name}, {n}"] for n in counts} for name in ("product", "sum"))
    return products, sums


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
