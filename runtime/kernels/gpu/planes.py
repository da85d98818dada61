"""Mixes the planes of a step's rows, in programs that each own some columns of one row: they read a
column's planes before they write them.

Letters: D width, P planes, T rows of a step."""

from typing import Any

from torch import Tensor

from hotsplit.runtime.kernels.gpu.gpu_kernel import Versions, gpu_kernel
from hotsplit.runtime.kernels.gpu.language import tl, triton
from hotsplit.runtime.kernels.gpu.launch import NUM_WARPS, overlap_options, power_of_2, step_rows
from hotsplit.runtime.kernels.gpu.overlap import admit_next, await_last

# Columns of a program. No fewer than threads: a value that two threads load could be written by the
# one before the other has read it.
_COLUMNS = 32 * NUM_WARPS


@gpu_kernel(reads=("choice_P", "x_X"), writes=("x_X", "active_D"))
def predict_planes(choice_P: Tensor, mix_QP: Tensor, x_X: Tensor, active_D: Tensor) -> Versions:
    """x_i += the sum over j of (C r)_ij x_j, with the mix C and the router's choice r; active =
    x_0."""

    def reference() -> None:
        x_PD = x_X.double().view(len(choice_P), -1)
        mix_PP = (mix_QP.double() @ choice_P.double()).view(len(choice_P), -1)
        found_PD = x_PD + mix_PP @ x_PD
        x_X.copy_(found_PD.flatten())
        active_D.copy_(found_PD[0])

    def launch() -> None:
        num_planes = choice_P.shape[-1]
        _launch(_predict_planes, num_planes, choice_P, mix_QP, x_X, active_D)

    return reference, launch


@gpu_kernel(reads=("choice_P", "x_X", "active_D"), writes=("x_X", "active_D"))
def correct_planes(
    choice_P: Tensor, mix_PP: Tensor, scale_D: Tensor, x_X: Tensor, active_D: Tensor
) -> Versions:
    """x_i += (1 + (C r)_i) (active - x_0); active = scale * x_0."""

    def reference() -> None:
        x_PD = x_X.double().view(len(choice_P), -1)
        share_P = 1.0 + mix_PP.double() @ choice_P.double()
        found_PD = x_PD + share_P[:, None] * (active_D - x_PD[0])
        x_X.copy_(found_PD.flatten())
        active_D.copy_(found_PD[0] * scale_D)

    def launch() -> None:
        num_planes = choice_P.shape[-1]
        _launch(_correct_planes, num_planes, choice_P, mix_PP, scale_D, x_X, active_D)

    return reference, launch


@gpu_kernel(reads=("x_X", "more_D"), writes=("x_X",))
def add_to_planes(x_X: Tensor, more_D: Tensor) -> Versions:
    """x_i += more, for all planes but the first."""

    def reference() -> None:
        x_PD = x_X.double().view(-1, len(more_D))
        x_PD[1:] += more_D
        x_X.copy_(x_PD.flatten())

    def launch() -> None:
        _launch(_add_to_planes, x_X.shape[-1] // more_D.shape[-1], x_X, more_D)

    return reference, launch


def _launch(kernel: Any, num_planes: int, *tensors: Tensor) -> None:
    """The last of the tensors is as wide as a plane."""
    for each in tensors:
        assert each.is_contiguous(), each.stride()
    width = tensors[-1].shape[-1]
    kernel[-(-width // _COLUMNS), step_rows(tensors[-1])](
        *tensors,
        WIDTH=width,
        NUM_PLANES=num_planes,
        BLOCK=power_of_2(num_planes),
        COLUMNS=_COLUMNS,
        **overlap_options(),
        num_warps=NUM_WARPS,
    )


@triton.jit
def _place(WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """(the row, the program's columns, which of them exist)"""
    column_D = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    return tl.program_id(1).to(tl.int64), column_D, column_D < WIDTH


@triton.jit
def _predict_planes(
    choice,
    mix,
    x,
    active,
    WIDTH: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    admit_next(OVERLAPS)
    await_last(OVERLAPS)
    row, column_D, in_row_D = _place(WIDTH, COLUMNS)
    plane_P = tl.arange(0, BLOCK)
    is_plane_P = plane_P < NUM_PLANES
    x += row * NUM_PLANES * WIDTH
    choice_P = tl.load(choice + row * NUM_PLANES + plane_P, mask=is_plane_P, other=0.0)
    at_PD = plane_P[:, None] * WIDTH + column_D[None, :]
    is_live_PD = is_plane_P[:, None] & in_row_D[None, :]
    x_PD = tl.load(x + at_PD, mask=is_live_PD, other=0.0)
    is_mixed_PP = is_plane_P[:, None] & is_plane_P[None, :]
    for plane in tl.static_range(NUM_PLANES):
        from_P = plane * NUM_PLANES + plane_P
        mix_PP = tl.load(
            mix + from_P[:, None] * NUM_PLANES + plane_P[None, :], mask=is_mixed_PP, other=0.0
        )
        share_P = tl.sum(mix_PP * choice_P[None, :], axis=1)
        own_P = tl.where(plane_P == plane, 1.0, 0.0)
        value_D = tl.sum(own_P[:, None] * x_PD, axis=0) + tl.sum(share_P[:, None] * x_PD, axis=0)
        tl.store(x + plane * WIDTH + column_D, value_D, mask=in_row_D)
        if plane == 0:
            tl.store(active + row * WIDTH + column_D, value_D, mask=in_row_D)


@triton.jit
def _correct_planes(
    choice,
    mix,
    scale,
    x,
    active,
    WIDTH: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    admit_next(OVERLAPS)
    await_last(OVERLAPS)
    row, column_D, in_row_D = _place(WIDTH, COLUMNS)
    plane_P = tl.arange(0, BLOCK)
    is_plane_P = plane_P < NUM_PLANES
    x += row * NUM_PLANES * WIDTH + column_D
    active += row * WIDTH + column_D
    choice_P = tl.load(choice + row * NUM_PLANES + plane_P, mask=is_plane_P, other=0.0)
    first_D = tl.load(x, mask=in_row_D, other=0.0)
    change_D = tl.load(active, mask=in_row_D, other=0.0) - first_D
    for plane in tl.static_range(NUM_PLANES):
        mix_P = tl.load(mix + plane * NUM_PLANES + plane_P, mask=is_plane_P, other=0.0)
        share = 1.0 + tl.sum(mix_P * choice_P, axis=0)
        value_D = tl.load(x + plane * WIDTH, mask=in_row_D, other=0.0) if plane else first_D
        value_D += share * change_D
        tl.store(x + plane * WIDTH, value_D, mask=in_row_D)
        if plane == 0:
            scale_D = tl.load(scale + column_D, mask=in_row_D, other=0.0)
            tl.store(active, value_D * scale_D, mask=in_row_D)


@triton.jit
def _add_to_planes(
    x,
    more,
    WIDTH: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    BLOCK: tl.constexpr,  # as the others'
    COLUMNS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    admit_next(OVERLAPS)
    await_last(OVERLAPS)
    row, column_D, in_row_D = _place(WIDTH, COLUMNS)
    x += row * NUM_PLANES * WIDTH + column_D
    more_D = tl.load(more + row * WIDTH + column_D, mask=in_row_D, other=0.0)
    for plane in tl.static_range(1, NUM_PLANES):
        value_D = tl.load(x + plane * WIDTH, mask=in_row_D, other=0.0) + more_D
        tl.store(x + plane * WIDTH, value_D, mask=in_row_D)
