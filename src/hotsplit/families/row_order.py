"""The order in which a model file has the rows of a checkpoint's tensors, such as rotary pairs that
are neighbours."""

from dataclasses import dataclass

import numpy as np

from hotsplit.families.sizes import Sizes


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Reorders the rows of a tensor: row r of the model file is row `order[r]` of the checkpoint's
    tensor that `name_of` calls `source`, which has `num_rows` rows."""

    source: str
    order: np.ndarray
    num_rows: int


def adjacent_pairs(num_rows: int, num_heads: int, num_rotated: int | None = None) -> np.ndarray:
    """The row order of a query or key projection that makes the two rows of a rotary pair adjacent:
    row r of the model file is row order[r] of the checkpoint. `num_rotated`: of a head's rows; its
    last ones stay.

    transformers pairs row p of a head's 2P rotated ones with row p + P, llama.cpp row 2p with row 2p + 1."""
    rows_HW = np.arange(num_rows).reshape(num_heads, -1)
    turned_HW, rest_HW = np.split(rows_HW, [num_rotated or rows_HW.shape[1]], axis=1)
    pairs_HW = turned_HW.reshape(num_heads, 2, -1).swapaxes(1, 2).reshape(num_heads, -1)
    return np.concatenate([pairs_HW, rest_HW], axis=1).reshape(-1)


def rotary_rows(sizes: Sizes) -> dict[str, Rows]:
    """The rows of queries and keys (and their biases) for a graph that rotates adjacent pairs."""
    rows = {}
    for name, heads in (("attn_q", sizes.num_heads), ("attn_k", sizes.num_kv_heads)):
        count = heads * sizes.head_dim
        order = adjacent_pairs(count, heads)
        for part in (".weight", ".bias"):
            rows[name + part] = Rows(source=name + part, order=order, num_rows=count)
    return rows
