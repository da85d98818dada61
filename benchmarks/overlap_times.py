"""The section of gpu_prompts.py about the kernels of a step: a graph of layers of norms,
projections and neurons, with and without launches that overlap (runtime/kernels/gpu/overlap.py)."""

import time
from collections.abc import Callable
from statistics import median

import torch
from gpu_sections import SectionTable
from torch import Tensor

from hotsplit.runtime.device.streams import CudaStream, PlainStream
from hotsplit.runtime.kernels.gate import Gate
from hotsplit.runtime.kernels.gpu.kernels import (
    Kernels,
    overlapped,
    reference_kernels,
    triton_kernels,
)
from hotsplit.runtime.kernels.gpu.ranges import down_parts
from hotsplit.runtime.step.backend import cuda_backend, plain_backend
from hotsplit.runtime.weights.matrix import Matrix

COLUMNS = ("width, neurons", "us a kernel", "overlapping", "same bits")
SHAPES, SMALL = ((576, 1536), (2048, 8192), (4096, 11008)), ((64, 96),)
LAYERS, KERNELS, ROUNDS = 20, 6, 12  # a layer's kernels


def overlap(device: torch.device, *, is_small: bool) -> list[SectionTable]:
    rows = [_row(device, *shape) for shape in (SMALL if is_small else SHAPES)]
    return [SectionTable(title="layers of a step in a graph, f16", columns=COLUMNS, rows=rows)]


def _row(device: torch.device, width: int, neurons: int) -> list[str]:
    kernels = triton_kernels() if device.type == "cuda" else reference_kernels()
    dense = _matrix(width, width, device)
    gate, up, down = (_matrix(neurons, width, device) for _ in range(3))
    x, normed, weight = (torch.ones(width, device=device) for _ in range(3))
    hidden = torch.zeros(neurons, device=device)
    parts = torch.zeros(down_parts(neurons, width), width, device=device)

    silu = Gate(activation="silu", computes_all=True)

    def submit(on: Kernels) -> None:
        for _ in range(LAYERS):
            on.add_norm(x, parts, weight, None, 1e-5, normed, x)
            on.dot(dense, None, normed, x)
            on.dot(dense, None, x, normed)
            on.add_norm(normed, None, weight, None, 1e-5, x, None)
            on.gate_up(gate, None, up, None, None, None, x, silu, hidden)
            on.down(down, hidden, parts, skips_zeros=False)

    found = []
    for on in (kernels, overlapped(kernels)):
        x.copy_(torch.linspace(-1, 1, width))
        parts.zero_()
        found.append((_seconds(device, on, submit), x.clone()))
    (plain_s, want), (overlapping_s, got) = found
    return [
        f"{width}, {neurons}",
        *(f"{1e6 * s / LAYERS / KERNELS:.2f}" for s in (plain_s, overlapping_s)),
        str(torch.equal(got, want)),
    ]


def _matrix(num_rows: int, width: int, device: torch.device) -> Matrix:
    data = torch.randn(num_rows, width, device=device).mul_(width**-0.5).half()
    return Matrix(data=data, kind="f16", width=width)


def _seconds(device: torch.device, on: Kernels, submit: Callable[[Kernels], None]) -> float:
    """Median seconds of a graph, which runs as often in both forms."""
    is_cuda = device.type == "cuda"
    backend = cuda_backend(None, has_graph=True) if is_cuda else plain_backend(on)
    main = CudaStream(device) if is_cuda else PlainStream()
    main.follow()
    empty: list[Tensor] = []
    main.launch(lambda: submit(on), reads=empty, writes=empty)  # compiles
    main.finish()
    run = backend.prepare(main, lambda: main.launch(lambda: submit(on), reads=empty, writes=empty))
    found = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        run()
        main.finish()
        found.append(time.perf_counter() - began)
    return median(found[2:])
