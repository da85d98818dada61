"""What a hybrid step runs on, and its plain form: both sides are on the CPU, where kernels run as
they are submitted. That is for tests of the step without a GPU, and the reference for captured
steps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hotsplit.runtime.device.streams import PlainStream, Stream
from hotsplit.runtime.step.hybrid_device import Take

if TYPE_CHECKING:
    from hotsplit.runtime.kernels.gpu.kernels import Kernels


# Turns a submission to a stream into a function that is called for every step.
Prepare = Callable[[Stream, Callable[[], None]], Callable[[], None]]


@dataclass(frozen=True, kw_only=True)
class Backend:
    """The kernels, streams and memory that a step runs on."""

    kernels: "Kernels"
    stream: Callable[[torch.device], Stream]  # makes one
    take: Callable[[torch.device], Take]  # zeroed memory for buffers
    prepare: Prepare
    is_pinned: bool


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
