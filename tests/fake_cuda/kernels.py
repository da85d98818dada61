"""The kernels of a decode step as kernels of the fake runtime: each call is one launch on torch's
current stream of the current device, with the memory that it reads and writes."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from fake_cuda import declared, library
from fake_cuda.library import Range
from fake_cuda.tensors import DeviceTensor, borrowed, range_of
from torch import Tensor

from sparkinfer.runtime.kernels.gpu import kernels as records
from sparkinfer.runtime.kernels.gpu.kernels import Kernels
from sparkinfer.runtime.kernels.stored import StoredMatrix

# Names in kernels.py of the arguments that kernels write.
WRITTEN = {
    "dot": {"out_N"},
    "embed": {"out_D"},
    "unpack": {"out_AD"},
    "add_norm": {"out_D", "x_out_D"},
    "rotate_append": {"qkv", "key_CKW", "value_CKW"},
    "attend": {"scratch", "out_HW"},
    "predict": {"named_B"},
    "gate_up": {"hidden_N"},
    "down": {"parts_SD"},
}


def launched(kernels: Kernels) -> Kernels:
    """`kernels` take CPU tensors: torch's reference, or an executor of PTX."""
    return Kernels(
        **{
            f.name: partial(_launch, f.name, _signature(f.name), getattr(kernels, f.name))
            for f in dataclasses.fields(Kernels)
        }
    )


def _signature(name: str) -> inspect.Signature:
    protocol = getattr(records, "".join(word.title() for word in name.split("_")))
    return inspect.signature(protocol.__call__)


def _launch(
    name: str, signature: inspect.Signature, run: Callable[..., None], *args: Any, **options: Any
) -> None:
    given = signature.bind(None, *args, **options).arguments
    ranges: list[Range] = []
    for argument, value in given.items():
        is_written = argument in WRITTEN[name]
        ranges += [range_of(t, is_written=is_written) for t in _tensors(name, value)]
    declared.check(name, ranges)
    stream = torch.cuda.current_stream().cuda_stream
    args, options = tuple(map(_borrowed, args)), {k: _borrowed(v) for k, v in options.items()}
    library.launch(name, stream, partial(run, *args, **options), ranges)


def on_device(name: str, tensor: Tensor) -> Tensor:
    """Returns the tensor. Raises ValueError, as Triton does, if a kernel cannot read it."""
    if not isinstance(tensor, DeviceTensor) and not tensor.is_pinned():
        raise ValueError(f"{name}: Pointer argument cannot be accessed from Triton (cpu tensor?)")
    return tensor


def _tensors(name: str, value: object) -> Iterator[Tensor]:
    if isinstance(value, StoredMatrix):
        value = value.data
    if isinstance(value, Tensor):
        yield on_device(name, value)


def _borrowed(value: Any) -> Any:
    if isinstance(value, StoredMatrix):
        return StoredMatrix(data=_borrowed(value.data), kind=value.kind, width=value.width)
    return borrowed(value) if isinstance(value, Tensor) else value
