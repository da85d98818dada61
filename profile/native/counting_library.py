"""The C++ counter in this folder, called on torch tensors.

If the C++ is not built, importing this raises HotsplitError.

Letters: T tokens, F neurons, B histogram bins."""

import ctypes
from functools import cache

import numpy as np
import torch
from torch import Tensor

from hotsplit.artifacts.profile_file import EDGES, NUM_BINS
from hotsplit.system.shared_libraries import INT, POINTER, SIZE, open_library

NUM_BUCKETS = 1 << 15


# hs_count of count.cpp: values and sizes | threshold | bins, edges | counts, histogram and its size
_TAKEN = (POINTER, SIZE, SIZE, ctypes.c_float, INT, POINTER, POINTER, POINTER, POINTER, SIZE)
_lib = open_library("hotsplit.profile._count", {"hs_count": (INT, _TAKEN)})


@cache
def tables() -> tuple[Tensor, Tensor]:
    """For each bucket, the bin of its smallest value and the edge where the next bin begins (NaN in
    the last bin). A bucket holds the f32 values that share their upper 16 bits (sign, 8 of
    exponent, 7 of mantissa). Bins are wider, so that at most one edge lies in a bucket."""
    edges = np.append(EDGES.astype(np.float32), np.float32(np.inf))
    smallest = (np.arange(NUM_BUCKETS, dtype=np.uint32) << 16).view(np.float32)
    smallest = np.where(np.isnan(smallest), np.float32(np.inf), smallest)
    first = np.minimum(np.searchsorted(edges, smallest, side="right") - 1, NUM_BINS - 1)
    edge = edges[first + 1]
    return torch.from_numpy(first.astype(np.uint8)), torch.from_numpy(
        np.where(edge < np.inf, edge, np.nan)
    )


def count(
    value_TF: Tensor, threshold: float, count_F: Tensor, histogram_B: Tensor, *, is_magnitude: bool
) -> None:
    """Adds to `count_F` the number of tokens for which each value (or |value|) is above the
    threshold, and to `histogram_B` |value| of those; the others go into bin 0. value_TF: f32; the
    sums: int64; all on the CPU."""
    value_TF, (first, edge) = value_TF.contiguous(), tables()
    num_tokens, num_neurons = value_TF.shape
    assert value_TF.dtype == torch.float32, value_TF.dtype
    assert count_F.dtype == histogram_B.dtype == torch.int64, (count_F.dtype, histogram_B.dtype)
    assert count_F.shape == (num_neurons,), (count_F.shape, num_neurons)
    assert all(t.is_cpu and t.is_contiguous() for t in (value_TF, count_F, histogram_B))
    status = _lib.hs_count(
        value_TF.data_ptr(),
        num_tokens,
        num_neurons,
        threshold,
        is_magnitude,
        first.data_ptr(),
        edge.data_ptr(),
        count_F.data_ptr(),
        histogram_B.data_ptr(),
        len(histogram_B),
    )
    assert status == 0, (status, value_TF.shape, histogram_B.shape)
