"""The kernels of a decode step as kernels of the fake runtime: each call is one launch on torch's
current stream of the current device, with the memory that it reads and writes."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from fake_cuda import declared, library
from fake_cuda.library import Range
from fake_cuda.tensors import DeviceTensor, borrowed, range_of, ranges_of
from torch import Tensor

from hotsplit.runtime.kernels.gpu.gpu_kernel import GpuKernel
from hotsplit.runtime.kernels.gpu.kernels import Kernels
from hotsplit.runtime.kernels.stored import StoredMatrix


def launched(kernels: Kernels) -> Kernels:
    """Wraps kernels that take CPU tensors, such as the reference: each call becomes a launch.
    `scatter` counts as writing what its launch declares or, outside of a declared launch, the
    targets in `copies_C4`, which are read after a synchronisation."""

    def scatter(staging_B: Tensor, copies_C4: Tensor, most_bytes: int) -> None:
        ranges = ranges_of((staging_B, copies_C4))
        args = borrowed(staging_B), borrowed(copies_C4), most_bytes
        writes = declared.written()
        if writes is None:
            torch.cuda.synchronize()
            writes = [(target, size, True) for _, target, size, _ in args[1].tolist()]
        _submit("scatter", partial(kernels.scatter, *args), ranges + writes)

    def version(kernel: GpuKernel) -> Callable[..., None]:
        return scatter if kernel.name == "scatter" else partial(_launch, kernel, kernels.of(kernel))

    return Kernels(version)


def _launch(kernel: GpuKernel, run: Callable[..., None], *args: Any, **options: Any) -> None:
    given = inspect.signature(kernel.reference).bind(*args, **options).arguments
    ranges: list[Range] = []
    for argument, value in given.items():
        is_written = argument in (*kernel.writes, "scratch")
        ranges += [range_of(t, is_written=is_written) for t in _tensors(kernel.name, value)]
    args, options = tuple(map(_borrowed, args)), {k: _borrowed(v) for k, v in options.items()}
    _submit(kernel.name, partial(run, *args, **options), ranges)


def _submit(name: str, run: Callable[[], None], ranges: list[Range]) -> None:
    declared.check(name, ranges)
    library.launch(name, torch.cuda.current_stream().cuda_stream, run, ranges)


def on_device(name: str, tensor: Tensor) -> Tensor:
    """Returns the tensor. Raises ValueError, as Triton does, if a kernel cannot read it."""
    if not isinstance(tensor, DeviceTensor) and not tensor.is_pinned():
        raise ValueError(f"{name}: Pointer argument cannot be accessed from Triton (cpu tensor?)")
    return tensor


def _tensors(name: str, value: object) -> Iterator[Tensor]:
    if isinstance(value, StoredMatrix):
        value = value.data
    for each in value.values() if isinstance(value, Mapping) else (value,):
        if isinstance(each, Tensor):
            yield on_device(name, each)


def _borrowed(value: Any) -> Any:
    if isinstance(value, StoredMatrix):
        return StoredMatrix(data=_borrowed(value.data), kind=value.kind, width=value.width)
    if isinstance(value, Mapping):
        return {name: borrowed(each) for name, each in value.items()}
    return borrowed(value) if isinstance(value, Tensor) else value
