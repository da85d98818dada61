"""Pairs of a row and one of its experts, sorted by expert, as the products of a pass read them:
sorted by a kernel for experts that a GPU stores, and on the host for those that are streamed to it,
which depend on how many rows each has.

Letters: T rows, K experts of a row, P pairs, G tiles of pairs, E experts, A some experts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Pairs of a tile, each of which unpacks its expert's weights anew. Tiles of 128, as of products
# with one matrix, spill 72 bytes of registers in q4_k; where weights are in the CPU's tiles, in
# which each byte has a place of its own, the small ones have 190 registers.
SMALL_TILE, LARGE_TILE = 32, 64


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """The pairs of some experts whose matrices are in one place.

    `tile_G3`, int32: (place of the expert, first pair in `row_3P`, pairs), an expert's tiles one
    after another. `row_3P`, int32: the pair's row t, its number among these, and k T + t, the row
    of its output; it may have other pairs as well. `weight_P`: the weight of each pair of the
    layer, at the row of its output."""

    tile_G3: Tensor
    row_3P: Tensor
    weight_P: Tensor
    tile_size: int

    @property
    def in_2P(self) -> Tensor:
        """For products of rows: rows of the input and the output."""
        return self.row_3P[:2]

    @property
    def out_2P(self) -> Tensor:
        """For products with hidden values: rows of the input and the output."""
        return self.row_3P[1:]


@dataclass(frozen=True, kw_only=True)
class PairBuffers:
    """Memory for the pairs of experts that a GPU stores."""

    tile_G3: Tensor  # int32
    row_3P: Tensor  # int32
    weight_P: Tensor

    @classmethod
    def of(
        cls, num_rows: int, num_used: int, num_experts: int, take: Callable[..., Tensor]
    ) -> "PairBuffers":
        num_pairs = num_rows * num_used
        return cls(
            tile_G3=take((num_pairs // SMALL_TILE + num_experts, 3), torch.int32),
            row_3P=take((3, num_pairs), torch.int32),
            weight_P=take((num_pairs,), torch.float32),
        )

    def rows(self, num_rows: int, num_used: int, num_experts: int) -> Pairs:
        """For passes of so many rows."""
        num_pairs = num_rows * num_used
        size = SMALL_TILE if num_pairs <= 2 * SMALL_TILE * num_experts else LARGE_TILE
        return Pairs(
            tile_G3=self.tile_G3[: num_pairs // size + num_experts],
            row_3P=self.row_3P.flatten()[: 3 * num_pairs].view(3, num_pairs),
            weight_P=self.weight_P,
            tile_size=size,
        )


def most_tiles(num_pairs: int, num_experts: int) -> int:
    """The most tiles of so many streamed pairs: each expert may have one that is not full."""
    return num_pairs // SMALL_TILE + min(num_experts, num_pairs)


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What the router of a layer has chosen, on the host: `pair_P` are the pairs K t + k sorted by
    expert, those of expert e from start_E[e] on, count_E[e] of them."""

    pair_P: np.ndarray
    start_E: np.ndarray
    count_E: np.ndarray

    @classmethod
    def of(cls, id_TK: np.ndarray, num_experts: int) -> "Choices":
        id_P = id_TK.ravel().astype(np.int16)  # sorted by digits
        count_E = np.bincount(id_P, minlength=num_experts)
        return cls(
            pair_P=np.argsort(id_P, kind="stable"),
            start_E=np.cumsum(count_E) - count_E,
            count_E=count_E,
        )

    def pairs(self, expert_A: np.ndarray) -> np.ndarray:
        """Those of some experts, one expert's after another's."""
        of_A = [self.pair_P[self.start_E[e] :][: self.count_E[e]] for e in expert_A]
        return np.concatenate([np.zeros(0, np.int64), *of_A])

    def in_parts(self, expert_A: np.ndarray, most: int) -> Iterator[np.ndarray]:
        """Some experts, which have pairs, in parts of at most `most` pairs, or of one expert."""
        part: list[int] = []
        number = 0
        for expert in expert_A.tolist():
            if part and number + self.count_E[expert] > most:
                yield np.array(part)
                part, number = [], 0
            part.append(expert)
            number += int(self.count_E[expert])
        if part:
            yield np.array(part)

    def tables(self, part_A: np.ndarray, num_rows: int, num_used: int) -> tuple[np.ndarray, int]:
        """(the tiles and rows of a part's pairs as Pairs has them, flat, the size of its tiles).
        The experts are at places 0, 1, ..."""
        count_A, pair_P = self.count_E[part_A], self.pairs(part_A)
        num_A = -(-count_A // SMALL_TILE)
        own_G = np.repeat(np.arange(len(num_A)), num_A)
        done_G = SMALL_TILE * (np.arange(len(own_G)) - np.repeat(np.cumsum(num_A) - num_A, num_A))
        start_G = (np.cumsum(count_A) - count_A)[own_G] + done_G
        tile_G3 = np.stack([own_G, start_G, np.minimum(SMALL_TILE, count_A[own_G] - done_G)], 1)
        row_P, k_P = np.divmod(pair_P, num_used)
        row_3P = np.stack([row_P, np.arange(len(pair_P)), k_P * num_rows + row_P])
        joined = np.concatenate([tile_G3.ravel(), row_3P.ravel()]).astype(np.int32)
        return joined, len(tile_G3)
