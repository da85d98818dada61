"""Evaluates a predictor: the neurons it predicts, as a bit mask. Letters: F neurons, R rank, B
words."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkinfer.architecture import SMOOTH, Activation, PredictorKind
from sparkinfer.runtime.kernels.gpu.activation import smooth
from sparkinfer.runtime.kernels.gpu.blocks import dot_rows, rows_at
from sparkinfer.runtime.kernels.gpu.launch import NUM_WARPS, Layout
from sparkinfer.runtime.kernels.stored import StoredMatrix

# Neurons per program: it writes one byte, so that no two programs write to the same address.
_ROWS = 8


@triton.jit(do_not_specialize=["num_rows"])
def _predict(
    data,
    stride,
    bias,
    inner,
    named,
    threshold,
    num_rows,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live_R = row_R < num_rows
    row = rows_at(data, row_R, stride, ALIGN)
    score_R = dot_rows(row, live_R, inner, KIND, WIDTH, PARTS, ROWS, UNITS)
    if bias is not None:
        score_R += tl.load(bias + row_R, mask=live_R, other=0.0)
    if ACTIVATION is not None:
        score_R = tl.abs(smooth(score_R, ACTIVATION))
    is_named_R = ((score_R <= threshold) == 0) & live_R
    bits = tl.sum(is_named_R.to(tl.int32) << tl.arange(0, ROWS), axis=0)
    tl.store(named + tl.program_id(0), bits.to(tl.uint8))


def predict(
    up: StoredMatrix,
    bias_F: Tensor | None,
    inner_R: Tensor,
    threshold: float,
    kind: PredictorKind,
    activation: Activation,
    named_B: Tensor,
) -> None:
    layout = Layout.of(up)
    assert kind != "gate" or activation in SMOOTH, (kind, activation)
    assert len(named_B) == triton.cdiv(up.num_rows, 32), (named_B.shape, up.num_rows)
    named = named_B.view(torch.uint8)  # bytes of a word, lowest bits first
    _predict[(len(named),)](
        up.data,
        layout.stride,
        bias_F,
        inner_R,
        named,
        float(threshold),
        up.num_rows,
        KIND=layout.kind,
        WIDTH=layout.width,
        PARTS=layout.parts,
        ALIGN=layout.align,
        ROWS=_ROWS,
        UNITS=layout.units_of_tile(_ROWS),
        ACTIVATION=activation if kind == "gate" else None,
        num_warps=NUM_WARPS,
    )
