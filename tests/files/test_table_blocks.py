"""Blocks of IQ1, IQ2 and IQ3 types as blocks of table types: every value is gguf's, to the bit."""

from dataclasses import replace

import numpy as np
import pytest
from gguf.quants import dequantize
from grid_blocks import blocks_of

from hotsplit.files import gguf_file, table_blocks
from hotsplit.files.gguf_file import (
    TensorEntry,
    chosen_rows,
    in_memory,
    prefetch,
    release,
    row_range,
    type_of,
)
from hotsplit.files.table_blocks import grid_codes, pack_table_blocks, table_values
from hotsplit.model.weight_types import BY_NAME, TABLES

# Of both signs: zero, the smallest and largest denormals, the smallest normal, usual, the largest.
EDGES = [
    sign * d for d in (0.0, 2.0**-24, 1023 * 2.0**-24, 2.0**-14, 1e-3, 65504.0) for sign in (1, -1)
]


def bits_of(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, np.float32).view(np.uint32)


@pytest.mark.parametrize("kind", TABLES)
def test_every_value_is_gguf_s_to_the_bit(kind):
    scales = np.random.default_rng(1).uniform(-0.01, 0.01, 4000).tolist()
    blocks = blocks_of(kind, EDGES * 9 + scales)
    packed = pack_table_blocks(blocks, kind)
    want = bits_of(dequantize(blocks, type_of(kind)))
    assert np.array_equal(bits_of(table_values(packed, TABLES[kind])), want)
    wrong = bits_of(table_values(np.roll(packed, 1, axis=0), TABLES[kind]))
    assert (wrong != want).mean() > 0.5
    # Every level, with every scale that the type has.
    codes = grid_codes(kind)
    assert codes.max() == np.count_nonzero(BY_NAME[TABLES[kind]].levels) // 2 - 1
    shapes = table_blocks._of_q3_k if packed.shape[1] == 110 else table_blocks._of_iq4_xs
    numbers = shapes(packed)[1]
    assert {*np.unique(numbers)} == {*range(33, 48 if kind.startswith("iq1") else 64, 2)}


@pytest.mark.parametrize("kind", TABLES)
def test_scales_that_are_not_finite_stay_so(kind):
    blocks = blocks_of(kind, [np.inf, -np.inf, np.nan])
    with np.errstate(invalid="ignore"):
        want = dequantize(blocks, type_of(kind))
        got = table_values(pack_table_blocks(blocks, kind), TABLES[kind])
    assert np.array_equal(got, want, equal_nan=True) and not np.isfinite(got).any()


@pytest.mark.parametrize("kind", TABLES)
def test_all_entries_of_a_grid_are_packed_alike_by_many_threads(kind, monkeypatch):
    blocks = blocks_of(kind, [1.0] * 1000)
    whole = pack_table_blocks(blocks, kind)
    monkeypatch.setattr(table_blocks, "PIECE_BLOCKS", 7)
    assert np.array_equal(pack_table_blocks(blocks, kind), whole)
    assert np.array_equal(
        pack_table_blocks(blocks.reshape(4, 50, -1), kind), whole.reshape(4, 50, -1)
    )


def test_an_entry_of_the_file_is_packed_when_its_rows_are_read(monkeypatch):
    blocks = blocks_of("iq2_s", [1e-3] * 24).reshape(4, 2, 3 * 82)
    in_file = TensorEntry(shape=(4, 2, 768), kind="iq2_s", read_rows=lambda a, b: blocks[a:b])
    entry = in_memory(in_file)
    assert (entry.kind, entry.shape, entry.in_file) == ("iq2_table", (4, 2, 768), in_file)
    assert (entry.row_bytes, entry.num_bytes) == (330, 4 * 2 * 330)
    assert np.array_equal(entry.read_rows(1, 3), entry.read()[1:3])
    assert np.array_equal(
        gguf_file.values_of(entry.read(), entry.kind), dequantize(blocks, type_of("iq2_s"))
    )
    assert in_memory(entry) is entry and in_memory(replace(in_file, kind="q8_0")).kind == "q8_0"
    monkeypatch.setattr(
        gguf_file, "pack_table_blocks", None
    )  # nothing is packed to advise on pages
    prefetch(entry)
    release(entry)


@pytest.mark.parametrize("rows", [[2, 3, 4], [7, 0, 5]])
def test_rows_of_a_packed_tensor_are_those_of_the_file_s(rows):
    raw = np.vstack([blocks_of("iq2_xxs", [1.0], seed) for seed in range(8)])
    entry = TensorEntry(shape=(8, 256), kind="iq2_xxs", read_rows=lambda a, b: raw[a:b])
    chosen = chosen_rows(in_memory(entry), np.array(rows))
    assert chosen.in_file.shape == chosen.shape == (3, 256)
    assert np.array_equal(chosen.in_file.read(), raw[rows])
    assert np.array_equal(chosen.read(), in_memory(entry).read()[rows])
    part = row_range(in_memory(entry), 3, 5)
    assert np.array_equal(part.in_file.read(), raw[3:5])
