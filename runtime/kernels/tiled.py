"""Tiled rows: the blocks of 16 rows interleaved, for matrices that the CPU reads in full.

Each lane of a vector is then a row, for one token and for several, and nothing has to be
transposed. A tile has as many bytes as its rows in the file:

    small blocks  and those of 64 and 128 values: for as many blocks as have 64 bytes of numbers
                  (two with f16 scales, four with exponents, one with a minimum or four scales; the
                  last may be fewer): for each block, the scales of 16 rows, then their minima | for
                  each block, its quants, four bytes of each of 16 rows in turn. Factors of rows
                  are before all blocks
    K-quants     for each block, interleaving 16 rows: the f16 numbers, one at a time | the scales,
                 one byte at a time | the bits above the quants, if any, and the quants, four bytes
                 at a time. Where a block has one f16 number, two blocks have both first, and a
                 single last block has its own at its end

`library.pack_rows` makes tiles. A slice of such a matrix has whole tiles."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from hotsplit.model.weight_types import BY_NAME, TYPES, kinds_in

TILE_ROWS = 16
# The tiled kind of each kind in a file.
TILED_KIND = kinds_in("tiled")
_FILE_KIND = {tiled: kind for kind, tiled in TILED_KIND.items()}


class _Piece(NamedTuple):
    """Bytes `start` .. `stop` - 1 of a block. A tile has `together` of them from one row, then as
    many from the next row, and so on."""

    start: int
    stop: int
    together: int


_SMALL = [each for each in TYPES if each.has_small_blocks or each.shares_heads]
_SMALL_NAMES = [each.name for each in _SMALL]
# The pieces of a block: its f16 numbers, and the others in the order of a tile.
_FLOATS: dict[str, _Piece] = {
    e.name: _Piece(*e.halves, 2) for e in TYPES if e.is_k_quant and e.halves
}
# With the bits of scales.
_FLOATS |= {each.name: _Piece(0, 8, 2) for each in TYPES if each.layout == "iq4_xs"}
_FLOATS |= {e.name: _Piece(0, e.head_bytes, 2 if e.halves else 1) for e in _SMALL}
_PIECES: dict[str, tuple[_Piece, ...]] = {
    "q4_k": (_Piece(4, 16, 1), _Piece(16, 144, 4)),
    "q5_k": (_Piece(4, 16, 1), _Piece(16, 48, 4), _Piece(48, 176, 4)),
    "q6_k": (_Piece(192, 208, 1), _Piece(128, 192, 4), _Piece(0, 128, 4)),
    "q3_k": (_Piece(96, 108, 1), _Piece(0, 32, 4), _Piece(32, 96, 4)),
    "q2_k": (_Piece(0, 16, 1), _Piece(16, 80, 4)),
    "iq4_xs": (_Piece(8, 136, 4),),
    "tq2_0": (_Piece(0, 64, 4),),
}
_PIECES |= {each.name: _PIECES[each.layout] for each in TYPES if each.layout in _PIECES}
_PIECES |= {e.name: (_Piece(e.head_bytes, e.block_bytes, 4),) for e in _SMALL}


def is_tiled(kind: str) -> bool:
    return kind.endswith("_tiled")


def from_tiled(data: Tensor, kind: str) -> tuple[Tensor, str]:
    """(rows as in the file, their kind), from whole tiles; other kinds are returned unchanged. Not
    for tiles of types with grids, which only the CPU reads."""
    if not is_tiled(kind):
        return data, kind
    assert data.dim() == 2 and len(data) % TILE_ROWS == 0, (kind, data.shape)
    file_kind = _FILE_KIND[kind]
    tiles = data.contiguous().view(-1, TILE_ROWS * data.shape[1])
    head = BY_NAME[file_kind].row_head
    rows = _rows(tiles[:, TILE_ROWS * head :], file_kind).flatten(2)
    if head:
        rows = torch.cat(
            [tiles[:, : TILE_ROWS * head].unflatten(1, (TILE_ROWS, head)), rows], dim=2
        )
    return rows.view(data.shape), file_kind


def _rows(tiles: Tensor, kind: str) -> Tensor:
    floats, pieces = _FLOATS[kind], _PIECES[kind]
    size = sum(piece.stop - piece.start for piece in (floats, *pieces))
    count = tiles.shape[1] // TILE_ROWS // size
    blocks = tiles.new_empty(len(tiles), TILE_ROWS, count, size)
    num_floats = TILE_ROWS * (floats.stop - floats.start)
    at_once = max(1, 64 // num_floats)  # blocks whose f16 numbers come first
    for first in range(0, count, at_once):
        some = min(at_once, count - first)
        part = tiles[:, first * TILE_ROWS * size :][:, : some * TILE_ROWS * size]
        rest = some * (TILE_ROWS * size - num_floats)
        numbers, others = (
            part.split([some * num_floats, rest], dim=1)
            if some == at_once or kind in _SMALL_NAMES
            else reversed(part.split([rest, some * num_floats], dim=1))
        )
        to = blocks[:, :, first : first + some].transpose(1, 2)  # tile, block, row, byte
        _put(numbers.unflatten(1, (some, num_floats)), floats, to)
        ends = [0]
        for piece in pieces:
            ends.append(ends[-1] + TILE_ROWS * (piece.stop - piece.start))
        each = others.unflatten(1, (some, ends[-1]))
        for piece, (start, stop) in zip(pieces, pairwise(ends), strict=True):
            _put(each[..., start:stop], piece, to)
    return blocks


def _put(data: Tensor, piece: _Piece, to: Tensor) -> None:
    """Writes a piece of the blocks of all rows; data [tile, block, bytes], to [tile, block, row,
    byte]."""
    items = data.unflatten(2, (-1, TILE_ROWS, piece.together))
    to[..., piece.start : piece.stop] = items.transpose(2, 3).flatten(3)
