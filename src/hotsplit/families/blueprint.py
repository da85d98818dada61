"""A blueprint: the spec of a model and the source of each of its tensors, derived by a family from
a checkpoint's config."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import gguf
import numpy as np

from hotsplit.families.row_order import Rows
from hotsplit.model.spec import ModelSpec

NameOf = Callable[[str], str | None]
# Matrices of all experts: with rows of gates before those of ups, or with columns of them in turn.
ExpertForm = Literal["rows", "columns"]
# Rotary frequencies stored by old versions of transformers; readers compute them from the config.
IGNORED = ("rotary_emb.inv_freq",)


@dataclass(frozen=True)
class Change:
    """A change of values, and its inverse, of f32 arrays."""

    apply: Callable[[np.ndarray], np.ndarray]
    undo: Callable[[np.ndarray], np.ndarray]


SAME = Change(lambda x: x, lambda x: x)
ADD_ONE = Change(lambda x: x + 1.0, lambda x: x - 1.0)
NEGATED_EXP = Change(lambda x: -np.exp(x), lambda x: np.log(-x))


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """The plan of a conversion. `name_of` maps the name of a checkpoint's tensor to its name in the
    model file, or to None if it is unknown.

    `rows` has an entry for each tensor whose rows are reordered, by its name within a layer or, for
    tensors outside the layers, by its full name. Tensors whose names end with one of `constants` are not in the
    checkpoint and have this value everywhere; the values of those with an end in `changes`, the first
    that matches, are changed. `columns`: as `rows`, the order of the columns of a matrix: column c of
    the model file is the checkpoint's column `columns[name][c]`."""

    spec: ModelSpec
    name_of: NameOf
    # These two are read from every config in the same way (table.read_blueprint).
    threshold: float = 0.0
    is_tied: bool | None = None  # None if only transformers' default says so
    rope_factors: Mapping[str, np.ndarray] = field(
        default_factory=dict
    )  # f32 [head_dim / 2], by tensor
    rows: Mapping[str, Rows] = field(default_factory=dict)
    constants: Mapping[str, float] = field(default_factory=dict)
    changes: Mapping[str, Change] = field(default_factory=dict)
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    ignored: tuple[str, ...] = IGNORED  # suffixes of the names of tensors that are left out
    ignored_prefixes: tuple[str, ...] = ()  # of such names, which are noted
    expert_form: ExpertForm = "rows"
    notes: tuple[str, ...] = ()


def gguf_names(arch: gguf.MODEL_ARCH, num_layers: int) -> NameOf:
    """The name map of llama.cpp's converter."""
    names = gguf.get_tensor_name_map(arch, num_layers)
    return lambda source: names.get_name(source, try_suffixes=(".weight", ".bias"))
