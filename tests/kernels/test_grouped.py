"""Grouped rows: at every level their sums are bit-identical to those of the file's rows, and dense
models use them."""

import pytest
import torch
from models import make_model, make_sizes
from test_cpu_kernels import rounded
from test_runtime import IDS, decoded
from test_tiled import assert_holds_rows, assert_same_with_any_threads, copied_and_mapped, rows_of

from hotsplit import Engine
from hotsplit.files.gguf_file import TensorEntry
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.kernels.grouped import GROUPED_KIND, from_grouped, is_grouped
from hotsplit.runtime.kernels.stored import unpack
from hotsplit.runtime.weights.matrix import Matrix
from hotsplit.runtime.weights.resident import Residence

WIDTHS = [32, 64, 96, 160, 512, 576, 1056]
FLOATS = {"f16": torch.float16, "bf16": torch.bfloat16}


def file_rows(kind, num_rows, width):
    if kind not in FLOATS:
        return rows_of(kind, num_rows, width)
    values = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(0))
    return values.to(FLOATS[kind])


def grouped(rows, kind):
    out = torch.zeros(len(rows), rows.shape[1] * rows.element_size(), dtype=torch.uint8)
    assert library.pack_rows(rows, kind, None, out, "grouped") == GROUPED_KIND[kind]
    return out


@pytest.mark.parametrize("kind", GROUPED_KIND)
@pytest.mark.parametrize("width", WIDTHS)
def test_groups_hold_the_rows_of_the_file(kind, width):
    rows = file_rows(kind, 128, width)
    groups = grouped(rows, kind)
    assert groups.nbytes == rows.nbytes
    assert width == 32 or not torch.equal(groups, rows.view(torch.uint8))
    back, found = from_grouped(groups, GROUPED_KIND[kind])
    assert found == kind and torch.equal(back, rows)
    assert_holds_rows(groups, GROUPED_KIND[kind], rows, kind, [127, 0, 64, 63, 17, 17])


@pytest.mark.parametrize("kind", GROUPED_KIND)
@pytest.mark.parametrize("width", WIDTHS)
def test_sums_are_bit_identical_to_those_of_the_rows_in_the_file(level, kind, width):
    rows = file_rows(kind, 192, width)
    groups = grouped(rows, kind)
    for seed in range(3):
        c_A = torch.randn(192, generator=torch.Generator().manual_seed(seed))
        c_A[seed::5] = 0.0
        want_D = library.accumulate_rows(rows, kind, c_A)
        got_D = library.accumulate_rows(groups, GROUPED_KIND[kind], c_A)
        assert torch.equal(got_D, want_D) and want_D.abs().min() > 0
        assert not torch.equal(got_D, library.accumulate_rows(rows, kind, c_A.flip(0)))
        exact_D = rounded(kind, c_A).double() @ unpack(rows, kind).double()
        assert (got_D - exact_D).norm() < 3e-4 * exact_D.norm()


@pytest.mark.parametrize("kind", GROUPED_KIND)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 3e38, 1e-40])
def test_sums_with_unusual_coefficients_are_bit_identical(level, kind, bad):
    rows = file_rows(kind, 128, 96)
    c_A = torch.randn(128)
    c_A[70] = bad
    want_D = library.accumulate_rows(rows, kind, c_A)
    got_D = library.accumulate_rows(grouped(rows, kind), GROUPED_KIND[kind], c_A)
    assert torch.equal(got_D.isnan(), want_D.isnan())
    assert torch.equal(got_D.nan_to_num(), want_D.nan_to_num())


@pytest.mark.parametrize("kind", GROUPED_KIND)
def test_threads_do_not_change_the_bits(kind):
    groups, c_A = grouped(file_rows(kind, 1024, 1056), kind), torch.randn(1024)
    assert_same_with_any_threads(lambda: library.accumulate_rows(groups, GROUPED_KIND[kind], c_A))


def test_incomplete_groups_are_not_grouped():
    rows = rows_of("q4_0", 80, 64)
    assert library.pack_rows(rows, "q4_0", None, torch.zeros_like(rows), "grouped") == "q4_0_planar"
    for shape in ((80, 64), (64, 72)):  # a part of a group; a part of a block
        out = torch.zeros(shape[0], 2 * shape[1], dtype=torch.uint8)
        values = torch.randn(shape).half()
        assert library.pack_rows(values, "f16", None, out, "grouped") == "f16"
        assert torch.equal(out.view(torch.float16), values)


def test_wrong_groups_are_refused():
    rows = rows_of("q8_0", 128, 64)
    groups, c_A = grouped(rows, "q8_0"), torch.randn(128)
    with pytest.raises(ValueError, match="contiguous groups of 64 rows"):
        library.accumulate_rows(groups[:80], "q8_0_grouped", c_A[:80])
    with pytest.raises(ValueError, match="summed all at once"):
        index_A = torch.arange(128, dtype=torch.int32)
        library.accumulate_rows(groups, "q8_0_grouped", c_A, index_A)
    with pytest.raises(ValueError, match="not multiplied"):
        library.dot_rows(groups, "q8_0_grouped", torch.randn(64))
    with pytest.raises(ValueError, match="q8_0_grouped are not packed again"):
        library.pack_rows(groups, "q8_0_grouped", None, torch.zeros_like(groups))
    with pytest.raises(ValueError, match="contiguous rows for the grouped form"):
        out = torch.zeros(128, 80, dtype=torch.uint8)[:, :68]
        library.pack_rows(rows, "q8_0", None, out, "grouped")


def test_parts_of_a_grouped_matrix_add_up_as_those_of_its_file(preferred):
    rows = rows_of("q4_0", 192, 64)
    entry = TensorEntry(shape=(192, 64), kind="q4_0", read_rows=lambda a, b: rows[a:b].numpy())
    matrix, whole = Residence().whole(entry, "grouped"), Matrix(data=rows, kind="q4_0", width=64)
    assert is_grouped(matrix.kind) and matrix.num_bytes == whole.num_bytes
    index_A, c_TN = torch.tensor([190, 2, 64]), torch.randn(3, 192)
    assert torch.equal(matrix.rows(index_A), whole.rows(index_A))
    assert torch.equal(matrix.combine_many(c_TN), whole.combine_many(c_TN))
    found, wanted = (each.part(64, 192).combine_many(c_TN[:, 64:]) for each in (matrix, whole))
    assert torch.equal(found, wanted)
    with pytest.raises(AssertionError):
        matrix.part(16, 192)


@pytest.mark.parametrize("kind", GROUPED_KIND)
@pytest.mark.parametrize("width, num_neurons", [(64, 192), (160, 192), (160, 1088)])
def test_a_dense_model_adds_groups_with_the_bits_of_its_file(
    preferred, level, tmp_path, kind, width, num_neurons
):
    """Tokens are computed one after another, and several at once. In rows of 160 values, the last
    block is rounded once more before it is added; chunks of two groups of 1,088 neurons add it to
    sums that are not 0."""
    shape = make_sizes(width=width, num_neurons=num_neurons)
    make_model(sizes=shape, kind=kind).save(tmp_path / "m.gguf")
    with copied_and_mapped(tmp_path / "m.gguf", "dense") as (copied, mapped):
        for layer in copied.layers:
            (block,) = layer.ffn.blocks
            assert is_grouped(block.down.kind)
        assert torch.equal(decoded(copied, IDS), decoded(mapped, IDS))
        for count in (2, 3, 5, 6, 7, 8, 9):
            ids = torch.arange(1, count + 1)
            assert torch.equal(copied.logits(ids), mapped.logits(ids))


@pytest.mark.parametrize("mode", ["exact", "predicted"])
def test_other_modes_have_no_groups(preferred, tmp_path, mode):
    shape = make_sizes(width=64, num_neurons=192)
    make_model(sizes=shape, kind="q8_0", predictor_rank=32).save(tmp_path / "m.gguf")
    with Engine.load(tmp_path / "m.gguf", mode=mode, is_resident=True) as engine:
        assert not any(is_grouped(b.down.kind) for layer in engine.layers for b in layer.ffn.blocks)
