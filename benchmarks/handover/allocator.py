"""The section of gpu_handover.py about torch's memory: which pools tensors come from under a limit,
what a graph's stream takes, cuBLAS's workspaces by thread, and flash attention's peak."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from gpu_sections import Table

MIB = 1 << 20
ASIDE, MORE = 48 * MIB, 9 * MIB  # set aside, and allowed beyond it
WORKSPACE_BYTES = 4_325_376  # of cuBLAS with CONFIG
CONFIG = ":4096:1:16:8"
VARIABLE = "CUBLAS_WORKSPACE_CONFIG"


def alloc() -> list[Table]:
    return [_pools(), _segments(), _workspaces(), _peaks()]


def _pools() -> Table:
    """How many tensors fit under a limit, of sizes on both sides of torch's small pool."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total, rows = torch.cuda.mem_get_info()[1], []
    for size in (MIB, MIB + 512, 4 * MIB):
        before = torch.cuda.memory_reserved()
        torch.cuda.set_per_process_memory_fraction(min(1.0, (before + ASIDE + MORE) / total))
        held = []
        try:
            _bytes(ASIDE)  # then free in the cache
            held.append(_bytes(WORKSPACE_BYTES))
            while len(held) <= 200:
                held.append(_bytes(size))
        except torch.OutOfMemoryError:
            pass
        count, reserved = len(held) - 1, torch.cuda.memory_reserved() - before
        rows.append([f"tensors of {size:,} bytes", str(count), _mib(count * size), _mib(reserved)])
        held.clear()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0)
    title = f"{ASIDE // MIB} MiB set aside and {MORE // MIB} MiB more allowed"
    return Table(title=title, columns=("", "fit", "MiB in all", "MiB reserved"), rows=rows)


def _segments() -> Table:
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
            _mib(found["total_size"]),
            f"{found['allocated_size']:,}",
        ]
        for found in torch.cuda.memory_snapshot()
        if found["total_size"] <= 20 * MIB
    ]
    columns = ("stream", "pool", "of a graph", "MiB", "bytes in use")
    return Table(title="small segments beside a captured graph", columns=columns, rows=rows)


def _workspaces() -> Table:
    clear: Callable[[], None] = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)

    def product() -> None:
        square = torch.zeros(256, 256, dtype=torch.float16, device="cuda")
        square @ square
        torch.cuda.synchronize()

    def in_thread() -> None:
        thread = threading.Thread(target=product)
        thread.start()
        thread.join()

    with _variable(VARIABLE):
        clear()
        rows = [
            ["a product, no variable", _grown(product)],
            ["one in another thread", _grown(in_thread)],
        ]
        clear()
        os.environ[VARIABLE] = CONFIG
        rows += [
            [f"cleared, with {CONFIG}", _grown(product)],
            ["one in another thread", _grown(in_thread)],
        ]
        clear()  # torch would pass the variable's size with a workspace of another size
    columns = ("", "MiB allocated")
    return Table(title=f"cuBLAS's workspaces ({VARIABLE})", columns=columns, rows=rows)


def _peaks() -> Table:
    rows, half = [], {"dtype": torch.float16, "device": "cuda"}
    x, square = torch.zeros(64, 4096, **half), torch.zeros(4096, 4096, **half)  # type: ignore[call-overload]
    us = _peak(lambda: torch.mm(x, square, out_dtype=torch.float32))  # type: ignore[call-overload]
    rows.append(["mm(out_dtype=f32), [64, 4096]", us, "1.0"])
    for tokens in (64, 256, 512):
        q = torch.zeros(1, 32, tokens, 128, **half)  # type: ignore[call-overload]
        k = torch.zeros(1, 32, 1024, 128, **half)  # type: ignore[call-overload]
        attend = torch.ops.aten._scaled_dot_product_flash_attention
        peak = _peak(lambda q=q, k=k, f=attend: f(q, k, k, is_causal=True, scale=1.0))
        rows.append([f"flash attention, {tokens} tokens, 32 heads", peak, _mib(2 * q.numel())])
    return Table(title="peaks of a call", columns=("", "MiB", "of which result"), rows=rows)


@contextmanager
def _variable(name: str) -> Iterator[None]:
    """Without the variable at first, and as it was afterwards."""
    before = os.environ.pop(name, None)
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


def _bytes(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, device="cuda")


def _grown(run: Callable[[], None]) -> str:
    before = torch.cuda.memory_allocated()
    run()
    return _mib(torch.cuda.memory_allocated() - before)


def _peak(run: Callable[[], object]) -> str:
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return _mib(torch.cuda.max_memory_allocated() - before)


def _mib(count: int) -> str:
    return f"{count / MIB:.1f}"
