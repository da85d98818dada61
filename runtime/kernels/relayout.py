"""The layout of rows on a GPU, from that in which the CPU reads them: where each byte comes from.

Rows in tiles and groups are permuted within as many rows; others within a row. The permutation is
found by permuting the digits of numbers, so it is that of `from_tiled`, `from_grouped` and
`planar`."""

import torch
from torch import Tensor

from hotsplit.runtime.kernels.grouped import from_grouped
from hotsplit.runtime.kernels.planar import PLANAR_KIND, from_planar, planar
from hotsplit.runtime.kernels.tiled import from_tiled


def positions(kind: str, target_kind: str, num_rows: int, row_bytes: int) -> Tensor | None:
    """int32 [num_rows * row_bytes], for each byte of `num_rows` rows of `target_kind` its position
    in those of `kind`; None if the layouts are equal. `num_rows`: those of a tile, of a group, or
    1."""
    if kind == target_kind:
        return None
    at = torch.arange(num_rows * row_bytes)
    found = torch.zeros_like(at)
    for shift in (0, 8, 16):
        digits = (at >> shift & 255).to(torch.uint8).view(num_rows, row_bytes)
        rows, file_kind = from_planar(*from_grouped(*from_tiled(digits, kind)))
        rows, made = planar(rows.contiguous().view(torch.uint8), file_kind)
        assert made == target_kind == PLANAR_KIND.get(file_kind, file_kind), (kind, target_kind)
        found += rows.flatten().long() << shift
    return found.to(torch.int32)
