"""Tiles of types with grids as files have them: gguf's values, the bits of the table types, and the
choice between the two."""

import itertools
import json

import numpy as np
import pytest
import torch
from checkpoints import random_llama
from gguf.quants import dequantize
from grid_blocks import blocks_of, grid_rows
from test_gguf_source import with_matrices
from test_runtime import IDS
from test_tiled import assert_same_with_any_threads

from hotsplit import Engine
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import TensorEntry, in_memory, type_of
from hotsplit.files.table_blocks import grid_codes, pack_table_blocks
from hotsplit.model.weight_types import GRID_NAMES, TABLES
from hotsplit.runtime.kernels import grids
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.weights.resident import Residence
from hotsplit.system.cache_place import GRIDS_FILE

VNNI = ("avx512bf16", "avx512vnni")
WIDTHS = (256, 512, 768, 2048)  # whole pairs of blocks and single last ones
needs_grids = pytest.mark.skipif(
    not library.reads_grids(), reason="the processor has no VBMI or no GFNI"
)


@pytest.fixture(autouse=True)
def as_in_a_new_process(monkeypatch, tmp_path):
    monkeypatch.setenv("HOTSPLIT_CACHE", str(tmp_path / "cache"))
    grids._is_faster.cache_clear()
    if library.reads_grids():
        for kind in GRID_NAMES:
            library.set_grid(kind, grid_codes(kind))
    yield
    grids._is_faster.cache_clear()


@pytest.fixture(params=[n for n in library.usable_levels() if n in ("amx", *VNNI)] or ["none"])
def level_with_grids(request):
    if not library.reads_grids():
        pytest.skip("the processor has no VBMI or no GFNI")
    library.set_level(request.param)
    assert library.reads_grids()
    return request.param


def tiles(rows, kind):
    rows, out = torch.from_numpy(rows), torch.zeros(rows.shape, dtype=torch.uint8)
    assert library.pack_rows(rows, kind, None, out, form="tiled") == f"{kind}_tiled"
    return out


def unpacked(data, kind, num_rows, width, index_A=None):
    count = num_rows if index_A is None else len(index_A)
    out_AD = torch.full((count, width), torch.nan)
    library.unpack_rows(data, f"{kind}_tiled", out_AD, index_A)
    return out_AD.numpy().view(np.uint32)


@needs_grids
@pytest.mark.parametrize("kind", GRID_NAMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_tiles_unpack_to_the_values_of_gguf(kind, width):
    scales = [0.0, -0.0, 2.0**-24, -(2.0**-15), 65504.0, *np.linspace(-0.01, 0.01, 43)]
    rows = blocks_of(kind, scales * (width // 256)).reshape(48, -1)
    want = dequantize(rows, type_of(kind)).view(np.uint32)
    data = tiles(rows, kind)
    assert np.array_equal(unpacked(data, kind, 48, width), want)
    chosen = torch.tensor([47, 0, 16, 16, 15], dtype=torch.int32)
    assert np.array_equal(unpacked(data, kind, 48, width, chosen), want[chosen])


@pytest.mark.parametrize("kind", GRID_NAMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_products_have_the_bits_of_the_table_type(level_with_grids, kind, width):
    rows, table = grid_rows(kind, 80, width, 0.01), TABLES[kind]
    own, other = tiles(rows, kind), tiles(pack_table_blocks(rows, kind), table)
    values_FD = torch.from_numpy(dequantize(rows, type_of(kind))).double()
    chosen = torch.tensor([3, 60, 17, 17, 79, 0], dtype=torch.int32)
    for count, index_A in itertools.product((1, 2, 3, 4, 5, 7, 8, 17, 64, 131), (None, chosen)):
        x_TD = torch.randn(count, width, generator=torch.Generator().manual_seed(count))
        got_TA = library.dot_rows(own, f"{kind}_tiled", x_TD, index_A)
        want_TA = library.dot_rows(other, f"{table}_tiled", x_TD, index_A)
        assert torch.equal(got_TA, want_TA) and want_TA.abs().min() > 0
        exact_TA = x_TD.double() @ (values_FD if index_A is None else values_FD[chosen]).T
        assert (got_TA - exact_TA).abs().max() < 1e-4 * exact_TA.abs().max()
        assert not torch.equal(got_TA, want_TA.flip(1))


@needs_grids
@pytest.mark.parametrize("kind", GRID_NAMES)
def test_threads_do_not_change_the_bits(kind):
    data = tiles(grid_rows(kind, 1040, 256, 0.01), kind)
    for count in (1, 3):
        x_TD = torch.randn(count, 256)
        assert_same_with_any_threads(
            lambda x_TD=x_TD: library.dot_rows(data, f"{kind}_tiled", x_TD)
        )


@needs_grids
@pytest.mark.parametrize("kind", GRID_NAMES)
def test_every_entry_and_every_bit_of_a_row_counts(kind):
    """A wrong code of the last entry is noticed, and so is any changed bit of a block."""
    rows, codes = grid_rows(kind, 16, 512, 0.01), grid_codes(kind)
    want = unpacked(tiles(rows, kind), kind, 16, 512)
    used = rows.copy().reshape(32, -1)  # every index is the last
    used[:, 2:] = 0xFF
    used = used.reshape(16, -1)
    before = unpacked(tiles(used, kind), kind, 16, 512)
    wrong = codes.copy()
    wrong[-1] = (wrong[-1] + 1) % 3
    library.set_grid(kind, wrong)
    assert not np.array_equal(unpacked(tiles(used, kind), kind, 16, 512), before)
    library.set_grid(kind, codes)
    for byte in range(rows.shape[1]):
        changed = rows.copy()
        changed[:, byte] ^= 1 << byte % 8
        assert not np.array_equal(unpacked(tiles(changed, kind), kind, 16, 512), want), byte


@needs_grids
def test_other_levels_have_no_such_kernels():
    data = tiles(grid_rows("iq3_xxs", 16, 256, 0.01), "iq3_xxs")
    library.set_level("generic")
    assert not library.reads_grids() and not grids.are_faster("iq3_xxs")
    for compute in (
        lambda: library.dot_rows(data, "iq3_xxs_tiled", torch.ones(256)),
        lambda: library.unpack_rows(data, "iq3_xxs_tiled", torch.ones(16, 256)),
        lambda: library.set_grid("q8_0", grid_codes("iq3_xxs")),
        lambda: library.set_grid("iq3_s", grid_codes("iq3_xxs")),
    ):
        with pytest.raises(AssertionError):
            compute()


def timed(monkeypatch, seconds):
    """Lets products take so many seconds, by kind; the first of each takes long."""
    now, calls = [0.0], []

    def dot_rows(data, kind, x_D):
        now[0] += seconds[kind] + (0.1 if kind not in calls else 0.0)
        calls.append(kind)

    monkeypatch.setattr(grids.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(library, "dot_rows", dot_rows)
    return calls


@needs_grids
@pytest.mark.parametrize(
    "own, table, wanted",
    [(2e-3, 3e-3, True), (1.0e-3, 0.97e-3, True), (1e-3, 0.9e-3, False), (1.0, 1e-3, True)],
)
def test_the_faster_is_chosen_and_the_smaller_if_they_are_alike(monkeypatch, own, table, wanted):
    calls = timed(monkeypatch, {"iq2_xs_tiled": own, "iq2_table_tiled": table})
    assert grids.measured("iq2_xs") is wanted
    assert len(calls) == (1 if own == 1.0 else 2 * (grids.ROUNDS + 1))


@needs_grids
def test_a_choice_is_measured_once_a_machine_and_type(monkeypatch, tmp_path):
    found = []
    monkeypatch.setattr(grids, "measured", lambda kind: found.append(kind) or kind == "iq2_xs")

    def again(kind):
        grids._is_faster.cache_clear()
        return grids.are_faster(kind)

    assert again("iq2_xs") and again("iq2_xs") and not again("iq3_s") and not again("iq3_s")
    assert found == ["iq2_xs", "iq3_s"] and not again("q8_0") and not again("iq2_s")
    monkeypatch.setattr(grids, "processor", lambda: "another")
    assert again("iq2_xs") and len(found) == 3
    path = tmp_path / "cache" / GRIDS_FILE
    assert len(json.loads(path.read_text())) == 3
    for damaged in ("", "[]", "3", path.read_text().replace("true", "1")):
        path.write_text(damaged)
        assert again("iq2_xs") and path.read_text() != damaged
    assert len(found) == 7


@needs_grids
def test_without_memory_nothing_is_measured(monkeypatch, tmp_path):
    def measured(kind):
        raise HotsplitError("no memory")

    monkeypatch.setattr(grids, "measured", measured)
    assert grids.are_faster("iq2_xxs") and not (tmp_path / "cache").exists()


@needs_grids
def test_the_measurement_runs_here():
    assert grids.measured("iq3_xxs") in (True, False)


def entry_of(kind, num_rows):
    rows = grid_rows(kind, num_rows, 256, 0.01)
    in_file = TensorEntry(shape=(num_rows, 256), kind=kind, read_rows=lambda a, b: rows[a:b])
    return in_memory(in_file)


@needs_grids
@pytest.mark.parametrize("kind", GRID_NAMES)
def test_matrices_that_are_multiplied_whole_take_the_bytes_of_the_file(monkeypatch, kind):
    monkeypatch.setattr(grids, "are_faster", lambda name: name == kind)
    entry, x_D = entry_of(kind, 48), torch.randn(256)
    home = Residence()
    matrix = home.whole(entry, "tiled")
    assert matrix.kind == f"{kind}_tiled"
    assert home.num_bytes == matrix.num_bytes == entry.in_file.num_bytes < entry.num_bytes
    want = Residence(only_cpu_reads=False).whole(entry, "tiled")
    assert want.kind == f"{TABLES[kind]}_tiled" and torch.equal(matrix.dot(x_D), want.dot(x_D))
    index_A = torch.tensor([5, 47])
    assert torch.equal(matrix.rows(index_A), want.rows(index_A))
    # Others: a number of rows that is no whole tiles, rows that are added, single rows.
    assert Residence().whole(entry_of(kind, 40), "tiled").kind == TABLES[kind]
    assert Residence().matrix(entry).kind == TABLES[kind]
    monkeypatch.setattr(grids, "are_faster", lambda name: False)
    assert Residence().whole(entry, "tiled").kind == f"{TABLES[kind]}_tiled"


@needs_grids
@pytest.mark.parametrize("kind", GRID_NAMES)
def test_a_model_has_the_same_bits_in_both(monkeypatch, tmp_path, kind):
    shape = {"hidden_size": 256, "intermediate_size": 512}
    source, plain = random_llama(tmp_path / "hf", hidden_act="silu", **shape), tmp_path / "f32.gguf"
    convert(ConvertConfig(source=source, output=plain, outtype="f32", layout="stock"))

    def rows_of(_, entry):
        return kind, grid_rows(kind, *entry.shape, scale=entry.shape[1] ** -0.5)

    with_matrices(plain, tmp_path / "m.gguf", rows_of)
    found, num_bytes = [], []
    for is_faster in (True, False):
        monkeypatch.setattr(grids, "are_faster", lambda name, value=is_faster: value)
        with Engine.load(tmp_path / "m.gguf", mode="dense", is_resident=True) as engine:
            found.append(engine.logits(IDS * 4))
            num_bytes.append(sum(engine.bytes_by_role["cpu"].values()))
    assert torch.equal(found[0], found[1]) and num_bytes[0] < num_bytes[1]
