"""The GPU kernels in torch, on any device: the fallback where Triton's are missing or wrong.

They are the float64 reference, run on pieces of matrices and heads to keep temporaries small. Some
synchronise with the device, so they cannot be captured into a graph.

Contracts and letters: see kernels.py."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from hotsplit.model.spec import Activation, PredictorKind
from hotsplit.runtime.kernels.gpu import reference
from hotsplit.runtime.kernels.gpu.kernels import Kernels
from hotsplit.runtime.kernels.gpu.ranges import range_of
from hotsplit.runtime.kernels.gpu.step_rows import by_rows
from hotsplit.runtime.kernels.stored import StoredMatrix

# Rows of a piece: 8 MiB in float64 if a row has 4,096 values. A multiple of 32, so that a piece has
# whole words of bits.
ROWS = 256


def torch_kernels() -> Kernels:
    return Kernels(
        dot=by_rows(_dot, "dot"),
        embed=reference.embed,
        unpack=_unpack,
        add_norm=reference.add_norm,
        rotate_append=reference.rotate_append,
        attend=by_rows(_attend, "attend"),
        predict=by_rows(_predict, "predict"),
        gate_up=by_rows(_gate_up, "gate_up"),
        down=by_rows(_down, "down"),
    )


def mixed(fast: Kernels, plain: Kernels, names: Iterable[str]) -> Kernels:
    """The fast kernels, with the named ones replaced by plain ones."""
    return replace(fast, **{name: getattr(plain, name) for name in names})


def _pieces(num_rows: int) -> Iterator[slice]:
    return (slice(start, min(start + ROWS, num_rows)) for start in range(0, num_rows, ROWS))


def _part(matrix: StoredMatrix, rows: slice) -> StoredMatrix:
    return replace(matrix, data=matrix.data[rows])


def _of(vector: Tensor | None, piece: slice) -> Tensor | None:
    return None if vector is None else vector[piece]


def _words(rows: slice) -> slice:
    """The words that hold the bits of these rows."""
    return slice(rows.start // 32, -(-rows.stop // 32))


def _dot(
    matrix: StoredMatrix,
    bias_N: Tensor | None,
    x_D: Tensor,
    out_N: Tensor,
    *,
    has_relu: bool = False,
) -> None:
    for rows in _pieces(matrix.num_rows):
        reference.dot(_part(matrix, rows), _of(bias_N, rows), x_D, out_N[rows], has_relu=has_relu)


def _unpack(matrix: StoredMatrix, out_AD: Tensor, index_A: Tensor | None = None) -> None:
    for rows in _pieces(len(out_AD)):
        if index_A is None:
            reference.unpack(_part(matrix, rows), out_AD[rows])
        else:
            reference.unpack(matrix, out_AD[rows], index_A[rows])


def _attend(
    qkv: Tensor,
    key_CKW: Tensor,
    value_CKW: Tensor,
    position_1: Tensor,
    num_heads: int,
    scratch: Tensor,
    out_HW: Tensor,
    sequence_1: Tensor | None = None,
    table_SN: Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
) -> None:
    num_kv, width = key_CKW.shape[-2:]
    group = num_heads // num_kv
    out = out_HW.view(-1)
    for head in range(num_kv):
        heads = slice(head * group * width, (head + 1) * group * width)
        kept = slice(head, head + 1)
        reference.attend(
            qkv[heads], key_CKW[..., kept, :], value_CKW[..., kept, :], position_1, group, scratch,
            out[heads], sequence_1, table_SN, scale=scale, window=window,
        )  # fmt: skip


def _down(down: StoredMatrix, hidden_N: Tensor, parts_SD: Tensor, *, skips_zeros: bool) -> None:
    size = range_of(len(hidden_N), len(parts_SD))
    piece_1D = torch.empty_like(parts_SD[:1])
    for part, parts_D in enumerate(parts_SD):
        first, last = part * size, min((part + 1) * size, len(hidden_N))
        sum_D = torch.zeros_like(parts_D, dtype=torch.float64)
        for rows in _pieces(max(0, last - first)):
            rows = slice(first + rows.start, first + rows.stop)
            piece = _part(down, rows)
            reference.down(piece, hidden_N[rows], piece_1D, skips_zeros=skips_zeros)
            sum_D += piece_1D[0]
        parts_D.copy_(sum_D)


def _predict(
    up: StoredMatrix,
    bias_F: Tensor | None,
    inner_R: Tensor,
    threshold: float,
    kind: PredictorKind,
    activation: Activation,
    named_B: Tensor,
) -> None:
    for rows in _pieces(up.num_rows):
        reference.predict(
            _part(up, rows), _of(bias_F, rows), inner_R, threshold, kind, activation,
            named_B[_words(rows)],
        )  # fmt: skip


def _gate_up(
    gate: StoredMatrix,
    gate_bias_N: Tensor | None,
    up: StoredMatrix | None,
    up_bias_N: Tensor | None,
    id_N: Tensor | None,
    named_B: Tensor | None,
    x_D: Tensor,
    activation: Activation,
    threshold: float,
    is_dense: bool,
    hidden_N: Tensor,
) -> None:
    for rows in _pieces(gate.num_rows):
        named = _of(named_B, _words(rows)) if id_N is None else named_B
        reference.gate_up(
            _part(gate, rows), _of(gate_bias_N, rows), None if up is None else _part(up, rows),
            _of(up_bias_N, rows), _of(id_N, rows), named, x_D, activation, threshold, is_dense,
            hidden_N[rows],
        )  # fmt: skip
