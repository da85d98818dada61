"""The reference of a prompt's products in float64 with torch, which defines their results.

Letters and contracts: see kernels.py; A pairs of a tile."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from hotsplit.runtime.kernels.stored import StoredMatrix, unpack


def multiply(
    matrix: StoredMatrix,
    bias_N: Tensor | None,
    x_TD: Tensor,
    power_T: Tensor | None,
    out_TN: Tensor,
    *,
    tile_G3: Tensor | None = None,
    row_2P: Tensor | None = None,
    factor_P: Tensor | None = None,
    tile_size: int = 0,
) -> None:
    if tile_G3 is not None:
        for own, left_T, right_T in tiles_of(tile_G3, row_2P, out_TN.shape[1]):
            y_TN = x_TD.new_empty(len(left_T), out_TN.shape[1], dtype=torch.float64)
            multiply(
                replace(matrix, data=matrix.data[own]),
                None if bias_N is None else bias_N[own],
                x_TD[left_T],
                None if power_T is None else power_T[left_T],
                y_TN,
            )
            put(out_TN, right_T, y_TN, factor_P)
        return
    y_TN = x_TD.double() @ unpack(matrix.data, matrix.kind).double().T
    y_TN = y_TN if power_T is None else y_TN * power_T[:, None]
    out_TN.copy_(y_TN if bias_N is None else y_TN + bias_N)


def multiply_down(
    matrix: StoredMatrix,
    hidden_TN: Tensor,
    power_T: Tensor | None,
    out_TD: Tensor,
    *,
    is_added: bool,
    bias_D: Tensor | None = None,
    tile_G3: Tensor | None = None,
    row_2P: Tensor | None = None,
    factor_P: Tensor | None = None,
    tile_size: int = 0,
) -> None:
    if tile_G3 is not None:
        assert not is_added
        for own, left_T, right_T in tiles_of(tile_G3, row_2P, hidden_TN.shape[1]):
            y_TD = hidden_TN.new_empty(len(left_T), out_TD.shape[1], dtype=torch.float64)
            multiply_down(
                replace(matrix, data=matrix.data[own]),
                hidden_TN[left_T],
                None if power_T is None else power_T[left_T],
                y_TD,
                is_added=False,
            )
            if bias_D is not None:
                place = own.start // hidden_TN.shape[1]
                y_TD += bias_D.view(-1, out_TD.shape[1])[place]
            put(out_TD, right_T, y_TD, factor_P)
        return
    y_TD = hidden_TN.double() @ unpack(matrix.data, matrix.kind).double()
    y_TD = y_TD if power_T is None else y_TD * power_T[:, None]
    out_TD.copy_(out_TD + y_TD if is_added else y_TD)


def tiles_of(
    tile_G3: Tensor, row_2P: Tensor | None, num_rows: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """For each tile: the rows of its expert, which has `num_rows`, and those of its pairs' inputs and
    outputs [A]."""
    assert row_2P is not None
    for place, first, count in tile_G3.tolist():
        left_A, right_A = row_2P[:, first : first + count].long()
        yield slice(place * num_rows, (place + 1) * num_rows), left_A, right_A


def put(out_TN: Tensor, row_A: Tensor, y_AN: Tensor, factor_T: Tensor | None) -> None:
    """Writes rows of a result, each times its factor."""
    y_AN = y_AN if factor_T is None else y_AN * factor_T[row_A, None]
    out_TN[row_A] = y_AN.to(out_TN.dtype)
