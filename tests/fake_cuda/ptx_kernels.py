"""The runtime's GPU kernels, with each Triton launch replaced by a kernel of the fake runtime that
executes PTX: the launching functions run as on a GPU, on tensors of the device."""

from functools import partial
from types import ModuleType

import torch
from fake_cuda import declared, library
from fake_cuda.kernels import on_device
from fake_cuda.tensors import borrowed, range_of
from ptx.compiler import Compiled
from ptx.kernels import STORES, PtxKernels, PtxLaunch
from torch import Tensor


class StreamedPtx(PtxKernels):
    """PtxKernels whose `kernels` can be passed to `fake_cuda`."""

    def _module(self, name: str) -> ModuleType:
        module = super()._module(name)
        for kernel in STORES:
            if hasattr(module, kernel):
                setattr(module, kernel, _StreamedLaunch(self, getattr(module, kernel).source))
        return module


class _StreamedLaunch(PtxLaunch):
    def _execute(self, text: str, compiled: Compiled, grid, given: dict) -> None:
        name = self.source.name
        tensors = {k: on_device(name, t) for k, t in given.items() if isinstance(t, Tensor)}
        ranges = [range_of(t, is_written=key in STORES[name]) for key, t in tensors.items()]
        declared.check(name, ranges)
        there = given | {key: borrowed(t) for key, t in tensors.items()}
        stream = torch.cuda.current_stream().cuda_stream
        run = partial(super()._execute, text, compiled, grid, there)
        library.launch(name.removeprefix("_"), stream, run, ranges)
