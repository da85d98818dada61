"""Summaries and codes of keys, by which the kernels find the keys that a token reads
(key_selection.h). A text's keys that come from a file are summarised here, with the bits of the
kernels.

Letters: B blocks of the cache, K key-value heads, N key blocks of a block of the cache, or of a
sequence, P positions of a key block, T tokens, W head width, S summary bytes, C code bytes; in
`summarise`, S parts of a summary."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from hotsplit.options.key_selection import KeySelection, padded
from hotsplit.runtime.cache.block_table import BlockTable
from hotsplit.runtime.cache.stored_rows import inverse, turn_by_hadamard

SUMMARY_LARGEST, CODE_STEP = 63.0, 0.9957


@dataclass(frozen=True, kw_only=True)
class KeyTables:
    """The summaries and codes of one layer's keys."""

    summary_BKNS: Tensor  # uint8
    unit_BKN: Tensor
    code_BKNPC: Tensor  # uint8; empty if the rule has no codes
    factor_BKNP: Tensor
    rule: KeySelection
    table: BlockTable
    width: int
    is_rotated: bool  # keys are stored rotated by the Hadamard matrix

    @classmethod
    def of(
        cls,
        rule: KeySelection,
        table: BlockTable,
        num_kv_heads: int,
        width: int,
        is_rotated: bool,
        zeros: Callable[[tuple[int, ...], torch.dtype], Tensor],
    ) -> "KeyTables":
        blocks = -(-table.block_length // rule.block)
        frame = (table.num_blocks, num_kv_heads, blocks)
        coded = (*frame, rule.block if rule.is_coded else 0)
        return cls(
            summary_BKNS=zeros((*frame, rule.summary_width(width)), torch.uint8),
            unit_BKN=zeros(frame, torch.float32),
            code_BKNPC=zeros((*coded, rule.code_width(width)), torch.uint8),
            factor_BKNP=zeros(coded, torch.float32),
            rule=rule,
            table=table,
            width=width,
            is_rotated=is_rotated,
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.summary_BKNS, self.unit_BKN, self.code_BKNPC, self.factor_BKNP

    def places(self, sequence: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """(block of the cache, key block within it) for the key blocks first .. last-1 of a
        sequence."""
        position_N = torch.arange(first, last) * self.rule.block
        length = self.table.block_length
        block_N = self.table.block_SN[sequence].long()[position_N // length]
        return block_N, position_N % length // self.rule.block

    def summarise(self, sequence: int, begin: int, key_TKW: Tensor) -> None:
        """Adds whole key blocks from position `begin` on; `key_TKW`: their stored keys, decoded to
        f32."""
        size = self.rule.block
        key_NPKW = key_TKW.unflatten(0, (-1, size))
        block_N, at_N = self.places(sequence, begin // size, begin // size + len(key_NPKW))
        part_NSKW = self._parts(key_NPKW)
        unit_NK = part_NSKW.abs().amax(dim=(1, 3)) / SUMMARY_LARGEST
        is_finite_NK = key_NPKW.isfinite().all(dim=3).all(dim=1)
        unit_NK = torch.where(is_finite_NK, unit_NK, math.nan)
        whole_NSKW = _whole(part_NSKW * inverse(unit_NK)[:, None, :, None])
        extra = padded(self.width) - self.width
        bytes_NKS = F.pad(whole_NSKW, (0, extra)).transpose(1, 2).flatten(2) + 64
        self.summary_BKNS[block_N, :, at_N] = bytes_NKS.to(torch.uint8)
        self.unit_BKN[block_N, :, at_N] = unit_NK
        if self.rule.is_coded:
            share = 1.0 if part_NSKW.shape[1] == 1 else 0.5
            center_NKW = whole_NSKW.sum(dim=1).float() * (share * unit_NK)[..., None]
            rest_NPKW = key_NPKW - center_NKW[:, None]
            code_NPKC, factor_NPK = encode_keys(
                rest_NPKW if self.is_rotated else turn_by_hadamard(rest_NPKW)
            )
            self.code_BKNPC[block_N, :, at_N] = code_NPKC.transpose(1, 2)
            self.factor_BKNP[block_N, :, at_N] = factor_NPK.transpose(1, 2)

    def _parts(self, key_NPKW: Tensor) -> Tensor:
        """The means of the keys [N, 1, K, W], or their largest and smallest values [N, 2, K, W]."""
        if self.rule.summary == "bounds":
            return torch.stack([key_NPKW.amax(dim=1), key_NPKW.amin(dim=1)], dim=1)
        total_NKW = key_NPKW[:, 0]
        for number in range(1, self.rule.block):  # in the kernels' order
            total_NKW = total_NKW + key_NPKW[:, number]
        return (total_NKW * (1.0 / self.rule.block))[:, None]


def encode_keys(rest: Tensor) -> tuple[Tensor, Tensor]:
    """(codes uint8 [..., C], factors [...]) of the rotated residuals of keys [..., W]."""
    width = rest.shape[-1]
    squares = _in_order(rest * rest)
    step = (squares / width).sqrt() * CODE_STEP
    level = _whole((rest * inverse(step)[..., None]).floor()).clamp(-2, 1)
    along = _in_order(rest * (level.float() + 0.5))
    factor = torch.where(along > 0, squares / along, 0.0)
    bits = F.pad(level + 2, (0, padded(width) - width)).to(torch.uint8)
    part = bits.unflatten(-1, (-1, 4, 16))  # axis -2: the four values of a byte
    code = part[..., 0, :]
    for number in range(1, 4):
        code = code | part[..., number, :] << 2 * number
    return code.flatten(-2), factor


def _whole(x: Tensor) -> Tensor:
    """Rounds to int32 within -127 .. 127; NaN becomes 0."""
    return x.round().nan_to_num(0.0, 127.0, -127.0).clamp(-127, 127).int()


def _in_order(x: Tensor) -> Tensor:
    """Sums over the last axis sequentially, in the kernels' order."""
    total = torch.zeros_like(x[..., 0])
    for column in x.unbind(-1):
        total = total + column
    return total
