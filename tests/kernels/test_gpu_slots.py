"""The neuron cache's GPU kernels and their definitions give exactly the bytes expected. The kernels
run on a CUDA device, or in Triton's interpreter if there is none."""

import numpy as np
import pytest
import torch
from gpu_matrices import CODED_KINDS, KINDS, REFERENCE, block_width, device, make_matrix

from hotsplit.runtime.device.bits import unpack_bits
from hotsplit.runtime.kernels.planar import FILE_KIND, FORMS, form_of, from_planar


def scattered(kernels, rows, slots, target, form):
    """A copy of the target matrix (uint8) with rows copied into slots."""
    place = torch.device("cpu") if kernels is REFERENCE else device()
    whole = target.to(place, copy=True)
    offset = 48 + torch.arange(len(rows)) * (-(-rows.shape[1] // 16) * 16)
    staging = torch.zeros(int(offset[-1]) + rows.shape[1] + 7, dtype=torch.uint8)
    for start, row in zip(offset.tolist(), rows, strict=True):
        staging[start : start + len(row)] = row
    copies = [
        [start, whole[slot].data_ptr(), rows.shape[1], form]
        for start, slot in zip(offset.tolist(), slots, strict=True)
    ]
    kernels.scatter(
        staging.to(place), torch.tensor(copies, dtype=torch.int64).to(place), rows.shape[1]
    )
    return whole.cpu()


@pytest.mark.parametrize("blocks", [1, 9])
@pytest.mark.parametrize("kind", [*KINDS, *CODED_KINDS])
def test_rows_of_every_kind_reach_their_slots(kernels, kind, blocks):
    """Rows are stored in the GPU's layout or in the file's."""
    source = make_matrix(kind, 5, blocks * block_width(kind))
    own = source.data.cpu().view(torch.uint8)
    before = torch.full((7, own.shape[1]), 255, dtype=torch.uint8)
    want = before.clone()
    want[[6, 0, 3]] = own[[1, 4, 2]]
    for stored in (kind, FILE_KIND.get(kind, kind)):
        data = own if stored == kind else from_planar(own, kind)[0]
        form = form_of(stored, kind)
        assert bool(form) == (stored != kind)
        for which in (REFERENCE, kernels):
            assert torch.equal(scattered(which, data[[1, 4, 2]], [6, 0, 3], before, form), want)


def test_copies_of_different_lengths_in_one_launch(kernels):
    """Bytes between the copies are unchanged."""
    random = np.random.default_rng(0)
    sizes = [4, 4, 34, 2 * 1024 * 2 - 2, 2 * 1024 * 2 + 2, 8706]
    place = device()
    target = torch.full((sum(sizes) + 64 * len(sizes),), 9, dtype=torch.uint8, device=place)
    staging = torch.from_numpy(random.integers(0, 256, 1 << 16).astype(np.uint8)).to(place)
    want, copies, at = target.cpu().clone(), [], 16
    for number, size in enumerate(sizes):
        begin = number * 9000 // 16 * 16
        copies.append([begin, target.data_ptr() + at, size, 0])
        want[at : at + size] = staging.cpu()[begin : begin + size]
        at += size + 64 - size % 2
    kernels.scatter(staging, torch.tensor(copies, device=place), max(sizes))
    assert torch.equal(target.cpu(), want)


@pytest.mark.parametrize("num_neurons", [1, 31, 32, 33, 256, 257, 300])
def test_bits_of_open_neurons(kernels, num_neurons):
    random = torch.Generator().manual_seed(num_neurons)
    num_slots = max(1, num_neurons // 3)
    slot_F = torch.full((num_neurons,), -1, dtype=torch.int32)
    ids = torch.randperm(num_neurons, generator=random)[:num_slots]
    slot_F[ids] = torch.arange(num_slots, dtype=torch.int32)
    hidden_N = torch.randn(num_slots, generator=random).relu()
    hidden_N[0] = torch.nan
    want = torch.zeros(-(-num_neurons // 32) * 32, dtype=torch.bool)
    want[ids] = hidden_N != 0
    for which in (REFERENCE, kernels):
        place = torch.device("cpu") if which is REFERENCE else device()
        open_W = torch.full((-(-num_neurons // 32),), -1, dtype=torch.int32, device=place)
        which.pack_open(hidden_N.to(place), slot_F.to(place), open_W)
        assert torch.equal(unpack_bits(open_W.cpu()), want)


@pytest.mark.parametrize("wrong", ["form", "slot"])
def test_the_comparison_notices_a_wrong_copy(wrong):
    source = make_matrix("q8_0_planar", 3, 64)
    own = source.data.cpu()
    before = torch.zeros_like(own)
    right = scattered(REFERENCE, own[:1], [1], before, 0)
    other = scattered(
        REFERENCE,
        own[:1],
        [1 if wrong == "form" else 2],
        before,
        FORMS.index("q8_0") if wrong == "form" else 0,
    )
    assert not torch.equal(right, other)
