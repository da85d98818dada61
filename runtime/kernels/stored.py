"""A weight matrix in the type of its file or in a layout made from it, and vectors, as kernels on
CPU and GPU read them.

Letters: N rows, D row width, A chosen rows."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from hotsplit.model.weight_types import BY_NAME, Form, WeightType
from hotsplit.runtime.kernels import k_quants
from hotsplit.runtime.kernels.grouped import GROUP_ROWS, from_grouped
from hotsplit.runtime.kernels.planar import from_planar
from hotsplit.runtime.kernels.tiled import TILE_ROWS, from_tiled

# The vectors of a block beside its matrices, by the names of the spec's fields.
Vectors = Mapping[str, Tensor]
NO_VECTORS: Vectors = MappingProxyType({})
FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
# Rows that a form interleaves; a matrix in it has a multiple of them.
ROWS_TOGETHER: dict[Form, int] = {"planar": 1, "tiled": TILE_ROWS, "grouped": GROUP_ROWS}


def rows_together(kind: str) -> int:
    """Number of rows that a layout interleaves; a matrix, or a slice of one, has a multiple of
    it."""
    return next((n for form, n in ROWS_TOGETHER.items() if kind.endswith(f"_{form}")), 1)


def unpack(data: Tensor, kind: str) -> Tensor:
    """Unpacks stored rows to f32 [A, D]; blocks are as in llama.cpp's ggml-quants.c."""
    data, kind = from_grouped(*from_tiled(*from_planar(data, kind)))
    if kind in FLOATS:
        return data.float()
    weight_type = BY_NAME[kind]
    head = weight_type.row_head
    blocks = data[..., head:].unflatten(-1, (-1, weight_type.block_bytes))
    if weight_type.is_k_quant:
        return k_quants.unpack_blocks(blocks, kind).flatten(-2)
    if weight_type.shares_heads:
        values = _values_of_groups(blocks, weight_type).flatten(-2)
        return values * data[..., :head].contiguous().view(torch.float32) if head else values
    numbers = _numbers(blocks[..., : weight_type.head_bytes])
    quants = blocks[..., weight_type.head_bytes :]
    if weight_type.has_nibbles:
        values = torch.tensor(weight_type.levels, device=data.device).float()[_codes(quants)]
    else:
        values = quants.contiguous().view(torch.int8).float()
    values = values * numbers[..., :1]
    return (values + numbers[..., 1:] if numbers.shape[-1] == 2 else values).flatten(-2)


def unpack_chosen(data: Tensor, kind: str, index_A: Tensor) -> Tensor:
    """Unpacks the chosen rows of a matrix to f32 [A, D]; of their whole tiles or groups, if it has
    such."""
    together = rows_together(kind)
    if together == 1:
        return unpack(data[index_A], kind)
    units = data.view(-1, together, data.shape[1])[index_A // together].flatten(0, 1)
    place_A = torch.arange(len(index_A), device=data.device) * together + index_A % together
    return unpack(units, kind)[place_A]


def _values_of_groups(blocks: Tensor, each: WeightType) -> Tensor:
    """f32 [..., block_values] of blocks of 64 or 128 values, uint8 [..., block_bytes]: of codes of
    one or two bits with an f16 scale, or of nvfp4, where sixteen values have eight bytes and a
    scale of type ue4m3, which is halved here (127 is 0)."""
    heads, quants = blocks[..., : each.head_bytes], blocks[..., each.head_bytes :]
    levels = torch.tensor(each.levels, device=blocks.device).float()
    if each.halves:
        bits = 8 * quants.shape[-1] // each.block_values
        place = torch.arange(0, 8, bits, dtype=torch.uint8, device=blocks.device)
        codes = (quants[..., None] >> place & (1 << bits) - 1).flatten(-2)
        return levels[codes.long()] * heads.contiguous().view(torch.float16).float()
    number = heads.int()
    magnitude = torch.where(number == 127, 0, (number & 127) << 20).view(torch.float32)
    pairs = quants.unflatten(-1, (-1, 8))
    codes = torch.cat([pairs & 15, pairs >> 4], dim=-1).long()
    return (levels[codes] * (magnitude * 2.0**119)[..., None]).flatten(-2)


def _numbers(head: Tensor) -> Tensor:
    """The scale, and the minimum if there is one, f32 [..., 1 or 2], before a block's quants: f16
    numbers, or a byte e that is 2^(e - 128)."""
    if head.shape[-1] > 1:
        return head.contiguous().view(torch.float16).float()
    exponent = head.int()
    bits = torch.where(exponent < 2, exponent + 1 << 21, exponent - 1 << 23)
    return bits.view(torch.float32)


def _codes(quants: Tensor) -> Tensor:
    """int64 [..., 32] of a block's bytes [..., 16], or [..., 20] with fifth bits first."""
    nibbles = quants[..., -16:]
    codes = torch.cat([nibbles & 15, nibbles >> 4], dim=-1).long()
    if quants.shape[-1] == 16:
        return codes
    place = torch.arange(8, dtype=torch.uint8, device=quants.device)
    fifth = (quants[..., :4, None] >> place & 1).flatten(-2)
    return codes | fifth.long() << 4


@dataclass(frozen=True, kw_only=True)
class StoredMatrix:
    """A matrix as stored. `data` is [N, D] in the type of a kind in FLOATS, else uint8
    [N, row_bytes]; rows may be strided.

    Kinds that end in "_planar", "_tiled" and "_grouped" exist in memory only: see
    runtime.kernels.planar, tiled and grouped."""

    data: Tensor
    kind: str
    width: int  # D

    @property
    def num_rows(self) -> int:
        return self.data.shape[0]

    @property
    def row_bytes(self) -> int:
        return self.data.shape[1] * self.data.element_size()

    @property
    def stride_bytes(self) -> int:
        """Bytes from the start of a row to that of the next."""
        return self.data.stride(0) * self.data.element_size()

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes
