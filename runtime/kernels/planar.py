"""Planar rows: each part of a row's blocks (scales, nibbles, ...) is contiguous. GPUs read this
layout, and the CPU does for small blocks (made there by library.pack_rows).

Blocks of 18, 34 and 210 bytes, as a file has them, do not align 16-byte loads. In a planar row each
part is contiguous over all blocks; the row has as many bytes as in the file:

    small blocks  scales, each with its minimum if there is one | fifth bits, 4 bytes per block, if
                  there are any | nibbles, 16 bytes per block, or values, 32
    q6_k_planar   ql, 128 bytes per super-block | qh, 64 | scales int8, 16 | d f16"""

import torch
from torch import Tensor

from hotsplit.model.weight_types import TYPES

# The planar kind of each kind in a file; other kinds are read as stored.
PLANAR_KIND: dict[str, str] = {
    each.name: each.gpu_kind for each in sorted(TYPES, key=lambda e: e.block_bytes) if each.planes
}
FORMS = ("", *PLANAR_KIND)  # of a file's rows that are copied: unchanged, or to planar rows
FILE_KIND = {planar: kind for kind, planar in PLANAR_KIND.items()}

COPY = 4  # int64 numbers of such a copy: offset in staging, target address, bytes, form

# (first byte in a block of the file, bytes), in planar order.
_PLANES = {each.gpu_kind: each.planes for each in TYPES if each.planes}


def form_of(kind: str, target_kind: str) -> int:
    """The form of a copy that turns rows of one kind into rows of another."""
    return 0 if kind == target_kind else FORMS.index(kind)


def planar(data: Tensor, kind: str) -> tuple[Tensor, str]:
    """(rows, their kind): a file's rows, uint8 [..., row_bytes], rearranged into new memory.

    Rows of a kind without a planar layout are returned unchanged."""
    if kind not in PLANAR_KIND:
        return data, kind
    out = torch.empty_like(data, memory_format=torch.contiguous_format)
    write_planar(data, kind, out)
    return out, PLANAR_KIND[kind]


def write_planar(data: Tensor, kind: str, out: Tensor) -> None:
    """`planar` into memory of the same shape; takes none."""
    planes = _PLANES[PLANAR_KIND[kind]]
    blocks = data.unflatten(-1, (-1, _block_bytes(planes)))
    count, first = blocks.shape[-2], 0
    for start, size in planes:
        part = out[..., first : first + size * count].unflatten(-1, (count, size))
        part.copy_(blocks[..., start : start + size])
        first += size * count


def from_planar(data: Tensor, kind: str) -> tuple[Tensor, str]:
    """The inverse of `planar`."""
    if kind not in FILE_KIND:
        return data, kind
    planes = _PLANES[kind]
    count = data.shape[-1] // _block_bytes(planes)
    blocks = data.new_empty(*data.shape[:-1], count, _block_bytes(planes))
    first = 0
    for start, size in planes:
        part = data[..., first : first + size * count]
        blocks[..., start : start + size] = part.unflatten(-1, (count, size))
        first += size * count
    return blocks.flatten(-2), FILE_KIND[kind]


def _block_bytes(planes: tuple[tuple[int, int], ...]) -> int:
    return sum(size for _, size in planes)
