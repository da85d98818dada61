"""A blueprint: the spec of a model and the source of each of its tensors, derived by a family from
a checkpoint's config."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import gguf
import numpy as np

from hotsplit.families.sizes import Sizes
from hotsplit.model.spec import ModelSpec

NameOf = Callable[[str], str | None]
# Rotary frequencies stored by old versions of transformers; readers compute them from the config.
IGNORED = ("rotary_emb.inv_freq",)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Reorders the rows of a tensor: row r of the model file is row `order[r]` of the checkpoint's
    tensor that `name_of` calls `source`, which has `num_rows` rows."""

    source: str
    order: np.ndarray
    num_rows: int


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """The plan of a conversion. `name_of` maps the name of a checkpoint's tensor to its name in the
    model file, or to None if it is unknown.

    `rows` has an entry for each tensor whose rows are reordered, by its name within a layer or, for
    tensors outside the layers, by its full name. Tensors whose names end with one of `constants` are not in the
    checkpoint and have this value everywhere; to those with an end in `added`, that is added."""

    spec: ModelSpec
    name_of: NameOf
    # These two are read from every config in the same way (table.read_blueprint).
    threshold: float = 0.0
    is_tied: bool | None = None  # None if only transformers' default says so
    rope_factors: np.ndarray | None = None  # f32 [head_dim / 2]
    rows: Mapping[str, Rows] = field(default_factory=dict)
    constants: Mapping[str, float] = field(default_factory=dict)
    added: Mapping[str, float] = field(default_factory=dict)
    ignored: tuple[str, ...] = IGNORED  # suffixes of the names of tensors that are left out
    notes: tuple[str, ...] = ()


def gguf_names(arch: gguf.MODEL_ARCH, num_layers: int) -> NameOf:
    """The name map of llama.cpp's converter."""
    names = gguf.get_tensor_name_map(arch, num_layers)
    return lambda source: names.get_name(source, try_suffixes=(".weight", ".bias"))


def adjacent_pairs(num_rows: int, num_heads: int) -> np.ndarray:
    """The row order of a query or key projection (heads of 2P rows each) that makes the two rows of
    a rotary pair adjacent: row r of the model file is row order[r] of the checkpoint.

    transformers pairs row p of a head with row p + P, llama.cpp row 2p with row 2p + 1."""
    return np.arange(num_rows).reshape(num_heads, 2, -1).swapaxes(1, 2).reshape(-1)


def rotary_rows(sizes: Sizes) -> dict[str, Rows]:
    """The rows of queries and keys (and their biases) for a graph that rotates adjacent pairs."""
    rows = {}
    for name, heads in (("attn_q", sizes.num_heads), ("attn_k", sizes.num_kv_heads)):
        count = heads * sizes.head_dim
        order = adjacent_pairs(count, heads)
        for part in (".weight", ".bias"):
            rows[name + part] = Rows(source=name + part, order=order, num_rows=count)
    return rows
