"""Engines on the fake runtime that compute nothing: memory is allocated, kernels are launched and
steps are captured as by a real load, but nothing is written or executed, so that a model of 70 B
takes seconds."""

import mmap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from fake_cuda import library
from fake_cuda.devices import FakeCuda
from fake_cuda.tensors import Dispatch, leaves, mapped, meta_of, on_meta, written_arguments
from fake_cuda.torch_cuda import fake_cuda
from torch import Tensor

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.files.gguf_file import TensorEntry
from hotsplit.runtime.device.cuda_runtime import CudaRuntime
from hotsplit.runtime.device.staging import Staging
from hotsplit.runtime.device.streams import HostNode
from hotsplit.runtime.kernels.cpu import library as cpu_kernels
from hotsplit.runtime.kernels.gpu.kernels import Kernels

_PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_"}
_DTYPES = {"f32": np.float32, "f16": np.float16}


def hollow_model(model: ModelFile) -> ModelFile:
    """The model with weights in address space that no one reads."""
    most = max(entry.num_bytes for entry in model.tensors.values())
    memory = np.frombuffer(mmap.mmap(-1, most), np.uint8)

    def hollow(entry: TensorEntry) -> TensorEntry:
        values = memory[: entry.num_bytes].view(_DTYPES.get(entry.kind, np.uint8))
        rows = values.reshape(*entry.shape[:-1], -1) if len(entry.shape) > 1 else values
        return replace(entry, read_rows=lambda start, stop: rows[start:stop])

    return replace(model, tensors={n: hollow(e) for n, e in model.tensors.items()})


_results: dict[object, Any] = {}  # tensors without memory, by operation and arguments


def _described(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype
    return leaf if leaf.__hash__ is not None else str(leaf)


def _kernel(self: Dispatch, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Dispatch._kernel without a launch: allocates what the operation returns."""
    index = self._index(name, args, kwargs)
    assert name not in _PRODUCTS, "cuBLAS would take memory that no plan has room for"
    written = written_arguments(func, args, kwargs)
    if written:
        return written[0] if len(written) == 1 else tuple(written)
    names = tuple(sorted(kwargs))
    key = (func, names, tuple(_described(leaf) for leaf in leaves((args, kwargs))))
    if key not in _results:
        given = {k: v for k, v in kwargs.items() if k != "pin_memory"}
        try:
            _results[key] = func(*mapped(meta_of, args), **on_meta(given))
        except (NotImplementedError, RuntimeError):
            _results[key] = None
    if not all(isinstance(leaf, Tensor) for leaf in leaves(_results[key])):
        return self._waiting(func, name, index, args, kwargs)
    return mapped(lambda like: self._new(index, like), _results[key])


def _nothing(*args: object, **options: object) -> None:
    pass


def _replaced() -> list[tuple[object, str, object]]:
    """What reads or writes memory: (object, name, replacement)."""

    def dot_rows(data: Tensor, kind: str, x: Tensor, rows: Tensor | None = None) -> Tensor:
        return torch.empty(*x.shape[:-1], len(data) if rows is None else len(rows))

    def send(self: Staging, target: Tensor, fill: object) -> object:
        return self.stream.record()

    return [
        (library, "launch", _nothing),
        (CudaRuntime, "copy", _nothing),
        (CudaRuntime, "host_function", _nothing),
        (Dispatch, "_copy_bytes", _nothing),
        (Dispatch, "_kernel", _kernel),
        (HostNode, "run", _nothing),
        (Staging, "send", send),
        (cpu_kernels, "dot_rows", dot_rows),
        (cpu_kernels, "unpack_rows", _nothing),
    ]


@contextmanager
def hollow_cuda(total_bytes: int) -> Iterator[FakeCuda]:
    """A CUDA device of this size for engines that compute nothing."""
    kernels = Kernels(lambda kernel: _nothing)
    with (
        fake_cuda(total_bytes=total_bytes, is_hollow=True, kernels=kernels) as cuda,
        ExitStack() as stack,
    ):
        for thing, name, value in _replaced():
            stack.enter_context(mock.patch.object(thing, name, value))
        yield cuda
