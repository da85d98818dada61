"""Sorts the pairs of a row and one of its experts by expert, for the products of a pass: a program
for each expert counts the pairs before its own, so that nothing waits for the host.

Letters: T rows, K experts of a row, E experts, P = T K pairs, G tiles of pairs, C pairs of a
chunk."""

import torch
from torch import Tensor

from hotsplit.runtime.kernels.gpu.gpu_kernel import Versions, gpu_kernel
from hotsplit.runtime.kernels.gpu.language import tl, triton
from hotsplit.runtime.kernels.gpu.launch import NUM_WARPS

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
) -> Versions:
    """The pairs of a row and one of its experts that are in a block, sorted by expert; `place_E`:
    see ExpertBlock. `tile_G3` and `row_3P` as in expert_pairs.Pairs, but the third row is k T + t,
    the row of a pair's output, whose weight is written there.

    The tiles of expert e begin at e + f // `tile_size` if f pairs are before its first: no program
    then needs the others' numbers of tiles. Tiles between them have no pairs."""

    def reference() -> None:
        num_rows, num_used = len(routed_T2K), routed_T2K.shape[1] // 2
        id_TK, weight_TK = routed_T2K[:, :num_used].long(), routed_T2K[:, num_used:]
        places = range(num_experts) if place_E is None else place_E.tolist()
        tile_G3.zero_()
        number = 0
        for expert in (e for e in range(num_experts) if places[e] >= 0):
            pairs = (id_TK == expert).nonzero().tolist()
            at = expert + number // tile_size
            for tile, first in enumerate(range(0, len(pairs), tile_size)):
                size = min(tile_size, len(pairs) - first)
                tile_G3[at + tile] = torch.tensor([places[expert], number + first, size])
            for row, k in pairs:
                out = k * num_rows + row
                row_3P[:, number] = torch.tensor([row, number, out])
                weight_P[out] = weight_TK[row, k]
                number += 1

    def launch() -> None:
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
            CHUNK=_CHUNK,
            TILE_SIZE=tile_size,
            num_warps=NUM_WARPS,
        )

    return reference, launch


@triton.jit
def _ids(routed, pair_C, num_pairs, NUM_USED: tl.constexpr):
    """(expert, row, number in the row) of pairs; the expert is -1 beyond the last pair."""
    row_C = pair_C // NUM_USED
    k_C = pair_C % NUM_USED
    id_C = tl.load(routed + row_C * (2 * NUM_USED) + k_C, mask=pair_C < num_pairs, other=-1.0)
    return id_C.to(tl.int32), row_C, k_C


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
    CHUNK: tl.constexpr,
    TILE_SIZE: tl.constexpr,
):
    expert = tl.program_id(0)
    before_C = tl.zeros([CHUNK], tl.int32)
    own_C = tl.zeros([CHUNK], tl.int32)
    for start in range(0, num_pairs, CHUNK):
        id_C, _, _ = _ids(routed, start + tl.arange(0, CHUNK), num_pairs, NUM_USED)
        is_before_C = (id_C >= 0) & (id_C < expert)
        if place is not None:
            is_before_C &= tl.load(place + id_C, mask=id_C >= 0, other=-1) >= 0
        before_C += is_before_C.to(tl.int32)
        own_C += (id_C == expert).to(tl.int32)
    first = tl.sum(before_C, axis=0)
    count = tl.sum(own_C, axis=0)
    own = expert
    if place is not None:
        own = tl.load(place + expert)
        count = tl.where(own >= 0, count, 0)
    at = expert + first // TILE_SIZE
    for done in range(0, count, TILE_SIZE):
        tl.store(tile + at * 3, own)
        tl.store(tile + at * 3 + 1, first + done)
        tl.store(tile + at * 3 + 2, tl.minimum(TILE_SIZE, count - done))
        at += 1
    end = expert + 1 + (first + count) // TILE_SIZE
    if expert == NUM_EXPERTS - 1:
        end = num_tiles
    for empty in range(at, end):
        tl.store(tile + empty * 3, 0)
        tl.store(tile + empty * 3 + 1, 0)
        tl.store(tile + empty * 3 + 2, 0)
    if count > 0:
        number = first
        for start in range(0, num_pairs, CHUNK):
            pair_C = start + tl.arange(0, CHUNK)
            id_C, row_C, k_C = _ids(routed, pair_C, num_pairs, NUM_USED)
            is_own_C = id_C == expert
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
