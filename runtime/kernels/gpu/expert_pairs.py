"""Pairs of a token and one of its experts, sorted by expert, as a prompt's products read them.

Letters: T tokens, K experts of a token, P pairs, G tiles of pairs, A experts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Pairs of a tile, each of which unpacks its expert's weights anew. Tiles of 128, as of products with one
# matrix, spill 72 bytes of registers in q4_k; where weights are in the CPU's tiles, in which each byte
# has a place of its own, the small ones have 190 registers.
SMALL_TILE, LARGE_TILE = 32, 64


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """The pairs of some experts, `number` of them, whose matrices are in one place.

    `tile_G3`, int32: (place of the expert, first pair in `row_3P`, pairs), an expert's tiles one after
    another. `row_3P`, int32: the pair's token, its number among these, and K * token + k, the row of its
    output; it has other pairs as well."""

    tile_G3: Tensor
    row_3P: Tensor
    number: int
    tile_size: int

    @property
    def in_2P(self) -> Tensor:
        """For products of tokens: rows of the input and the output."""
        return self.row_3P[:2]

    @property
    def out_2P(self) -> Tensor:
        """For products with hidden values: rows of the input and the output."""
        return self.row_3P[1:]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some experts: their places, and how many pairs each has, at least one."""

    place_A: np.ndarray
    count_A: np.ndarray
    most_of_tile: int = LARGE_TILE

    @property
    def number(self) -> int:
        return int(self.count_A.sum())

    @property
    def tile_size(self) -> int:
        return (
            SMALL_TILE if self.number <= 2 * SMALL_TILE * len(self.count_A) else self.most_of_tile
        )

    def tiles(self, first: int) -> np.ndarray:
        """[G, 3], if the pairs begin at `first`."""
        size = self.tile_size
        num_A = -(-self.count_A // size)
        own_G = np.repeat(np.arange(len(num_A)), num_A)
        done_G = size * (np.arange(len(own_G)) - np.repeat(np.cumsum(num_A) - num_A, num_A))
        start_G = first + (np.cumsum(self.count_A) - self.count_A)[own_G] + done_G
        sizes_G = np.minimum(size, self.count_A[own_G] - done_G)
        return np.stack([self.place_A[own_G], start_G, sizes_G], axis=1)


def pairs_of(
    parts: Sequence[Part], pair_P: np.ndarray, num_used: int, device: torch.device
) -> list[Pairs]:
    """The pairs of several parts, with one copy to the device. `pair_P`: K * token + k, sorted by part
    and expert."""
    first_A = np.cumsum([0, *(part.number for part in parts)]).tolist()
    tiles = [part.tiles(first) for part, first in zip(parts, first_A, strict=False)]
    own_P = np.concatenate([np.arange(part.number) for part in parts])
    joined = np.concatenate([*map(np.ravel, tiles), pair_P // num_used, own_P, pair_P])
    sizes = [*(tile_G3.size for tile_G3 in tiles), 3 * len(pair_P)]
    *found, row = torch.from_numpy(joined.astype(np.int32)).to(device).split(sizes)
    return [
        Pairs(
            tile_G3=tile.view(-1, 3),
            row_3P=row.view(3, -1),
            number=part.number,
            tile_size=part.tile_size,
        )
        for tile, part in zip(found, parts, strict=True)
    ]
