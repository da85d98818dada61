"""The GPU kernels in torch, on any device: the fallback where Triton's are missing or wrong.

They are the float64 reference, run on pieces of matrices and heads to keep temporaries small. Some
synchronise with the device, so they cannot be captured into a graph.

Contracts and letters: see kernels.py."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import wraps
from typing import Any, ParamSpec

import torch
from torch import Tensor

from hotsplit.model.spec import Attention
from hotsplit.runtime.kernels.gpu import product_reference, reference
from hotsplit.runtime.kernels.gpu.kernels import NAMES, Kernels, reference_kernels
from hotsplit.runtime.kernels.gpu.own_kernels import OwnKernel
from hotsplit.runtime.kernels.gpu.ranges import range_of
from hotsplit.runtime.kernels.gpu.step_rows import by_rows
from hotsplit.runtime.kernels.stored import NO_VECTORS, StoredMatrix, Vectors

# Rows of a piece: 8 MiB in float64 if a row has 4,096 values. A multiple of 32, so that a piece has
# whole words of bits.
ROWS = 256
SCORES = 1 << 19  # of attention at a time: 4 MiB in float64; they exist twice
# Of these arguments, whose last axis has a value for each row of the matrix, a piece takes its part.
_BY_ROW = ("bias_N", "bias_F", "gate_bias_N", "up_bias_N", "id_N", "out_N", "hidden_N", "out_TN")
Parameters = ParamSpec("Parameters")


def torch_kernels() -> Kernels:
    return replace(
        reference_kernels(),
        dot=_in_pieces(reference.dot),
        unpack=_unpack,
        attend=attend,
        attend_tokens=attend_tokens,
        predict=_in_pieces(reference.predict),
        gate_up=_in_pieces(reference.gate_up),
        down=down,
        multiply=_in_pieces(product_reference.multiply),
        multiply_down=multiply_down,
    )


def mixed(fast: Kernels, plain: Kernels, names: Iterable[str]) -> Kernels:
    """The fast kernels, with the named ones replaced by plain ones."""
    replaced = frozenset(names)

    def own(kernel: OwnKernel[Parameters]) -> Callable[Parameters, None]:
        return (plain if kernel.name in replaced else fast).own(kernel)

    of_core = {name: getattr(plain, name) for name in replaced.intersection(NAMES)}
    return replace(fast, **of_core, own=own)


def _pieces(num_rows: int, size: int = ROWS) -> Iterator[slice]:
    return (slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size))


def _part(matrix: StoredMatrix, rows: slice) -> StoredMatrix:
    return replace(matrix, data=matrix.data[rows])


def _in_pieces(kernel: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """The kernel, run on pieces of its matrices' rows."""
    signature = inspect.signature(kernel)

    @wraps(kernel)
    def run(*arguments: Parameters.args, **options: Parameters.kwargs) -> None:
        given = signature.bind(*arguments, **options).arguments
        if given.get("tile_G3") is not None:  # an expert at a time
            kernel(*arguments, **options)
            return
        matrix = next(each for each in given.values() if isinstance(each, StoredMatrix))
        for rows in _pieces(matrix.num_rows):
            words = rows if given.get("id_N") is None else slice(None)  # ids are of the whole layer
            own = {name: _cut(name, value, rows, words) for name, value in given.items()}
            kernel(**own)  # type: ignore[call-arg]

    return run


def _cut(name: str, value: Any, rows: slice, named: slice) -> Any:
    """What a piece takes of an argument; `named`: the neurons whose bits it reads or writes."""
    if isinstance(value, StoredMatrix):
        return _part(value, rows)
    if value is not None and name in _BY_ROW:
        return value[..., rows]
    if value is not None and name in ("named_B", "copy_B"):
        return value[..., _words(named)]
    return value


def _words(rows: slice) -> slice:
    """The words that hold the bits of these rows."""
    return slice(None) if rows.stop is None else slice(rows.start // 32, -(-rows.stop // 32))


def _unpack(matrix: StoredMatrix, out_AD: Tensor, index_A: Tensor | None = None) -> None:
    for rows in _pieces(len(out_AD)):
        if index_A is None:
            reference.unpack(_part(matrix, rows), out_AD[rows])
        else:
            reference.unpack(matrix, out_AD[rows], index_A[rows])


def _of_one_head(spec: Attention) -> tuple[int, Attention]:
    """The queries of a key-value head, and their attention alone."""
    group = spec.num_heads // spec.num_kv_heads
    return group, replace(spec, num_heads=group, num_kv_heads=1, scale=spec.score_scale)


@by_rows
def attend(
    qkv: Tensor,
    key_CKW: Tensor,
    value_CKW: Tensor,
    position_1: Tensor,
    spec: Attention,
    scratch: Tensor,
    out_HW: Tensor,
    sequence_1: Tensor | None = None,
    table_SN: Tensor | None = None,
    *,
    vectors: Vectors = NO_VECTORS,
) -> None:
    num_kv, group, of_one = spec.num_kv_heads, *_of_one_head(spec)
    out_KN = out_HW.view(num_kv, -1)
    query_KN = qkv[: spec.query_size + spec.gate_size].view(num_kv, -1)
    for head in range(num_kv):
        kept, heads = slice(head, head + 1), slice(head * group, (head + 1) * group)
        reference.attend(
            query_KN[head], key_CKW[..., kept, :], value_CKW[..., kept, :], position_1, of_one,
            scratch, out_KN[head], sequence_1, table_SN,
            vectors={name: vector_H[heads] for name, vector_H in vectors.items()},
        )  # fmt: skip


def attend_tokens(
    query_THW: Tensor,
    key_CKW: Tensor,
    value_CKW: Tensor,
    position_T: Tensor,
    spec: Attention,
    out_THW: Tensor,
    sequence_1: Tensor | None = None,
    table_SN: Tensor | None = None,
    *,
    vectors: Vectors = NO_VECTORS,
    gated_TQ: Tensor | None = None,
) -> None:
    num_kv, width, count = spec.num_kv_heads, spec.head_dim, int(position_T[-1]) + 1
    group, of_one = _of_one_head(spec)
    for tokens in _pieces(len(query_THW), max(1, SCORES // (group * count))):
        for head in range(num_kv):
            heads, kept = slice(head * group, (head + 1) * group), slice(head, head + 1)
            reference.attend_tokens(
                query_THW[tokens, heads], key_CKW[..., kept, :], value_CKW[..., kept, :],
                position_T[tokens], of_one, out_THW[tokens, heads], sequence_1, table_SN,
                vectors={name: vector_H[heads] for name, vector_H in vectors.items()},
                gated_TQ=None if gated_TQ is None
                else gated_TQ[tokens, 2 * width * heads.start : 2 * width * heads.stop],
            )  # fmt: skip


@by_rows
def down(down: StoredMatrix, hidden_N: Tensor, parts_SD: Tensor, *, skips_zeros: bool) -> None:
    size = range_of(len(hidden_N), len(parts_SD))
    for part, parts_D in enumerate(parts_SD):
        first, last = part * size, min((part + 1) * size, len(hidden_N))
        sum_D = torch.zeros_like(parts_D, dtype=torch.float64)
        for rows in _pieces(max(0, last - first)):
            index_A = torch.arange(first + rows.start, first + rows.stop, device=hidden_N.device)
            sum_D += reference.weighted_sum(down, hidden_N, index_A, skips_zeros=skips_zeros)
        parts_D.copy_(sum_D)


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
        product_reference.multiply_down(
            matrix, hidden_TN, power_T, out_TD, is_added=is_added, bias_D=bias_D, tile_G3=tile_G3,
            row_2P=row_2P, factor_P=factor_P, tile_size=tile_size,
        )  # fmt: skip
        return
    sum_TD = out_TD.double() if is_added else torch.zeros_like(out_TD, dtype=torch.float64)
    for rows in _pieces(matrix.num_rows):
        piece, own_TN = _part(matrix, rows), hidden_TN[:, rows]
        product_reference.multiply_down(piece, own_TN, power_T, sum_TD, is_added=True)
    out_TD.copy_(sum_TD)
