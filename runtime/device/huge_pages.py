"""Memory in huge pages, where the system has them.

A row of the cache or of a weight that is read alone costs a look-up of its page, and in pages of 4 KiB
a few gigabytes have more of them than any processor keeps."""

import mmap
from math import prod

import torch
from torch import Tensor

from sparkinfer.errors import SparkinferError
from sparkinfer.runtime.device.pinned import PinnableMemory
from sparkinfer.sizes import format_bytes

HUGE_PAGE_BYTES = 2 << 20


def untouched(num_bytes: int) -> tuple[PinnableMemory, Tensor]:
    """A mapping, and in it at least `num_bytes` zero bytes from a page's beginning on, which take no
    memory until written. Raises OSError if there are not so many addresses."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    mapping = PinnableMemory(-1, num_bytes + HUGE_PAGE_BYTES, flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a system without huge pages: the same, slower
            pass
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    return mapping, memory[-memory.data_ptr() % HUGE_PAGE_BYTES :]


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros on the CPU that are written, so that their memory is taken; small ones as torch has them."""
    num_bytes = prod(shape) * dtype.itemsize
    if num_bytes < HUGE_PAGE_BYTES:
        return torch.zeros(shape, dtype=dtype)
    try:
        memory = untouched(num_bytes)[1][:num_bytes]
    except OSError as error:
        raise SparkinferError(
            f"no {format_bytes(num_bytes)} for the cache ({error.strerror}); give a smaller context, or"
            " keys and values in a smaller type"
        ) from error
    return memory.view(dtype).view(shape).zero_()
