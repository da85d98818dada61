"""A backend that runs both sides of a hybrid step on the CPU, where kernels run as they are
submitted.

Used to test the step without a GPU, and as the reference for captured steps."""

from collections.abc import Callable

import torch
from torch import Tensor

from hotsplit.runtime.device.streams import PlainStream, Stream
from hotsplit.runtime.kernels.gpu.kernels import Kernels
from hotsplit.runtime.kernels.gpu.slots import SlotKernels, reference_slot_kernels
from hotsplit.runtime.step.hybrid_device import Take
from hotsplit.runtime.step.hybrid_step import Backend


def plain_backend(kernels: Kernels, slot_kernels: SlotKernels | None = None) -> Backend:
    return Backend(
        kernels=kernels,
        stream=lambda device: PlainStream(),
        take=_take,
        prepare=_as_it_is,
        is_pinned=False,
        slot_kernels=slot_kernels or reference_slot_kernels(),
    )


def _take(device: torch.device) -> Take:
    def take(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return take


def _as_it_is(stream: Stream, submit: Callable[[], None]) -> Callable[[], None]:
    return submit
