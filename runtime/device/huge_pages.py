"""Allocates memory in huge pages where the system has them, spread over memory nodes if there are
several.

Reading a row of the cache or of a matrix needs a page translation, and a few gigabytes in pages of
4 KiB are more pages than any processor's TLB holds."""

import mmap
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

from hotsplit.errors import HotsplitError
from hotsplit.runtime.device.pinned import PinnableMemory
from hotsplit.system.memory_nodes import spread_if_many
from hotsplit.system.sizes import format_bytes

HUGE_PAGE_BYTES = 2 << 20


def untouched(num_bytes: int) -> tuple[PinnableMemory, Tensor]:
    """A mapping, and a view of at least `num_bytes` zero bytes in it, aligned to a huge page; they
    take no memory until written. Raises OSError if the address space is too small."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    mapping = PinnableMemory(-1, num_bytes + HUGE_PAGE_BYTES, flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without huge pages is only slower
            mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    spread_if_many(memory.data_ptr(), memory.nbytes)
    return mapping, memory[-memory.data_ptr() % HUGE_PAGE_BYTES :]


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros on the CPU, written so that their memory is committed; small tensors are torch's."""
    num_bytes = prod(shape) * dtype.itemsize
    if num_bytes < HUGE_PAGE_BYTES:
        return torch.zeros(shape, dtype=dtype)
    try:
        memory = untouched(num_bytes)[1][:num_bytes]
    except OSError as error:
        raise HotsplitError(
            f"the cache of {format_bytes(num_bytes)} cannot be allocated ({error.strerror}); choose"
            " a smaller context, or a smaller type for keys and values"
        ) from error
    return memory.view(dtype).view(shape).zero_()
