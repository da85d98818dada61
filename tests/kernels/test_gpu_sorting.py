"""Pairs of a row and one of its experts, sorted on a GPU: Triton's kernel in its interpreter (on
a device if there is one), against the reference and numpy's stable sort."""

import numpy as np
import pytest
import torch
from gpu_matrices import device

pytest.importorskip("triton")

from hotsplit.runtime.kernels.gpu.kernels import reference_kernels  # noqa: E402

# Rows, experts, experts of a row, the share of experts in the block, pairs of a tile.
CASES = (
    (1, 4, 1, None, 16),
    (2, 8, 3, None, 16),
    (7, 60, 4, None, 16),
    (65, 32, 4, 0.4, 32),
    (512, 32, 4, 0.1, 16),  # more than one chunk
    (64, 16, 2, 0.0, 16),  # none is in the block
)


@pytest.mark.parametrize(("num_rows", "num_experts", "num_used", "share", "tile_size"), CASES)
def test_pairs_are_sorted_by_expert(kernels, num_rows, num_experts, num_used, share, tile_size):
    chance = np.random.default_rng(num_rows)
    # Some experts are chosen by many rows, others by none.
    chances = chance.dirichlet(np.full(num_experts, 0.3)) + 1e-9
    ids = np.stack(
        [
            chance.choice(num_experts, num_used, replace=False, p=chances / chances.sum())
            for _ in range(num_rows)
        ]
    )
    weights = chance.standard_normal(ids.shape).astype(np.float32)
    place = None
    if share is not None:
        is_own = chance.random(num_experts) < share
        place = np.where(is_own, np.cumsum(is_own) - 1, -1).astype(np.int32)
    got, want = (
        sorted_by(each, ids, weights, place, num_experts, tile_size)
        for each in (kernels, reference_kernels())
    )
    tile_G3, row_3P, weight_P = got
    for values, expected in zip(got, want, strict=True):
        assert torch.equal(values.nan_to_num(nan=-1), expected.nan_to_num(nan=-1))
    own = ids.reshape(-1) if place is None else place[ids.reshape(-1)]
    order = np.lexsort((np.arange(own.size), ids.reshape(-1)))
    order = order[own[order] >= 0]
    assert (row_3P[0, : order.size].numpy() == order // num_used).all()
    out = order % num_used * num_rows + order // num_used
    assert (row_3P[2, : order.size].numpy() == out).all()
    assert (weight_P.numpy()[out] == weights.reshape(-1)[order]).all()
    covered = np.concatenate([np.arange(first, first + size) for _, first, size in tile_G3.numpy()])
    assert (covered == np.arange(order.size)).all() and (tile_G3[:, 2] <= tile_size).all()
    places = np.repeat(tile_G3[:, 0].numpy(), tile_G3[:, 2].numpy())
    assert (places == own[order]).all()


def sorted_by(kernels, ids, weights, place, num_experts, tile_size):
    """(tile_G3, row_3P, weight_P), filled before with what no pair has."""
    num_rows, num_used = ids.shape

    num_pairs = ids.size
    most_tiles = num_pairs // tile_size + num_experts
    made = (
        torch.full((most_tiles, 3), 77, dtype=torch.int32, device=device()),
        torch.full((3, num_pairs), -1, dtype=torch.int32, device=device()),
        torch.full((num_pairs,), torch.nan, device=device()),
    )
    routed = np.concatenate([ids.astype(np.float32), weights], axis=1)
    kernels.sort_pairs(
        torch.from_numpy(routed).to(device()),
        None if place is None else torch.from_numpy(place).to(device()),
        *made,
        num_experts=num_experts,
        tile_size=tile_size,
    )
    return tuple(each.cpu() for each in made)
