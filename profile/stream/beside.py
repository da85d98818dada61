"""Values that operations before the layers make for a layer that is streamed, and models whose layers are
not."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hotsplit.model.position_wise import TOKEN
from hotsplit.model.spec import ModelSpec
from hotsplit.runtime.model.loader import Builder
from hotsplit.runtime.ops.embed import embed
from hotsplit.runtime.ops.position_wise import Loaded, load_all, run_in_turn
from hotsplit.runtime.weights.matrix import Matrix, matrix_of

CPU = torch.device("cpu")


def why_whole(spec: ModelSpec) -> str:
    """Which layers must be in memory together; empty if each can be alone."""
    if groups := spec.together():
        return f"layers that {groups[0].reason}"
    is_begun = any("x" in block.outputs for block in spec.first)
    return "layers whose hidden state is not the embedding" if is_begun or spec.last else ""


@dataclass(frozen=True)
class Beside:
    builder: Builder

    def of_layer(self, index: int, ids_T: Tensor) -> dict[str, Tensor]:
        """The values that one layer reads, of these tokens."""
        spec = self.builder.model.spec
        if not spec.first:
            return {}
        own = {kind: each.of_layer(index) for kind, each in self._first.items()}
        x_TD = embed(self._embedding, None, ids_T, 0, scale=spec.embedding_scale)
        return run_in_turn(own, {spec.embedded: x_TD, TOKEN: ids_T})

    @cached_property
    def _first(self) -> Mapping[str, Loaded]:
        return load_all(self.builder, self.builder.model.spec.first, None, CPU)

    @cached_property
    def _embedding(self) -> Matrix:
        return matrix_of(self.builder.model.tensors["token_embd.weight"], CPU)
