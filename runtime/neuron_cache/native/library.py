"""Calls the C++ in this folder: the neuron cache's policy, and a bound to compare it with.

Letters: T steps, F neurons of a layer, W words of F bits."""

import ctypes
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_void_p
from importlib.util import find_spec

import numpy as np

from hotsplit.errors import HotsplitError

MOST_PENDING = 32  # in policy.h


class LayerStruct(Structure):
    _fields_ = [("score", c_void_p), ("burst", c_void_p), ("slot", c_void_p), ("id", c_void_p),
                ("planned", c_void_p), ("resident", c_void_p), ("num_slots", c_int64),
                ("hot_s", c_double), ("hot_row_s", c_double), ("cold_s", c_double),
                ("cold_row_s", c_double), ("copy_row_s", c_double), ("gather_row_s", c_double),
                ("cold_share", c_double), ("read", c_int64), ("hits", c_int64),
                ("planned_hits", c_int64), ("num_applied", c_int64)]  # fmt: skip


class CacheStruct(Structure):
    _fields_ = [("layer", POINTER(LayerStruct)), ("pending", c_void_p), ("swap", c_void_p), ("num_layers", c_int64),
                ("num_neurons", c_int64), ("most_rows", c_int64), ("num_visited", c_int64),
                ("rest_s", c_double), ("copy_s", c_double), ("decay", c_float),
                ("burst_decay", c_float), ("burst_weight", c_float), ("prior_tokens", c_float),
                ("margin", c_float), ("is_always_on", c_int32), ("are_experts", c_int32),
                ("stay", c_double),
                ("start_gain", c_double), ("num_swaps", c_int64), ("next_layer", c_int64),
                ("num_rows", c_int64), ("num_steps", c_int64), ("num_pending", c_int64),
                ("pending_rate", c_float * MOST_PENDING), ("price", c_double),
                ("step_s", c_double), ("free_s", c_double), ("gain_s", c_double),
                ("saved_s", c_double), ("is_on", c_int32), ("is_returning", c_int32),
                ("cached_s", c_double), ("planned_s", c_double), ("total_swaps", c_int64),
                ("steps_on", c_int64), ("num_starts", c_int64)]  # fmt: skip


# Neuron `in` replaces neuron `out` in slot `slot` of the layer. No neuron or slot occurs in two
# swaps of a decision.
SWAP = np.dtype(
    [("layer", "i4"), ("slot", "i4"), ("in", "i4"), ("out", "i4"), ("gain_s", "f8")], align=True
)


def _load() -> ctypes.CDLL:
    spec = find_spec("hotsplit.runtime._neuron_cache")  # finds the file in every kind of install
    if spec is None or spec.origin is None:
        raise HotsplitError("the C++ of the neuron cache is not built; run `make build`")
    lib = ctypes.CDLL(spec.origin)
    for function in (lib.hs_cache_learn, lib.hs_cache_step):
        function.argtypes = [POINTER(CacheStruct), c_void_p, c_int64]
        function.restype = None
    lib.hs_cache_gain.argtypes = [
        c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_float, c_float, c_void_p,
        POINTER(c_int64), POINTER(c_int64),
    ]  # fmt: skip
    lib.hs_cache_gain.restype = c_double
    return lib


lib = _load()


def best_gain(
    bits_TW: np.ndarray, num_neurons: int, initial_W: np.ndarray, price_T: np.ndarray,
    value: float, fetch: float,
) -> tuple[float, np.ndarray, int, int]:  # fmt: skip
    """The sum over a layer's neurons of the most that each can gain if it may enter or leave a slot
    at every step: it gains `value` for a step that reads it in a slot, and pays the slot's price at
    each step and `fetch` for each copy. Also, for that choice, the slots in use at each step (int32
    [T]), the copies and the hits.

    bits_TW: uint32, rows may be strided; initial_W: uint32, the neurons in slots before the first
    step; price_T: f32."""
    assert bits_TW.dtype == initial_W.dtype == np.uint32 and price_T.dtype == np.float32
    num_steps, num_words = bits_TW.shape
    assert bits_TW.strides[1] == 4 and num_words == len(initial_W) == -(-num_neurons // 32)
    assert price_T.shape == (num_steps,) and price_T.flags.c_contiguous
    used_T = np.empty(num_steps, np.int32)
    copies, hits = c_int64(), c_int64()
    gain = lib.hs_cache_gain(
        bits_TW.ctypes.data, num_steps, num_neurons, bits_TW.strides[0] // 4,
        np.ascontiguousarray(initial_W).ctypes.data, price_T.ctypes.data, value, fetch,
        used_T.ctypes.data, copies, hits,
    )  # fmt: skip
    return gain, used_T, copies.value, hits.value
