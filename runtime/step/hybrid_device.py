"""One GPU's buffers in a decode step, and its operations on them; runtime/ops has their kernels.

Every buffer has a fixed address, so that a captured step can be replayed. hybrid_submissions.py
calls the operations as the step program (program.py) requires them.

A step of T rows uses the beginning of each buffer's memory (of all but `tables`). Vectors become
[T, ...], `sum_PD` becomes [P, T, D] and `ffn_in_2D` [2, T, D]. For one row there is no T axis,
except in inputs.

The summands of a sum are adjacent rows of `sum_PD` (DividedLayer): row 0 is attention's output, and
the rows after it are those of neurons. Values of position-wise operations are in rows while these
are free, from 1 before the neurons, and from 0 after the last read of both; other such values have
buffers of their own.

Letters: T rows, D model width, F neurons of a layer, N hot ones, E experts, K those of a row, H
heads, K key-value heads, W head width, or words of F bits, S partial sums, P summands, V
vocabulary; in `tables`, S sequences and N blocks of each."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from hotsplit.model.latent_experts import COLD_SUM, HOT_SUM, LATENT_SUM
from hotsplit.model.operations import padded
from hotsplit.model.spec import ATTN_OUT, Block, LayerSpec, ModelSpec, Neurons, read_by, written_by
from hotsplit.runtime.cache.block_table import BlockTable
from hotsplit.runtime.kernels.gpu.ranges import attend_scratch, down_parts, expert_parts
from hotsplit.runtime.model.layers import Layer
from hotsplit.runtime.ops.attention.gpu import launch_attend
from hotsplit.runtime.ops.attention.latent import launch_latent_values, launch_latents
from hotsplit.runtime.ops.device import Launcher, Rounded
from hotsplit.runtime.ops.embed import launch_embed
from hotsplit.runtime.ops.loaded_op import LoadedOp, RecurrentOp, Slots
from hotsplit.runtime.ops.neurons import gpu as of_neurons
from hotsplit.runtime.ops.neurons.feed_forward import FeedForward
from hotsplit.runtime.ops.neurons.native import NativeNeurons
from hotsplit.runtime.ops.predict import launch_predict
from hotsplit.runtime.ops.route import launch_route
from hotsplit.runtime.ops.structs import NotNative
from hotsplit.runtime.step.native_parts import StepBuffers, beginning, inputs_of
from hotsplit.runtime.step.native_step import ALIASES
from hotsplit.runtime.step.program import HOST, device_of, name_of
from hotsplit.runtime.weights.expert_block import ExpertBlock, UnitBlock
from hotsplit.runtime.weights.matrix import Matrix

# The rows of all operations but position-wise ones.
CORE = ("attn_out", "hot_out", "cold_out", "ffn_out", "bias", "shared_out")
# Those of experts that read a latent, which are as wide as it, and whose rows they have.
OF_LATENT = {HOT_SUM: "hot_out", COLD_SUM: "cold_out", LATENT_SUM: "ffn_out"}


@dataclass(frozen=True, kw_only=True)
class DividedLayer:
    """A layer's neurons or experts divided by device; `hot_id_N` is None if all neurons are hot, or
    none."""

    index: int
    layer: Layer
    hot: UnitBlock | None
    hot_id_N: Tensor | None  # int32
    cold: NativeNeurons | None
    num_parts: int  # S, the partial sums of the hot neurons, or of the outputs of all hot experts
    num_shared: int = 0  # partial sums of shared experts
    num_cold: int = 0  # 1: cold neurons or experts are streamed to the GPU, in a pass
    named_W: Tensor  # bits of the predicted neurons on the host, int32 [F / 32 rounded up] per row
    # With a neuron cache and no predictor, int32 on the device: the slot of each neuron, and the
    # bits of the hot neurons that fired, which a step writes.
    hot_bits: tuple[Tensor, Tensor] | None = None
    # With a neuron cache of experts: where the host gets the router's result of this layer, which
    # others do not overwrite.
    routed_R: Tensor | None = None
    own_rows: Mapping[str, int] = field(default_factory=dict)  # of position-wise operations

    @property
    def latent_size(self) -> int | None:
        """Values of what the layer's experts read, if it is not the hidden state."""
        return self.layer.spec.neurons.latent_size

    def width(self, name: str) -> int | None:
        """Values of a row of an output; None: those of the hidden state."""
        return self.latent_size if name in OF_LATENT else None

    def has_rows(self, name: str) -> bool:
        """True for a value in DeviceBuffers.sums."""
        return name in CORE or name in self.own_rows or name in OF_LATENT

    def rows(self, name: str) -> range:
        """The rows of an output in DeviceBuffers.rows_of; the summands of a sum are adjacent."""
        end = 1 + self.num_parts
        assert self.has_rows(name), name
        if self.latent_size is not None and name in ("ffn_out", "shared_out"):  # behind all sums
            begin = end + self.num_cold + 1
            if name == "ffn_out":
                return range(begin, begin + 1)
            return range(begin + 1, begin + 1 + self.num_shared)
        name = OF_LATENT.get(name, name)
        if name == "cold_out":
            return range(end, end + self.num_cold)
        if name in self.own_rows:
            return range(self.own_rows[name], self.own_rows[name] + 1)
        if name == "attn_out":
            return range(0, 1)
        if name == "hot_out" or (name == "ffn_out" and self.num_parts):
            return range(1, end)
        end += self.num_cold
        if name == "bias":
            return range(end, end + 1)
        if name == "shared_out":  # after the experts', wherever they are
            begin = end + (not self.num_parts)
            return range(begin, begin + self.num_shared)
        return range(end, end + 1)  # "ffn_out", the CPU's alone, copied

    def summands(self, names: Iterable[str], summed: Iterable[str]) -> range | None:
        """The rows of these outputs; None unless they are adjacent. Of those in `summed`, the first
        row is the sum of all."""
        first, rows = set(summed), list[int]()
        for name in names:
            if not self.has_rows(name):
                return None
            rows += self.rows(name)[:1] if name in first else self.rows(name)
        found = range(rows[0], rows[0] + len(rows)) if rows else range(0)
        return found if rows == list(found) else None

    def rows_of(self, values: Iterable[str]) -> set[tuple[str, int]]:
        """The rows of values of the step program, each with the GPU that has it."""
        found = {value for value in values if device_of(value) != HOST}
        found = {value for value in found if self.has_rows(name_of(value))}
        return {(device_of(value), row) for value in found for row in self.rows(name_of(value))}


def hot_sizes(
    layer: LayerSpec, num_hot: int, width: int, *, is_by_output: bool = False
) -> tuple[int, int]:
    """(hidden values of a row, partial sums) of the neurons or experts of a layer that are on a
    GPU. `is_by_output`: experts have a row of `down` for each output."""
    if not num_hot:
        return 0, 0
    width = layer.neurons.width(width)
    if layer.route is None:  # and the gates, if all are needed
        return num_hot * (1 + layer.neurons.needs_all_gates), down_parts(num_hot, width)
    used, own = layer.route.num_used, layer.neurons.of_expert
    return used * own, used * expert_parts(used, own, width, is_by_output=is_by_output)


def shared_parts(layer: LayerSpec, width: int, *, is_by_output: bool) -> int:
    """Partial sums of the shared experts of a layer on a GPU; 0 without any."""
    if layer.shared is None:
        return 0
    return 1 if is_by_output else down_parts(layer.shared.number, width)


def output_rows(spec: ModelSpec) -> tuple[Mapping[str, int], ...]:
    """For each layer, the rows of values that are as wide as the hidden state, and of the layer
    alone."""
    outer = _outer(spec)
    return tuple(_rows(layer, spec.hidden_size, outer) for layer in spec.layers)


def own_sizes(spec: ModelSpec) -> dict[str, int]:
    """f32 values of a token, of each value that has a buffer of its own."""
    apart = set(_outer(spec))
    for layer, rows in zip(spec.layers, output_rows(spec), strict=True):
        apart |= {name for block in layer.operations for name in block.outputs} - rows.keys()
    apart -= {"x", *CORE}
    return {name: size for name, size in spec.value_sizes.items() if name in apart}


def _outer(spec: ModelSpec) -> frozenset[str]:
    """The values that operations outside the layers read or write."""
    blocks = (*spec.first, *spec.last)
    return frozenset(name for block in blocks for name in (*block.inputs, *block.outputs))


def _rows(layer: LayerSpec, hidden_size: int, outer: frozenset[str]) -> Mapping[str, int]:
    blocks = layer.blocks
    neurons = [block for block in blocks if isinstance(block, Neurons)]
    core = {n for each in neurons for n in (each.reads, each.writes)}
    core |= {mixer.writes for mixer in layer.mixers}
    begin = blocks.index(neurons[0]) if neurons else len(blocks)
    end = max(_last_read(blocks, name) for name in core)
    before, after = list[str](), list[str]()
    for block in layer.operations:
        at, sizes = blocks.index(block), block.values(hidden_size)
        for name in block.outputs:
            is_used = any(name in (*read_by(b), *written_by(b)) for b in blocks[:at])
            is_alone = name not in ("x", *outer) and not is_used
            if not is_alone or sizes[name] != hidden_size or name in (ATTN_OUT, *block.inputs):
                continue
            if max(at, _last_read(blocks, name)) < begin:
                before.append(name)
            elif at > end:
                after.append(name)
    return {name: row for row, name in (*enumerate(before, start=1), *enumerate(after))}


def _last_read(blocks: Sequence[Block], name: str) -> int:
    return max((i for i, block in enumerate(blocks) if name in read_by(block)), default=-1)


Take = Callable[[tuple[int, ...], torch.dtype], Tensor]


_REAL = torch.float32


@dataclass(frozen=True, kw_only=True)
class DeviceBuffers(StepBuffers):
    """The buffers of a step on one GPU, f32 unless noted. Besides values of the program: "inner" of
    predictors and routers, and "shared_weight", 0 and the weight of shared experts. Values of
    position-wise operations are here unless they are in rows of `sums`."""

    room: Tensor  # flat, of one operation after the other
    attending: tuple[int, int, int]  # how attention divides it, see `of_attention`
    hidden: Tensor  # of hot neurons, or of the chosen experts, flat
    # [P, most rows, D]: attention's output; partial sums of hot neurons, or outputs of hot experts;
    # bias, or sum of cold ones; output of shared experts. For position-wise operations see above.
    # Behind attention's output, rows may be narrower (`rows_of`).
    sums: Tensor

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        hot_sizes_L: Sequence[tuple[int, int]],
        tables: Sequence[BlockTable],
        take: Take,
        *,
        has_head: bool = True,
        has_cache: bool = True,
        max_rows: int = 1,
        most_shared: int = 0,
        hidden_values: int | None = None,
    ) -> "DeviceBuffers":
        """Allocates the buffers; `take` returns zeros on the device. `hot_sizes_L`: of this GPU's
        layers; `most_shared`: partial sums of shared experts. `has_cache`: it attends, which needs
        scratch. `hidden_values`: f32 values of gates and hidden neurons in a pass; None: in a
        step."""
        width, scratch = spec.hidden_size, 0
        routers = [layer.route.num_experts for layer in spec.layers if layer.route is not None]
        shared = [layer.shared for layer in spec.layers if layer.shared is not None]
        most_hidden = max([0, *(h for h, _ in hot_sizes_L), *(each.number for each in shared)])
        most_parts = max([parts for _, parts in hot_sizes_L], default=0)
        is_pass = hidden_values is not None
        inner = max([spec.most_rank, *routers])
        if has_cache and is_pass:
            scratch = spec.most_query_size
        elif has_cache:
            length = tables[0].context_length
            scratch = max(attend_scratch(length, a.num_heads, a.value_dim) for a in spec.attentions)
        low, queries, others = spec.most_latent_sizes
        qkv = padded(max_rows * max(spec.most_qkv_size, others))
        heads = padded(max_rows * max(spec.most_heads_size, low))
        rest = padded(max_rows * max(scratch, queries))
        own = [block.scratch(width) for layer in spec.layers for block in layer.operations]
        room = max(qkv + heads + rest, max_rows * max(own, default=0))
        last_rows = [row for rows in output_rows(spec) for row in rows.values()]
        num_sums = max([1 + most_parts + most_shared, *last_rows]) + 1
        num_sums += 2 * any(layer.neurons.latent_size is not None for layer in spec.layers)

        sizes = {"x": spec.x_size, **own_sizes(spec), "attn_in": width}
        sizes |= {"ffn_in.0": width, "ffn_in.1": width, "inner": inner}
        sizes |= {
            "routed": 2 * spec.most_used,
            "shared_weight": 2 * any(block.has_output_gate for block in shared),
            "logits": spec.vocab_size if has_head and not is_pass else 0,
        }
        values = {name: take((max_rows, size), _REAL) for name, size in sizes.items()}
        values["named"] = take((max_rows, -(-spec.most_named // 32)), torch.int32)
        return cls(
            num_rows=max_rows,
            inputs=inputs_of(spec, max_rows, 1 if is_pass else max_rows, take),
            tables={
                table: take(tuple(table.block_SN.shape), torch.int32)
                for table in tables
                if has_cache and not table.is_whole
            },
            values=values,
            room=take((room,), _REAL),
            attending=(qkv, heads, room - qkv - heads),
            hidden=take((hidden_values or max_rows * most_hidden,), _REAL),
            sums=take((num_sums, max_rows, width), _REAL),
        )

    @property
    def sum_PD(self) -> Tensor:
        """The summands of a step's rows, [P, T, D], or [P, D] for one row."""
        return self.rows_of(None)

    def rows_of(self, size: int | None) -> Tensor:
        """The same memory as rows of so many values, of which those from 1 on begin behind row 0 of
        the hidden size; None: of the hidden size. A wide row is behind all narrow ones of lesser
        numbers."""
        parts, _, width = self.sums.shape
        size = size or width
        shape = (parts, size) if self.num_rows == 1 else (parts, self.num_rows, size)
        begin = self.num_rows * (width - size)
        return self.sums.flatten()[begin : begin + prod(shape)].view(shape)

    @property
    def of_attention(self) -> Sequence[Tensor]:
        """Room for the input projections of the layer with most, the outputs of its heads, and
        scratch."""
        return self.room.split(self.attending)

    def carved(self, memory: Tensor, size: int) -> Tensor:
        """The beginning of flat memory as [T, size], or [size] for one row."""
        return beginning(memory, self.num_rows, size)


@dataclass(frozen=True, kw_only=True)
class DeviceKernels(Launcher):
    """Submits the operations of a GPU, on its buffers, to its stream."""

    is_pass: ClassVar[bool] = False
    buffers: DeviceBuffers

    def value(self, name: str, divided: DividedLayer | None) -> Tensor:
        """The buffer of a value in the program; for the terms of a layer's sums, its place depends
        on the layer. Of several partial sums, the first."""
        b, name = self.buffers, ALIASES.get(name, name)
        if divided is not None and name == "named":
            return self.named(divided.layer.ffn)
        if divided is not None and name == "routed":
            return self.routed(divided.layer)
        if divided is not None and divided.has_rows(name):
            return self.sums([name], divided)[0]
        if divided is not None and name in ("qkv", "heads"):
            return self.attended(divided.layer)[name == "heads"]
        return b[name]

    def sums(
        self, names: Sequence[str], divided: DividedLayer, summed: Sequence[str] = ()
    ) -> Tensor:
        """The rows of `sum_PD` that hold these outputs of a layer, [P, D], or of a latent. Of those
        in `summed`, partial sums have been added up in the first row.

        Raises NotNative if they are not adjacent."""
        rows = divided.summands(names, summed)
        if rows is None:
            raise NotNative(f"a sum of {', '.join(names)} is not supported on a GPU")
        return self.buffers.rows_of(divided.width(names[0]))[rows.start : rows.stop]

    def attended(self, layer: Layer) -> tuple[Tensor, Tensor]:
        """The layer's input projections and the outputs of its heads, at the beginning of their
        buffers."""
        qkv_size, heads_size = layer.attention.widths
        b = self.buffers
        qkv, heads, _ = b.of_attention
        return b.carved(qkv, qkv_size), b.carved(heads, heads_size)

    def named(self, ffn: FeedForward) -> Tensor:
        """The bits of a layer's named neurons [T, F / 32 rounded up]."""
        return self.buffers.first("named", -(-ffn.num_neurons // 32))

    def embed(self, embedding: Matrix, scale: float, *, has_positions: bool) -> None:
        b = self.buffers
        launch_embed(self, embedding, b["token"], b["x"], scale=scale, has_positions=has_positions)

    def attention(self, layer: Layer, x_D: Tensor | Rounded) -> None:
        """Writes attention's output to the first row of sum_PD."""
        b, (qkv, heads) = self.buffers, self.attended(layer)
        table_SN = b.tables.get(layer.attention.cache.table)
        paging = None if table_SN is None else b["sequence"], table_SN
        self.inputs(layer, x_D)
        given = layer.attention, qkv, b["position"], *paging, b.of_attention[2], heads
        self.output(layer, launch_attend(self, *given, is_pass=self.is_pass))

    @property
    def slots(self) -> Slots:
        return self.buffers["runs"], self.buffers["writes"]

    def own(self, own: LoadedOp, read: Sequence[Any], written: Sequence[Tensor]) -> None:
        """Runs an operation of a layer that has a room of its own."""
        if isinstance(own, RecurrentOp):
            own.launch_rows(self, read[0], written[0], self.buffers.room, self.slots)
        else:
            own.launch(self, read, written, self.buffers.room)

    def inputs(self, layer: Layer, x_D: Tensor | Rounded) -> None:
        """Writes queries, keys and values."""
        attention, qkv = layer.attention, self.attended(layer)[0]
        if attention.latent is None:
            self.project(attention.inputs, x_D, qkv)
        else:
            launch_latents(self, attention, x_D, qkv, self.buffers.of_attention)

    def output(self, layer: Layer, heads: Tensor) -> None:
        """Writes attention's output from those of the heads to the first row of sum_PD."""
        attention = layer.attention
        if attention.latent is not None:
            heads = launch_latent_values(self, attention, heads, self.buffers.of_attention[0])
        self.dot(attention.output, heads, self.buffers.sum_PD[0])

    def predict(self, ffn: FeedForward, x_D: Tensor, copy_W: Tensor | None) -> None:
        """Writes the bits of the named neurons, and again to `copy_W` on the host."""
        predictor, b = ffn.predictor, self.buffers
        assert predictor is not None
        inner = b.first("inner", predictor.down.weight.num_rows if predictor.down else 0)
        launch_predict(self, predictor, x_D, inner, self.named(ffn), copy_W)

    def routed(self, layer: Layer) -> Tensor:
        """The router's result of a layer [T, 2 K]."""
        assert layer.router is not None
        return self.buffers.first("routed", 2 * layer.router.spec.num_used)

    def route(self, layer: Layer, x_D: Tensor, copy: Tensor | None) -> None:
        """Writes the chosen experts and their weights, and again to `copy` on the host."""
        router, b = layer.router, self.buffers
        assert router is not None
        logit_E = b.first("inner", router.spec.num_experts)
        launch_route(self, router, x_D, logit_E, self.routed(layer), copy)

    def experts(self, divided: DividedLayer, hot: ExpertBlock, x_D: Tensor) -> None:
        """Writes the partial sums of the weighted outputs of a layer's chosen experts to sum_PD; 0
        of those that are on the CPU."""
        b, layer = self.buffers, divided.layer
        assert layer.router is not None
        num_used, num_neurons = layer.router.spec.num_used, len(hot.id_F)
        hidden_KF = b.carved(b.hidden, num_used * num_neurons)
        hidden_KF = hidden_KF.unflatten(-1, (num_used, num_neurons))
        parts_PD = b.rows_of(divided.latent_size)[1 : 1 + divided.num_parts]
        gate = layer.ffn.gate
        of_neurons.launch_experts(self, hot, gate, self.routed(layer), x_D, hidden_KF, parts_PD)

    def shared(self, divided: DividedLayer, x_D: Tensor) -> None:
        """Writes the partial sums of a layer's shared experts to sum_PD."""
        b, shared = self.buffers, divided.layer.shared
        assert shared is not None
        rows, gate_room = divided.rows("shared_out"), (b.first("inner", 1), b["shared_weight"])
        hidden_F = b.carved(b.hidden, shared.block.num_units)
        parts_SD = b.sum_PD[rows.start : rows.stop]
        of_neurons.launch_shared(self, shared, x_D, hidden_F, *gate_room, parts_SD)

    def hot(self, divided: DividedLayer, x_D: Tensor, *, are_named: bool) -> None:
        """Writes the partial sums of a layer's hot neurons to sum_PD and, if `divided` has
        `hot_bits`, the bits of those that fired. `are_named`: only neurons in `named_W` are
        computed."""
        b, ffn, hot = self.buffers, divided.layer.ffn, divided.hot
        if isinstance(hot, ExpertBlock):
            self.experts(divided, hot, x_D)
            return
        assert hot is not None
        hidden_N, parts_SD = b.carved(b.hidden, len(hot.id_N)), b.sum_PD[1 : 1 + divided.num_parts]
        gate_N, named_W = None, self.named(ffn) if are_named else None
        if ffn.gate.needs_all:
            gate_N = b.carved(b.hidden[hidden_N.numel() :], len(hot.id_N))
        given = divided.hot_id_N, named_W, x_D, hidden_N, parts_SD, gate_N
        of_neurons.launch_neurons(self, hot, ffn.gate, *given)
        if divided.hot_bits is not None:
            self.run(self.kernels.pack_open, hidden_N, *divided.hot_bits)
