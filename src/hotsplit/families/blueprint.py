"""A blueprint: the keys and the spec of a model, and the source of each of its tensors, made from a
checkpoint's config by the table of its family."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import gguf
import numpy as np

from hotsplit.files.gguf_file import Value
from hotsplit.model.spec import ModelSpec

NameOf = Callable[[str], str | None]
# Matrices of all experts: with rows of gates before those of ups; the same or its transpose, which
# the shape says; or with columns of gates and ups in turn.
ExpertForm = Literal["rows", "rows or transposed", "columns"]
# Rotary frequencies stored by old versions of transformers; readers compute them from the config.
IGNORED = ("rotary_emb.inv_freq",)


@dataclass(frozen=True)
class ValueChange:
    """A change of values, and its inverse, of f32 arrays."""

    apply: Callable[[np.ndarray], np.ndarray]
    undo: Callable[[np.ndarray], np.ndarray]


SAME = ValueChange(lambda x: x, lambda x: x)
ADD_ONE = ValueChange(lambda x: x + 1.0, lambda x: x - 1.0)
NEGATED_EXP = ValueChange(lambda x: -np.exp(x), lambda x: np.log(-x))


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Reorders the rows of a tensor: row r of the model file is row `order[r]` of the checkpoint's
    tensor that `name_of` calls `source`, which has `num_rows` rows."""

    source: str
    order: np.ndarray
    num_rows: int


@dataclass(frozen=True, kw_only=True)
class HeadRows:
    """The matrices of the heads of a tensor [H, N, M]: of each `total` rows of the checkpoint's
    tensor that `name_of` calls `source`, of `width` columns, rows `begin` .. `end` - 1, or their
    columns if it `is_turned`."""

    source: str
    begin: int
    end: int
    total: int
    width: int
    is_turned: bool = False


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where a checkpoint's tensors are not those of a model file.

    renamed: llama.cpp's map of names, as it is for this family. rows: an entry for each tensor
    whose rows are reordered, by its name within a layer or, for tensors outside the layers, by its
    full name. columns: the same for the columns of a matrix: column c of the model file is the
    checkpoint's column `columns[name][c]`. heads: an entry for each tensor with a matrix of each
    head, by its name within a layer. constants: tensors whose names end so are not in the
    checkpoint and have this value everywhere. changes: of the values of tensors whose names end so;
    the first that matches counts. factors: of the rows of matrices, or one of all rows, by which a
    model file has them multiplied, by name as `rows`. pieces: tensors whose rows may be those of
    several of the checkpoint's, which `name_of` calls by the name with the piece's number before
    `.weight`. ignored: suffixes of the names of tensors
    that are left out;
    ignored_prefixes: beginnings of such names, which are noted."""

    renamed: Callable[[NameOf], NameOf] = field(default=lambda name_of: name_of, compare=False)
    rows: Mapping[str, Rows] = field(default_factory=dict)
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    heads: Mapping[str, HeadRows] = field(default_factory=dict)
    constants: Mapping[str, float] = field(default_factory=dict)
    changes: Mapping[str, ValueChange] = field(default_factory=dict)
    factors: Mapping[str, np.ndarray] = field(default_factory=dict)
    pieces: frozenset[str] = frozenset()
    ignored: tuple[str, ...] = IGNORED
    ignored_prefixes: tuple[str, ...] = ()
    expert_form: ExpertForm = "rows"


@dataclass(frozen=True, kw_only=True)
class Blueprint(Sources):
    """The plan of a conversion. `keys`: of the model file's architecture, without its prefix.
    `name_of` maps the name of a checkpoint's tensor to its name in the model file, or to None if it
    is unknown."""

    spec: ModelSpec
    keys: Mapping[str, Value]
    name_of: NameOf
    threshold: float = 0.0
    is_tied: bool | None = None  # None if only transformers' default says so
    rope_factors: Mapping[str, np.ndarray] = field(
        default_factory=dict
    )  # f32 [head_dim / 2], by tensor
    notes: tuple[str, ...] = ()


def gguf_names(arch: gguf.MODEL_ARCH, num_layers: int) -> NameOf:
    """The name map of llama.cpp's converter."""
    names = gguf.get_tensor_name_map(arch, num_layers)
    return lambda source: names.get_name(source, try_suffixes=(".weight", ".bias"))


def suffixed(ends: Mapping[str, str]) -> Callable[[NameOf], NameOf]:
    """A map of names with these ends of a checkpoint's names where llama.cpp's map lacks them."""

    def renamed(name_of: NameOf) -> NameOf:
        def name(source: str) -> str | None:
            for theirs, known in ends.items():
                if source.endswith(theirs):
                    return name_of(source.removesuffix(theirs) + known)
            return name_of(source)

        return name

    return renamed
