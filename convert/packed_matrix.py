"""Matrices that a checkpoint has packed: moved into blocks of ours bit by bit, or unpacked.

Letters: N rows, M columns, G groups of columns that share a scale, B blocks."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hotsplit.convert.encode import not_finite
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_types import block_sizes
from hotsplit.model.weight_types import BY_NAME, FLOAT_NAMES

# Values of a nibble: a sign, two bits of exponent and one of mantissa (OCP Microscaling, version
# 1.0).
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = np.array([*_VALUES, *(-value for value in _VALUES)], np.float32)

Rows = slice | np.ndarray


@dataclass(frozen=True, kw_only=True)
class Codes:
    """Some rows: a value is its code (or the level that it stands for) times the scale of its
    group, plus the minimum if there is one."""

    codes_NM: np.ndarray  # integers; of FP8 f32
    scale_NG: np.ndarray  # f32
    minimum_NG: np.ndarray | None = None  # f32


@dataclass(frozen=True, kw_only=True)
class PackedMatrix:
    """`packing` describes it to the user. `kinds` are the types of ours that hold it, with a loss
    only in scales, the smallest first. `read` takes an expert's number, None for a matrix, and some
    of its rows; `factor`, of all values, an expert's number. `are_rows`: of all experts, with rows
    even where a family has columns of them in 16 bits."""

    label: str  # file and tensor, for errors
    packing: str
    kinds: tuple[str, ...]
    group_M: np.ndarray
    read: Callable[[int | None, Rows], Codes]
    levels: np.ndarray | None = None  # f32, by code
    factor: Callable[[int | None], np.float32] | None = None
    are_rows: bool = False

    def kind_in(self, columns: np.ndarray | None) -> str | None:
        """The first of `kinds` of which each block has one scale with its columns in this order."""
        group_M = self.group_M if columns is None else self.group_M[columns]
        for kind in self.kinds:
            unit = _unit(kind)
            if len(group_M) % block_sizes(kind)[0] == 0:
                group_BU = group_M.reshape(-1, unit)
                if kind in FLOAT_NAMES or bool((group_BU == group_BU[:, :1]).all()):
                    return kind
        return None

    def is_unsorted(self, columns: np.ndarray | None) -> bool:
        """True if one of `kinds` would hold it with its columns sorted by groups alone."""
        order = np.argsort(self.group_M, kind="stable")
        return self.kind_in(columns) is None and self.kind_in(order) is not None

    def values(self, rows: Rows = slice(None), expert: int | None = None) -> tuple[Tensor, bool]:
        """f32 [N, M], and whether a float holds them exactly that holds the codes."""
        found = self.read(expert, rows)
        codes = found.codes_NM if self.levels is None else self.levels[found.codes_NM]
        with np.errstate(over="ignore", invalid="ignore"):  # `encode` refuses them
            values = codes.astype(np.float32) * np.take(found.scale_NG, self.group_M, axis=1)
            if found.minimum_NG is not None:
                values += np.take(found.minimum_NG, self.group_M, axis=1)
            if self.factor is not None:
                values *= self._checked_factor(expert)
        mantissa, _ = np.frexp(found.scale_NG)
        return torch.from_numpy(values), bool(np.isin(mantissa, (0, 0.5)).all())

    def blocks(
        self, kind: str, rows: Rows, columns: np.ndarray | None, expert: int | None = None
    ) -> tuple[np.ndarray, bool]:
        """Rows of one of `kinds` with the columns in this order, uint8 [N, row bytes], and whether
        these hold the scales exactly. Raises HotsplitError for scales that they do not hold at all,
        and for codes that do not fit."""
        if self.factor is not None:
            self._checked_factor(expert)
        found = self.read(expert, rows)
        codes, group_M = found.codes_NM, self.group_M
        if columns is not None:
            codes, group_M = codes[:, columns], group_M[columns]
        scales = [each for each in (found.scale_NG, found.minimum_NG) if each is not None]
        heads = [self._head(kind, each) for each in scales]
        group_B = group_M[:: _unit(kind)]
        packed = _packed(kind, codes, [np.take(head, group_B, axis=1) for head, _ in heads])
        if packed is None:
            raise HotsplitError(
                f"{self.label} has zero points other than the middle, although config.json calls"
                f" it symmetric: {kind} does not hold it; correct config.json, or give an outtype"
            )
        return packed, all(is_exact for _, is_exact in heads)

    def _checked_factor(self, expert: int | None) -> np.float32:
        assert self.factor is not None
        if not 0 < (factor := self.factor(expert)) < np.inf:
            raise HotsplitError(
                f"{self.label} has a scale of the whole matrix of {factor:g}; download its damaged"
                " file again"
            )
        return factor

    def _head(self, kind: str, scale_NG: np.ndarray) -> tuple[np.ndarray, bool]:
        """Numbers of blocks as bytes [N, G, bytes], and whether these hold them exactly."""
        if not bool(np.isfinite(scale_NG).all()):
            raise not_finite(self.label)
        if kind == "mxfp4":  # powers of two
            exponent = np.frexp(scale_NG)[1] + 126
            if exponent.max() > 251:  # 6 times it would be infinite
                raise not_finite(self.label)
            return exponent.astype(np.uint8)[..., None], True
        if kind == "nvfp4":
            if scale_NG.min() < 0:
                raise HotsplitError(f"{self.label} has scales below zero; download it again")
            bits = torch.from_numpy(np.abs(scale_NG)).to(torch.float8_e4m3fn).view(torch.uint8)
            return bits.numpy()[..., None], True
        with np.errstate(over="ignore"):
            half = (-scale_NG if kind == "q2_0" else scale_NG).astype(np.float16)
        if not bool(np.isfinite(half).all()):
            raise HotsplitError(
                f"{self.label} has scales that overflow the f16 numbers of {kind}; give outtype"
                " bf16"
            )
        is_exact = bool((np.abs(half.astype(np.float32)) == np.abs(scale_NG)).all())
        return half[..., None].view(np.uint8), is_exact


def _unit(kind: str) -> int:
    """Columns that share a number in a block."""
    return 16 if kind == "nvfp4" else block_sizes(kind)[0]


def _packed(kind: str, codes_NM: np.ndarray, heads: list[np.ndarray]) -> np.ndarray | None:
    """Rows of blocks with these numbers [N, B, bytes]; None for codes that the type lacks. The
    codes of q2_0 end above zero, and those of symmetric ones below, so that their signs change."""
    block, levels = block_sizes(kind)[0], () if kind == "nvfp4" else BY_NAME[kind].levels
    lowest = -128 if kind == "q8_0" else min(levels, default=0) if levels[:1] < (0,) else 0
    count = 256 if kind == "q8_0" else len(levels) or 16
    quants = (-codes_NM if kind == "q2_0" else codes_NM).astype(np.int16) - lowest
    if not 0 <= quants.min() <= quants.max() < count:
        return None
    quants_NBM = quants.astype(np.uint8).reshape(len(quants), -1, block)
    parts: list[np.ndarray]
    if kind == "q8_0":
        parts = [quants_NBM ^ 128]  # signed bytes
    elif kind == "q2_0":
        fours = quants_NBM.reshape(*quants_NBM.shape[:2], -1, 4) << np.arange(
            0, 8, 2, dtype=np.uint8
        )
        parts = [np.bitwise_or.reduce(fours, axis=-1)]
    else:
        half = 8 if kind == "nvfp4" else 16
        units = (quants_NBM & 15).reshape(*quants_NBM.shape[:2], -1, 2, half)
        fifth = [np.packbits(quants_NBM >> 4, axis=-1, bitorder="little")] * (count == 32)
        nibbles = units[..., 0, :] | units[..., 1, :] << 4
        parts = [*fifth, nibbles.reshape(*quants_NBM.shape[:2], -1)]
    numbers = [head.reshape(*quants_NBM.shape[:2], -1) for head in heads]
    return np.concatenate([*numbers, *parts], axis=-1).reshape(len(quants), -1)


def unpack_bits(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """The first `count` numbers of `bits` bits each, uint8 [..., count], of words [..., W], from
    the lowest bits of the first word on; they may straddle words."""
    raw = np.ascontiguousarray(words).view(np.uint8)
    if 8 % bits == 0:
        numbers = np.empty((*raw.shape[:-1], raw.shape[-1] * 8 // bits), np.uint8)
        for place in range(8 // bits):  # 40 times as fast as all places at once
            numbers[..., place :: 8 // bits] = raw >> place * bits & (1 << bits) - 1
        return numbers[..., :count]
    flags = np.unpackbits(raw, axis=-1, bitorder="little", count=count * bits)
    flags = flags.reshape(*raw.shape[:-1], count, bits)
    numbers = flags[..., 0].copy()
    for place in range(1, bits):
        numbers |= flags[..., place] << place
    return numbers
