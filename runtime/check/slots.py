"""Compares the neuron cache's kernels on a device with their references, bit for bit.

Their machine code does not depend on the plan, so one check holds for all plans.

Letters: C copies, B bytes, F neurons of a layer, N slots, W words of F bits."""

from collections.abc import Callable

import torch
from torch import Tensor

from hotsplit.model.weight_types import BY_NAME
from hotsplit.runtime.check.kernels import Wrong
from hotsplit.runtime.kernels.gpu.slots import FORMS, SlotKernels, pack_open_ref, scatter_ref

_CPU = torch.device("cpu")
# Bytes of a block, by form.
_BLOCK_BYTES = {form: BY_NAME[form].block_bytes if form else 2 for form in FORMS}
_LONG_BYTES = 5000  # at most this many per row: three programs of 2 KiB each
_ID_BYTES = 4  # of a neuron's id
_GAP = 64  # bytes after each copy that must not be written; rows are 16-byte aligned
_UNTOUCHED = 0xAA
_NUM_NEURONS, _EVERY = 1000, 3  # the last word is partly used; a random third of neurons has slots


def check_scatter(kernels: SlotKernels, device: torch.device, wait: Callable[[], None]) -> None:
    """Copies rows of every form, and an id, in one launch. Raises Wrong, or any error of the
    kernel."""
    sizes = [_LONG_BYTES // _BLOCK_BYTES[form] * _BLOCK_BYTES[form] for form in FORMS]
    copies = [*enumerate(sizes), (0, _ID_BYTES)]
    step = -(-max(sizes) // 16) * 16 + _GAP
    random = torch.Generator().manual_seed(0)
    staging_B = torch.randint(0, 256, (step * len(copies),), dtype=torch.uint8, generator=random)
    target_B = torch.full_like(staging_B, _UNTOUCHED)

    def run(scatter: Callable[[Tensor, Tensor, int], None], place: torch.device) -> Tensor:
        target = target_B.to(place, copy=True)
        numbers = [
            (step * index, target.data_ptr() + step * index, size, form)
            for index, (form, size) in enumerate(copies)
        ]
        copies_C4 = torch.tensor(numbers, dtype=torch.int64).to(place)
        scatter(staging_B.to(place), copies_C4, max(sizes))
        if place == device:
            wait()
        return target.cpu()

    _compare("bytes of copied rows", run(kernels.scatter, device), run(scatter_ref, _CPU))


def check_pack_open(kernels: SlotKernels, device: torch.device, wait: Callable[[], None]) -> None:
    """Packs the bits of a layer with silent neurons, a NaN and neurons without a slot."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randperm(_NUM_NEURONS, generator=random)[: _NUM_NEURONS // _EVERY]
    slot_F = torch.full((_NUM_NEURONS,), -1, dtype=torch.int32)
    slot_F[ids] = torch.arange(len(ids), dtype=torch.int32)
    hidden_N = torch.randn(len(ids), generator=random).relu()
    hidden_N[0] = torch.nan
    open_W = torch.full((-(-_NUM_NEURONS // 32),), -1, dtype=torch.int32)
    want_W, got_W = open_W.clone(), open_W.to(device)
    pack_open_ref(hidden_N, slot_F, want_W)
    kernels.pack_open(hidden_N.to(device), slot_F.to(device), got_W)
    wait()
    _compare("words of packed bits", got_W.cpu(), want_W)


def _compare(what: str, got: Tensor, want: Tensor) -> None:
    if count := int((got != want).sum()):
        raise Wrong(f"{count:,} of {want.numel():,} {what} are wrong")
