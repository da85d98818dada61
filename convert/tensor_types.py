"""Chooses the type of each tensor of a model file."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from gguf import GGML_QUANT_SIZES

from sparkinfer.convert.encode import kind_for
from sparkinfer.convert.options import check_outtype
from sparkinfer.errors import SparkinferError
from sparkinfer.gguf_file import type_of
from sparkinfer.typed import shown


@dataclass(frozen=True, kw_only=True)
class TensorTypes:
    """Vectors are f32. Matrices are `outtype`, or f16 if their rows are not whole blocks, unless an
    override says otherwise.

    An override is "NAME=TYPE", where NAME is a regular expression that is searched for in the
    tensor's name; the first override that matches counts (as in `--tensor-type` of llama.cpp's
    quantiser). Overrides do not apply to vectors."""

    outtype: str
    overrides: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for text in self.overrides:
            name, _, kind = text.rpartition("=")
            if not name:
                raise SparkinferError(f"tensor type {shown(text)}; wanted NAME=TYPE")
            check_outtype(kind.lower(), f"tensor type {shown(text)}")
            try:
                re.compile(name)
            except re.error as error:
                raise SparkinferError(
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
        """The type of a tensor. Raises SparkinferError for an override that its rows do not fit."""
        kind = self.override(name) if len(shape) > 1 else None
        if kind is None:
            return kind_for(shape, self.outtype)
        block = GGML_QUANT_SIZES[type_of(kind)][0]
        if shape[-1] % block:
            raise SparkinferError(
                f"tensor type {kind} for {name}: rows of {shape[-1]} values are not whole blocks"
                f" of {block}; leave it out for this tensor"
            )
        return kind

    def check_used(self, names: Iterable[str]) -> None:
        """Raises SparkinferError for an override that matches no tensor, most likely a typo."""
        every = list(names)
        for text in self.overrides:
            if not any(re.search(text.rpartition("=")[0], name) for name in every):
                raise SparkinferError(
                    f"tensor type {shown(text)}: no tensor has such a name; the first is {every[0]}"
                )
