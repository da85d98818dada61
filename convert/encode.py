"""The type of each tensor of a model file; its weights encoded as the bytes of that type, refused if
they would not survive, and checked to read back up to the type's rounding.

Letters: N rows, M values of a row."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from gguf.quants import dequantize
from torch import Tensor

from hotsplit.convert.native.library import encode_rows
from hotsplit.convert.options import check_outtype
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import TensorEntry, is_whole_blocks, type_of
from hotsplit.files.typed import shown
from hotsplit.model.weight_types import BY_NAME


@dataclass(frozen=True, kw_only=True)
class TensorTypes:
    """Vectors are f32. Matrices are `outtype`, or q8_0 or f16 if their rows are not whole blocks,
    unless an override says otherwise.

    An override is "NAME=TYPE", where NAME is a regular expression that is searched for in the
    tensor's name; the first override that matches counts (as in `--tensor-type` of llama.cpp's
    quantiser). Overrides do not apply to vectors."""

    outtype: str
    overrides: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for text in self.overrides:
            name, _, kind = text.rpartition("=")
            if not name:
                raise HotsplitError(f"tensor type {shown(text)}; wanted NAME=TYPE")
            check_outtype(kind.lower(), f"tensor type {shown(text)}")
            try:
                re.compile(name)
            except re.error as error:
                raise HotsplitError(
                    f"tensor type {shown(text)}: {shown(name)} is not a regular expression ({error})"
                ) from error

    def override(self, name: str) -> str | None:
        """The type that an override asks for; None if no override matches."""
        for text in self.overrides:
            pattern, _, kind = text.rpartition("=")
            if re.search(pattern, name):
                return kind.lower()
        return None

    def kind(self, name: str, shape: tuple[int, ...]) -> str:
        """The type of a tensor. Raises HotsplitError for an override that its rows do not fit."""
        if len(shape) == 1:
            return "f32"
        kind = self.override(name)
        if kind is None:
            kinds = (self.outtype, "q8_0")
            return next((k for k in kinds if is_whole_blocks(shape[-1], k)), "f16")
        if not is_whole_blocks(shape[-1], kind):
            raise HotsplitError(
                f"tensor type {kind} for {name}: rows of {shape[-1]} values are not whole blocks"
                f" of {BY_NAME[kind].block_values}; leave it out for this tensor"
            )
        return kind

    def fallen_note(self, tensors: Mapping[str, TensorEntry]) -> str | None:
        """A note on matrices of another type than asked for, because their rows do not fit it."""
        block = BY_NAME[self.outtype].block_values
        matrices = [(n, e) for n, e in tensors.items() if len(e.shape) == 2]
        fallen = [(n, e) for n, e in matrices if e.shape[-1] % block and self.override(n) is None]
        if not fallen:
            return None
        share = sum(e.num_bytes for _, e in fallen) / sum(e.num_bytes for e in tensors.values())
        kinds = " or ".join(sorted({e.kind for _, e in fallen}, reverse=True))
        names = ", ".join(n for n, _ in fallen[:3])
        return (
            f"{len(fallen)} of {len(matrices)} matrices, {share:.0%} of the bytes, are {kinds}, because"
            f" their rows are not whole {self.outtype} blocks of {block}:"
            f" {names}{', ...' if fallen[3:] else ''}"
        )

    def check_used(self, names: Iterable[str]) -> None:
        """Raises HotsplitError for an override that matches no tensor, most likely a typo."""
        every = list(names)
        for text in self.overrides:
            if not any(re.search(text.rpartition("=")[0], name) for name in every):
                raise HotsplitError(
                    f"tensor type {shown(text)}: no tensor has such a name; the first is {every[0]}"
                )


DTYPES = {"f32": np.float32, "f16": np.float16}


def encode(
    values: np.ndarray | Tensor, kind: str, name: str, *, rows: np.ndarray | None = None,
    wider: str = "bf16",
) -> np.ndarray:  # fmt: skip
    """The bytes of f32, f16 or bf16 values [M] or [N, M]; each row taken becomes a row of bytes.

    `rows` are the indices of the rows to take, in order; None means all. A transposed view is read
    in place. An error names the tensor and its file by `name`, and suggests the outtype `wider`
    (f32 if `kind` is bf16). Raises HotsplitError for NaN and infinite values, and for
    values that `kind` cannot hold. The bytes are those of gguf.quants or, for K-quants, of ggml."""
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    assert tensor.dim() in (1, 2) and tensor.numel() > 0, tensor.shape
    encoded, largest = encode_rows(torch.atleast_2d(tensor), kind, rows=rows)
    if not math.isfinite(largest):
        raise not_finite(name)
    if largest >= BY_NAME[kind].overflows_at:
        other = "f32" if kind == "bf16" else wider
        raise HotsplitError(
            f"{name} holds a magnitude of {largest:g}, which overflows {kind}; use outtype {other}"
        )
    encoded = encoded.view(DTYPES.get(kind, np.uint8))
    return encoded if tensor.dim() == 2 else encoded.reshape(-1)


def not_finite(name: str) -> HotsplitError:
    return HotsplitError(
        f"{name} has NaN or infinite values; its file is damaged: download it again"
    )


def restore(entry: TensorEntry, want: np.ndarray, name: str) -> np.ndarray:
    """The values of `entry` as f32; it was made from `want`, f32 of the same shape.

    Raises HotsplitError if they differ by more than the type's rounding."""
    values = dequantize(entry.read(), type_of(entry.kind)).reshape(entry.shape)
    if not is_rounding(values, want, entry.kind):
        raise HotsplitError(
            f"{name}: written as {entry.kind}, it does not read back as it was; the file is not"
            " kept: is the disk failing? please report it"
        )
    return values


def is_rounding(got: np.ndarray, want: np.ndarray, kind: str) -> bool:
    """True if `got` is `want`, f32 [M] or [N, M], rounded to the type."""
    if got.shape != want.shape:
        return False
    scale = np.abs(want)
    weight_type = BY_NAME[kind]
    block = weight_type.block_values
    if block > 1:
        scale = scale.reshape(-1, block).max(axis=1, keepdims=True)
        got, want = got.reshape(-1, block), want.reshape(-1, block)
    bound = np.float32(weight_type.relative_error) * scale + np.float32(weight_type.absolute_error)
    return bool((np.abs(got - want) <= bound).all())
