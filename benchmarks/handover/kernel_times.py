"""The section of gpu_handover.py about small dependent kernels: what one costs in a graph, with and
without programmatic dependent launch (PDL)."""

import time
from collections.abc import Callable
from statistics import median

import torch
from gpu_sections import SectionTable
from handover.handover_gpu import HandoverGpu

WIDTH, BLOCK, ROWS = 576, 1024, 4  # SmolLM2's vectors
COUNT, REPLAYS = 100, 12

Launch = Callable[[int], object]


def kernels(gpu: HandoverGpu) -> list[SectionTable]:
    """Graphs of COUNT kernels, each of which needs the one before."""
    x, y, w = gpu.zeros(BLOCK), gpu.zeros(BLOCK), torch.ones(BLOCK, device="cuda")
    matrix = torch.randn(WIDTH, WIDTH, device="cuda", dtype=torch.float16)
    one = torch.ones(1, device="cuda")
    sizes = {"D": WIDTH, "BLOCK": BLOCK, "num_warps": 4}

    def norm(i: int, **options: object) -> None:
        vectors = (x, w, y) if i % 2 else (y, w, x)
        gpu.launch("norm", (1,), *vectors, **sizes, **({"PDL": False} | options))

    def product(i: int, **options: object) -> None:
        vectors, grid = (x, y) if i % 2 else (y, x), (WIDTH // ROWS,)
        gpu.launch(
            "product", grid, matrix, *vectors, ROWS=ROWS, **sizes, **({"PDL": False} | options)
        )

    def multiply(i: int) -> None:
        with torch.cuda.stream(gpu.main):
            one.mul_(1.0)

    def both(i: int, **options: object) -> None:
        (norm if i % 2 else product)(i, **options)

    launches: dict[str, Launch] = {
        "one.mul_(1.0)": multiply,
        "a kernel that stores one value": lambda i: gpu.launch("empty", (1,), x, num_warps=1),
        f"a norm of {WIDTH} values": norm,
        f"a product, {WIDTH} x {WIDTH} f16": product,
        "product, norm, ...": both,
        "product, norm, ..., PDL": lambda i: both(i, PDL=True, launch_pdl=True),
    }
    return [
        SectionTable(
            title=f"graphs of {COUNT} kernels, each of which needs the one before",
            columns=("", "us a kernel", "us until the host knows", "us to launch the graph"),
            rows=[[name, *_times(gpu, launch)] for name, launch in launches.items()],
        )
    ]


def _times(gpu: HandoverGpu, launch: Launch) -> list[str]:
    for i in range(4):  # compiles
        launch(i)
    gpu.synchronize()
    graph = gpu.captured(lambda: [launch(i) for i in range(COUNT)])
    found = [gpu.timed(graph) for _ in range(REPLAYS)][3:]
    began = time.perf_counter()
    with torch.cuda.stream(gpu.main):
        for _ in range(10):
            graph.replay()
    launch_us = 1e5 * (time.perf_counter() - began)
    gpu.synchronize()
    kernel_us = median(us for us, _ in found) / COUNT
    return [f"{kernel_us:.2f}", f"{median(us for _, us in found):.0f}", f"{launch_us:.0f}"]
