"""One GPU's operations of a decode step: the kernels of each, and the vectors that they share.

Every vector has a fixed address: a step allocates nothing, so that it can be captured once and
replayed. program.py has the order of operations, hybrid_lowering.py submits them.

Letters: D model width, F neurons of a layer, N hot ones, R predictor rank, H heads, K key-value
heads, W head width, S partial sums, P vectors to be added up, V vocabulary."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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

    def rows(self, name: str) -> tuple[int, int]:
        """The rows of an output in DeviceBuffers.sum_PD: those that a sum takes are adjacent."""
        num_parts = self.num_parts
        if name == "attn_out":
            return 0, 1
        if name == "hot_out" or (name == "ffn_out" and self.hot is not None):
            return 1, 1 + num_parts
        if name == "bias":
            return 1 + num_parts + (self.cold is not None), 2 + num_parts + (self.cold is not None)
        assert name in ("cold_out", "ffn_out"), name
        return 1 + num_parts, 2 + num_parts


# Names in the program -> fields.
_PLAIN = {
    "token": "token_1", "position": "position_1", "x": "x_D", "attn_in": "attn_input_D",
    "head_in": "attn_input_D", "named": "named_W", "logits": "logits_V",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DeviceBuffers:
    """The vectors of a step on one GPU, f32 unless noted."""

    token_1: Tensor  # int64
    position_1: Tensor  # int64
    x_D: Tensor  # the hidden state
    attn_input_D: Tensor
    ffn_in_2D: Tensor  # of this layer and the previous one, alternating
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
            ffn_in_2D=take((2, width), real),
            qkv=take(((num_heads + 2 * num_kv) * head_width,), real),
            heads_HW=take((num_heads * head_width,), real),
            scratch=take((scratch,), real),
            inner_R=take((max(ranks, default=0),), real),
            named_W=take((-(-num_neurons // 32),), torch.int32),
            hidden_N=take((most_hot,), real),
            sum_PD=take((1 + most_parts + 2, width), real),
            logits_V=take((weights.head.weight.num_rows if has_head else 0,), real),
        )


@dataclass(frozen=True, kw_only=True)
class DeviceKernels:
    """Submits the operations of a GPU to its main stream. `side` is for what runs beside them."""

    kernels: Kernels
    main: Stream
    side: Stream
    buffers: DeviceBuffers
    rotary: Rotary | None
    slot_kernels: SlotKernels | None = None

    def value(self, name: str, divided: DividedLayer | None) -> Tensor:
        """A value by its name in the program; those of a layer's sums depend on the layer."""
        b = self.buffers
        base, _, number = name.partition(".")
        if base == "ffn_in":
            return b.ffn_in_2D[int(number)]
        if base in _PLAIN:
            found: Tensor = getattr(b, _PLAIN[base])
            return found
        assert divided is not None, name
        return self.sums([name], divided)[0]

    def sums(self, names: Sequence[str], divided: DividedLayer) -> Tensor:
        """[P, D] the rows of some outputs of a layer, which are adjacent."""
        first, last = (divided.rows(name) for name in (names[0], names[-1]))
        count = sum(len(range(*divided.rows(name))) for name in names)
        assert count == last[1] - first[0], (names, first, last)
        return self.buffers.sum_PD[first[0] : last[1]]

    def embed(self, embedding: Matrix, *, has_positions: bool) -> None:
        """Learned positions are in the hidden state already."""
        b = self.buffers
        self._launch(
            lambda: self.kernels.embed(embedding, b.token_1, b.x_D, is_added=has_positions),
            [b.token_1, b.x_D, embedding.data], [b.x_D],
        )  # fmt: skip

    def add_norm(
        self,
        x_D: Tensor,
        sum_PD: Tensor | None,
        norm: Norm | None,
        out_D: Tensor | None,
        x_out_D: Tensor | None,
    ) -> None:
        """out = the norm of x + the rows of sum, which is also written to x_out."""
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
        start = 0
        for linear in attention.inputs:
            stop = start + linear.weight.num_rows
            self.dot(linear, x_D, b.qkv[start:stop])
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
                magnitude=rotary.magnitude if rotary else 1.0,
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
        self.dot(attention.output, b.heads_HW, b.sum_PD[0])

    def predict(self, ffn: FeedForward, x_D: Tensor) -> None:
        predictor = ffn.predictor
        assert predictor is not None
        b, inner = self.buffers, x_D
        if predictor.down:
            inner = b.inner_R[: predictor.down.weight.num_rows]
            self.dot(predictor.down, x_D, inner, has_relu=predictor.kind == "relu")
        up, activation = predictor.up, ffn.gate.activation
        self._launch(
            lambda: self.kernels.predict(
                up.weight, up.bias_N, inner, predictor.threshold, predictor.kind, activation,
                b.named_W,
            ),
            [up.weight.data, up.bias_N, inner], [b.named_W],
        )  # fmt: skip

    def hot(self, divided: DividedLayer, x_D: Tensor) -> None:
        """Writes the partial sums of a layer's hot neurons."""
        b, ffn, hot = self.buffers, divided.layer.ffn, divided.hot
        assert hot is not None
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
