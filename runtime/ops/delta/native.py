"""The gated delta net as a struct for C++ (kernels/cpu/delta.h)."""

from ctypes import Structure, c_int32, c_int64, c_void_p

from hotsplit.runtime.ops.norm import NormStruct
from hotsplit.runtime.ops.structs import MatrixStruct


class DeltaStruct(Structure):
    _fields_ = [("input", MatrixStruct * 4), ("output", MatrixStruct), ("norm", NormStruct),
                ("conv", c_void_p), ("decay", c_void_p), ("step_bias", c_void_p),
                ("state", c_void_p), ("inputs", c_void_p),
                ("num_key_heads", c_int64), ("num_value_heads", c_int64), ("key_width", c_int64),
                ("value_width", c_int64), ("num_taps", c_int64), ("num_slots", c_int64),
                ("is_grouped", c_int32), ("unused", c_int32)]  # fmt: skip
