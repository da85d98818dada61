"""The gated delta net as a struct for C++ (kernels/cpu/delta.h)."""

from ctypes import Structure, c_int32, c_int64, c_void_p

import torch

from hotsplit.runtime.ops.delta.block import DeltaNet
from hotsplit.runtime.ops.norm import NormStruct, norm_struct
from hotsplit.runtime.ops.structs import MatrixStruct, Structs, members


class DeltaStruct(Structure):
    _fields_ = [
        ("input", MatrixStruct * 4),
        ("output", MatrixStruct),
        ("norm", NormStruct),
        *members(c_void_p, "conv decay step_bias state inputs"),
        *members(c_int64, "num_key_heads num_value_heads key_width value_width num_taps"),
        ("num_slots", c_int64),
        *members(c_int32, "is_grouped unused"),
    ]


def delta_struct(structs: Structs, delta: DeltaNet | None) -> DeltaStruct:
    """Has a copy of the convolution's weights, tap by tap."""
    if delta is None:
        return DeltaStruct()
    spec, state = delta.spec, delta.state
    return DeltaStruct(
        input=(MatrixStruct * 4)(*map(structs.linear, delta.inputs)),
        output=structs.linear(delta.output),
        norm=norm_struct(structs, delta.norm, spec.value_head_dim),
        conv=structs.vector(delta.conv_CJ.t().contiguous(), spec.num_taps, spec.num_channels),
        decay=structs.vector(delta.decay_V, spec.num_value_heads),
        step_bias=structs.vector(delta.decay_bias_V, spec.num_value_heads),
        state=structs.pointer(state.state_SVNM, torch.float32),
        inputs=structs.pointer(state.conv_SJC, torch.float32),
        num_key_heads=spec.num_key_heads,
        num_value_heads=spec.num_value_heads,
        key_width=spec.key_head_dim,
        value_width=spec.value_head_dim,
        num_taps=spec.num_taps,
        num_slots=len(state.state_SVNM),
        is_grouped=spec.is_grouped,
    )
