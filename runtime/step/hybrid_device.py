"""One GPU's part of a decode step, layer by layer, while the CPU computes the cold neurons.

    main   norm  qkv  attention  norm  predictor ----- hot neurons ----- sum with the next norm
    side                                   \\-- x, names --> cold neurons --> y --/

Every vector has a fixed address: a step allocates nothing, so that it can be captured once and
replayed. The reference for the order of operations is decoder.run_layer. hybrid_builder.py decides
which layers run on which device.

Letters: D model width, F neurons of a layer, N hot ones, R predictor rank, H heads, K key-value
heads, W head width, S partial sums, P vectors to be added up, V vocabulary."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparkinfer.runtime.device.streams import Stream
from sparkinfer.runtime.kernels.gpu.kernels import Kernels
from sparkinfer.runtime.kernels.gpu.ranges import attend_scratch
from sparkinfer.runtime.kernels.gpu.slots import SlotKernels
from sparkinfer.runtime.model.attention import Norm, Rotary
from sparkinfer.runtime.model.feed_forward import FeedForward, NeuronBlock
from sparkinfer.runtime.model.layers import Layer, Weights
from sparkinfer.runtime.model.native_neurons import NativeNeurons
from sparkinfer.runtime.step.native_parts import HostBuffers, neuron_node
from sparkinfer.runtime.weights.matrix import Linear, Matrix

Take = Callable[[tuple[int, ...], torch.dtype], Tensor]


@dataclass(frozen=True, kw_only=True)
class DividedLayer:
    """A layer's neurons divided by device; `hot_id_N` is None if all neurons are hot."""

    index: int
    layer: Layer
    hot: NeuronBlock | None
    hot_id_N: Tensor | None  # int32
    cold: NativeNeurons | None
    num_parts: int  # S, the partial sums of the hot neurons
    named_W: Tensor  # the predicted neurons on the host, int32 [F / 32 rounded up]
    # With a neuron cache in mode "exact", int32 on the device: the slot of each neuron, and the bits of
    # the hot ones that a step reads, which it writes.
    hot_bits: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True, kw_only=True)
class DeviceBuffers:
    """The vectors of a step on one GPU, f32 unless noted."""

    token_1: Tensor  # int64
    position_1: Tensor  # int64
    x_D: Tensor  # the hidden state
    attn_input_D: Tensor
    ffn_input_2D: Tensor  # of this layer and the previous one, alternating
    qkv: Tensor  # [(H + 2 K) W]
    heads_HW: Tensor
    scratch: Tensor  # of attention
    inner_R: Tensor
    named_W: Tensor  # int32 [F / 32 rounded up]
    hidden_N: Tensor
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
    ) -> "DeviceBuffers":
        """Allocates the buffers; `take` returns zeros on the device."""
        width = weights.embedding.width
        first = weights.layers[0]
        cache = first.attention.cache
        context_length = cache.table.context_length
        num_kv, head_width = cache.num_kv_heads, cache.head_width
        num_heads, num_neurons = first.attention.num_heads, first.ffn.num_neurons
        scratch = attend_scratch(context_length, num_heads, head_width)
        ranks = [
            layer.ffn.predictor.down.weight.num_rows
            for layer in weights.layers
            if layer.ffn.predictor and layer.ffn.predictor.down
        ]
        most_hot = max([len(d.hot.id_N) for d in layers if d.hot], default=0)
        most_parts = max([d.num_parts for d in layers], default=0)
        real = torch.float32
        return cls(
            token_1=take((1,), torch.int64),
            position_1=take((1,), torch.int64),
            x_D=take((width,), real),
            attn_input_D=take((width,), real),
            ffn_input_2D=take((2, width), real),
            qkv=take(((num_heads + 2 * num_kv) * head_width,), real),
            heads_HW=take((num_heads * head_width,), real),
            scratch=take((scratch,), real),
            inner_R=take((max(ranks, default=0),), real),
            named_W=take((-(-num_neurons // 32),), torch.int32),
            hidden_N=take((most_hot,), real),
            sum_PD=take((1 + most_parts + 2, width), real),
            logits_V=take((weights.head.weight.num_rows if has_head else 0,), real),
        )


@dataclass(kw_only=True)
class DeviceProgram:
    """Submits work to a GPU's two streams. `pending` are rows of sum_PD not yet added to the hidden
    state; the next norm adds them as it reads."""

    kernels: Kernels
    main: Stream
    side: Stream
    buffers: DeviceBuffers
    host: HostBuffers
    rotary: Rotary | None
    input_layer_offset: int
    slot_kernels: SlotKernels | None = None
    pending: Tensor | None = None

    def begin(self) -> None:
        """Copies the token's position to the device, before any use of it."""
        self.main.copy(self.buffers.position_1, self.host.position_1)

    def enter(self, layer: int) -> None:
        """Copies the hidden state and, for a predictor, the previous layer's input from the host."""
        self.main.copy(self.buffers.x_D, self.host.x_D)
        if self.input_layer_offset and layer > 0:
            self.main.copy(self._ffn_input(layer - 1), self.host.ffn_input_D)

    def leave(self, layer: int) -> None:
        """Copies to the host what `enter` takes; `layer` is the next one."""
        self.settle()
        self.main.copy(self.host.x_D, self.buffers.x_D)
        if self.input_layer_offset and layer > 0:
            self.main.copy(self.host.ffn_input_D, self._ffn_input(layer - 1))

    def receive(self, other: "DeviceProgram", layer: int) -> None:
        """Copies the same from another GPU, which has settled; `layer` is the next one."""
        self.main.copy(self.buffers.x_D, other.buffers.x_D)
        if self.input_layer_offset and layer > 0:
            self.main.copy(self._ffn_input(layer - 1), other._ffn_input(layer - 1))

    def embed(self, embedding: Matrix, *, has_positions: bool) -> None:
        """Embeds the token on the GPU; learned positions come from the host."""
        b = self.buffers
        self.main.copy(b.token_1, self.host.token_1)
        if has_positions:
            self.main.copy(b.x_D, self.host.x_D)
        self._launch(
            lambda: self.kernels.embed(embedding, b.token_1, b.x_D, is_added=has_positions),
            [b.token_1, b.x_D, embedding.data], [b.x_D],
        )  # fmt: skip

    def run(self, divided: DividedLayer) -> None:
        """Runs a layer with attention on this GPU, in any layer order of decoder.run_layer."""
        layer, b = divided.layer, self.buffers
        ffn_input_D = self._ffn_input(divided.index)
        named_by_D = ffn_input_D
        if self.input_layer_offset and divided.index > 0:
            named_by_D = self._ffn_input(divided.index - 1)
        attention_out = b.sum_PD[:1]
        if layer.ffn_norm is None:
            self._norm(layer.attn_norm, ffn_input_D)
            own_D = ffn_input_D
            if layer.attn_norm_2:
                own_D = b.attn_input_D
                self._norm(layer.attn_norm_2, own_D)
            self._attention(layer, own_D)
            count = self._feed_forward(divided, ffn_input_D, named_by_D)
            self.pending = b.sum_PD[: 1 + count]
        elif layer.is_post_norm:
            self.settle()
            self._attention(layer, b.x_D)
            self.pending = attention_out
            self._norm(layer.attn_norm, ffn_input_D, keeps_sum=False)
            count = self._feed_forward(divided, ffn_input_D, named_by_D)
            self._add_norm(ffn_input_D, b.sum_PD[1 : 1 + count], layer.ffn_norm, b.x_D, None)
        else:
            self._norm(layer.attn_norm, b.attn_input_D)
            self._attention(layer, b.attn_input_D)
            self.pending = attention_out
            self._norm(layer.ffn_norm, ffn_input_D)
            count = self._feed_forward(divided, ffn_input_D, named_by_D)
            self.pending = b.sum_PD[1 : 1 + count]

    def run_hot(self, divided: DividedLayer, *, is_predicted: bool) -> None:
        """Runs the hot neurons of a layer with attention on the CPU: input and predicted neurons
        come from the host, the sum goes back to it."""
        assert divided.hot is not None
        b, host = self.buffers, self.host
        ffn_input_D = self._ffn_input(divided.index)
        self.main.copy(ffn_input_D, host.ffn_input_D)
        if is_predicted:
            self.main.copy(b.named_W, divided.named_W)
        self._hot(divided, divided.hot, ffn_input_D)
        first_D, rest_PD = b.sum_PD[1], b.sum_PD[2 : 1 + divided.num_parts]
        if len(rest_PD):
            self._add_norm(first_D, rest_PD, None, None, first_D)
        self.main.copy(host.hot_D, first_D)

    def start_cold(self, cold: NativeNeurons) -> Any:
        """Starts the cold neurons of such a layer; returns the event at which the host has their
        sum."""
        self.side.wait(self.main.record())
        self.side.host(neuron_node(cold))
        return self.side.record()

    def head(self, weights: Weights) -> None:
        """Computes logits; they are on the host once the stream has finished."""
        b = self.buffers
        if weights.output_norm:
            self._norm(weights.output_norm, b.attn_input_D, keeps_sum=False)
        else:
            self.settle()
        x_D = b.attn_input_D if weights.output_norm else b.x_D
        self._dot(weights.head, x_D, b.logits_V)
        self.main.copy(self.host.logits_V, b.logits_V)

    def settle(self) -> None:
        """Adds the pending rows to the hidden state."""
        if self.pending is not None:
            self._add_norm(self.buffers.x_D, self.pending, None, None, self.buffers.x_D)
        self.pending = None

    def _ffn_input(self, layer: int) -> Tensor:
        return self.buffers.ffn_input_2D[layer % 2]

    def _norm(self, norm: Norm, out_D: Tensor, *, keeps_sum: bool = True) -> None:
        """Norms the hidden state plus pending rows; with `keeps_sum`, the hidden state becomes the
        sum."""
        x_D = self.buffers.x_D
        kept = x_D if keeps_sum and self.pending is not None else None
        self._add_norm(x_D, self.pending, norm, out_D, kept)
        self.pending = None

    def _add_norm(
        self,
        x_D: Tensor,
        sum_PD: Tensor | None,
        norm: Norm | None,
        out_D: Tensor | None,
        x_out_D: Tensor | None,
    ) -> None:
        weight_D, bias_D = (norm.weight_D, norm.bias_D) if norm else (None, None)
        epsilon = norm.epsilon if norm else 0.0
        self._launch(
            lambda: self.kernels.add_norm(x_D, sum_PD, weight_D, bias_D, epsilon, out_D, x_out_D),
            [x_D, sum_PD, weight_D, bias_D], [out_D, x_out_D],
        )  # fmt: skip

    def _dot(self, linear: Linear, x_D: Tensor, out_N: Tensor, *, has_relu: bool = False) -> None:
        weight, bias_N = linear.weight, linear.bias_N
        self._launch(
            lambda: self.kernels.dot(weight, bias_N, x_D, out_N, has_relu=has_relu),
            [weight.data, bias_N, x_D], [out_N],
        )  # fmt: skip

    def _attention(self, layer: Layer, x_D: Tensor) -> None:
        """Writes attention's output to the first row of sum_PD."""
        b, attention = self.buffers, layer.attention
        start = 0
        for linear in attention.inputs:
            stop = start + linear.weight.num_rows
            self._dot(linear, x_D, b.qkv[start:stop])
            start = stop
        rotary = self.rotary
        query, key = attention.query_norm, attention.key_norm
        cache, num_heads = attention.cache, attention.num_heads
        frequency_W = rotary.frequency_W if rotary else None
        query_W, key_W = query.weight_D if query else None, key.weight_D if key else None
        self._launch(
            lambda: self.kernels.rotate_append(
                b.qkv, frequency_W, bool(rotary and rotary.is_adjacent), query_W, key_W,
                query.epsilon if query else 0.0,
                b.position_1, cache.key_CKW, cache.value_CKW, num_heads,
            ),
            [b.qkv, frequency_W, query_W, key_W, b.position_1],
            [b.qkv, cache.key_CKW, cache.value_CKW],
        )  # fmt: skip
        self._launch(
            lambda: self.kernels.attend(
                b.qkv, cache.key_CKW, cache.value_CKW, b.position_1, num_heads, b.scratch,
                b.heads_HW,
            ),
            [b.qkv, cache.key_CKW, cache.value_CKW, b.position_1], [b.scratch, b.heads_HW],
        )  # fmt: skip
        self._dot(attention.output, b.heads_HW, b.sum_PD[0])

    def _feed_forward(self, divided: DividedLayer, ffn_input_D: Tensor, named_by_D: Tensor) -> int:
        """Writes rows of sum_PD from the second on and returns their number. Cold neurons start
        before the hot ones and are waited for after them."""
        b, ffn = self.buffers, divided.layer.ffn
        self._predict(ffn, named_by_D)
        count, done = divided.num_parts, None
        if divided.cold:
            done = self._cold(divided.cold, ffn_input_D, b.sum_PD[1 + count])
            count += 1
        if divided.hot:
            self._hot(divided, divided.hot, ffn_input_D)
        if ffn.down_bias_D is not None:
            self.main.copy(b.sum_PD[1 + count], ffn.down_bias_D)
            count += 1
        if divided.cold:
            self.main.wait(done)
        return count

    def _predict(self, ffn: FeedForward, x_D: Tensor) -> None:
        predictor = ffn.predictor
        if predictor is None:
            return
        b, inner = self.buffers, x_D
        if predictor.down:
            inner = b.inner_R[: predictor.down.weight.num_rows]
            self._dot(predictor.down, x_D, inner, has_relu=predictor.kind == "relu")
        up, activation = predictor.up, ffn.gate.activation
        self._launch(
            lambda: self.kernels.predict(
                up.weight, up.bias_N, inner, predictor.threshold, predictor.kind, activation,
                b.named_W,
            ),
            [up.weight.data, up.bias_N, inner], [b.named_W],
        )  # fmt: skip

    def _cold(self, cold: NativeNeurons, ffn_input_D: Tensor, out_D: Tensor) -> Any:
        """Starts cold neurons on the side stream; returns the event at which `out_D` has their
        sum."""
        self.side.wait(self.main.record())
        self.side.copy(cold.x_D, ffn_input_D)
        if cold.named_W is not None:
            self.side.copy(cold.named_W, self.buffers.named_W)
        self.side.host(neuron_node(cold))
        self.side.copy(out_D, cold.y_D)
        return self.side.record()

    def _hot(self, divided: DividedLayer, hot: NeuronBlock, x_D: Tensor) -> None:
        b, ffn = self.buffers, divided.layer.ffn
        gate, up, down = hot.gate, hot.up, hot.down
        up_weight, up_bias_N = (up.weight, up.bias_N) if up else (None, None)
        named_W = b.named_W if ffn.mode == "predicted" else None
        hidden_N = b.hidden_N[: len(hot.id_N)]
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
