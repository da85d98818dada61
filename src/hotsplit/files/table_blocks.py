"""Blocks of a file's IQ1, IQ2 and IQ3 types as blocks of the table types in memory, with the same
values (weight_types.TABLES), and the values of these.

The packer is C++ (native/table_blocks.cpp); the grids, whose entries are four or eight values, are
gguf's.

Letters: N blocks, E entries of a grid."""

from ctypes import CDLL
from functools import cache, partial

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from hotsplit.files.pipeline import in_order, num_threads
from hotsplit.model.weight_types import BY_NAME, TABLES
from hotsplit.system.shared_libraries import INT, POINTER, SIZE, open_library

PIECE_BLOCKS = 1 << 14  # blocks packed by a thread at a time, 4 Mi values
_OK = 0


def pack_table_blocks(rows: np.ndarray, kind: str) -> np.ndarray:
    """Rows of a file's type, uint8 [..., row_bytes], as rows of its table type."""
    number, table = GGMLQuantizationType[kind.upper()], BY_NAME[TABLES[kind]]
    _, block_bytes = GGML_QUANT_SIZES[number]
    blocks = np.ascontiguousarray(rows).reshape(-1, block_bytes)
    packed, grid = np.empty((len(blocks), table.block_bytes), np.uint8), grid_codes(kind)

    def pack(start: int) -> None:
        some, to = blocks[start : start + PIECE_BLOCKS], packed[start:]
        addresses = some.ctypes.data, grid.ctypes.data, len(some), to.ctypes.data
        status = _library().hs_pack_table_blocks(int(number), *addresses)
        assert status == _OK, (kind, status)

    starts = range(0, len(blocks), PIECE_BLOCKS)
    threads = min(len(starts), num_threads())
    pieces = (partial(pack, start) for start in starts)
    for _ in in_order(pieces, threads) if threads > 1 else (piece() for piece in pieces):
        pass
    return packed.reshape(*rows.shape[:-1], -1)


@cache
def _library() -> CDLL:
    taken = (INT, POINTER, POINTER, SIZE, POINTER)
    return open_library("hotsplit._tables", {"hs_pack_table_blocks": (INT, taken)})


@cache
def grid_codes(kind: str) -> np.ndarray:
    """The codes without signs of the entries of a type's grid, uint8 [E, 4 or 8]."""
    grid_type: type[quants.IQ2_XXS] = getattr(quants, kind.upper())
    grid_type.init_grid()
    entries = np.asarray(grid_type.grid).reshape(grid_type.grid_shape)
    levels = BY_NAME[TABLES[kind]].levels
    positive = np.array(levels[: len(levels) // 2])
    values = 8 * entries + 1 if kind.startswith("iq1") else entries
    codes = (values[..., None] == positive).argmax(-1).astype(np.uint8)
    assert np.array_equal(positive[codes], values), kind
    return codes


def table_values(rows: np.ndarray, kind: str) -> np.ndarray:
    """The f32 values of rows of a table type, uint8 [..., row_bytes]."""
    table = BY_NAME[kind]
    blocks = rows.reshape(-1, table.block_bytes)
    is_wide = len(table.levels) == 16
    codes_N256, numbers = _of_iq4_xs(blocks) if is_wide else _of_q3_k(blocks)
    assert table.halves is not None
    d_N1 = np.ascontiguousarray(blocks[:, slice(*table.halves)]).view(np.float16)
    scales = np.float32(table.unit) * d_N1.astype(np.float32) * (numbers.astype(np.float32) - 32)
    levels = np.array(table.levels, np.float32)[codes_N256]
    values = levels.reshape(*scales.shape, -1) * scales[..., None]
    return values.reshape(*rows.shape[:-1], -1)


def _of_q3_k(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The codes [N, 256], and the scales [N, 16], which count from -32."""
    twos = blocks[:, 32:96].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    third = blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None]
    codes = (twos & 3).reshape(-1, 256) | (third & 1).reshape(-1, 256) << 2
    upper = blocks[:, None, 104:108] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    nibbles = np.hstack([blocks[:, 96:104] & 15, blocks[:, 96:104] >> 4])
    return codes, nibbles | (upper & 3).reshape(-1, 16) << 4


def _of_iq4_xs(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The codes [N, 256], and the scales [N, 8], which count from -32."""
    pairs = blocks[:, 8:].reshape(-1, 8, 16)
    codes = np.concatenate([pairs & 15, pairs >> 4], axis=-1).reshape(-1, 256)
    upper = blocks[:, 2:4, None] >> np.arange(0, 8, 2, dtype=np.uint8)
    nibbles = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=-1).reshape(-1, 8)
    return codes, nibbles | (upper & 3).reshape(-1, 8) << 4
