"""The parts of the runtime on one GPU, which a check tries one by one. Tests pass parts that
fail."""

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

import torch

from hotsplit.artifacts.device_checks import DeviceKey, installed_version
from hotsplit.runtime.check import step_check
from hotsplit.runtime.check.kernels import Wrong
from hotsplit.runtime.device import device_memory
from hotsplit.runtime.device.streams import CudaStream
from hotsplit.runtime.kernels.gpu.kernels import Kernels, triton_kernels
from hotsplit.runtime.kernels.gpu.slots import SlotKernels, triton_slot_kernels
from hotsplit.runtime.kernels.gpu.torch_kernels import torch_kernels
from hotsplit.runtime.step.cuda_backend import cuda_backend
from hotsplit.runtime.step.decode_step import DecodeStep
from hotsplit.runtime.step.hybrid_device import Take
from hotsplit.runtime.step.hybrid_step import Backend
from hotsplit.runtime.weights import gpu_products

_LIMIT_BYTES, _MORE_BYTES = 64 << 20, 512 << 20
_SIZE = 256  # rows and columns of the matrices, values of the vector
_OVERLAPPING = 9  # compute capability
_DRIVER = Path("/proc/driver/nvidia/version")


class DeviceParts:
    """The parts that a check tries on a CUDA device. They raise if they fail; `kernels` and
    `slot_kernels` raise ImportError without Triton."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.plain_kernels = device, torch_kernels()

    @cached_property
    def key(self) -> DeviceKey:
        return key_of(self.device)

    def kernels(self) -> Kernels:
        return triton_kernels()

    def slot_kernels(self) -> SlotKernels:
        return triton_slot_kernels()

    def backend(
        self,
        take: Callable[[torch.device], Take] | None,
        *,
        has_graph: bool,
        has_doorbells: bool = False,
        kernels: Kernels | None,
    ) -> Backend:
        return cuda_backend(take, has_graph=has_graph, has_doorbells=has_doorbells, kernels=kernels)

    def hand_over_s(self, backends: Sequence[Backend]) -> list[float]:
        """Seconds that a hand-over to the CPU and back takes with each of the backends."""
        return step_check.hand_over_s(backends, self.device)

    @cached_property
    def can_overlap(self) -> bool:
        """True if kernels may begin before the last one has ended (kernels.gpu.overlap)."""
        return bool(torch.cuda.get_device_properties(self.device).major >= _OVERLAPPING)

    def seconds_of(self, step: DecodeStep) -> float:
        """Median seconds of a token."""
        return step_check.seconds_of(step)

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)

    def free(self) -> None:
        """Frees the memory that the allocator caches, and the workspaces of the checks' products."""
        device_memory.free_workspaces()
        torch.cuda.empty_cache()

    def use(self) -> None:
        """Multiplies two matrices, copies the product back (from a GPU on a new stream) and
        compares it with the CPU's."""
        random = torch.Generator().manual_seed(0)
        left, right = (torch.randn(_SIZE, _SIZE, generator=random) for _ in range(2))
        there = left.to(self.device) @ right.to(self.device)
        back = torch.empty_like(there)
        if self.device.type == "cuda":
            stream = CudaStream(self.device)  # loads the CUDA runtime
            stream.follow()
            stream.copy(back, there)
            stream.finish()
        else:
            back.copy_(there)
        error = float((back.cpu() - left @ right).norm() / (left @ right).norm())
        if not error < 1e-2:  # TF32, if the user allows it, has 10 bits of mantissa
            raise Wrong(f"a product of two matrices is off by {error:.2g}")

    def pin(self) -> None:
        """Copies from pinned memory."""
        values = torch.arange(_SIZE, dtype=torch.float32).pin_memory()
        if not torch.equal(values.to(self.device, non_blocking=True).cpu(), values):
            raise Wrong("pinned memory is copied wrongly")

    def multiply(self, dtype: torch.dtype) -> None:
        """Multiplies several tokens by a tile, as for prompts."""
        random = torch.Generator().manual_seed(0)
        x_TD, tile_AD = (torch.randn(_SIZE, _SIZE, generator=random) for _ in range(2))
        tile_AD = tile_AD.to(dtype)
        got = gpu_products.product(
            x_TD.to(self.device), _SIZE, [(0, tile_AD.to(self.device))]
        ).cpu()
        want = x_TD.double() @ tile_AD.double().T
        error = float((got - want).norm() / want.norm())
        if not error < 1e-2:  # from rounding the tokens' values to 8 or 11 bits
            raise Wrong(f"a product in {str(dtype).removeprefix('torch.')} is off by {error:.2g}")

    def limit(self) -> None:
        """Checks that torch's allocator respects a limit."""
        with device_memory.temporarily_limited(self.device, _LIMIT_BYTES):
            try:
                torch.empty(_MORE_BYTES, dtype=torch.uint8, device=self.device)
            except torch.OutOfMemoryError:
                return
        raise Wrong("torch's allocator gives more memory than its limit allows")


def parts_of(device: torch.device) -> DeviceParts | None:
    """The parts of a CUDA device; None for the CPU, which needs no check."""
    return DeviceParts(device) if device.type == "cuda" else None


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
