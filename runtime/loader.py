"""From a model file and a plan to layers on their devices.

What lies on the CPU stays in the mapped file; what lies on the GPU is copied there once. A plan
without a GPU at hand runs with both roles on the CPU: the hot block still has matrices of its
own. What this module does not know: the order of a forward pass."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from gguf.quants import dequantize
from torch import Tensor

from sparkinfer.budget import kv_kind, transposed_kind
from sparkinfer.gguf_file import TensorEntry, type_of
from sparkinfer.model_file import ModelFile
from sparkinfer.runtime.attention import Attention, LayerCache, Rotary
from sparkinfer.runtime.feed_forward import (
    FeedForward,
    Gate,
    Mode,
    NeuronBlock,
    Predictor,
    Traffic,
)
from sparkinfer.runtime.matrix import Matrix, matrix_of, vector_of
from sparkinfer.runtime.observers import Observers
from sparkinfer.split_file import Split


@dataclass(frozen=True, kw_only=True)
class Layer:
    device: torch.device  # of attention, norms, predictor and cache
    attention: Attention
    ffn_norm_D: Tensor
    ffn: FeedForward


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Everything a forward pass needs; `num_bytes` counts what each role holds, as a plan does."""

    embedding: Matrix
    layers: tuple[Layer, ...]
    output_norm_D: Tensor
    head: Matrix
    head_device: torch.device
    rotary: dict[torch.device, Rotary]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Which device has which part. `hot` is None where no layer is divided."""

    gpu: torch.device  # the CPU, where there is none
    dense_on_gpu: tuple[bool, ...]
    head_on_gpu: bool
    hot: tuple[np.ndarray, ...] | None

    @classmethod
    def of_split(cls, split: Split, gpu: torch.device) -> "Placement":
        return cls(
            gpu=gpu,
            dense_on_gpu=split.dense_on_gpu,
            head_on_gpu=split.head_on_gpu,
            hot=split.hot,
        )

    @classmethod
    def on_one_device(cls, num_layers: int, device: torch.device) -> "Placement":
        return cls(gpu=device, dense_on_gpu=(True,) * num_layers, head_on_gpu=True, hot=None)

    def device(self, is_on_gpu: bool) -> torch.device:
        return self.gpu if is_on_gpu else torch.device("cpu")


def load_weights(
    model: ModelFile,
    placement: Placement,
    mode: Mode,
    context_length: int,
    observers: Observers,
    traffic: Traffic,
    notice: Callable[[str], None],
) -> Weights:
    """`notice` hears what a user should know, e.g. the error of a transposed down projection."""
    builder = _Builder(model, placement, mode, context_length, observers, traffic, notice)
    head_device = placement.device(placement.head_on_gpu)
    embedding_device = head_device if model.is_tied else torch.device("cpu")
    embedding = matrix_of(model.tensors["token_embd.weight"], embedding_device)
    layers = tuple(builder.layer(index) for index in range(model.shape.num_layers))
    factors = model.tensors.get("rope_freqs.weight")
    devices = {layer.device for layer in layers}
    return Weights(
        embedding=embedding,
        layers=layers,
        output_norm_D=vector_of(model.tensors["output_norm.weight"], head_device),
        head=embedding if model.is_tied else matrix_of(model.tensors["output.weight"], head_device),
        head_device=head_device,
        rotary={
            device: Rotary.of(
                model.shape, None if factors is None else vector_of(factors, device), device
            )
            for device in devices
        },
    )


@dataclass(frozen=True)
class _Builder:
    model: ModelFile
    placement: Placement
    mode: Mode
    context_length: int
    observers: Observers
    traffic: Traffic
    notice: Callable[[str], None]

    def layer(self, index: int) -> Layer:
        device = self.placement.device(self.placement.dense_on_gpu[index])
        return Layer(
            device=device,
            attention=self.attention(index, device),
            ffn_norm_D=vector_of(self.entry(index, "ffn_norm.weight"), device),
            ffn=FeedForward(
                layer=index,
                num_neurons=self.model.shape.num_neurons,
                gate=Gate(
                    activation=self.model.activation, threshold=self.model.threshold_L[index]
                ),
                blocks=self.blocks(index),
                predictor=self.predictor(index, device) if self.mode == "predicted" else None,
                mode=self.mode,
                observers=self.observers,
                traffic=self.traffic,
            ),
        )

    def entry(self, index: int, name: str) -> TensorEntry:
        return self.model.tensors[f"blk.{index}.{name}"]

    def attention(self, index: int, device: torch.device) -> Attention:
        shape = self.model.shape
        size = (self.context_length, shape.num_kv_heads, shape.head_width)
        dtype = {"f32": torch.float32, "f16": torch.float16}[kv_kind(self.model)]
        return Attention(
            norm_D=vector_of(self.entry(index, "attn_norm.weight"), device),
            query=matrix_of(self.entry(index, "attn_q.weight"), device),
            key=matrix_of(self.entry(index, "attn_k.weight"), device),
            value=matrix_of(self.entry(index, "attn_v.weight"), device),
            output=matrix_of(self.entry(index, "attn_output.weight"), device),
            cache=LayerCache(
                torch.zeros(size, dtype=dtype, device=device),
                torch.zeros(size, dtype=dtype, device=device),
            ),
            head_width=shape.head_width,
        )

    def predictor(self, index: int, device: torch.device) -> Predictor:
        info = self.model.predictor
        assert info is not None

        def bias(name: str) -> Tensor | None:
            entry = self.model.tensors.get(f"blk.{index}.{name}")
            return None if entry is None else vector_of(entry, device)

        return Predictor(
            kind=info.kind,
            down=matrix_of(self.entry(index, "ffn_pred_down.weight"), device),
            up=matrix_of(self.entry(index, "ffn_pred_up.weight"), device),
            down_bias_R=bias("ffn_pred_down.bias"),
            up_bias_F=bias("ffn_pred_up.bias"),
            threshold=info.threshold_L[index],
        )

    def blocks(self, index: int) -> tuple[NeuronBlock, ...]:
        """The hot neurons with matrices of their own, the cold ones as rows of the file's."""
        entries = (
            self.entry(index, "ffn_gate.weight"),
            self.entry(index, "ffn_up.weight"),
            self.down(index),
        )
        num_neurons, cpu = self.model.shape.num_neurons, torch.device("cpu")
        if self.placement.hot is None:
            return (_block(entries, self.placement.gpu, np.arange(num_neurons), "all"),)
        hot = self.placement.hot[index].astype(np.int64)
        cold = np.setdiff1d(np.arange(num_neurons), hot)
        blocks = []
        if len(hot):
            blocks.append(_block(entries, self.placement.gpu, hot, "own"))
        if len(cold):
            blocks.append(_block(entries, cpu, cold, "shared" if len(hot) else "all"))
        return tuple(blocks)

    def down(self, index: int) -> TensorEntry:
        """The neuron-major down projection; that of a stock file is transposed here."""
        if self.model.layout == "sparse":
            return self.entry(index, "ffn_down_t.weight")
        stock = self.entry(index, "ffn_down.weight")
        entry, error = transpose(stock, transposed_kind(self.model))
        if error > 0:
            self.notice(
                f"layer {index}: down projection transposed from {stock.kind} to {entry.kind},"
                f" relative error {error:.1e}"
            )
        return entry


def _block(
    entries: tuple[TensorEntry, TensorEntry, TensorEntry],
    device: torch.device,
    ids: np.ndarray,
    rows: str,
) -> NeuronBlock:
    """`rows`: "own" copies these neurons' rows, "shared" points at them, "all" takes all rows."""
    gate, up, down = (matrix_of(e, device, ids if rows == "own" else None) for e in entries)
    id_N = torch.from_numpy(ids).to(device)
    return NeuronBlock(
        gate=gate,
        up=up,
        down=down,
        id_N=id_N,
        row_N=id_N if rows == "shared" else None,
        is_whole=rows == "all",
    )


def transpose(entry: TensorEntry, kind: str) -> tuple[TensorEntry, float]:
    """A [D, F] matrix as [F, D] of a float type, and its relative error |new - old| / |old|."""
    old = torch.from_numpy(np.array(dequantize(entry.read(), type_of(entry.kind))))
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[kind]
    new = old.T.to(dtype).contiguous()
    error = ((new.T.float() - old).norm() / old.norm().clamp(min=1e-30)).item()
    data = (new.view(torch.uint8) if kind == "bf16" else new).numpy()
    return TensorEntry(shape=tuple(new.shape), kind=kind, read_rows=lambda a, b: data[a:b]), error
