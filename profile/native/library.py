"""The C++ counter in this folder, called on torch tensors.

If the C++ is not built, importing this raises HotsplitError.

Letters: T tokens, F neurons, B histogram bins."""

import ctypes
from importlib.util import find_spec

import torch
from torch import Tensor

from hotsplit.errors import HotsplitError

NUM_BUCKETS = 1 << 15


def _load() -> ctypes.CDLL:
    spec = find_spec("hotsplit.profile._count")  # finds the file in every kind of install
    if spec is None or spec.origin is None:
        raise HotsplitError("the C++ counter of profile is not built; run `make build`")
    lib = ctypes.CDLL(spec.origin)
    pointer, size, int32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    lib.hs_count.argtypes = [
        pointer, size, size, ctypes.c_float, int32, pointer, pointer, pointer, pointer, size,
    ]  # fmt: skip
    lib.hs_count.restype = int32
    return lib


_lib = _load()


def count(
    value_TF: Tensor,
    threshold: float,
    *,
    is_magnitude: bool,
    first: Tensor,
    edge: Tensor,
    count_F: Tensor,
    histogram_B: Tensor,
) -> None:
    """Adds to `count_F` the number of tokens for which each value (or |value|) is above the
    threshold, and to `histogram_B` |value| of those; the others go into bin 0.

    value_TF: f32; first: uint8 and edge: f32, one per bucket; the sums: int64; all on the CPU."""
    value_TF = value_TF.contiguous()
    num_tokens, num_neurons = value_TF.shape
    assert value_TF.dtype == edge.dtype == torch.float32 and first.dtype == torch.uint8
    assert count_F.dtype == histogram_B.dtype == torch.int64, (count_F.dtype, histogram_B.dtype)
    assert count_F.shape == (num_neurons,) and len(first) == len(edge) == NUM_BUCKETS
    assert all(
        t.is_cpu and t.is_contiguous() for t in (value_TF, first, edge, count_F, histogram_B)
    )
    status = _lib.hs_count(
        value_TF.data_ptr(), num_tokens, num_neurons, threshold, is_magnitude,
        first.data_ptr(), edge.data_ptr(), count_F.data_ptr(), histogram_B.data_ptr(),
        len(histogram_B),
    )  # fmt: skip
    assert status == 0, (status, value_TF.shape, histogram_B.shape)
