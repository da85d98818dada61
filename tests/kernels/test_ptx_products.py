"""The products of a prompt compiled and executed as PTX, against float64. sm_90's own instructions
for products (wgmma) are not executed."""

import re

import pytest
import torch
from gpu_matrices import CODED_KINDS, EPS, REFERENCE, make_matrix, sizes
from ptx import DataRace, Uninitialised
from ptx.kernels import PtxKernels
from test_gpu_products import bound, is_right, powers, tokens

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="they run on the device instead")
ADA, BLACKWELL = 89, 120
# Rounding toward zero after every 16 terms adds at most one unit in the last place each time.
TRUNCATED = 2.0**-23


@pytest.mark.parametrize(
    "kind, arch, count",
    [("q8_0_planar", ADA, 5), ("q4_k", BLACKWELL, 40), *((kind, ADA, 3) for kind in CODED_KINDS)],
)
def test_rows_times_tokens(kind, arch, count):
    """Those that differ only in how a block is unpacked are smaller."""
    is_coded = kind in CODED_KINDS
    num_rows, width = (33, 256) if is_coded else (70, 512)
    matrix, x_TD = make_matrix(kind, num_rows, width), tokens(count, width)
    cases = [(torch.linspace(-1, 1, num_rows), powers(count)), (None, None)]
    for bias, power in cases[: 1 if is_coded else 2]:
        got, want = torch.empty(2, count, num_rows)
        PtxKernels(arch).kernels.multiply(matrix, bias, x_TD, power, got)
        REFERENCE.multiply(matrix, bias, x_TD, power, want)
        allowed = bound(x_TD, sizes(matrix).T, power) * (1 + 32 * TRUNCATED) + EPS
        assert is_right(got, want, allowed)


@pytest.mark.parametrize("kind, count", [("q6_k_planar", 40), ("q4_0_planar", 3)])
def test_sums_of_rows(kind, count):
    matrix, hidden_TN = make_matrix(kind, 70, 512), tokens(count, 72)[:, :70]
    for power, is_added in ((None, False), (powers(count), True)):
        got = torch.full((count, 512), 0.5)
        want = got.clone()
        PtxKernels(ADA).kernels.multiply_down(matrix, hidden_TN, power, got, is_added=is_added)
        REFERENCE.multiply_down(matrix, hidden_TN, power, want, is_added=is_added)
        assert is_right(got, want, bound(hidden_TN, sizes(matrix), power) + EPS)


def test_a_token_has_the_same_bits_in_every_pass():
    kernels, matrix, x_TD = PtxKernels(ADA).kernels, make_matrix("q4_k", 70, 256), tokens(40, 256)
    whole, own = torch.empty(40, 70), torch.empty(3, 70)
    kernels.multiply(matrix, None, x_TD, None, whole)
    kernels.multiply(matrix, None, x_TD[35:38], None, own)
    assert torch.equal(own, whole[35:38])
    whole, own = torch.empty(40, 256), torch.empty(3, 256)
    kernels.multiply_down(matrix, x_TD[:, :70], None, whole, is_added=False)
    kernels.multiply_down(matrix, x_TD[35:38, :70], None, own, is_added=False)
    assert torch.equal(own, whole[35:38])


def test_copies_that_are_not_awaited_and_swapped_halves_are_found():
    matrix, x_TD, got, want = (
        make_matrix("q8_0_planar", 33, 256),
        tokens(3, 256),
        *torch.empty(2, 3, 33),
    )
    REFERENCE.multiply(matrix, None, x_TD, None, want)

    def run(old: str, new: str) -> None:
        def edit(name: str, text: str) -> str:
            changed = re.sub(old, new, text)
            assert changed != text
            return changed

        PtxKernels(ADA, edit=edit).kernels.multiply(matrix, None, x_TD, None, got)

    with pytest.raises((DataRace, Uninitialised)):
        run(r"cp\.async\.wait_group\s+\d+", "cp.async.wait_group 90")
    run(r"(mma\.sync\S+ \{[^}]*\}, \{ )(%r\d+), (%r\d+)", r"\1\3, \2")
    assert not is_right(got, want, bound(x_TD, sizes(matrix).T, None) + EPS)
