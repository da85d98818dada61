"""Unpacks llama.cpp's K-quants, and table types, with torch, where no kernel does it.

A block has 256 values, laid out as in dequantize_row_q2_K to _q6_K and _iq4_xs in ggml-quants.c;
runtime/kernels/cpu/k_formats.h describes the layouts.

A part is 32 values of a block."""

import torch
from torch import Tensor

from hotsplit.model.weight_types import BY_NAME, K_QUANT_NAMES, WeightType

KINDS = K_QUANT_NAMES


def unpack_blocks(blocks: Tensor, kind: str) -> Tensor:
    """Unpacks blocks, uint8 [..., block_bytes], to f32 [..., 256]."""
    each = BY_NAME[kind]
    return _UNPACK[each.layout](blocks, each)


def _unpack_six_bits(blocks: Tensor, _: WeightType) -> Tensor:
    """q4_k, and q5_k, which has 32 bytes of fifth bits before its nibbles."""
    factors = _halves(blocks[..., :4])
    scale, minimum = _six_bit_numbers(blocks[..., 4:16])
    quants = _parts(blocks[..., -128:].unflatten(-1, (4, 32)))
    if blocks.shape[-1] == 176:
        fifth = blocks[..., None, 16:48] >> _places(blocks, range(8))
        quants = quants | (fifth & 1) << 4
    scale, minimum = factors[..., :1] * scale, factors[..., 1:] * minimum
    return (scale[..., None] * quants - minimum[..., None]).flatten(-2)


def _unpack_q6_k(blocks: Tensor, _: WeightType) -> Tensor:
    # Each half of the block has the low nibbles of 64 bytes, then their high nibbles.
    nibbles = blocks[..., :128].unflatten(-1, (2, 1, 64))
    quants = torch.cat([nibbles & 15, nibbles >> 4], dim=-2).unflatten(-1, (2, 32)).flatten(-3, -2)
    upper = blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> _places(blocks, (0, 2, 4, 6))
    quants = (quants | (upper & 3) << 4).float() - 32
    scale = _halves(blocks[..., 208:]) * blocks[..., 192:208].contiguous().view(torch.int8)
    return (quants.flatten(-3).unflatten(-1, (16, 16)) * scale[..., None]).flatten(-2)


def _unpack_q3_k(blocks: Tensor, each: WeightType) -> Tensor:
    third = blocks[..., None, :32] >> _places(blocks, range(8))
    quants = _looked_up(_twos(blocks[..., 32:96]) | (third & 1).flatten(-2) << 2, each)
    nibbles, upper = (
        blocks[..., 96:104],
        blocks[..., None, 104:108] >> _places(blocks, (0, 2, 4, 6)),
    )
    number = torch.cat([nibbles & 15, nibbles >> 4], dim=-1) | (upper & 3).flatten(-2) << 4
    scale = each.unit * _halves(blocks[..., 108:]) * (number.float() - 32)
    return (quants.unflatten(-1, (16, 16)) * scale[..., None]).flatten(-2)


def _unpack_q2_k(blocks: Tensor, _: WeightType) -> Tensor:
    factors = _halves(blocks[..., 80:])
    scale, minimum = (
        factors[..., :1] * (blocks[..., :16] & 15),
        factors[..., 1:] * (blocks[..., :16] >> 4),
    )
    quants = _twos(blocks[..., 16:80]).unflatten(-1, (16, 16))
    return (quants * scale[..., None] - minimum[..., None]).flatten(-2)


def _unpack_iq4_xs(blocks: Tensor, each: WeightType) -> Tensor:
    """A part's 16 bytes have its first values in the low nibbles, its last in the high ones."""
    low, upper = blocks[..., 4:8], blocks[..., 2:4, None] >> _places(blocks, (0, 2, 4, 6))[:, 0]
    number = torch.stack([low & 15, low >> 4], dim=-1).flatten(-2) | (upper & 3).flatten(-2) << 4
    scale = each.unit * _halves(blocks[..., :2]) * (number.float() - 32)
    nibbles = blocks[..., 8:].unflatten(-1, (8, 16))
    quants = _looked_up(torch.cat([nibbles & 15, nibbles >> 4], dim=-1), each)
    return (quants * scale[..., None]).flatten(-2)


def _unpack_tq2_0(blocks: Tensor, each: WeightType) -> Tensor:
    return _halves(blocks[..., 64:]) * _looked_up(_twos(blocks[..., :64]), each)


_UNPACK = {
    "q4_k": _unpack_six_bits,
    "q5_k": _unpack_six_bits,
    "q6_k": _unpack_q6_k,
    "q3_k": _unpack_q3_k,
    "q2_k": _unpack_q2_k,
    "iq4_xs": _unpack_iq4_xs,
    "tq2_0": _unpack_tq2_0,
}


def _looked_up(codes: Tensor, each: WeightType) -> Tensor:
    return torch.tensor(each.levels, device=codes.device).float()[codes.long()]


def _twos(data: Tensor) -> Tensor:
    """Numbers of two bits [..., 256] from 64 bytes: the lowest bits of 32 bytes, then the next, and
    so on; then likewise of the other 32."""
    shifted = data.unflatten(-1, (2, 1, 32)) >> _places(data, (0, 2, 4, 6))
    return (shifted & 3).flatten(-3)


def _halves(data: Tensor) -> Tensor:
    """The f16 numbers in some bytes, as f32."""
    return data.contiguous().view(torch.float16).float()


def _parts(data: Tensor) -> Tensor:
    """Nibbles [..., 8, 32] of bytes [..., 4, 32]: the low ones of 32 bytes, then their high
    ones."""
    return torch.stack([data & 15, data >> 4], dim=-2).flatten(-3, -2)


def _places(blocks: Tensor, bits: range | tuple[int, ...]) -> Tensor:
    return torch.tensor([*bits], dtype=torch.uint8, device=blocks.device)[:, None]


def _six_bit_numbers(data: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minima from 12 bytes. The first four of each are the low six bits of
    bytes 0-3 and 4-7; the others have their low four bits in the nibbles of bytes 8-11 and their
    high two in the top bits of bytes 0-7."""
    low, middle, high = data.unflatten(-1, (3, 4)).unbind(-2)
    scale = torch.cat([low & 63, high & 15 | low >> 6 << 4], dim=-1)
    minimum = torch.cat([middle & 63, high >> 4 | middle >> 6 << 4], dim=-1)
    return scale, minimum
