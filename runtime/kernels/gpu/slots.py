"""The kernels of the neuron cache on a GPU: rows from staging to the slots of hot neurons, and the bits
of the hot neurons that a step reads.

A copy is described by four numbers (`COPY`): where its bytes are in staging, the address they go to,
how many they are, and in which form (`FORMS`): as they are, or blocks as in a file, which are arranged
in planes on the way (runtime.kernels.planar). Bytes and addresses are multiples of 2.

Letters: C copies, B bytes of staging, F neurons of a layer, N slots, W words of F bits."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from sparkinfer.runtime.device.bits import pack_bits
from sparkinfer.runtime.kernels.planar import PLANAR_KIND, planar

COPY = 4  # int64 numbers of a copy: offset in staging, target address, bytes, form
FORMS = ("", *PLANAR_KIND)  # "q4_0", "q8_0", "q6_k" of a file


def form_of(kind: str, target_kind: str) -> int:
    """The form of rows of one kind that become rows of another."""
    return 0 if kind == target_kind else FORMS.index(kind)


def scatter_ref(staging_B: Tensor, copies_C4: Tensor, most_bytes: int) -> None:
    """The definition, on the CPU: copies in order."""
    for offset, target, num_bytes, form in copies_C4.tolist():
        row = staging_B[offset : offset + num_bytes]
        row = planar(row, FORMS[form])[0].contiguous()
        ctypes.memmove(target, row.data_ptr(), num_bytes)


def pack_open_ref(hidden_N: Tensor, slot_F: Tensor, open_W: Tensor) -> None:
    """Bit j: whether neuron j is in a slot with a hidden value other than 0. `slot_F`, int32, is the
    slot of each neuron, below 0 if it has none."""
    value_F = hidden_N[slot_F.clamp(min=0).long()]
    open_W.copy_(pack_bits((slot_F >= 0) & (value_F != 0)))


@dataclass(frozen=True, kw_only=True)
class SlotKernels:
    """`scatter` does copies in any order, none of more than `most_bytes`; `pack_open` writes all
    words."""

    scatter: Callable[[Tensor, Tensor, int], None]
    pack_open: Callable[[Tensor, Tensor, Tensor], None]


def reference_slot_kernels() -> SlotKernels:
    return SlotKernels(scatter=scatter_ref, pack_open=pack_open_ref)


def triton_slot_kernels() -> SlotKernels:
    """Triton's kernels. Raises ImportError without Triton, like kernels.triton_kernels."""
    from sparkinfer.runtime.kernels.gpu import slot_kernels

    return SlotKernels(scatter=slot_kernels.scatter, pack_open=slot_kernels.pack_open)
