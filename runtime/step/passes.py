"""A pass over several tokens whose memory is counted, before weights are loaded."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.costs.part_bytes import FLOAT_BYTES
from hotsplit.model.modes import Mode
from hotsplit.model.spec import ModelSpec
from hotsplit.runtime.device.pools import PoolBytes
from hotsplit.runtime.kernels.stored import FLOATS
from hotsplit.runtime.weights import gpu_products

Way = Literal["gpu", "gpu, tiles"]


def way_on(device: torch.device) -> Way:
    """The way of passes on a GPU."""
    return "gpu" if gpu_products.multiplies_blocks(device) else "gpu, tiles"


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A pass over T tokens on a GPU. `way`: "gpu" where matrices in blocks are multiplied without tiles.
    `num_hot`: of each layer; None: any number."""

    model: ModelFile
    mode: Mode
    num_tokens: int
    context_length: int
    way: Way
    num_hot: Sequence[int] | None = None
    num_sequences: int = 1

    @cached_property
    def spec(self) -> ModelSpec:
        return self.model.spec.in_mode(self.mode)

    def tensor(self, num_bytes: int) -> PoolBytes:
        return PoolBytes.of(num_bytes)

    def floats(self, values: float) -> PoolBytes:
        """A tensor of f32 values, given for one token."""
        return self.tensor(int(FLOAT_BYTES * self.num_tokens * values))

    def kind(self, name: str) -> str:
        return self.model.tensors[f"{name}.weight"].kind

    def rounded(self, kind: str, width: int) -> PoolBytes:
        """The input of a product on a GPU, rounded for a matrix of this kind, and powers of two."""
        return PoolBytes() if kind == "f32" else self.floats(width / 2) + self.floats(1)

    def tile(self, kind: str, width: int, num_rows: int, *, is_copied: bool = False) -> PoolBytes:
        """A product on a GPU beside its input and its result: unless the matrix is read as stored, a
        tile of rows and, if there are several, a tile's product."""
        dtype = gpu_products.tile_dtype(kind)
        is_as_stored = FLOATS.get(kind) == dtype or (kind not in FLOATS and self.way == "gpu")
        if is_as_stored and not is_copied:
            return PoolBytes()
        rows = min(gpu_products.tile_rows(width), num_rows)
        return self.tensor(dtype.itemsize * rows * width) + self.floats(rows * (rows < num_rows))

    def product(self, kind: str, width: int, num_rows: int) -> PoolBytes:
        """A product on a GPU beside its result."""
        return self.rounded(kind, width) + self.tile(kind, width, num_rows)
