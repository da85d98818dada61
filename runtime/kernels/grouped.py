"""Grouped rows: 64 rows stored together, in the order in which the CPU reads them as it sums, for
down projections whose rows are all added for every token.

In small blocks, the products of coefficient and weight scale of the 64 neurons share one scale in
each block of 32 columns (kernels/cpu/grouped_template.h). The lanes of a vector are columns, so
quants and f16 values need not be interleaved. A group has as many bytes as its rows in the file:

    nibbles        for each block of columns: 64 scales f16 | for p = 0 .. 15 and each byte of
                   a row's nibbles, that byte of rows p, p + 16, p + 32 and p + 48
    q8_0_grouped   the same with values
    f16_grouped, bf16_grouped   for each block of columns: the values of each row, 64 bytes

`library.pack_rows` makes groups. A slice of such a matrix must consist of whole groups."""

import torch
from torch import Tensor

from hotsplit.model.weight_types import BY_NAME, kinds_in

GROUP_ROWS = 64
# The grouped kind of each kind in a file.
GROUPED_KIND = kinds_in("grouped")
_FILE_KIND = {grouped: kind for kind, grouped in GROUPED_KIND.items()}
_FLOATS = {"f16": torch.float16, "bf16": torch.bfloat16}


def is_grouped(kind: str) -> bool:
    return kind in _FILE_KIND


def from_grouped(data: Tensor, kind: str) -> tuple[Tensor, str]:
    """(rows as in the file, their kind), from whole groups; other kinds are returned unchanged."""
    if not is_grouped(kind):
        return data, kind
    assert data.dim() == 2 and len(data) % GROUP_ROWS == 0, (kind, data.shape)
    file_kind = _FILE_KIND[kind]
    if file_kind in _FLOATS:
        tiles = data.contiguous().view(-1, data.shape[1] // 64, GROUP_ROWS, 64)
        rows = tiles.transpose(1, 2).reshape(data.shape)
        return rows.view(_FLOATS[file_kind]), file_kind
    return _blocks(data, BY_NAME[file_kind].block_bytes - 2), file_kind


def _blocks(data: Tensor, size: int) -> Tensor:
    """The rows as in the file; each block has `size` bytes of quants."""
    count = data.shape[1] // (2 + size)
    tiles = data.contiguous().view(-1, count, GROUP_ROWS * (2 + size))
    blocks = data.new_empty(len(tiles), GROUP_ROWS, count, 2 + size)
    scales, quants = tiles.split([GROUP_ROWS * 2, GROUP_ROWS * size], dim=2)
    blocks[..., :2] = scales.unflatten(2, (GROUP_ROWS, 2)).transpose(1, 2)
    fours = quants.unflatten(2, (GROUP_ROWS // 4, size, 4))  # rows p, p + 16, ... of each byte
    blocks[..., 2:] = fours.permute(0, 4, 2, 1, 3).flatten(1, 2)
    return blocks.view(data.shape)
