"""Calls the C++ in this folder: the neuron cache's policy."""

from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_void_p

import numpy as np

from hotsplit.system.shared_libraries import open_library

MOST_PENDING = 32  # in policy.h


class CacheLayerStruct(Structure):
    _fields_ = [
        ("score", c_void_p),
        ("burst", c_void_p),
        ("slot", c_void_p),
        ("id", c_void_p),
        ("planned", c_void_p),
        ("resident", c_void_p),
        ("num_slots", c_int64),
        ("hot_s", c_double),
        ("hot_row_s", c_double),
        ("cold_s", c_double),
        ("cold_row_s", c_double),
        ("copy_row_s", c_double),
        ("gather_row_s", c_double),
        ("cold_share", c_double),
        ("read", c_int64),
        ("hits", c_int64),
        ("planned_hits", c_int64),
        ("num_applied", c_int64),
    ]


class CacheStruct(Structure):
    _fields_ = [
        ("layer", POINTER(CacheLayerStruct)),
        ("pending", c_void_p),
        ("swap", c_void_p),
        ("num_layers", c_int64),
        ("num_neurons", c_int64),
        ("most_rows", c_int64),
        ("num_visited", c_int64),
        ("rest_s", c_double),
        ("copy_s", c_double),
        ("decay", c_float),
        ("burst_decay", c_float),
        ("burst_weight", c_float),
        ("prior_tokens", c_float),
        ("margin", c_float),
        ("is_always_on", c_int32),
        ("are_experts", c_int32),
        ("stay", c_double),
        ("start_gain", c_double),
        ("num_swaps", c_int64),
        ("next_layer", c_int64),
        ("num_rows", c_int64),
        ("num_steps", c_int64),
        ("num_pending", c_int64),
        ("pending_rate", c_float * MOST_PENDING),
        ("price", c_double),
        ("step_s", c_double),
        ("free_s", c_double),
        ("gain_s", c_double),
        ("saved_s", c_double),
        ("is_on", c_int32),
        ("is_returning", c_int32),
        ("cached_s", c_double),
        ("planned_s", c_double),
        ("total_swaps", c_int64),
        ("steps_on", c_int64),
        ("num_starts", c_int64),
    ]


# Neuron `in` replaces neuron `out` in slot `slot` of the layer. No neuron or slot occurs in two
# swaps of a decision.
SWAP = np.dtype(
    [("layer", "i4"), ("slot", "i4"), ("in", "i4"), ("out", "i4"), ("gain_s", "f8")], align=True
)


lib = open_library(
    "hotsplit.runtime._neuron_cache",
    {"hs_cache_step": (None, (POINTER(CacheStruct), c_void_p, c_int64))},
)
