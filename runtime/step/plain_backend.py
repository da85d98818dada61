"""A hybrid step with both roles on the CPU: every kernel when it is submitted, by any set of kernels.

It is how the step is tested without a GPU, and what a captured one is compared with."""

from collections.abc import Callable

import torch
from torch import Tensor

from sparkinfer.runtime.device.streams import PlainStream, Stream
from sparkinfer.runtime.kernels.gpu.kernels import Kernels
from sparkinfer.runtime.step.hybrid_device import Take
from sparkinfer.runtime.step.hybrid_step import Backend


def plain_backend(kernels: Kernels) -> Backend:
    return Backend(
        kernels=kernels,
        streams=lambda device: (PlainStream(), PlainStream()),
        take=_take,
        prepare=_as_it_is,
        is_pinned=False,
    )


def _take(device: torch.device) -> Take:
    def take(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return take


def _as_it_is(stream: Stream, submit: Callable[[], None]) -> Callable[[], None]:
    return submit
