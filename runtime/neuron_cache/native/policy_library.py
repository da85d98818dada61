"""Calls the C++ in this folder: the neuron cache's policy."""

from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_void_p

import numpy as np

from hotsplit.runtime.ops.structs import members
from hotsplit.system.shared_libraries import open_library

MOST_PENDING = 32  # in policy.h


class CacheLayerStruct(Structure):
    _fields_ = [
        *members(c_void_p, "score burst slot id planned resident"),
        ("num_slots", c_int64),
        *members(c_double, "hot_s hot_row_s cold_s cold_row_s copy_row_s gather_row_s cold_share"),
        *members(c_int64, "read hits planned_hits num_applied num_learnt"),
    ]


class CacheStruct(Structure):
    _fields_ = [
        ("layer", POINTER(CacheLayerStruct)),
        *members(c_void_p, "pending swap"),
        *members(c_int64, "num_layers num_neurons most_rows num_visited"),
        *members(c_double, "rest_s copy_s"),
        *members(c_float, "decay burst_decay burst_weight prior_tokens margin"),
        *members(c_int32, "is_always_on are_experts"),
        *members(c_double, "stay start_gain"),
        *members(c_int64, "num_swaps next_layer num_rows num_steps num_pending"),
        ("pending_rate", c_float * MOST_PENDING),
        *members(c_double, "price step_s free_s gain_s saved_s"),
        *members(c_int32, "is_on is_returning"),
        *members(c_double, "cached_s planned_s"),
        *members(c_int64, "total_swaps steps_on num_starts"),
    ]


# Neuron `in` replaces neuron `out` in slot `slot` of the layer. No neuron or slot occurs in two
# swaps of a decision.
SWAP = np.dtype(
    [("layer", "i4"), ("slot", "i4"), ("in", "i4"), ("out", "i4"), ("gain_s", "f8")], align=True
)


lib = open_library(
    "hotsplit.runtime._neuron_cache",
    {
        "hs_cache_step": (None, (POINTER(CacheStruct), c_void_p, c_int64)),
        "hs_cache_learn": (None, (POINTER(CacheStruct), c_int64, c_void_p, c_int64, c_void_p)),
    },
)
