"""Planar rows and named bits, in which weights and neurons are on GPUs; and what needs Triton."""

import subprocess
import sys

import pytest
import torch
from gpu_matrices import make_matrix

from hotsplit.files.gguf_file import values_of
from hotsplit.runtime.kernels.gpu.kernels import triton_kernels
from hotsplit.runtime.kernels.planar import PLANAR_KIND, from_planar, planar
from hotsplit.runtime.kernels.stored import unpack

# ---- planar rows ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PLANAR_KIND)
def test_planar_rows_have_the_values_of_the_file(kind):
    """The gguf package gives the values, if it knows the type. The number of bytes is unchanged,
    and converting back is exact."""
    raw = make_matrix(kind, 3, 768).data.cpu()
    rows, made = planar(raw, kind)
    assert made == PLANAR_KIND[kind] and rows.shape == raw.shape
    want = values_of(raw.numpy(), kind)
    assert torch.equal(unpack(rows, made), torch.from_numpy(want))
    back, back_kind = from_planar(rows, made)
    assert back_kind == kind and torch.equal(back, raw)


def test_the_planes_of_a_row_follow_one_another():
    blocks = torch.arange(2 * 34, dtype=torch.uint8)[None]
    rows, _ = planar(blocks, "q8_0")
    assert rows[0, :4].tolist() == [0, 1, 34, 35]
    assert rows[0, 4:].tolist() == [*range(2, 34), *range(36, 68)]


# ---- the records ---------------------------------------------------------------------------


def test_without_triton_the_error_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ImportError, match="need Triton.*pip install triton") as caught:
        triton_kernels()
    assert "\n" not in str(caught.value)


def test_the_reference_needs_no_triton():
    program = """if True:
        import sys
        sys.modules["triton"] = None
        import torch
        from hotsplit.runtime.kernels.gpu.kernels import KERNELS, reference_kernels
        x = torch.ones(4)
        reference_kernels().add_norm(x, None, None, None, 0.0, None, out := torch.empty(4), x)
        assert out.tolist() == [2.0] * 4 and len(KERNELS) > 20"""
    subprocess.run([sys.executable, "-c", program], check=True)
