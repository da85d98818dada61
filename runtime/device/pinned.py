"""Pins host memory so that GPUs copy from it directly: registers it with CUDA (cudaHostRegister),
and unregisters it before it is unmapped."""

import mmap
import sys
from typing import Any

import torch

from hotsplit.errors import HotsplitError
from hotsplit.system.sizes import format_bytes

_FOR_ALL_DEVICES = 1  # cudaHostRegisterPortable


class PinnableMemory(mmap.mmap):
    """Memory that can be pinned. It lives as long as the last tensor in it."""

    _pinned_at: int | None = None
    _runtime: Any = None

    def pin(self, address: int, num_bytes: int) -> None:
        """Pins a range. Raises HotsplitError if CUDA or the limit on locked memory refuses."""
        assert self._pinned_at is None
        if not num_bytes:
            return
        runtime = torch.cuda.cudart()
        status = int(runtime.cudaHostRegister(address, num_bytes, _FOR_ALL_DEVICES))
        if status:
            raise HotsplitError(
                f"{format_bytes(num_bytes)} of main memory cannot be pinned for the GPU (CUDA error"
                f" {status}); the limit on locked memory is {_limit_on_locked()}: raise it (ulimit"
                " -l unlimited, or --ulimit memlock=-1 for a container)"
            )
        self._pinned_at, self._runtime = address, runtime

    def __del__(self) -> None:
        if self._pinned_at is not None and not sys.is_finalizing():
            self._runtime.cudaHostUnregister(self._pinned_at)
            self._pinned_at = None


def _limit_on_locked() -> str:
    try:
        import resource
    except ImportError:  # no such limit on this system
        return "unknown"
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return "none" if limit == resource.RLIM_INFINITY else format_bytes(limit)
