"""The type that each tensor of a model file gets."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from hotsplit.artifacts.importance_file import Importances
from hotsplit.convert.importances import mean_squares
from hotsplit.convert.options import check_type
from hotsplit.convert.type_mixtures import NAMED_AS_TYPES, Roles
from hotsplit.convert.type_mixtures import NAMES as MIXTURES
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import TensorEntry, is_whole_blocks
from hotsplit.files.typed import shown
from hotsplit.model.tensors import is_router, is_vector
from hotsplit.model.weight_types import BY_NAME, FILE_NAMES, FLOAT_NAMES, IN_MEMORY, SMALLER_BLOCKS


@dataclass(frozen=True, kw_only=True)
class TensorTypes:
    """Vectors and routers are f32; matrices that llama.cpp's quantiser leaves as they are (`roles`)
    are f16 at least. Other matrices are `outtype`, or what it says for their role if it is a
    mixture, which needs `roles`; if their rows are not whole blocks, a type of smaller blocks, or
    f16. An override says otherwise. `importances` weigh the errors of types that are searched.

    An override is "NAME=TYPE", where NAME is a regular expression that is searched for in the
    tensor's name; the first override that matches counts (as in `--tensor-type` of llama.cpp's
    quantiser). Overrides do not apply to vectors.

    `keeps_packed`: matrices that a checkpoint has in a type of ours stay in it, where nothing is
    transposed and no override matches."""

    outtype: str
    roles: Roles | None = None
    importances: Importances | None = None
    overrides: tuple[str, ...] = ()
    keeps_packed: bool = False

    def __post_init__(self) -> None:
        for text in self.overrides:
            name, _, kind = text.rpartition("=")
            if not name:
                raise HotsplitError(f"tensor type {shown(text)}; wanted NAME=TYPE")
            check_type(kind.lower(), f"tensor type {shown(text)}")
            try:
                re.compile(name)
            except re.error as error:
                raise HotsplitError(
                    f"tensor type {shown(text)}: {shown(name)} is not a regular expression"
                    f" ({error})"
                ) from error

    def override(self, name: str) -> str | None:
        """The type that an override asks for; None if no override matches."""
        for text in self.overrides:
            pattern, _, kind = text.rpartition("=")
            if re.search(pattern, name):
                return kind.lower()
        return None

    def kind(self, name: str, shape: tuple[int, ...], *, packed: str | None = None) -> str:
        """The type of a tensor, which the checkpoint may have in type `packed`. Raises
        HotsplitError for an override that its rows do not fit."""
        kind = None if is_vector(name, shape) else self.override(name)
        if is_vector(name, shape) or (kind is None and is_router(name)):
            return "f32"
        if kind is None and packed is not None and self.keeps_packed:
            return packed
        if kind is None:
            wanted = self._wanted(name)
            kinds = (wanted, SMALLER_BLOCKS.get(wanted, wanted))
            return next((k for k in kinds if is_whole_blocks(shape[-1], k)), "f16")
        if not is_whole_blocks(shape[-1], kind):
            raise HotsplitError(
                f"tensor type {kind} for {name}: rows of {shape[-1]} values are not whole blocks"
                f" of {BY_NAME[kind].block_values}; leave it out for this tensor"
            )
        return kind

    def importance(self, name: str, shape: tuple[int, ...]) -> np.ndarray | None:
        """f32 [E, M] of a matrix, see mean_squares."""
        return mean_squares(self.importances, name, shape)

    def _wanted(self, name: str) -> str:
        """The type of a matrix, if its rows fit it."""
        is_kept = self.roles is not None and name in self.roles.unquantised
        if is_kept and self.outtype not in FLOAT_NAMES:
            return "f16"
        if self.outtype not in (*MIXTURES, *NAMED_AS_TYPES):
            return self.outtype
        assert self.roles is not None
        return self.roles.type_in(self.outtype, name)

    def stored_kind(self, name: str, shape: tuple[int, ...], source: str, *, is_whole: bool) -> str:
        """The type of a tensor that a GGUF has as `source`: what an override asks for; without one
        its own, if it runs and its blocks stay whole; else q8_0, which loses least."""
        if self.override(name) is not None and not is_vector(name, shape):
            return self.kind(name, shape)
        if source in (*FILE_NAMES, *IN_MEMORY) and (source in FLOAT_NAMES or is_whole):
            return source
        return replace(self, outtype="q8_0", roles=None).kind(name, shape)

    def fallen_note(self, tensors: Mapping[str, TensorEntry]) -> str | None:
        """A note on matrices of another type than asked for, because their rows do not fit it."""
        matrices = [
            (n, e) for n, e in tensors.items() if not is_vector(n, e.shape) and not is_router(n)
        ]
        fallen = [
            (n, e)
            for n, e in matrices
            if self.override(n) is None and not is_whole_blocks(e.shape[-1], self._wanted(n))
        ]
        if not fallen:
            return None
        share = sum(e.num_bytes for _, e in fallen) / sum(e.num_bytes for e in tensors.values())
        kinds = " or ".join(sorted({e.kind for _, e in fallen}, reverse=True))
        wanted = " or ".join(sorted({self._wanted(n) for n, _ in fallen}))
        names = ", ".join(n for n, _ in fallen[:3])
        block = BY_NAME[self._wanted(fallen[0][0])].block_values
        return (
            f"{len(fallen)} of {len(matrices)} matrices, {share:.0%} of the bytes, are {kinds},"
            f" because their rows are not whole {wanted} blocks of {block}:"
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
