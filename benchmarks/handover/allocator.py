"""The section of gpu_handover.py about torch's memory: what torch reserves for an arena of passes
(runtime/device/device_memory.py), and what the stream of a graph holds beside it."""

import torch
from gpu_sections import SectionTable

MIB = 1 << 20
SEGMENT_BYTES, LEAST_BYTES = 2 * MIB, 10 * MIB
ARENAS = (LEAST_BYTES, 10 * MIB + 512, 23 * MIB, 150 * MIB + 256)


def alloc() -> list[SectionTable]:
    return [_arenas(), _segments()]


def _arenas() -> SectionTable:
    """What torch reserves for a tensor, under a limit that has no room for more."""
    total, rows = torch.cuda.mem_get_info()[1], []
    for size in ARENAS:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        wanted = -(-size // SEGMENT_BYTES) * SEGMENT_BYTES
        before = torch.cuda.memory_reserved()
        torch.cuda.set_per_process_memory_fraction(min(1.0, (before + wanted) / total))
        try:
            arena = torch.empty(size, dtype=torch.uint8, device="cuda")
            found = f"{torch.cuda.memory_reserved() - before:,}"
            del arena
        except torch.OutOfMemoryError:
            found = "out of memory"
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        rows.append([f"{size:,} bytes", f"{wanted:,}", found])
    return SectionTable(title="an arena of passes", columns=("", "wanted", "reserved"), rows=rows)


def _segments() -> SectionTable:
    graph, stream, x = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.zeros(16, device="cuda")
    with torch.cuda.graph(graph, stream=stream):
        x.mul_(1.0)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    rows = [
        [
            "the graph's" if found["stream"] == stream.cuda_stream else hex(found["stream"]),
            found["segment_type"],
            str(tuple(found.get("segment_pool_id", ()))),
            f"{found['total_size'] / MIB:.1f}",
            f"{found['allocated_size']:,}",
        ]
        for found in torch.cuda.memory_snapshot()
        if found["total_size"] <= 20 * MIB
    ]
    columns = ("stream", "pool", "of a graph", "MiB", "bytes in use")
    return SectionTable(title="small segments beside a captured graph", columns=columns, rows=rows)
