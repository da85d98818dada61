"""Sorts the pairs of a row and one of its experts by expert, for the products of a pass: a counting
sort with a program for each expert, so that nothing waits for the host.

Letters: T rows, K experts of a row, E experts, P = T K pairs, G tiles of pairs, C pairs of a
chunk."""

import torch
from torch import Tensor

from hotsplit.runtime.kernels.gpu.gpu_kernel import gpu_kernel
from hotsplit.runtime.kernels.gpu.language import tl, triton
from hotsplit.runtime.kernels.gpu.launch import NUM_WARPS, power_of_2

_CHUNK = 1024  # pairs that a program looks at together


@gpu_kernel(
    reads=("routed_T2K", "place_E"), writes=("tile_G3", "row_3P", "weight_P"), is_of_step=False
)
def sort_pairs(
    routed_T2K: Tensor,
    place_E: Tensor | None,
    tile_G3: Tensor,
    row_3P: Tensor,
    weight_P: Tensor,
    *,
    num_experts: int,
    tile_size: int,
) -> None:
    """The pairs of a row and one of its experts that are in a block, sorted by expert; `place_E`:
    see ExpertBlock. `tile_G3` and `row_3P` as in expert_pairs.Pairs, but the third row is k T + t,
    the row of a pair's output, whose weight is written there. Unused tiles have no pairs."""
    num_rows, num_used = len(routed_T2K), routed_T2K.shape[1] // 2
    id_TK, weight_TK = routed_T2K[:, :num_used].long(), routed_T2K[:, num_used:]
    places = range(num_experts) if place_E is None else place_E.tolist()
    tiles, number = list[list[int]](), 0
    for expert in (e for e in range(num_experts) if places[e] >= 0):
        pairs = (id_TK == expert).nonzero().tolist()
        for first in range(0, len(pairs), tile_size):
            size = min(tile_size, len(pairs) - first)
            tiles.append([places[expert], number + first, size])
        for row, k in pairs:
            out = k * num_rows + row
            row_3P[:, number] = torch.tensor([row, number, out])
            weight_P[out] = weight_TK[row, k]
            number += 1
    tile_G3.zero_()
    if tiles:
        tile_G3[: len(tiles)] = torch.tensor(tiles, dtype=torch.int32)


@triton.jit
def _is_own(routed, expert, pair_C, num_pairs, NUM_USED: tl.constexpr):
    """(whether a pair is of an expert, its row, its number in the row)."""
    row_C = pair_C // NUM_USED
    k_C = pair_C % NUM_USED
    id_C = tl.load(routed + row_C * (2 * NUM_USED) + k_C, mask=pair_C < num_pairs, other=-1.0)
    return id_C.to(tl.int32) == expert, row_C, k_C


@triton.jit(do_not_specialize=["num_pairs"])
def _sort_pairs(
    routed,
    place,
    tile,
    row,
    weight,
    num_pairs,
    num_tiles,
    NUM_USED: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE_SIZE: tl.constexpr,
):
    expert = tl.program_id(0)
    expert_E = tl.arange(0, BLOCK)
    count_E = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_pairs, CHUNK):  # the counts of all experts
        pair_C = start + tl.arange(0, CHUNK)
        id_C = tl.load(
            routed + pair_C // NUM_USED * (2 * NUM_USED) + pair_C % NUM_USED,
            mask=pair_C < num_pairs,
            other=0.0,
        ).to(tl.int32)
        count_E += tl.histogram(id_C, BLOCK)
        # tl.histogram takes no mask: those beyond the last pair count as expert 0.
        beyond = tl.sum((pair_C >= num_pairs).to(tl.int32), axis=0)
        count_E -= tl.where(expert_E == 0, beyond, 0)
    if place is not None:
        place_E = tl.load(place + expert_E, mask=expert_E < NUM_EXPERTS, other=-1)
        count_E = tl.where(place_E >= 0, count_E, 0)
    tiles_E = (count_E + TILE_SIZE - 1) // TILE_SIZE
    is_before_E = expert_E < expert
    first = tl.sum(tl.where(is_before_E, count_E, 0), axis=0)
    first_tile = tl.sum(tl.where(is_before_E, tiles_E, 0), axis=0)
    count = tl.sum(tl.where(expert_E == expert, count_E, 0), axis=0)
    own = expert
    if place is not None:
        own = tl.load(place + expert)
    at = first_tile
    for done in range(0, count, TILE_SIZE):
        tl.store(tile + at * 3, own)
        tl.store(tile + at * 3 + 1, first + done)
        tl.store(tile + at * 3 + 2, tl.minimum(TILE_SIZE, count - done))
        at += 1
    if expert == NUM_EXPERTS - 1:
        for empty in range(at, num_tiles):
            tl.store(tile + empty * 3 + 2, 0)
            tl.store(tile + empty * 3, 0)
            tl.store(tile + empty * 3 + 1, 0)
    if count > 0:
        number = first
        for start in range(0, num_pairs, CHUNK):
            pair_C = start + tl.arange(0, CHUNK)
            is_own_C, row_C, k_C = _is_own(routed, expert, pair_C, num_pairs, NUM_USED)
            number_C = number + tl.cumsum(is_own_C.to(tl.int32), axis=0) - 1
            out_C = k_C * (num_pairs // NUM_USED) + row_C
            tl.store(row + number_C, row_C, mask=is_own_C)
            tl.store(row + num_pairs + number_C, number_C, mask=is_own_C)
            tl.store(row + 2 * num_pairs + number_C, out_C, mask=is_own_C)
            value_C = tl.load(
                routed + row_C * (2 * NUM_USED) + NUM_USED + k_C, mask=is_own_C, other=0.0
            )
            tl.store(weight + out_C, value_C, mask=is_own_C)
            number += tl.sum(is_own_C.to(tl.int32), axis=0)


@sort_pairs.launch
def _launch_sort_pairs(
    routed_T2K: Tensor,
    place_E: Tensor | None,
    tile_G3: Tensor,
    row_3P: Tensor,
    weight_P: Tensor,
    *,
    num_experts: int,
    tile_size: int,
) -> None:
    assert routed_T2K.is_contiguous() and tile_G3.is_contiguous() and row_3P.is_contiguous()
    num_pairs = routed_T2K.numel() // 2
    assert row_3P.shape == (3, num_pairs), (row_3P.shape, num_pairs)
    _sort_pairs[(num_experts,)](
        routed_T2K,
        place_E,
        tile_G3,
        row_3P,
        weight_P,
        num_pairs,
        len(tile_G3),
        NUM_USED=routed_T2K.shape[1] // 2,
        NUM_EXPERTS=num_experts,
        BLOCK=power_of_2(num_experts),
        CHUNK=_CHUNK,
        TILE_SIZE=tile_size,
        num_warps=NUM_WARPS,
    )
