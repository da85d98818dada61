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
from hotsplit.runtime.model.loader import Builder
from hotsplit.runtime.step.hollow import hollow_builder
from hotsplit.runtime.weights import gpu_products

Way = Literal["watched", "unwatched", "gpu", "gpu, tiles"]


def way_on(device: torch.device) -> Way:
    """The way of passes on a GPU."""
    return "gpu" if gpu_products.multiplies_blocks(device) else "gpu, tiles"


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A pass over T tokens at the end of a context. `way`: "watched" by observers, who see all
    values; "gpu" where matrices in blocks are multiplied without tiles. `num_hot`: of each layer;
    None: any number."""

    model: ModelFile
    mode: Mode
    num_tokens: int
    context_length: int
    way: Way
    num_hot: Sequence[int] | None = None
    num_sequences: int = 1

    @property
    def is_on_gpu(self) -> bool:
        return self.way in ("gpu", "gpu, tiles")

    @cached_property
    def hollow(self) -> Builder:
        is_whole = self.model.spec.has_experts and self.model.layout == "stock"
        return hollow_builder(self.model, "dense" if is_whole else "exact", is_divided=False)

    @cached_property
    def spec(self) -> ModelSpec:
        return self.model.spec.in_mode(self.mode)

    def tensor(self, num_bytes: int) -> PoolBytes:
        """One tensor; main memory has no pools, so there it may be several."""
        return PoolBytes.of(num_bytes) if self.is_on_gpu else PoolBytes(large=num_bytes)

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

    @property
    def beside(self) -> PoolBytes:
        """The values of operations before the layers that layers read beside the hidden state; on the CPU."""
        made = {name for block in self.spec.first for name in block.outputs} - {"x"}
        sizes = (self.spec.value_sizes[name] for name in sorted(made))
        return PoolBytes() if self.is_on_gpu else sum(map(self.floats, sizes), PoolBytes())
