"""Planar rows: each part of a row's blocks (scales, nibbles, ...) is contiguous. GPUs read this
layout, and the CPU does for small blocks (made there by library.pack_rows).

Blocks of 18, 34 and 210 bytes, as a file has them, do not align 16-byte loads. In a planar row each
part is contiguous over all blocks; the row has as many bytes as in the file:

    small blocks  scales, each with its minimum if there is one | fifth bits, 4 bytes per block, if
                  there are any | nibbles, 16 bytes per block, or values, 32
    q6_k_planar   ql, 128 bytes per super-block | qh, 64 | scales int8, 16 | d f16

Blocks of 64 and 128 values have their quants first; the factor of a row of nvfp4_scaled, which is
before its blocks in a row that is not planar, is the row's end."""

import torch
from torch import Tensor

from hotsplit.model.weight_types import BY_NAME, TYPES

# The planar kind of each kind in a file; other kinds are read as stored.
PLANAR_KIND: dict[str, str] = {
    each.name: each.gpu_kind for each in sorted(TYPES, key=lambda e: e.block_bytes) if each.planes
}
FILE_KIND = {planar: kind for kind, planar in PLANAR_KIND.items()}
# The first type of those with the same planes.
_LIKE = {(each.planes, each.row_head): each.name for each in reversed(TYPES) if each.planes}
FORMS = ("", *_LIKE.values())  # of a file's rows that are copied: unchanged, or to planar rows

COPY = 4  # int64 numbers of such a copy: offset in staging, target address, bytes, form


def form_of(kind: str, target_kind: str) -> int:
    """The form of a copy that turns rows of one kind into rows of another."""
    if kind == target_kind:
        return 0
    each = BY_NAME[kind]
    return FORMS.index(_LIKE[each.planes, each.row_head])


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
    each = BY_NAME[kind]
    blocks = data[..., each.row_head :].unflatten(-1, (-1, each.block_bytes))
    count, first = blocks.shape[-2], 0
    for start, size in each.planes:
        part = out[..., first : first + size * count].unflatten(-1, (count, size))
        part.copy_(blocks[..., start : start + size])
        first += size * count
    out[..., first:].copy_(data[..., : each.row_head])


def from_planar(data: Tensor, kind: str) -> tuple[Tensor, str]:
    """The inverse of `planar`."""
    if kind not in FILE_KIND:
        return data, kind
    each = BY_NAME[FILE_KIND[kind]]
    count, first = data.shape[-1] // each.block_bytes, 0
    blocks = data.new_empty(*data.shape[:-1], count, each.block_bytes)
    for start, size in each.planes:
        part = data[..., first : first + size * count]
        blocks[..., start : start + size] = part.unflatten(-1, (count, size))
        first += size * count
    return torch.cat([data[..., first:], blocks.flatten(-2)], dim=-1), each.name
