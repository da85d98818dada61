"""The memory of passes on one GPU: what lies between the products of a pass beside the values of
the step program. Sizes depend on the form of the model and its plan alone, so a plan reserves what
a pass takes.

Letters: T rows, P = T K pairs of a row and one of its K experts, G tiles of pairs."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from hotsplit.costs.pass_parts import gpu_part_neurons
from hotsplit.model.spec import LayerSpec, ModelSpec
from hotsplit.runtime.cache.block_table import BlockTable
from hotsplit.runtime.kernels.gpu.expert_pairs import PairBuffers, most_tiles
from hotsplit.runtime.model.layers import Layer, Weights
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.prefill.cold_stream import ColdStream
from hotsplit.runtime.prefill.expert_stream import ExpertStream
from hotsplit.runtime.step.hybrid_device import DeviceBuffers, Take
from hotsplit.runtime.weights.expert_block import ExpertBlock
from hotsplit.runtime.weights.neuron_block import NeuronBlock, by_role

# Rows of a pass, which is the shortest that holds its tokens. Products have tiles of 32 tokens or
# 128 (kernels.gpu.products), so any length between two of these takes as long as the longer one.
PASS_ROWS = (32, 64, 128, 256, 384, 512)


@dataclass(frozen=True, kw_only=True)
class LayerPart:
    """What a GPU has of a layer in passes: hot and streamed neurons, or experts."""

    layer: LayerSpec
    num_hot: int
    is_streamed: bool  # the others are streamed to it
    is_by_output: bool

    def values(self, num_rows: int) -> int:
        """The most values of one matrix's products at a time."""
        neurons, part = self.layer.neurons, gpu_part_neurons(num_rows)
        number = neurons.number if self.is_streamed else self.num_hot
        if self.layer.route is not None:
            most = self.num_parts * neurons.of_expert
        else:
            takes_all = neurons.needs_all_gates or self.is_by_output
            most = number if takes_all else min(part, number)
        if self.layer.shared is not None:
            shared, is_gated = self.layer.shared.number, self.layer.shared.has_output_gate
            most = max(most, shared if is_gated or self.is_by_output else min(part, shared))
        return num_rows * most

    @property
    def num_parts(self) -> int:
        """Rows of partial sums of its neurons: one for each expert of a token."""
        if not self.num_hot and not self.is_streamed:
            return 0
        return 1 if self.layer.route is None else self.layer.route.num_used


@dataclass(frozen=True, kw_only=True)
class PassRoom:
    """Buffers of passes of up to T rows."""

    buffers: DeviceBuffers
    rounded: Tensor  # f32, flat: values in the types of products
    power_T: Tensor  # the powers of two that they are divided by
    hidden: Tensor  # f32, flat: hidden values in the types of products
    hidden_power_P: Tensor
    pairs: PairBuffers
    streamed_pairs: Tensor  # int32, flat: tiles and rows of streamed experts
    host_pairs: Tensor  # the same on the host
    pieces: tuple[Tensor, ...]  # two of streamed weights, or none

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        parts: Sequence[LayerPart],
        tables: Sequence[BlockTable],
        take: Take,
        *,
        num_rows: int,
        has_cache: bool,
        piece_bytes: int = 0,
        is_pinned: bool = False,
    ) -> "PassRoom":
        """`take` returns memory on the device. `num_rows`: of the longest pass; `piece_bytes`: of
        streamed weights."""
        lengths = [rows for rows in PASS_ROWS if rows <= num_rows]
        values = max((part.values(rows) for part in parts for rows in lengths), default=0)
        routes = [part.layer.route for part in parts if part.layer.route is not None]
        num_used = max((route.num_used for route in routes), default=0)
        num_experts = max((route.num_experts for route in routes), default=0)
        num_pairs, real = num_rows * num_used, torch.float32
        widest = max(spec.hidden_size, spec.most_query_size, *_columns(spec))
        num_streamed = 3 * (num_pairs + most_tiles(num_pairs, num_experts)) if piece_bytes else 0
        return cls(
            buffers=DeviceBuffers.of(
                spec,
                [(0, part.num_parts + part.is_streamed) for part in parts],
                tables,
                take,
                has_head=False,
                has_cache=has_cache,
                max_rows=num_rows,
                most_shared=max((int(part.layer.shared is not None) for part in parts), default=0),
                hidden_values=2 * values,
            ),
            rounded=take((num_rows * widest,), real),
            power_T=take((num_rows,), real),
            hidden=take((values,), real),
            hidden_power_P=take((max(num_rows, num_pairs),), real),
            pairs=PairBuffers.of(num_rows, num_used, num_experts, take),
            streamed_pairs=take((num_streamed,), torch.int32),
            host_pairs=torch.zeros(num_streamed, dtype=torch.int32, pin_memory=is_pinned),
            pieces=tuple(take((piece_bytes,), torch.uint8) for _ in range(2 if piece_bytes else 0)),
        )


@dataclass(frozen=True, kw_only=True)
class PassSetup:
    """Passes of a hybrid step: of up to `num_rows` rows, 0: none. `piece_bytes`: of streamed
    weights, by GPU; `streamed`: layers that have some; `streams`: makes those of a GPU, by layer,
    which copy to two buffers; `take`: allocates a GPU's memory."""

    num_rows: int = 0
    take: Callable[[torch.device], Take] = lambda device: partial(_zeros, device)
    piece_bytes: Mapping[torch.device, int] = field(default_factory=dict)
    streamed: Collection[int] = ()
    streams: Callable[..., Mapping[int, ColdStream | ExpertStream]] = lambda *_: {}

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(rows for rows in PASS_ROWS if rows <= self.num_rows)

    def room(
        self, weights: Weights, placement: Placement, number: int, *, is_pinned: bool
    ) -> PassRoom:
        """The memory of passes on the GPU with this number."""
        device = placement.gpu(number)
        mine = [i for i, home in enumerate(placement.numbers[:-1]) if home == number]
        return PassRoom.of(
            weights.spec,
            [_part_of(weights.layers[index], index in self.streamed) for index in mine],
            weights.cache.tables,
            self.take(device),
            num_rows=self.num_rows,
            has_cache=not placement.is_cache_on_host,
            piece_bytes=self.piece_bytes.get(device, 0),
            is_pinned=is_pinned,
        )


def _part_of(layer: Layer, is_streamed: bool) -> LayerPart:
    blocks: Sequence[NeuronBlock | ExpertBlock] = layer.ffn.experts or layer.ffn.blocks
    hot, _ = by_role(blocks)
    num_hot = 0
    if isinstance(hot, ExpertBlock):
        num_hot = len(hot.gate.data)
    elif hot is not None:
        num_hot = len(hot.id_N)
    shared = layer.shared.ffn.blocks[0].is_by_output if layer.shared else False
    return LayerPart(
        layer=layer.spec,
        num_hot=num_hot,
        is_streamed=is_streamed,
        is_by_output=blocks[0].is_by_output or shared,
    )


def _zeros(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def _columns(spec: ModelSpec) -> Iterable[int]:
    """The columns of matrices of position-wise operations in layers."""
    for layer in spec.layers:
        for block in layer.position_wise:
            yield from (shape[-1] for shape in block.shapes(spec.hidden_size).values())
