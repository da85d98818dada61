"""Summaries and codes of keys, and the search for the keys that a token reads: the torch
reference for key_selection.h.

The tables are bit-identical to those of the kernels. Scores differ by rounding, so near ties may be
resolved differently. Letters: B blocks of the cache, K key-value heads, N key blocks of a block of
the cache, or of a sequence, P positions of a key block, T tokens, W head width, S summary bytes, C
code bytes, G queries that share a head, M candidates; in `summarise`, S parts of a summary."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from hotsplit.options.key_selection import KeySelection, padded
from hotsplit.runtime.cache.block_table import BlockTable
from hotsplit.runtime.cache.stored_rows import inverse, turn_by_hadamard

SUMMARY_LARGEST, QUERY_LARGEST, CODE_STEP = 63.0, 127.0, 0.9957


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

    def window_begin(self, position: int) -> int:
        """The first position in the window of a token at `position`."""
        return max(0, position + 1 - self.rule.window) // self.rule.block * self.rule.block

    def takes_all(self, position: int) -> bool:
        """True if a token at `position` reads all keys."""
        rule = self.rule
        return position < rule.full or self.window_begin(position) <= rule.sinks + rule.top

    def choose(self, sequence: int, position: int, query_KGW: Tensor, score_scale: float) -> Tensor:
        """The positions that a token at `position` reads for these queries, int64 [K, positions],
        ascending; scores are multiplied by `score_scale`. Not for a token that reads all keys (`takes_all`). If stored keys are rotated,
        queries must be too."""
        rule, window = self.rule, self.window_begin(position)
        always = [torch.arange(rule.sinks), torch.arange(window, position + 1)]
        found = []
        block_N, at_N = self.places(sequence, rule.sinks // rule.block, window // rule.block)
        for head, query_GW in enumerate(query_KGW):
            won = self._search(head, block_N, at_N, query_GW, score_scale)
            found.append(torch.cat([always[0], won + rule.sinks, always[1]]))
        return torch.stack(found)

    def _search(
        self, head: int, block_N: Tensor, at_N: Tensor, query_GW: Tensor, score_scale: float
    ) -> Tensor:
        """The `top` best positions, int64, relative to the end of the sinks."""
        rule, size = self.rule, self.rule.block
        summary_NS = self.summary_BKNS[block_N, head, at_N].int() - 64
        unit_N = self.unit_BKN[block_N, head, at_N]
        parts = 2 if rule.summary == "bounds" else 1
        whole_GW, unit_G1 = _query(query_GW, self.width)
        split_GS = torch.cat([whole_GW.clamp_min(0), whole_GW.clamp_max(0)], dim=1)
        scale = unit_G1 * score_scale
        asked_GS = split_GS if parts == 2 else whole_GW
        score_GN = _dots(asked_GS, summary_NS) * unit_N * scale
        wanted = rule.top * max(1, rule.candidates)
        best_M = _largest(_mass(score_GN), min(len(block_N), -(-wanted // size)))
        position_M = (best_M[:, None] * size + torch.arange(size)).flatten()
        if not rule.is_coded:
            return position_M[: rule.top]
        center_GM = _dots(whole_GW.repeat(1, parts), summary_NS[best_M]) * unit_N[best_M]
        center_GM = center_GM * (scale / parts)
        turned_GW = query_GW if self.is_rotated else turn_by_hadamard(query_GW)
        whole_GW, unit_G1 = _query(turned_GW, self.width)
        code_NPC = self.code_BKNPC[block_N[best_M], head, at_N[best_M]]
        factor_NP = self.factor_BKNP[block_N[best_M], head, at_N[best_M]]
        dot_GM = _dots(whole_GW, 2 * decode_keys(code_NPC.flatten(0, 1)) - 3) * factor_NP.flatten()
        score_GM = center_GM.repeat_interleave(size, dim=1)
        score_GM = score_GM + dot_GM * (0.5 * unit_G1 * score_scale)
        return position_M[_largest(_mass(score_GM), rule.top)]


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


def decode_keys(code_MC: Tensor) -> Tensor:
    """The levels that codes stand for, each plus 2 and so from 0 to 3; int32 [M, W padded]."""
    part_MNB = code_MC.unflatten(-1, (-1, 16))
    parts = [part_MNB >> 2 * number & 3 for number in range(4)]
    return torch.stack(parts, dim=-2).flatten(1).int()


def _query(query_GW: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Quantises queries: (int32 [G, W padded], their unit [G, 1])."""
    unit_G1 = query_GW.abs().amax(dim=1, keepdim=True) / QUERY_LARGEST
    whole_GW = _whole(query_GW * inverse(unit_G1))
    return F.pad(whole_GW, (0, padded(width) - width)), unit_G1


def _dots(x_GS: Tensor, row_NS: Tensor) -> Tensor:
    """Exact dot products of integer vectors, f32 [G, N]."""
    return (x_GS.double() @ row_NS.double().T).float()


def _mass(score_GN: Tensor) -> Tensor:
    return score_GN.softmax(dim=-1).sum(dim=0)


def _largest(score_N: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest values, ascending. Of equal values the first win; NaN counts
    as infinite."""
    order_N = torch.where(score_N.isnan(), math.inf, score_N).argsort(descending=True, stable=True)
    return order_N[:count].sort().values


def _whole(x: Tensor) -> Tensor:
    """Rounds to int32 within -127 .. 127; NaN becomes 0."""
    return x.round().nan_to_num(0.0, 127.0, -127.0).clamp(-127, 127).int()


def _in_order(x: Tensor) -> Tensor:
    """Sums over the last axis sequentially, in the kernels' order."""
    total = torch.zeros_like(x[..., 0])
    for column in x.unbind(-1):
        total = total + column
    return total
