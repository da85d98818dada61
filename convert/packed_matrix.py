"""Matrices that a checkpoint has packed: moved into blocks of ours bit by bit, or unpacked.

Letters: N rows, M columns, G groups of columns that share a scale, B blocks of 32 columns."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hotsplit.convert.encode import not_finite
from hotsplit.errors import HotsplitError
from hotsplit.model.weight_types import BY_NAME

BLOCK = 32
# Values of a nibble: a sign, two bits of exponent and one of mantissa (OCP Microscaling, version
# 1.0).
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = np.array([*_VALUES, *(-value for value in _VALUES)], np.float32)

Rows = slice | np.ndarray


@dataclass(frozen=True, kw_only=True)
class Codes:
    """Some rows: a value is its code (or the level that it stands for) times the scale of its
    group, plus the minimum if there is one; all times the factor of the matrix."""

    codes_NM: np.ndarray  # integers; of FP8 f32
    scale_NG: np.ndarray  # f32
    minimum_NG: np.ndarray | None = None  # f32
    factor: np.float32 | None = None


@dataclass(frozen=True, kw_only=True)
class PackedMatrix:
    """`packing` describes it to the user. `kind` is the type of ours that holds it, with a loss
    only in scales; None if there is none. `read` takes an expert's number, None for a matrix, and
    some of its rows. `are_rows`: of all experts, with rows even where a family has columns of them
    in 16 bits."""

    label: str  # file and tensor, for errors
    packing: str
    kind: str | None
    group_M: np.ndarray
    read: Callable[[int | None, Rows], Codes]
    levels: np.ndarray | None = None  # f32, by code
    are_rows: bool = False

    def kind_in(self, columns: np.ndarray | None) -> str | None:
        """`kind`, if blocks of 32 columns in this order have one scale each."""
        if self.kind is None or BY_NAME[self.kind].is_float:
            return self.kind
        group_M = self.group_M if columns is None else self.group_M[columns]
        if len(group_M) % BLOCK:
            return None
        group_B32 = group_M.reshape(-1, BLOCK)
        return self.kind if bool((group_B32 == group_B32[:, :1]).all()) else None

    def values(self, rows: Rows = slice(None), expert: int | None = None) -> tuple[Tensor, bool]:
        """f32 [N, M], and whether they are exact in `kind` if that is a float."""
        found = self.read(expert, rows)
        codes = found.codes_NM if self.levels is None else self.levels[found.codes_NM]
        with np.errstate(over="ignore", invalid="ignore"):  # `encode` refuses them
            values = codes.astype(np.float32) * np.take(found.scale_NG, self.group_M, axis=1)
            if found.minimum_NG is not None:
                values += np.take(found.minimum_NG, self.group_M, axis=1)
            if found.factor is not None:
                values *= found.factor
        mantissa, _ = np.frexp(found.scale_NG)
        return torch.from_numpy(values), bool(np.isin(mantissa, (0, 0.5)).all())

    def blocks(
        self, rows: Rows, columns: np.ndarray | None, expert: int | None = None
    ) -> tuple[np.ndarray, bool]:
        """Rows of `kind` with the columns in this order, uint8 [N, row bytes], and whether f16
        holds their scales exactly. Raises HotsplitError for scales that it does not hold at all,
        and for codes that do not fit."""
        assert self.kind is not None
        found = self.read(expert, rows)
        codes, group_M = found.codes_NM, self.group_M
        if columns is not None:
            codes, group_M = codes[:, columns], group_M[columns]
        group_B = group_M[::BLOCK]
        scales = [each for each in (found.scale_NG, found.minimum_NG) if each is not None]
        heads = [self._head(each) for each in scales]
        packed = _packed(self.kind, codes, [np.take(head, group_B, axis=1) for head, _ in heads])
        if packed is None:
            raise HotsplitError(
                f"{self.label} has zero points other than the middle, although config.json calls"
                f" it symmetric: {self.kind} does not hold it; correct config.json, or give an"
                " outtype"
            )
        return packed, all(is_exact for _, is_exact in heads)

    def _head(self, scale_NG: np.ndarray) -> tuple[np.ndarray, bool]:
        """Numbers of blocks as bytes [N, G, bytes], and whether these hold them exactly."""
        if not bool(np.isfinite(scale_NG).all()):
            raise not_finite(self.label)
        if self.kind == "mxfp4":  # powers of two
            exponent = np.frexp(scale_NG)[1] + 126
            if exponent.max() > 251:  # 6 times it would be infinite
                raise not_finite(self.label)
            return exponent.astype(np.uint8)[..., None], True
        with np.errstate(over="ignore"):
            half = scale_NG.astype(np.float16)
        if not bool(np.isfinite(half).all()):
            raise HotsplitError(
                f"{self.label} has scales that overflow the f16 numbers of {self.kind}; give"
                " outtype bf16"
            )
        is_exact = bool((half.astype(np.float32) == scale_NG).all())
        return half[..., None].view(np.uint8), is_exact


def _packed(kind: str, codes_NM: np.ndarray, heads: list[np.ndarray]) -> np.ndarray | None:
    """Rows of blocks with these numbers [N, B, bytes]; None for codes that the type lacks."""
    levels = BY_NAME[kind].levels
    lowest, count = (-128, 256) if kind == "q8_0" else (min(levels[0], 0), len(levels))
    quants = codes_NM.astype(np.int16) - lowest
    if not 0 <= quants.min() <= quants.max() < count:
        return None
    quants_NB32 = quants.astype(np.uint8).reshape(len(quants), -1, BLOCK)
    if kind == "q8_0":
        parts = [*heads, quants_NB32 ^ 128]  # signed bytes
    else:
        fifth = [np.packbits(quants_NB32 >> 4, axis=-1, bitorder="little")] * (count == 32)
        low = quants_NB32 & 15
        parts = [*heads, *fifth, low[..., :16] | low[..., 16:] << 4]
    return np.concatenate(parts, axis=-1).reshape(len(quants), -1)


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
