"""The GPU kernel of gated short convolutions, compared with its float64 reference on a CUDA device
or in Triton's interpreter, and executed as PTX. A token has the same bits in every pass.

Letters: T rows, S slots, D hidden size, J taps."""

from itertools import pairwise

import pytest
import torch
from gpu_matrices import EPS, NAN, REFERENCE, device
from ptx import Fault
from ptx.kernels import PtxKernels

pytest.importorskip("triton")
from hotsplit.runtime.kernels.gpu.kernels import Kernels, triton_kernels  # noqa: E402

SLOTS = 6
WIDE, ODD = (130, 3), (40, 5)  # hidden size, taps
CASES = ((WIDE, 1), ((128, 1), 2), (WIDE, 7), (ODD, 64), (ODD, 257))  # with rows of a text
Found = tuple[torch.Tensor, torch.Tensor]  # outputs [T, D], states [S, J-1, D]


def values(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device())


def run(kernels: Kernels, shape: tuple[int, int], ends: list[int], first: int = -1) -> Found:
    """A text in passes that end after so many rows, from slot `first`; the state after the n-th
    pass is in slot n % 2, that after the second last row of a pass in slot 3."""
    width, taps = shape
    projected, conv = values(max(ends), 3 * width, seed=1), values(width, taps, seed=2)
    state = values(SLOTS, taps - 1, width, seed=3)
    out = torch.full((max(ends), width), NAN, device=device())
    for number, (begin, end) in enumerate(pairwise([0, *ends])):
        count, slot = end - begin, first if number == 0 else (number - 1) % 2
        writes = torch.full((count,), -1, dtype=torch.int32)
        writes[max(0, count - 2)], writes[-1] = 3, number % 2
        run_13 = torch.tensor([[0, count, slot]], dtype=torch.int32, device=device())
        kernels.convolve_gated(
            projected[begin:end].contiguous(),
            conv,
            state,
            run_13,
            writes.to(device()),
            out[begin:end],
        )
    return out, state


def is_right(got: Found, want: Found, taps: int) -> bool:
    for mine, right in zip(got, want, strict=True):
        error = (mine - right).abs() / (1 + right.abs())
        if not torch.equal(mine.isnan(), right.isnan()):
            return False
        if error.numel() and error.nan_to_num().max() > 4 * taps * EPS:
            return False
    return True


@pytest.mark.parametrize(
    "shape, rows", [*CASES[:4], pytest.param(*CASES[4], marks=pytest.mark.slow)], ids=str
)
def test_any_passes_are_the_reference_with_equal_bits(shape, rows):
    first = 2 if rows == 7 else -1
    whole = run(triton_kernels(), shape, [rows], first)
    assert is_right(whole, run(REFERENCE, shape, [rows], first), shape[1])
    if rows < 64:
        ends = sorted({1, rows // 3, rows - 1, rows} - {0})
        parts, _ = run(triton_kernels(), shape, ends, first)
        assert torch.equal(whole[0], parts)


def several(kernels: Kernels) -> Found:
    """Rows of three texts, one of two rows beside a run of none, and a row of no text."""
    width, taps = WIDE
    runs = torch.tensor([[0, 1, 0], [1, 3, -1], [4, 2, 3], [0, 0, 0]], dtype=torch.int32)
    writes = torch.tensor([1, 5, -1, 2, -1, 4, -1], dtype=torch.int32)
    projected, conv = values(7, 3 * width, seed=4), values(width, taps, seed=5)
    state, out = values(SLOTS, taps - 1, width, seed=6), torch.full((7, width), NAN)
    out = out.to(device())
    kernels.convolve_gated(projected, conv, state, runs.to(device()), writes.to(device()), out)
    return out, state


def test_several_texts_and_a_row_of_none():
    got = several(triton_kernels())
    assert is_right(got, several(REFERENCE), WIDE[1]) and got[0][6].isnan().all()


@pytest.mark.parametrize("wrong", [0, 1])
def test_the_bound_rejects_wrong_results(wrong):
    want = several(REFERENCE)
    for change in (torch.zeros_like, lambda t: t * (1 + 1e-3), lambda t: t.flip(-1)):
        found = list(several(REFERENCE))
        found[wrong] = change(found[wrong])
        assert not is_right((found[0], found[1]), want, WIDE[1])


on_ptx = pytest.mark.skipif(torch.cuda.is_available(), reason="they run on the device instead")


@on_ptx
@pytest.mark.parametrize("arch, cases", [(89, CASES[:3]), (90, CASES[3:4]), (120, CASES[1:3])])
def test_ptx(arch, cases):
    kernels = PtxKernels(arch, overlaps=arch >= 90).kernels
    assert is_right(several(kernels), several(REFERENCE), WIDE[1])
    for shape, rows in cases:
        got = run(kernels, shape, [rows])
        assert torch.equal(got[0], run(kernels, shape, sorted({1, rows}))[0])
        assert is_right(got, run(REFERENCE, shape, [rows]), shape[1])


@on_ptx
@pytest.mark.parametrize("old, new", [("setp.gt.s64", "setp.ge.s64"), ("mul.f32", "add.f32")])
def test_planted_faults_are_found(old, new):
    def edit(name: str, text: str) -> str:
        assert old in text, sorted(set(text.split()))
        return text.replace(old, new)

    try:
        found = several(PtxKernels(89, edit=edit).kernels)
    except Fault:
        return
    assert not is_right(found, several(REFERENCE), WIDE[1])
