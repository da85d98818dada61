"""A backend that runs both sides of a hybrid step on the CPU, where kernels run as they are
submitted.

Used to test the step without a GPU, and as the reference for captured steps."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hotsplit.runtime.device.streams import PlainStream, Stream
from hotsplit.runtime.step.hybrid_device import Take
from hotsplit.runtime.step.hybrid_step import Backend

if TYPE_CHECKING:
    from hotsplit.runtime.kernels.gpu.kernels import Kernels


def plain_backend(kernels: "Kernels") -> Backend:
    return Backend(
        kernels=kernels,
        stream=lambda device: PlainStream(),
        take=allocated,
        prepare=submitted,
        is_pinned=False,
    )


def allocated(device: torch.device) -> Take:
    """Torch's allocator on a device."""

    def take(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return take


def submitted(stream: Stream, submit: Callable[[], None]) -> Callable[[], None]:
    return submit
