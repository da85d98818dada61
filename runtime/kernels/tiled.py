"""Tiled rows: the blocks of 16 rows interleaved, for matrices that the CPU reads in full.

Each lane of a vector is then a row, for one token and for several, and nothing has to be
transposed. A tile has as many bytes as its rows in the file:

    q4_0_tiled   for every two blocks (the last may be alone): the f16 scales of 16 rows for each
                 block | for each block, every four bytes of nibbles of 16 rows
    q8_0_tiled   the same with values

`library.pack_rows` makes tiles. A slice of such a matrix has whole tiles."""

from torch import Tensor

TILE_ROWS = 16
# The tiled kind of each kind in a file, and the bytes of a block without its scale.
TILED_KIND = {"q4_0": "q4_0_tiled", "q8_0": "q8_0_tiled"}
_FILE_KIND = {tiled: kind for kind, tiled in TILED_KIND.items()}
_QUANT_BYTES = {"q4_0": 16, "q8_0": 32}


def is_tiled(kind: str) -> bool:
    return kind in _FILE_KIND


def from_tiled(data: Tensor, kind: str) -> tuple[Tensor, str]:
    """(rows as in the file, their kind), from whole tiles; other kinds are returned unchanged."""
    if not is_tiled(kind):
        return data, kind
    assert data.dim() == 2 and len(data) % TILE_ROWS == 0, (kind, data.shape)
    file_kind = _FILE_KIND[kind]
    size = _QUANT_BYTES[file_kind]
    count = data.shape[1] // (2 + size)
    tiles = data.contiguous().view(-1, TILE_ROWS * data.shape[1])
    blocks = data.new_empty(len(tiles), TILE_ROWS, count, 2 + size)
    for first in range(0, count, 2):
        some = min(2, count - first)
        pair = tiles[:, first * TILE_ROWS * (2 + size) :][:, : some * TILE_ROWS * (2 + size)]
        scales, quants = pair.split([some * TILE_ROWS * 2, some * TILE_ROWS * size], dim=1)
        to = blocks[:, :, first : first + some]
        to[..., :2] = scales.unflatten(1, (some, TILE_ROWS, 2)).permute(0, 2, 1, 3)
        fours = quants.unflatten(1, (some, size // 4, TILE_ROWS, 4))
        to[..., 2:] = fours.permute(0, 3, 1, 2, 4).flatten(3)
    return blocks.view(data.shape), file_kind
