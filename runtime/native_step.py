"""A decode step of the whole model in one native call: built once, from the loaded weights.

The structs are those of kernels/cpu/step.h, field by field; they point at the tensors of the model,
which this module keeps alive. What is not covered keeps the ordinary path of decoder.py: `build`
says why. What this module does not know: the order of a forward pass."""

from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparkinfer.runtime.attention import Norm
from sparkinfer.runtime.feed_forward import NeuronBlock, Traffic
from sparkinfer.runtime.kernels.cpu import library
from sparkinfer.runtime.loader import Layer, Weights
from sparkinfer.runtime.matrix import Linear, Matrix

_ACTIVATIONS = ("relu", "fatrelu", "drelu", "silu", "gelu", "gelu_tanh")
_MODES = ("dense", "exact", "predicted")
_PREDICTORS = ("linear", "relu", "gate")
_ALIGNMENT = 64


class _Matrix(Structure):
    _fields_ = [("data", c_void_p), ("bias", c_void_p), ("num_rows", c_int64),
                ("num_columns", c_int64), ("stride", c_int64), ("kind", c_int32),
                ("unused", c_int32)]  # fmt: skip


class _Norm(Structure):
    _fields_ = [("weight", c_void_p), ("bias", c_void_p)]


class _Block(Structure):
    _fields_ = [("gate", _Matrix), ("up", _Matrix), ("down", _Matrix), ("id", c_void_p),
                ("row", c_void_p), ("num_neurons", c_int64)]  # fmt: skip


class _Layer(Structure):
    _fields_ = [("attn_norm", _Norm), ("attn_norm_2", _Norm), ("ffn_norm", _Norm),
                ("query_norm", _Norm), ("key_norm", _Norm),
                ("input", _Matrix * 3), ("output", _Matrix),
                ("predictor_down", _Matrix), ("predictor_up", _Matrix),
                ("down_bias", c_void_p), ("key", c_void_p), ("value", c_void_p),
                ("block", POINTER(_Block)), ("num_blocks", c_int64),
                ("threshold", c_float), ("predictor_threshold", c_float)]  # fmt: skip


class _Step(Structure):
    _fields_ = [("embedding", _Matrix), ("positions", _Matrix), ("head", _Matrix),
                ("output_norm", _Norm), ("layer", POINTER(_Layer)), ("frequency", c_void_p),
                ("workspace", c_void_p),
                ("num_layers", c_int64), ("width", c_int64), ("num_neurons", c_int64),
                ("num_heads", c_int64), ("num_kv_heads", c_int64), ("head_width", c_int64),
                ("context_length", c_int64),
                ("gate_bytes", c_int64), ("up_bytes", c_int64), ("down_bytes", c_int64),
                ("predictor_bytes", c_int64),
                ("epsilon", c_float),
                ("is_adjacent", c_int32), ("is_post_norm", c_int32), ("cache_kind", c_int32),
                ("activation", c_int32), ("mode", c_int32), ("predictor_kind", c_int32),
                ("input_layer_offset", c_int32)]  # fmt: skip


class NotNative(Exception):
    """Why a model's decode step cannot be one native call."""


@dataclass(frozen=True, kw_only=True)
class NativeStep:
    step: _Step
    vocab_size: int
    traffic: Traffic
    kept: tuple[Any, ...]  # whatever the structs point at

    def run(self, token: int, position: int) -> Tensor:
        """f32 [V]: the logits behind one token; appends to the cache and counts the traffic.

        Raises IndexError for a token or position that cannot be."""
        logits_V = torch.empty(self.vocab_size, dtype=torch.float32)
        before = self._bytes()
        library.run_step(self.step, token, position, logits_V)
        gate, up, down, predictor = (b - a for a, b in zip(before, self._bytes(), strict=True))
        self.traffic.gate += gate
        self.traffic.up += up
        self.traffic.down += down
        self.traffic.predictor += predictor
        return logits_V

    def _bytes(self) -> tuple[int, int, int, int]:
        step = self.step
        return step.gate_bytes, step.up_bytes, step.down_bytes, step.predictor_bytes


def build(weights: Weights, input_layer_offset: int, traffic: Traffic) -> NativeStep | str:
    """The step of this model, or in a few words why there is none."""
    if not library.is_available():
        return "the C++ kernels are not built"
    try:
        return _Builder().step(weights, input_layer_offset, traffic)
    except NotNative as reason:
        return str(reason)


class _Builder:
    """Turns parts of a model into structs; `kept` grows by what they point at."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def step(self, weights: Weights, input_layer_offset: int, traffic: Traffic) -> NativeStep:
        layers = (_Layer * len(weights.layers))(*(self.layer(layer) for layer in weights.layers))
        first = weights.layers[0]
        cache, ffn = first.attention.cache.key_CKW, first.ffn
        rotary = next(iter(weights.rotary.values()), None)
        predictor = ffn.predictor
        step = _Step(
            embedding=self.matrix(weights.embedding),
            positions=_Matrix() if weights.positions is None else self.matrix(weights.positions),
            head=self.linear(weights.head),
            output_norm=self.norm(weights.output_norm),
            layer=layers,
            frequency=None if rotary is None else self.pointer(rotary.frequency_W, torch.float64),
            num_layers=len(weights.layers),
            width=weights.embedding.width,
            num_neurons=ffn.num_neurons,
            num_heads=first.attention.num_heads,
            num_kv_heads=cache.shape[1],
            head_width=cache.shape[2],
            context_length=cache.shape[0],
            epsilon=first.attn_norm.epsilon,
            is_adjacent=bool(rotary and rotary.is_adjacent),
            is_post_norm=first.is_post_norm,
            cache_kind=library.kind_code("f32" if cache.dtype == torch.float32 else "f16"),
            activation=_ACTIVATIONS.index(ffn.gate.activation),
            mode=_MODES.index(ffn.mode),
            predictor_kind=0 if predictor is None else _PREDICTORS.index(predictor.kind),
            input_layer_offset=input_layer_offset,
        )
        self.kept += [layers, rotary]
        step.workspace = self.workspace(library.step_bytes(step))
        return NativeStep(
            step=step, vocab_size=weights.head.weight.num_rows, traffic=traffic,
            kept=tuple(self.kept),
        )  # fmt: skip

    def workspace(self, num_bytes: int) -> int:
        if num_bytes < 0:
            raise NotNative("its sizes do not fit together")
        memory = torch.empty(num_bytes + _ALIGNMENT, dtype=torch.uint8)
        self.kept.append(memory)
        return -(-memory.data_ptr() // _ALIGNMENT) * _ALIGNMENT

    def layer(self, layer: Layer) -> _Layer:
        attention, ffn = layer.attention, layer.ffn
        inputs = [self.linear(linear) for linear in attention.inputs]
        blocks = (_Block * len(ffn.blocks))(*(self.block(block) for block in ffn.blocks))
        predictor = ffn.predictor
        down = None if predictor is None else predictor.down
        cache = attention.cache
        self.kept.append(blocks)
        return _Layer(
            attn_norm=self.norm(layer.attn_norm),
            attn_norm_2=self.norm(layer.attn_norm_2),
            ffn_norm=self.norm(layer.ffn_norm),
            query_norm=self.norm(attention.query_norm),
            key_norm=self.norm(attention.key_norm),
            input=(_Matrix * 3)(*inputs),
            output=self.linear(attention.output),
            predictor_down=_Matrix() if down is None else self.linear(down),
            predictor_up=_Matrix() if predictor is None else self.linear(predictor.up),
            down_bias=self.vector(ffn.down_bias_D),
            key=self.pointer(cache.key_CKW, cache.key_CKW.dtype),
            value=self.pointer(cache.value_CKW, cache.key_CKW.dtype),
            block=blocks,
            num_blocks=len(blocks),
            threshold=ffn.gate.threshold,
            predictor_threshold=0.0 if predictor is None else predictor.threshold,
        )

    def block(self, block: NeuronBlock) -> _Block:
        return _Block(
            gate=self.linear(block.gate),
            up=_Matrix() if block.up is None else self.linear(block.up),
            down=self.matrix(block.down),
            id=None if block.is_whole else self.indices(block.id_N),
            row=None if block.row_N is None else self.indices(block.row_N),
            num_neurons=len(block.id_N),
        )

    def linear(self, linear: Linear) -> _Matrix:
        matrix = self.matrix(linear.weight)
        matrix.bias = self.vector(linear.bias_N)
        return matrix

    def matrix(self, matrix: Matrix) -> _Matrix:
        return _Matrix(
            data=self.pointer(matrix.data, matrix.data.dtype),
            num_rows=matrix.num_rows,
            num_columns=matrix.width,
            stride=matrix.stride_bytes,
            kind=library.kind_code(matrix.kind),
        )

    def norm(self, norm: Norm | None) -> _Norm:
        if norm is None:
            return _Norm()
        return _Norm(weight=self.vector(norm.weight_D), bias=self.vector(norm.bias_D))

    def indices(self, index_N: Tensor) -> int:
        return self.pointer(index_N.to(torch.int32), torch.int32)

    def vector(self, vector: Tensor | None) -> int | None:
        return None if vector is None else self.pointer(vector, torch.float32)

    def pointer(self, tensor: Tensor, dtype: torch.dtype) -> int:
        if tensor.device.type != "cpu":
            raise NotNative(f"a part of it is on {tensor.device}")
        is_in_rows = tensor.dim() == 2 and tensor.stride(1) == 1
        if tensor.dtype != dtype or not (tensor.is_contiguous() or is_in_rows):
            raise NotNative(f"a tensor is {tensor.dtype} with strides {tensor.stride()}")
        self.kept.append(tensor)
        return tensor.data_ptr()
