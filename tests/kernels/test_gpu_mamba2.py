"""The GPU kernels of Mamba-2, compared with their float64 references on a CUDA device or in
Triton's interpreter, and executed as PTX. A token has the same bits in every pass.

Letters: T rows, S slots, H heads, P head width, G groups, N state width, J taps."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from gpu_matrices import EPS, NAN, REFERENCE, device
from ptx.kernels import PtxKernels

pytest.importorskip("triton")
from hotsplit.runtime.kernels.gpu.kernels import Kernels, triton_kernels  # noqa: E402

SLOTS = 6
Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # outputs, convolutions and states of slots


def values(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device())


@dataclass(frozen=True, kw_only=True)
class Case:
    heads: int
    width: int
    groups: int
    state: int
    taps: int = 4
    has_norm: bool = True

    def run(self, kernels: Kernels, ends: list[int], first: int = -1) -> Found:
        """A text in passes that end after so many rows, from slot `first`; the state after the n-th
        pass is in slot n % 2, that after the second last row of a pass in slot 3."""
        size, rows = self.heads * self.width, max(ends)
        channels = size + 2 * self.groups * self.state
        projected = values(rows, size + channels + self.heads, seed=1)
        taps, bias = values(channels, self.taps, seed=2) * 0.3, values(channels, seed=3)
        step_bias, rate = values(self.heads, seed=4), -values(self.heads, seed=5).abs()
        skip, weight = values(self.heads, seed=6), values(size, seed=7) if self.has_norm else None
        conv = values(SLOTS, self.taps - 1, channels, seed=8)
        state = values(SLOTS, self.heads, self.state, self.width, seed=9)
        out = torch.full((rows, self.heads, self.width), NAN, device=device())
        for number, (begin, end) in enumerate(pairwise([0, *ends])):
            count, slot = end - begin, first if number == 0 else (number - 1) % 2
            writes = torch.full((count,), -1, dtype=torch.int32)
            writes[max(0, count - 2)], writes[-1] = 3, number % 2
            runs = torch.tensor([[0, count, slot]], dtype=torch.int32, device=device())
            given = runs, writes.to(device())
            mixed = torch.full((count, channels + 2 * self.heads), NAN, device=device())
            own, rows_TW = out[begin:end], projected[begin:end].contiguous()
            kernels.convolve_channels(rows_TW, taps, bias, step_bias, rate, conv, *given, mixed)
            kernels.scan_states(mixed, skip, state, *given, own, self.groups)
            kernels.gate_groups(own.flatten(1), rows_TW, weight, 1e-5, self.groups)
        return out, conv, state


ODD = Case(heads=6, width=20, groups=3, state=12)
CASES = {
    "odd": (ODD, [7], 2),
    "one group": (Case(heads=3, width=8, groups=1, state=40, taps=3), [5], -1),
    "no norm": (Case(heads=5, width=16, groups=5, state=130, has_norm=False), [3], -1),
    "a row": (ODD, [1], 0),
}


def is_right(got: Found, want: Found) -> bool:
    return all(
        not mine.isnan().any() and ((mine - right).abs() / (1 + right.abs())).max() < 64 * EPS
        for mine, right in zip(got, want, strict=True)
    )


@pytest.mark.parametrize("case", CASES)
def test_any_passes_are_the_reference_with_equal_bits(case):
    own, ends, first = CASES[case]
    whole = own.run(triton_kernels(), ends, first)
    assert is_right(whole, own.run(REFERENCE, ends, first))
    parts = own.run(triton_kernels(), sorted({1, max(1, ends[0] - 2), *ends}), first)
    assert torch.equal(whole[0], parts[0])


@pytest.mark.parametrize("wrong", range(3))
def test_the_bound_rejects_wrong_results(wrong):
    want = ODD.run(REFERENCE, [3])
    for change in (torch.zeros_like, lambda t: t * (1 + 1e-3), lambda t: t.flip(-1)):
        found = list(ODD.run(REFERENCE, [3]))
        found[wrong] = change(found[wrong])
        assert not is_right((found[0], found[1], found[2]), want)


@pytest.mark.skipif(torch.cuda.is_available(), reason="they run on the device instead")
@pytest.mark.parametrize("arch", [89, 90])
def test_ptx(arch):
    kernels = PtxKernels(arch, overlaps=arch >= 90).kernels
    whole = ODD.run(kernels, [4], 2)
    assert is_right(whole, ODD.run(REFERENCE, [4], 2))
    assert torch.equal(whole[0], ODD.run(kernels, [1, 4], 2)[0])
