"""The kernels of the neuron cache on a GPU: `scatter` copies rows from staging to the slots of hot
neurons, `pack_open` packs the bits of the hot neurons that a step reads.

A copy is described by four numbers (`COPY`): offset in staging, target address, number of bytes,
and form (planar.FORMS): "" copies the bytes unchanged, the others rearrange a file's blocks to planar
rows (runtime.kernels.planar). Addresses are multiples of 2, and so are sizes but those of rows with
blocks of an odd number of bytes.

Letters: C copies, B bytes of staging, F neurons of a layer, N slots, W words that hold F bits."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from hotsplit.runtime.device.bits import pack_bits
from hotsplit.runtime.kernels.planar import FORMS, planar

COPY = 4  # int64 numbers of a copy: offset in staging, target address, bytes, form


def form_of(kind: str, target_kind: str) -> int:
    """The form of a copy that turns rows of one kind into rows of another."""
    return 0 if kind == target_kind else FORMS.index(kind)


def scatter_ref(staging_B: Tensor, copies_C4: Tensor, most_bytes: int) -> None:
    """The reference on the CPU, which makes the copies in order."""
    for offset, target, num_bytes, form in copies_C4.tolist():
        row = staging_B[offset : offset + num_bytes]
        row = planar(row, FORMS[form])[0].contiguous()
        ctypes.memmove(target, row.data_ptr(), num_bytes)


def pack_open_ref(hidden_N: Tensor, slot_F: Tensor, open_W: Tensor) -> None:
    """Sets bit j if neuron j is in a slot and its hidden value is not 0. `slot_F`, int32: the slot
    of each neuron, negative if it has none."""
    value_F = hidden_N[slot_F.clamp(min=0).long()]
    open_W.copy_(pack_bits((slot_F >= 0) & (value_F != 0)))


@dataclass(frozen=True, kw_only=True)
class SlotKernels:
    """`scatter` makes copies of at most `most_bytes` each, in any order; `pack_open` writes all
    words."""

    scatter: Callable[[Tensor, Tensor, int], None]
    pack_open: Callable[[Tensor, Tensor, Tensor], None]


def reference_slot_kernels() -> SlotKernels:
    return SlotKernels(scatter=scatter_ref, pack_open=pack_open_ref)


def triton_slot_kernels() -> SlotKernels:
    """Triton's kernels. Raises ImportError without Triton."""
    from hotsplit.runtime.kernels.gpu import slot_kernels

    return SlotKernels(scatter=slot_kernels.scatter, pack_open=slot_kernels.pack_open)
