"""One GPU's operations of a decode step: their kernels, and the buffers that they share.

Every buffer has a fixed address, so that a captured step can be replayed. hybrid_lowering.py calls
the operations as the step program (program.py) requires them.

A step of T rows uses the beginning of each buffer's memory (of all but `table_SN`). Vectors become
[T, ...], `sum_PD` becomes [P, T, D] and `ffn_in_2D` [2, T, D]. For one row there is no T axis,
except in `token_T`, `position_T` and `sequence_T`.

Letters: T rows, D model width, F neurons of a layer, N hot ones, H heads, K key-value heads, W head
width, or words of F bits, S partial sums, P summands, V vocabulary; in table_SN, S sequences and N
blocks of each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from hotsplit.runtime.device.streams import Stream
from hotsplit.runtime.kernels.gpu.kernels import Kernels
from hotsplit.runtime.kernels.gpu.ranges import attend_scratch
from hotsplit.runtime.kernels.gpu.slots import SlotKernels
from hotsplit.runtime.model.attention import Norm
from hotsplit.runtime.model.feed_forward import FeedForward, NeuronBlock
from hotsplit.runtime.model.layers import Layer, Weights
from hotsplit.runtime.model.native_neurons import NativeNeurons
from hotsplit.runtime.step.native_parts import beginning, first
from hotsplit.runtime.weights.matrix import Linear, Matrix

Take = Callable[[tuple[int, ...], torch.dtype], Tensor]


@dataclass(frozen=True, kw_only=True)
class DividedLayer:
    """A layer's neurons divided by device; `hot_id_N` is None if all neurons are hot, or none."""

    index: int
    layer: Layer
    hot: NeuronBlock | None
    hot_id_N: Tensor | None  # int32
    cold: NativeNeurons | None
    num_parts: int  # S, the partial sums of the hot neurons
    named_W: Tensor  # bits of the predicted neurons on the host, int32 [F / 32 rounded up] per row
    # With a neuron cache in mode "exact", int32 on the device: the slot of each neuron, and the
    # bits of the hot neurons that fired, which a step writes.
    hot_bits: tuple[Tensor, Tensor] | None = None

    def rows(self, name: str) -> tuple[int, int]:
        """The range of an output's rows in DeviceBuffers.sum_PD; the summands of a sum are
        adjacent."""
        num_parts = self.num_parts
        if name == "attn_out":
            return 0, 1
        if name == "hot_out" or (name == "ffn_out" and self.hot is not None):
            return 1, 1 + num_parts
        if name == "bias":
            return 1 + num_parts + (self.cold is not None), 2 + num_parts + (self.cold is not None)
        assert name in ("cold_out", "ffn_out"), name
        return 1 + num_parts, 2 + num_parts


OUTPUTS = ("attn_out", "hot_out", "cold_out", "ffn_out", "bias")  # names in the program: see rows
# Names in the program -> fields of DeviceBuffers.
_PLAIN = {
    "token": "token_T", "position": "position_T", "x": "x_D", "attn_in": "attn_input_D",
    "head_in": "attn_input_D", "logits": "logits_V",
}  # fmt: skip
_REAL = torch.float32


@dataclass(frozen=True, kw_only=True)
class DeviceBuffers:
    """The buffers of a step on one GPU, f32 unless noted. They have memory for `max_rows` rows and
    shapes for `num_rows`."""

    max_rows: int
    num_rows: int
    token_T: Tensor  # int64
    position_T: Tensor  # int64
    sequence_T: Tensor  # int32
    table_SN: Tensor | None  # int32, with several sequences, if the cache is on the GPU
    x_D: Tensor  # the hidden state
    attn_input_D: Tensor
    ffn_in_2D: Tensor  # of this layer and the previous one, alternating
    qkv: Tensor  # flat, room for [(H + 2 K) W] of the layer with most
    heads: Tensor  # flat, room for [H W]
    scratch: Tensor  # of attention
    inner: Tensor  # of predictors, flat
    named_W: Tensor  # int32 [F / 32 rounded up]
    hidden: Tensor  # of hot neurons, flat
    sum_PD: Tensor  # attention's output; partial sums of hot neurons; sum of cold ones; bias
    logits_V: Tensor

    @classmethod
    def of(
        cls,
        weights: Weights,
        layers: Sequence[DividedLayer],
        take: Take,
        *,
        has_head: bool,
        has_cache: bool = True,
        max_rows: int = 1,
    ) -> "DeviceBuffers":
        """Allocates the buffers; `take` returns zeros on the device. `has_cache`: keys and values
        are on the GPU, so attention there needs scratch."""
        width, table, spec = weights.embedding.width, weights.cache.table, weights.spec
        scratch = 0
        if has_cache:
            scratch = max(
                attend_scratch(table.context_length, a.num_heads, a.head_dim)
                for a in (layer.attention for layer in spec.layers)
            )
        has_table = has_cache and not table.is_whole
        ranks = [
            layer.ffn.predictor.down.weight.num_rows
            for layer in weights.layers
            if layer.ffn.predictor and layer.ffn.predictor.down
        ]
        most_hot = max([len(d.hot.id_N) for d in layers if d.hot], default=0)
        most_parts = max([d.num_parts for d in layers], default=0)

        def take_rows(size: int, dtype: torch.dtype = _REAL) -> Tensor:
            return take((max_rows, size), dtype)

        return cls(
            max_rows=max_rows,
            num_rows=max_rows,
            token_T=take((max_rows,), torch.int64),
            position_T=take((max_rows,), torch.int64),
            sequence_T=take((max_rows,), torch.int32),
            table_SN=take(tuple(table.block_SN.shape), torch.int32) if has_table else None,
            x_D=take_rows(width),
            attn_input_D=take_rows(width),
            ffn_in_2D=take((2, max_rows, width), _REAL),
            qkv=take((max_rows * spec.most_qkv_size,), _REAL),
            heads=take((max_rows * spec.most_query_size,), _REAL),
            scratch=take((max_rows * scratch,), _REAL),
            inner=take((max_rows * max(ranks, default=0),), _REAL),
            named_W=take_rows(-(-spec.most_neurons // 32), torch.int32),
            hidden=take((max_rows * most_hot,), _REAL),
            sum_PD=take((1 + most_parts + 2, max_rows, width), _REAL),
            logits_V=take_rows(weights.head.weight.num_rows if has_head else 0),
        )

    def rows(self, num_rows: int) -> "DeviceBuffers":
        """The same memory with shapes for steps of `num_rows` rows."""
        changes: dict[str, Any] = {name: getattr(self, name)[:num_rows] for name in _LISTS}
        for name in _VECTORS:
            values = getattr(self, name)
            changes[name] = self.first(values, values.shape[-1], num_rows=num_rows)
        parts, width = self.sum_PD.shape[0], self.sum_PD.shape[-1]
        shape = (parts, width) if num_rows == 1 else (parts, num_rows, width)
        changes["sum_PD"] = self.sum_PD.flatten()[: prod(shape)].view(shape)
        changes["ffn_in_2D"] = first(self.ffn_in_2D, num_rows, axis=1)
        return replace(self, **changes, num_rows=num_rows)

    def first(self, values: Tensor, size: int, *, num_rows: int | None = None) -> Tensor:
        """The beginning of a buffer's memory as [T, size], or [size] for one row."""
        return beginning(values, self.num_rows if num_rows is None else num_rows, size)


_LISTS = ("token_T", "position_T", "sequence_T")
_VECTORS = ("x_D", "attn_input_D", "named_W", "logits_V")


@dataclass(frozen=True, kw_only=True)
class DeviceKernels:
    """Submits the operations of a GPU to its main stream. `side` is for work concurrent with
    them."""

    kernels: Kernels
    main: Stream
    side: Stream
    buffers: DeviceBuffers
    slot_kernels: SlotKernels | None = None

    def value(self, name: str, divided: DividedLayer | None) -> Tensor:
        """The buffer of a value in the program; for the terms of a layer's sums, its place depends
        on the layer. Of several partial sums, the first."""
        b = self.buffers
        base, _, number = name.partition(".")
        if base == "ffn_in":
            return b.ffn_in_2D[int(number)]
        if base in _PLAIN:
            found: Tensor = getattr(b, _PLAIN[base])
            return found
        assert divided is not None, name
        if base == "named":
            return self.named(divided.layer.ffn)
        if base in ("qkv", "heads"):
            return self.attended(divided.layer)[base == "heads"]
        return self.sums([name], divided)[0]

    def sums(
        self, names: Sequence[str], divided: DividedLayer, summed: Sequence[str] = ()
    ) -> Tensor:
        """The rows of `sum_PD` that hold these outputs of a layer, [P, D]; they must be adjacent.
        Of those in `summed`, partial sums have been added up in the first row."""
        ranges = [divided.rows(name) for name in names]
        ends = [
            begin + 1 if name in summed else end
            for name, (begin, end) in zip(names, ranges, strict=True)
        ]
        begin, end = ranges[0][0], ends[-1]
        count = sum(stop - start for (start, _), stop in zip(ranges, ends, strict=True))
        assert count == end - begin, (names, begin, end)
        return self.buffers.sum_PD[begin:end]

    def embed(self, embedding: Matrix, scale: float, *, has_positions: bool) -> None:
        """Writes the embedding, times `scale`, to the hidden state, or adds it to the learned
        positions there."""
        b = self.buffers
        self._launch(
            lambda: self.kernels.embed(
                embedding, b.token_T, b.x_D, is_added=has_positions, scale=scale
            ),
            [b.token_T, b.x_D, embedding.data], [b.x_D],
        )  # fmt: skip

    def add_norm(
        self,
        x_D: Tensor,
        sum_PD: Tensor | None,
        norm: Norm | None,
        out_D: Tensor | None,
        x_out_D: Tensor | None,
    ) -> None:
        """x_out = x + the sum of the rows of sum; out = the norm of that. Both outputs are
        optional."""
        weight_D, bias_D = (norm.weight_D, norm.bias_D) if norm else (None, None)
        epsilon = norm.epsilon if norm else 0.0
        self._launch(
            lambda: self.kernels.add_norm(x_D, sum_PD, weight_D, bias_D, epsilon, out_D, x_out_D),
            [x_D, sum_PD, weight_D, bias_D], [out_D, x_out_D],
        )  # fmt: skip

    def dot(self, linear: Linear, x_D: Tensor, out_N: Tensor, *, has_relu: bool = False) -> None:
        weight, bias_N = linear.weight, linear.bias_N
        self._launch(
            lambda: self.kernels.dot(weight, bias_N, x_D, out_N, has_relu=has_relu),
            [weight.data, bias_N, x_D], [out_N],
        )  # fmt: skip

    def attention(self, layer: Layer, x_D: Tensor) -> None:
        """Writes attention's output to the first row of sum_PD."""
        b, attention = self.buffers, layer.attention
        self.inputs(layer, x_D)
        qkv, heads = self.attended(layer)
        rotary = attention.rotary
        query, key = attention.query_norm, attention.key_norm
        (keys, values), num_heads = attention.cache.for_kernels, attention.num_heads
        sequence_T = None if b.table_SN is None else b.sequence_T
        frequency_W = rotary.frequency_W if rotary else None
        query_W, key_W = query.weight_D if query else None, key.weight_D if key else None
        self._launch(
            lambda: self.kernels.rotate_append(
                qkv, frequency_W, bool(rotary and rotary.is_adjacent), query_W, key_W,
                query.epsilon if query else 0.0, b.position_T, keys, values, num_heads,
                sequence_T, b.table_SN, magnitude=rotary.magnitude if rotary else 1.0,
            ),
            [qkv, frequency_W, query_W, key_W, b.position_T, sequence_T, b.table_SN],
            [qkv, keys, values],
        )  # fmt: skip
        self._launch(
            lambda: self.kernels.attend(
                qkv, keys, values, b.position_T, num_heads, b.scratch, heads, sequence_T,
                b.table_SN, scale=attention.score_scale, window=attention.window,
            ),
            [qkv, keys, values, b.position_T, sequence_T, b.table_SN], [b.scratch, heads],
        )  # fmt: skip
        self.output(layer, heads)

    def attended(self, layer: Layer) -> tuple[Tensor, Tensor]:
        """The layer's queries, keys and values [T, (H + 2 K) W], and outputs of its heads [T, H W],
        at the beginning of their buffers."""
        qkv_size, heads_size = layer.attention.widths
        b = self.buffers
        return b.first(b.qkv, qkv_size), b.first(b.heads, heads_size)

    def inputs(self, layer: Layer, x_D: Tensor) -> None:
        """Projects queries, keys and values."""
        start, (qkv, _) = 0, self.attended(layer)
        for linear in layer.attention.inputs:
            stop = start + linear.weight.num_rows
            self.dot(linear, x_D, qkv[..., start:stop])
            start = stop

    def output(self, layer: Layer, heads: Tensor) -> None:
        """Writes the output projection of the heads to the first row of sum_PD."""
        self.dot(layer.attention.output, heads, self.buffers.sum_PD[0])

    def predict(self, ffn: FeedForward, x_D: Tensor) -> None:
        predictor = ffn.predictor
        assert predictor is not None
        b, inner = self.buffers, x_D
        if predictor.down:
            inner = b.first(b.inner, predictor.down.weight.num_rows)
            self.dot(predictor.down, x_D, inner, has_relu=predictor.kind == "relu")
        up, activation, named_W = predictor.up, ffn.gate.activation, self.named(ffn)
        self._launch(
            lambda: self.kernels.predict(
                up.weight, up.bias_N, inner, predictor.threshold, predictor.kind, activation,
                named_W,
            ),
            [up.weight.data, up.bias_N, inner], [named_W],
        )  # fmt: skip

    def named(self, ffn: FeedForward) -> Tensor:
        """The bits of a layer's named neurons [T, F / 32 rounded up]."""
        return self.buffers.first(self.buffers.named_W, -(-ffn.num_neurons // 32))

    def hot(self, divided: DividedLayer, x_D: Tensor, *, are_named: bool) -> None:
        """Writes the partial sums of a layer's hot neurons to sum_PD and, if `divided` has
        `hot_bits`, the bits of those that fired. `are_named`: only neurons in `named_W` are
        computed."""
        b, ffn, hot = self.buffers, divided.layer.ffn, divided.hot
        assert hot is not None
        gate, up, down = hot.gate, hot.up, hot.down
        up_weight, up_bias_N = (up.weight, up.bias_N) if up else (None, None)
        named_W = self.named(ffn) if are_named else None
        hidden_N = b.first(b.hidden, len(hot.id_N))
        parts_SD = b.sum_PD[1 : 1 + divided.num_parts]
        is_dense = ffn.mode == "dense"
        act = ffn.gate
        self._launch(
            lambda: self.kernels.gate_up(
                gate.weight, gate.bias_N, up_weight, up_bias_N, divided.hot_id_N, named_W, x_D,
                act.activation, act.threshold, is_dense, hidden_N,
            ),
            [gate.weight.data, gate.bias_N, up_weight.data if up_weight else None, up_bias_N,
             divided.hot_id_N, named_W, x_D],
            [hidden_N],
        )  # fmt: skip
        self._launch(
            lambda: self.kernels.down(down, hidden_N, parts_SD, skips_zeros=not is_dense),
            [down.data, hidden_N],
            [parts_SD],
        )
        if divided.hot_bits is not None:
            assert self.slot_kernels is not None
            (slot_F, open_W), pack_open = divided.hot_bits, self.slot_kernels.pack_open
            self._launch(lambda: pack_open(hidden_N, slot_F, open_W), [hidden_N, slot_F], [open_W])

    def _launch(
        self, run: Callable[[], None], reads: list[Tensor | None], writes: list[Tensor | None]
    ) -> None:
        self.main.launch(
            run,
            reads=[t for t in reads if t is not None],
            writes=[t for t in writes if t is not None],
        )
