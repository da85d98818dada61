"""Tiled rows: the same bits as the rows of the file at every level, and where they are used."""

from contextlib import contextmanager

import k_quants
import pytest
import small_blocks
import torch
from models import make_model, make_sizes
from reference import rel_error
from test_runtime import IDS, decoded

from hotsplit import Engine
from hotsplit.files.gguf_file import TensorEntry
from hotsplit.files.gguf_types import block_sizes
from hotsplit.model.weight_types import BY_NAME, IN_MEMORY
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.kernels.stored import unpack
from hotsplit.runtime.kernels.tiled import TILED_KIND, from_tiled, is_tiled
from hotsplit.runtime.weights.matrix import Matrix
from hotsplit.runtime.weights.resident import Residence

BLOCK_BYTES = {"q4_0": 18, "q8_0": 34}
WIDTHS = [(kind, width) for kind in BLOCK_BYTES for width in (32, 64, 96, 160, 576, 1056)]
WIDTHS += [(kind, width) for kind in small_blocks.CODED for width in (32, 96, 416)]
WIDTHS += [(n, k * e.block_values) for n, e in small_blocks.GROUPS.items() for k in (1, 3, 10)]
WIDTHS += [(kind, width) for kind in k_quants.BLOCK_BYTES for width in (256, 768)]


def rows_of(kind, num_rows, width, seed=0):
    """Rows with random quants and scales of either sign near 0.01."""
    if kind in k_quants.BLOCK_BYTES:
        return torch.from_numpy(k_quants.random_rows(kind, num_rows, width, 0.01, seed))
    if kind in small_blocks.CODED or kind in small_blocks.GROUPS:
        return torch.from_numpy(small_blocks.random_rows(kind, num_rows, width, 0.01, seed))
    made = torch.Generator().manual_seed(seed)
    shape = (num_rows, width // 32, BLOCK_BYTES[kind])
    blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=made)
    blocks[..., 1] = 0x20 + blocks[..., 1] % 4 + blocks[..., 1] // 128 * 128
    return blocks.flatten(1)


@contextmanager
def copied_and_mapped(path, mode):
    """Engines whose weights are in memory, packed as the runtime likes, and in the file."""
    with (
        Engine.load(path, mode=mode, is_resident=True) as copied,
        Engine.load(path, mode=mode, is_resident=False) as mapped,
    ):
        yield copied, mapped


def assert_same_with_any_threads(compute):
    found = []
    for count in (1, 2, 3):
        library.set_threads(count)
        found.append(compute())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def assert_holds_rows(packed, kind, rows, file_kind, index):
    """`packed` unpacks to the rows of the file, whole and those of a list."""
    for chosen in (None, torch.tensor(index, dtype=torch.int32)):
        want = rows if chosen is None else rows[chosen.long()]
        right_AD = unpack(want, file_kind)
        out_AD = torch.full_like(right_AD, torch.nan)
        library.unpack_rows(packed, kind, out_AD, chosen)
        assert torch.equal(out_AD, right_AD)
        assert not torch.equal(out_AD, unpack(want.flip(0), file_kind))


def tiled(rows, kind):
    out = torch.zeros_like(rows)
    assert library.pack_rows(rows, kind, None, out, form="tiled") == TILED_KIND[kind]
    return out


@pytest.mark.parametrize("kind, width", WIDTHS)
def test_tiles_hold_the_rows_of_the_file(kind, width):
    rows = rows_of(kind, 48, width)
    tiles = tiled(rows, kind)
    assert tiles.shape == rows.shape and not torch.equal(tiles, rows)
    back, found = from_tiled(tiles, TILED_KIND[kind])
    assert found == kind and torch.equal(back, rows)
    assert_holds_rows(tiles, TILED_KIND[kind], rows, kind, [47, 0, 16, 16, 15])


@pytest.mark.parametrize("kind, width", WIDTHS)
def test_products_have_the_bits_of_the_rows_in_the_file(level, kind, width):
    rows = rows_of(kind, 64, width)
    tiles = tiled(rows, kind)
    lists = [None, torch.tensor([3, 60, 17, 17, 0]), torch.arange(63, -1, -1)]
    for count in (1, 2, 3, 8, 9, 33):
        x_TD = torch.randn(count, width, generator=torch.Generator().manual_seed(count))
        for chosen in lists:
            index_A = None if chosen is None else chosen.int()
            want_TA = library.dot_rows(rows, kind, x_TD, index_A)
            got_TA = library.dot_rows(tiles, TILED_KIND[kind], x_TD, index_A)
            assert torch.equal(got_TA, want_TA) and want_TA.abs().min() > 0
            assert not torch.equal(got_TA, want_TA.flip(1))


@pytest.mark.parametrize("kind", TILED_KIND)
def test_products_with_many_vectors_have_the_bits_of_single_ones(level, kind):
    width = max(64, BY_NAME[kind].block_values)
    rows = rows_of(kind, 48, width)
    x_TD = torch.randn(131, width, generator=torch.Generator().manual_seed(1))
    want_TA = torch.cat([library.dot_rows(rows, kind, x_D[None]) for x_D in x_TD])
    assert torch.equal(library.dot_rows(rows, kind, x_TD), want_TA)
    assert torch.equal(library.dot_rows(tiled(rows, kind), TILED_KIND[kind], x_TD), want_TA)


@pytest.mark.parametrize("kind", TILED_KIND)
def test_threads_do_not_change_the_bits(kind):
    tiles = tiled(rows_of(kind, 1040, 256), kind)
    x_D = torch.randn(256)
    assert_same_with_any_threads(lambda: library.dot_rows(tiles, TILED_KIND[kind], x_D))


def test_rows_that_are_no_whole_tiles_become_planar():
    rows = rows_of("q4_0", 17, 64)
    assert (
        library.pack_rows(rows, "q4_0", None, torch.zeros_like(rows), form="tiled") == "q4_0_planar"
    )
    floats = torch.randn(16, 64)
    out = torch.zeros(16, 256, dtype=torch.uint8)
    assert library.pack_rows(floats, "f32", None, out, form="tiled") == "f32"


def test_wrong_tiles_are_refused():
    rows = rows_of("q8_0", 32, 64)
    tiles = tiled(rows, "q8_0")
    x_D = torch.randn(64)
    for bad in (tiles[:17], torch.cat([tiles, tiles], dim=1)[:, : tiles.shape[1]]):
        with pytest.raises(ValueError, match="contiguous tiles of 16 rows"):
            library.dot_rows(bad, "q8_0_tiled", x_D)
    with pytest.raises(ValueError, match="not summed"):
        library.accumulate_rows(tiles, "q8_0_tiled", torch.randn(32))
    with pytest.raises(ValueError, match="q8_0_tiled are not packed again"):
        library.pack_rows(tiles, "q8_0_tiled", None, torch.zeros_like(tiles))
    with pytest.raises(ValueError, match="contiguous rows for the tiled form"):
        library.pack_rows(
            rows, "q8_0", None, torch.zeros(32, 80, dtype=torch.uint8)[:, :68], form="tiled"
        )


def test_parts_of_a_matrix_are_whole_tiles(preferred):
    rows = rows_of("q4_0", 48, 64)
    entry = TensorEntry(shape=(48, 64), kind="q4_0", read_rows=lambda a, b: rows[a:b].numpy())
    matrix = Residence().whole(entry, "tiled")
    whole = Matrix(data=rows, kind="q4_0", width=64)
    assert is_tiled(matrix.kind) and matrix.num_bytes == whole.num_bytes
    index_A = torch.tensor([40, 2])
    assert torch.equal(matrix.rows(index_A), whole.rows(index_A))
    x_TD = torch.randn(3, 64)
    assert torch.equal(matrix.part(16, 48).product(x_TD), whole.part(16, 48).product(x_TD))
    with pytest.raises(AssertionError):
        matrix.part(8, 48)


@pytest.mark.parametrize("kind", IN_MEMORY)
def test_a_prompt_has_the_bits_of_its_steps(level, tmp_path, kind):
    """The file types that are packed, with any number of threads. Passes of more than 32 tokens
    attend in another order of sums."""
    shape = make_sizes(width=256, num_neurons=256, context_length=128)
    make_model(sizes=shape, kind=kind).save(tmp_path / "m.gguf")
    ids = [7 * place % shape.vocab_size for place in range(100)]
    with Engine.load(tmp_path / "m.gguf", mode="dense") as engine:
        steps = decoded(engine, ids[:32])
        for threads in (1, 2, 3):
            library.set_threads(threads)
            assert torch.equal(engine.logits(ids[:32])[-1], steps)
        assert rel_error(engine.logits(ids)[-1], decoded(engine, ids)) < 1e-5
    assert steps.isfinite().all() and len(steps.unique()) > shape.vocab_size // 2


@pytest.mark.parametrize("kind", [k for k in TILED_KIND if BY_NAME[k].is_in_files] + [*IN_MEMORY])
@pytest.mark.parametrize("mode", ["dense", "exact", "predicted"])
def test_a_model_uses_tiles_where_all_rows_are_multiplied(preferred, tmp_path, kind, mode):
    width, rank = (256, 256) if block_sizes(kind)[0] > 64 else (64, 32)
    shape = make_sizes(width=width, num_neurons=96)
    make_model(sizes=shape, kind=kind, predictor_rank=rank).save(tmp_path / "m.gguf")
    with copied_and_mapped(tmp_path / "m.gguf", mode) as (copied, mapped):
        for layer in copied.layers:
            (block,) = layer.ffn.blocks
            assert all(is_tiled(linear.weight.kind) for linear in layer.attention.inputs)
            assert is_tiled(block.gate.weight.kind) == (mode != "predicted")
            assert is_tiled(block.up.weight.kind) == (mode == "dense")
            assert not is_tiled(block.down.kind)
        assert torch.equal(decoded(copied, IDS), decoded(mapped, IDS))
        assert torch.equal(copied.logits(IDS), mapped.logits(IDS))
