"""The parts of the runtime on one GPU, which a check tries one by one. Tests pass parts that
fail."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from hotsplit.artifacts.device_checks import DeviceKey, installed_version
from hotsplit.runtime.check.kernels import Wrong
from hotsplit.runtime.device import device_memory
from hotsplit.runtime.device.streams import CudaStream
from hotsplit.runtime.kernels.gpu.kernels import Kernels, triton_kernels
from hotsplit.runtime.kernels.gpu.slots import SlotKernels, triton_slot_kernels
from hotsplit.runtime.kernels.gpu.torch_kernels import torch_kernels
from hotsplit.runtime.step.cuda_backend import cuda_backend
from hotsplit.runtime.step.hybrid_device import Take
from hotsplit.runtime.step.hybrid_step import Backend
from hotsplit.runtime.weights import gpu_products

_LIMIT_BYTES, _MORE_BYTES = 64 << 20, 512 << 20
_SIZE = 256  # rows and columns of the matrices, values of the vector
_DRIVER = Path("/proc/driver/nvidia/version")


class BackendOf(Protocol):
    def __call__(
        self,
        take: Callable[[torch.device], Take] | None = None,
        *,
        has_graph: bool,
        kernels: Kernels | None = None,
    ) -> Backend: ...


@dataclass(frozen=True, kw_only=True)
class DeviceParts:
    """The parts that a check tries on a device. The functions raise if a part fails; `kernels` and
    `slot_kernels` raise ImportError without Triton."""

    device: torch.device
    key: DeviceKey
    kernels: Callable[[], Kernels]
    slot_kernels: Callable[[], SlotKernels]
    plain_kernels: Kernels
    backend: BackendOf
    use: Callable[[], None]  # multiplies, and copies to the device and back
    pin: Callable[[], None]
    limit: Callable[[], None]  # checks that memory beyond a limit is refused
    multiply: Callable[[torch.dtype], None]  # multiplies by a tile of this type
    wait: Callable[[], None]
    free: Callable[[], None]  # frees the memory that the allocator caches


def parts_of(device: torch.device) -> DeviceParts | None:
    """The parts of a CUDA device; None for the CPU, which needs no check."""
    if device.type != "cuda":
        return None
    return DeviceParts(
        device=device,
        key=key_of(device),
        kernels=triton_kernels,
        slot_kernels=triton_slot_kernels,
        plain_kernels=torch_kernels(),
        backend=cuda_backend,
        use=lambda: use_device(device),
        pin=lambda: _pin(device),
        limit=lambda: _limit(device),
        multiply=lambda dtype: multiply(device, dtype),
        wait=lambda: torch.cuda.synchronize(device),
        free=torch.cuda.empty_cache,
    )


def key_of(device: torch.device) -> DeviceKey:
    """The device and software for which the results of checking a CUDA device hold."""
    properties = torch.cuda.get_device_properties(device)
    return DeviceKey(
        index=device.index or 0,
        device=properties.name,
        capability=f"{properties.major}.{properties.minor}",
        memory_bytes=int(properties.total_memory),
        driver=driver_version(),
        torch=str(torch.__version__),
        triton=installed_version("triton"),
        package=installed_version("hotsplit"),
    )


def driver_version() -> str:
    """The driver's version, e.g. 580.65.06; where /proc does not tell it, as under WSL, the CUDA
    version that the driver supports, or "unknown"."""
    try:
        words = _DRIVER.read_text().split("\n", 1)[0].split()
        return next(word for word in words if word[:1].isdigit() and "." in word)
    except (OSError, StopIteration):
        found = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)()
        return f"CUDA {found // 1000}.{found % 1000 // 10}" if found else "unknown"


def use_device(device: torch.device) -> None:
    """Multiplies two matrices, copies the product back (from a GPU on a new stream) and compares it
    with the CPU's."""
    random = torch.Generator().manual_seed(0)
    left, right = (torch.randn(_SIZE, _SIZE, generator=random) for _ in range(2))
    there = left.to(device) @ right.to(device)
    back = torch.empty_like(there)
    if device.type == "cuda":
        stream = CudaStream(device)  # loads the CUDA runtime
        stream.follow()
        stream.copy(back, there)
        stream.finish()
    else:
        back.copy_(there)
    error = float((back.cpu() - left @ right).norm() / (left @ right).norm())
    if not error < 1e-2:  # TF32, if the user allows it, has 10 bits of mantissa
        raise Wrong(f"a product of two matrices is off by {error:.2g}")


def _pin(device: torch.device) -> None:
    """Copies from pinned memory."""
    values = torch.arange(_SIZE, dtype=torch.float32).pin_memory()
    if not torch.equal(values.to(device, non_blocking=True).cpu(), values):
        raise Wrong("pinned memory is copied wrongly")


def multiply(device: torch.device, dtype: torch.dtype) -> None:
    """Multiplies several tokens by a tile, as for prompts."""
    random = torch.Generator().manual_seed(0)
    x_TD, tile_AD = (torch.randn(_SIZE, _SIZE, generator=random) for _ in range(2))
    tile_AD = tile_AD.to(dtype)
    got = gpu_products.product(x_TD.to(device), _SIZE, [(0, tile_AD.to(device))]).cpu()
    want = x_TD.double() @ tile_AD.double().T
    error = float((got - want).norm() / want.norm())
    if not error < 1e-2:  # from rounding the tokens' values to 8 or 11 bits
        raise Wrong(f"a product in {str(dtype).removeprefix('torch.')} is off by {error:.2g}")


def _limit(device: torch.device) -> None:
    """Checks that torch's allocator respects a limit."""
    with device_memory.temporarily_limited(device, _LIMIT_BYTES):
        try:
            torch.empty(_MORE_BYTES, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            return
    raise Wrong("torch's allocator gives more memory than its limit allows")
