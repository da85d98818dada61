"""One GPU's operations in a pass, and their memory: a step of many rows, all of one sequence, whose
products are tiles. Cold neurons and experts that are streamed to the GPU are another placement of
the same operations.

The memory is what lies between the products of a pass beside the values of the step program. Sizes
depend on the form of the model and its plan alone, so a plan reserves what a pass takes.

Letters: T rows, D model width, N neurons, K experts of a row, P = T K pairs of a row and one of its
experts, G tiles of pairs, A some experts."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from hotsplit.costs.pass_parts import expert_part_pairs, gpu_part_neurons
from hotsplit.model.spec import LayerSpec, ModelSpec
from hotsplit.runtime.cache.block_table import BlockTable
from hotsplit.runtime.kernels.gate import Gate
from hotsplit.runtime.kernels.gpu.expert_pairs import (
    SMALL_TILE,
    Choices,
    PairBuffers,
    Pairs,
    most_tiles,
)
from hotsplit.runtime.model.layers import Layer, Weights
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.ops.device import Rounded, TileLauncher, tile_dtype
from hotsplit.runtime.ops.neurons import gpu as of_neurons
from hotsplit.runtime.ops.neurons.native import NativeNeurons
from hotsplit.runtime.prefill.cold_stream import ColdStream
from hotsplit.runtime.prefill.expert_stream import ExpertStream
from hotsplit.runtime.step.backend import allocated
from hotsplit.runtime.step.hybrid_device import DeviceBuffers, DeviceKernels, DividedLayer, Take
from hotsplit.runtime.step.program import Op
from hotsplit.runtime.weights.expert_block import ExpertBlock
from hotsplit.runtime.weights.matrix import Linear
from hotsplit.runtime.weights.neuron_block import NeuronBlock, by_role

# Rows of a pass, which is the shortest that holds its tokens. Products have tiles of 32 tokens or
# 128 (kernels.gpu.products), so any length between two of these takes as long as the longer one.
PASS_ROWS = (32, 64, 128, 256, 384, 512)


@dataclass(frozen=True)
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
        own = [block for layer in spec.layers for block in layer.operations]
        columns = [shape[-1] for block in own for shape in block.shapes(spec.hidden_size).values()]
        sizes = spec.most_heads_size, *spec.most_latent_sizes
        widest = max(spec.hidden_size, *sizes, *columns)
        num_streamed = 3 * (num_pairs + most_tiles(num_pairs, num_experts)) if piece_bytes else 0
        buffers = DeviceBuffers.of(
            spec,
            [(0, part.num_parts + part.is_streamed) for part in parts],
            tables,
            take,
            has_head=False,
            has_cache=has_cache,
            max_rows=num_rows,
            most_shared=int(any(part.layer.shared is not None for part in parts)),
            hidden_values=2 * values,
        )
        return cls(
            buffers=buffers,
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
    take: Callable[[torch.device], Take] = allocated
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
    blocks, shared = layer.ffn.blocks, layer.shared
    hot, _ = by_role(blocks)
    is_by_output = any(block.is_by_output for block in blocks) or bool(
        shared and shared.block.is_by_output
    )
    return LayerPart(layer.spec, 0 if hot is None else hot.num_units, is_streamed, is_by_output)


@dataclass(frozen=True)
class SomeExperts:
    """The CPU's call for those experts of a layer that have a place in `place_E`."""

    native: NativeNeurons
    place_E: Tensor  # int32


@dataclass(frozen=True, kw_only=True)
class PassKernels(TileLauncher, DeviceKernels):
    """Submits the operations of a pass on a GPU. `streams`: of layers whose cold neurons or experts
    may be streamed."""

    is_pass: ClassVar[bool] = True
    room: PassRoom
    streams: Mapping[int, ColdStream | ExpertStream]
    on_cpu: Mapping[int, SomeExperts]  # of layers whose experts may be streamed

    def types_read(self, op: Op, divided: DividedLayer) -> set[torch.dtype | None]:
        """The types in which tiles take the first value of an operation; None: others read it."""
        layer = divided.layer
        inputs: Sequence[Linear]
        recurrent = layer.recurrent
        is_recurrent = recurrent is not None and op.kind == recurrent.block.kind
        if op.kind == "attention" or is_recurrent:
            inputs = recurrent.inputs if recurrent and is_recurrent else layer.attention.inputs
            if not all(map(self.is_tiled, inputs)):
                return {None}
        elif op.kind == "neurons" and isinstance(divided.hot, NeuronBlock) and len(op.reads) == 1:
            hot = divided.hot
            inputs = [hot.gate] if hot.up is None else [hot.gate, hot.up]
        else:
            return {None}
        return {tile_dtype(linear.weight.kind) for linear in inputs}

    def shared(self, divided: DividedLayer, x_D: Tensor) -> None:
        b, shared = self.buffers, divided.layer.shared
        assert shared is not None
        out_TD = b.sum_PD[divided.rows("shared_out").start]
        if shared.gate is None:
            self._neurons(shared.block, shared.rule, x_D, out_TD)
            return
        # One expert of every row.
        pairs, rooms = self.room.pairs.rows(len(x_D), 1, 1), (b.hidden, self.room.hidden)
        routed_T2, logit_T1 = b["shared_weight"], b.first("inner", 1).view(-1, 1)
        of_neurons.launch_shared_weight(self, shared.gate, x_D, logit_T1, routed_T2)
        of_neurons.launch_sort(self, None, 1, routed_T2, pairs)
        of_neurons.launch_shared_tiles(self, shared, pairs, x_D, rooms, out_TD)

    def hot(self, divided: DividedLayer, x_D: Tensor | Rounded, *, are_named: bool) -> None:
        hot, ffn = divided.hot, divided.layer.ffn
        if isinstance(hot, ExpertBlock):
            assert isinstance(x_D, Tensor)
            self.experts(divided, hot, x_D)
            return
        assert hot is not None
        named_TW = self.named(ffn) if are_named else None
        out_TD = self.buffers.sum_PD[1]
        self._neurons(hot, ffn.gate, x_D, out_TD, named_TW, divided.hot_id_N)

    def streamed(self, divided: DividedLayer, x_D: Tensor, *, are_named: bool) -> None:
        """Writes the output of a layer's cold neurons, which are streamed; of experts, that of all
        of them."""
        stream = self.streams[divided.index]
        if isinstance(stream, ExpertStream):
            self._streamed_experts(divided, x_D, stream)
            return
        ffn = divided.layer.ffn
        named_TW = self.named(ffn) if are_named else None
        name = "cold_out" if divided.hot is not None else "ffn_out"
        out_TD = self.buffers.sum_PD[divided.rows(name).start]
        self.clear(out_TD)
        stream.run(
            divided.index,
            lambda piece: self._neurons(
                piece, ffn.gate, x_D, out_TD, named_TW, piece.id_N, is_added=True
            ),
        )

    def clear(self, values: Tensor) -> None:
        def run() -> None:
            values.zero_()

        self.launch(run, [], [values])

    def _neurons(
        self,
        block: NeuronBlock,
        gate: Gate,
        x_TD: Tensor | Rounded,
        out_TD: Tensor,
        named_TW: Tensor | None = None,
        id_N: Tensor | None = None,
        *,
        is_added: bool = False,
    ) -> None:
        """Writes the output of a block, or adds it, in parts of neurons."""
        count, rooms = len(block.id_N), (self.buffers.hidden, self.room.hidden)
        size = count if gate.needs_all or block.is_by_output else gpu_part_neurons(len(x_TD))
        for start in range(0, count, size):
            stop = min(start + size, count)
            of_neurons.launch_neuron_tiles(
                self,
                block if size >= count else block.part(start, stop),
                gate,
                x_TD,
                rooms,
                out_TD,
                named_TW=named_TW,
                id_N=None if named_TW is None or id_N is None else id_N[start:stop],
                is_added=is_added or start > 0,
            )

    def experts(self, divided: DividedLayer, hot: ExpertBlock, x_D: Tensor) -> None:
        if hot.place_E is not None:  # pairs of experts on the CPU have no output here
            self.clear(self._parts_of_pairs(divided, x_D))
        self._stored_experts(divided, hot, x_D)

    def _stored_experts(self, divided: DividedLayer, hot: ExpertBlock, x_TD: Tensor) -> None:
        """Writes the outputs of the pairs of experts that the GPU stores."""
        layer = divided.layer
        assert layer.router is not None
        pairs = self.room.pairs.rows(len(x_TD), layer.router.spec.num_used, hot.num_experts)
        of_neurons.launch_sort(self, hot.place_E, hot.num_experts, self.routed(layer), pairs)
        self._pairs(divided, hot, pairs, x_TD)

    def _pairs(self, divided: DividedLayer, block: ExpertBlock, pairs: Pairs, x_TD: Tensor) -> None:
        gate, rooms = divided.layer.ffn.gate, (self.buffers.hidden, self.room.hidden)
        parts_PD = self._parts_of_pairs(divided, x_TD)
        of_neurons.launch_expert_tiles(self, block, gate, pairs, x_TD, rooms, parts_PD)

    def _parts_of_pairs(self, divided: DividedLayer, x_TD: Tensor) -> Tensor:
        """The outputs of all pairs [P, D], that of a row's k-th expert in row k T + t."""
        assert divided.layer.router is not None
        num_used = divided.layer.router.spec.num_used
        return self.buffers.rows_of(x_TD.shape[1])[1 : 1 + num_used].view(-1, x_TD.shape[1])

    def _streamed_experts(self, divided: DividedLayer, x_TD: Tensor, stream: ExpertStream) -> None:
        """All experts of a layer: those stored here, and of the others those that are streamed; the
        CPU computes the rest meanwhile. Which these are follows from the router's choice, for which
        this waits, and so depends on the other rows of the pass; a row's result may differ by the
        rounding of the devices. Rows that repeat the last one count for nothing, as the CPU does
        not compute them."""
        layer, num_rows = divided.layer, len(x_TD)
        hot, cold = by_role(layer.ffn.blocks)
        assert isinstance(cold, ExpertBlock) and layer.router is not None
        own, num_used = self.on_cpu[divided.index], layer.router.spec.num_used
        native = own.native
        x_host, routed_host = (each.flatten() for each in native.node.reads)
        x_host = x_host[: x_TD.numel()].view(x_TD.shape)
        routed_host = routed_host[: num_rows * 2 * num_used].view(num_rows, -1)
        routed, parts_PD = self.routed(layer), self._parts_of_pairs(divided, x_TD)
        self.main.copy(routed_host, routed)
        self.main.copy(x_host, x_TD)
        self.clear(parts_PD)
        weight_P = self.room.pairs.weight_P[: num_rows * num_used]

        def weigh() -> None:
            weight_P.view(num_used, -1).copy_(routed[:, num_used:].T)

        self.launch(weigh, [routed], [weight_P])
        if isinstance(hot, ExpertBlock):
            self._stored_experts(divided, hot, x_TD)
        self.main.finish()
        is_given = slice(native.struct.num_tokens)
        choices = Choices.of(routed_host[is_given, :num_used].numpy(), cold.num_experts)
        expert_A = np.flatnonzero((cold.places >= 0) & (choices.count_E > 0))
        streamed_A = stream.chosen(expert_A, choices.count_E[expert_A])
        most = expert_part_pairs(num_rows, len(cold.id_F))
        parts = [
            part[start : start + stream.most_experts]
            for part in choices.in_parts(streamed_A, most)
            for start in range(0, len(part), stream.most_experts)
        ]
        pairs = self._sent([choices.tables(part, num_rows, num_used) for part in parts])
        stream.run(
            divided.index,
            parts,
            lambda number, block: self._pairs(divided, block, pairs[number], x_TD),
        )
        on_cpu_A = np.setdiff1d(expert_A, streamed_A)
        out_TD, y_TD = self.buffers.rows_of(x_TD.shape[1])[1 + num_used], native.y_D
        if len(on_cpu_A):
            is_own_E = np.isin(np.arange(cold.num_experts), on_cpu_A)
            own.place_E.copy_(torch.from_numpy(np.where(is_own_E, cold.places, -1)))
            native.node.run()  # while the GPU computes
            self.main.copy(out_TD, y_TD.flatten()[: x_TD.numel()].view(x_TD.shape))
        else:
            self.clear(out_TD)

    def _sent(self, tables: Sequence[tuple[np.ndarray, int]]) -> list[Pairs]:
        """Copies the pairs of parts to the GPU, all at once."""
        if not tables:
            return []
        joined = np.concatenate([values for values, _ in tables])
        on_host = self.room.host_pairs[: len(joined)]
        on_host.numpy()[:] = joined
        on_gpu = self.room.streamed_pairs[: len(joined)]
        self.main.copy(on_gpu, on_host)
        found = []
        for own, (values, num_tiles) in zip(
            on_gpu.split([len(values) for values, _ in tables]), tables, strict=True
        ):
            tile, row = own[: 3 * num_tiles], own[3 * num_tiles :]
            found.append(
                Pairs(
                    tile_G3=tile.view(-1, 3),
                    row_3P=row.view(3, -1),
                    weight_P=self.room.pairs.weight_P,
                    tile_size=SMALL_TILE,
                )
            )
            assert len(values) == len(own)
        return found
