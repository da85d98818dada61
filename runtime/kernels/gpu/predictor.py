"""Evaluates a predictor: writes the predicted neurons as a bit mask for each row of a step.

Letters: F neurons, R rank (in the kernel, the rows of a program), B words."""

import torch
from torch import Tensor

from hotsplit.runtime.device.bits import pack_bits
from hotsplit.runtime.kernels.gpu.blocks import dot_rows, rows_at
from hotsplit.runtime.kernels.gpu.gpu_kernel import Versions, gpu_kernel
from hotsplit.runtime.kernels.gpu.language import tl, triton
from hotsplit.runtime.kernels.gpu.launch import NUM_WARPS, Groups, Layout, ceil_div, overlap_options
from hotsplit.runtime.kernels.gpu.overlap import admit_next
from hotsplit.runtime.kernels.gpu.reference import product
from hotsplit.runtime.kernels.stored import StoredMatrix

# Neurons per program, which writes their bits as one byte, so no two programs write the same
# address.
_ROWS = 8


@gpu_kernel(reads=("inner_R",), writes=("named_B", "copy_B"))
def predict(
    up: StoredMatrix,
    bias_F: Tensor | None,
    inner_R: Tensor,
    threshold: float,
    named_B: Tensor,
    copy_B: Tensor | None = None,
) -> Versions:
    """Writes `named_B`, int32 [ceil(F / 32)]: bit j % 32 of word j // 32 is 1 if neuron j is
    predicted. `copy_B`: the same again, for example in pinned memory of the host.

    Its score is up_j inner + bias; it is predicted unless score <= threshold. Bits past F are 0."""

    def reference() -> None:
        score_F = product(up, bias_F, inner_R)
        named_B.copy_(pack_bits(~(score_F <= threshold)))
        if copy_B is not None:
            copy_B.copy_(named_B)

    def launch() -> None:
        layout = Layout.of(up)
        assert named_B.shape[-1] == ceil_div(up.num_rows, 32), (named_B.shape, up.num_rows)
        assert inner_R.is_contiguous() and named_B.dim() == inner_R.dim(), inner_R.stride()
        if copy_B is not None:
            assert copy_B.shape == named_B.shape and copy_B.stride() == named_B.stride(), copy_B
        groups = Groups.of(inner_R, layout.group)
        named = named_B.view(torch.uint8)  # little-endian: the lowest bits first
        _predict[(named.shape[-1] * groups.count,)](
            up.data,
            layout.stride,
            bias_F,
            inner_R,
            named,
            None if copy_B is None else copy_B.view(torch.uint8),
            float(threshold),
            up.num_rows,
            None if inner_R.dim() == 1 else named.stride(0),
            **layout.constants(_ROWS),
            **groups.constants,
            **overlap_options(),
            num_warps=NUM_WARPS,
        )

    return reference, launch


@triton.jit(do_not_specialize=["num_rows", "named_stride"])
def _predict(
    data,
    stride,
    bias,
    inner,
    named,
    copy,
    threshold,
    num_rows,
    named_stride,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    admit_next(OVERLAPS)
    byte = tl.program_id(0) // NUM_GROUPS
    row_R = byte * ROWS + tl.arange(0, ROWS)
    if NUM_GROUPS > 1:
        group = tl.program_id(0) % NUM_GROUPS
        inner += group * GROUP * WIDTH
        named += group * GROUP * named_stride
        if copy is not None:
            copy += group * GROUP * named_stride
    live_R = row_R < num_rows
    row = rows_at(data, row_R, stride, ALIGN)
    results = dot_rows(row, live_R, inner, KIND, WIDTH, PARTS, ROWS, UNITS, GROUP, OVERLAPS)
    for t in tl.static_range(GROUP):
        score_R = results[t]
        if bias is not None:
            score_R += tl.load(bias + row_R, mask=live_R, other=0.0)
        is_named_R = ((score_R <= threshold) == 0) & live_R
        bits = tl.sum(is_named_R.to(tl.int32) << tl.arange(0, ROWS), axis=0)
        tl.store(named + byte, bits.to(tl.uint8))
        if copy is not None:
            tl.store(copy + byte, bits.to(tl.uint8))
        if GROUP > 1:
            named += named_stride
            if copy is not None:
                copy += named_stride
