"""torch.cuda on the fake runtime: thin stand-ins for the C++ that torch's CPU build lacks.

`fake_cuda()` installs them in torch for a block, in which hotsplit's code runs unchanged. What
torch implements in Python (torch.cuda.graph, torch.cuda.stream, torch.cuda.device) stays torch's
own."""

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from fake_cuda import library
from fake_cuda.declared import declarations
from fake_cuda.devices import ACTIVE, CUDAGraph, Event, FakeCuda, Stream
from fake_cuda.kernels import launched
from fake_cuda.tensors import DeviceTensor, Dispatch
from torch import Tensor

from hotsplit.runtime import loading
from hotsplit.runtime.device import cuda_runtime, device_memory
from hotsplit.runtime.kernels.gpu import launch
from hotsplit.runtime.kernels.gpu.kernels import Kernels, reference_kernels
from hotsplit.runtime.step import backend


def _cudart() -> SimpleNamespace:
    """What torch.cuda.cudart() returns: functions that return a status and raise nothing."""
    runtime = library.load()
    return SimpleNamespace(
        cudaHostRegister=runtime.cudaHostRegister, cudaHostUnregister=runtime.cudaHostUnregister
    )


class _Generator(torch.Generator):
    """Makes a generator of the CPU where one of a CUDA device is asked for."""

    def __new__(cls, device: Any = "cpu") -> torch.Generator:  # type: ignore[misc]
        is_fake = torch.device(device).type == "cuda"
        return _real_generator("cpu" if is_fake else device)


_real_generator = torch.Generator


def _is_pinned(tensor: Tensor, device: object = None) -> bool:
    is_there = not isinstance(tensor, DeviceTensor) and tensor.device.type == "cpu"
    return bool(is_there and library.load().fakeIsPinned(tensor.data_ptr()))


def _replaced(cuda: FakeCuda) -> dict[str, object]:
    """The replacements in torch.cuda, by name."""
    stats = cuda.allocators
    return {
        "is_available": lambda: True,
        "device_count": lambda: cuda.num_devices,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "is_initialized": lambda: True,
        "current_device": lambda: cuda.current,
        "set_device": lambda device: cuda.set_device(cuda.index(device)),
        "_exchange_device": cuda.set_device,
        "_maybe_exchange_device": cuda.set_device,
        "get_device_name": lambda device=None: cuda.properties().name,
        "get_device_properties": cuda.properties,
        "synchronize": cuda.synchronize,
        "current_stream": cuda.current_stream,
        "default_stream": lambda d=None: Stream(torch.device("cuda", cuda.index(d)), handle=0),
        "set_stream": cuda.set_stream,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": CUDAGraph,
        "mem_get_info": cuda.mem_get_info,
        "empty_cache": cuda.empty_cache,
        "memory_allocated": lambda d=None: stats[cuda.index(d)].allocated,
        "memory_reserved": lambda d=None: stats[cuda.index(d)].reserved,
        "max_memory_allocated": lambda d=None: stats[cuda.index(d)].peak_allocated,
        "max_memory_reserved": lambda d=None: stats[cuda.index(d)].peak_reserved,
        "set_per_process_memory_fraction": cuda.set_fraction,
        "get_allocator_backend": lambda: "native",
        "cudart": _cudart,
    }


@contextmanager
def fake_cuda(
    num_devices: int = 1,
    total_bytes: int = 1 << 30,
    seed: int = 0,
    kernels: Kernels | None = None,
    is_hollow: bool = False,
    is_checked: bool = False,
) -> Iterator[FakeCuda]:
    """CUDA devices for the code in the block.

    `seed` selects one of the orders that streams and events allow. `kernels` take Triton's place
    (kernels.launched, ptx_kernels.StreamedPtx); None: the float64 reference. `is_hollow`: memory is
    not written (hollow.hollow_cuda). `is_checked`: loads end with the check of a device, which
    tests of other things need not repeat."""
    library.add_device_guard()
    library.load().fakeReset(num_devices, total_bytes, seed, is_hollow)
    _forget_cached()
    cuda = FakeCuda(num_devices, total_bytes)
    with ExitStack() as stack:
        for name, value in _replaced(cuda).items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(torch.Tensor, "is_pinned", _is_pinned))
        stack.enter_context(
            mock.patch.object(torch._C, "_host_emptyCache", lambda: None, create=True)
        )
        dispatch = Dispatch(cuda)
        stack.enter_context(
            mock.patch.object(torch.Tensor, "pin_memory", lambda t, d=None: dispatch.pinned(t))
        )
        stack.enter_context(mock.patch.object(torch, "Generator", _Generator))
        stack.enter_context(mock.patch.object(DeviceTensor, "dispatch", dispatch))
        stack.enter_context(mock.patch.object(threading.Thread, "run", _run_in(dispatch)))
        made = kernels or launched(reference_kernels())
        for module in [m for m in sys.modules.values() if vars(m).get("triton_kernels")]:
            stack.enter_context(mock.patch.object(module, "triton_kernels", lambda: made))
        stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=...) is then a copy
        stack.enter_context(declarations())
        stack.enter_context(mock.patch.object(cuda_runtime, "_DRIVER", library.load()._name))
        if not is_checked:
            for name in ("logits_of", "check_against_cpu"):
                stack.enter_context(mock.patch.object(loading, name, lambda *a, **options: {}))
        # The emulated kernels do not overlap.
        stack.enter_context(mock.patch.object(loading, "can_overlap", lambda device: False))
        # The queue runs while the server asks whether the stream still runs.
        stack.enter_context(mock.patch.object(backend, "QUERY_US", 0))
        stack.callback(_finish, cuda)
        ACTIVE.append(cuda)
        with dispatch:
            yield cuda


def _run_in(dispatch: Dispatch) -> Callable[[threading.Thread], None]:
    """A Thread.run with which new threads can use tensors on the devices, too: torch keeps its
    modes per thread."""
    run = threading.Thread.run

    def in_mode(thread: threading.Thread) -> None:
        torch._C._set_only_lift_cpu_tensors(True)  # this flag, too, is per thread
        with dispatch:
            run(thread)

    return in_mode


def _finish(cuda: FakeCuda) -> None:
    if any(allocator.allocated for allocator in cuda.allocators):
        gc.collect()  # reference cycles in hotsplit: a captured step and its inputs
    library.load().fakeForgive()
    cuda.empty_cache()
    for start in cuda.unused:
        library.call("cudaFreeHost", start)
    cuda.is_over = True
    ACTIVE.remove(cuda)
    _forget_cached()


def _forget_cached() -> None:
    """Clears what hotsplit caches about devices for the life of a process."""
    for module in (cuda_runtime, device_memory, launch):
        for function in vars(module).values():
            getattr(function, "cache_clear", lambda: None)()
