"""Loads a model file and a plan into layers on their devices.

Weights on the CPU are copied into memory arranged for decoding (`runtime.weights.resident`), or
stay in the mapped file; those on a GPU go straight from the mapped file into the GPU's slab
(`runtime.weights.upload`). A plan without an available GPU runs with both roles on the CPU: the hot
block still has its own matrices."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from gguf.quants import dequantize
from torch import Tensor

from sparkinfer.budget import kv_kind, transposed_kind
from sparkinfer.cache_types import CacheTypes
from sparkinfer.gguf_file import TensorEntry, type_of
from sparkinfer.limits import LayerLimits
from sparkinfer.model_file import ModelFile
from sparkinfer.runtime.cache.block_table import BlockTable
from sparkinfer.runtime.cache.kv_cache import KVCache, LayerCache
from sparkinfer.runtime.device import huge_pages
from sparkinfer.runtime.model.attention import Attention, Norm, Rotary
from sparkinfer.runtime.model.feed_forward import (
    FeedForward,
    Gate,
    Mode,
    NeuronBlock,
    Predictor,
    Traffic,
)
from sparkinfer.runtime.model.observers import Observers
from sparkinfer.runtime.weights.matrix import Linear, Matrix, matrix_of, vector_of
from sparkinfer.runtime.weights.resident import Residence
from sparkinfer.runtime.weights.slot_rows import apart, joined, rows_of_slots
from sparkinfer.runtime.weights.upload import Uploader
from sparkinfer.split_file import Split

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer. `ffn_norm` is None if attention and feed-forward share their input."""

    device: torch.device  # of attention, norms, predictor and cache
    attn_norm: Norm
    attn_norm_2: Norm | None  # attention's own, if it does not share that input
    attention: Attention
    ffn_norm: Norm | None
    ffn: FeedForward
    is_post_norm: bool

    def with_threshold(self, threshold: float) -> "Layer":
        """The layer with another activation threshold."""
        gate = replace(self.ffn.gate, threshold=threshold)
        return replace(self, ffn=replace(self.ffn, gate=gate))


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Everything a forward pass needs."""

    embedding: Matrix
    positions: Matrix | None  # learned ones, on the CPU; otherwise `rotary` has the layers' devices
    layers: tuple[Layer, ...]
    output_norm: Norm | None
    head: Linear
    head_device: torch.device
    rotary: dict[torch.device, Rotary]

    @property
    def cache(self) -> KVCache:
        caches = tuple(layer.attention.cache for layer in self.layers)
        return KVCache(table=caches[0].table, layers=caches)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The device of each part. `hot` is None if no layer is divided.

    A layer's parts on GPUs are all on its home GPU; the last home is the head's."""

    homes: tuple[torch.device, ...]  # one per layer, and the head's; the CPU if there is no GPU
    dense_on_gpu: tuple[bool, ...]
    head_on_gpu: bool
    hot: tuple[np.ndarray, ...] | None
    numbers: tuple[int, ...]  # of the homes, as indices of the plan's GPUs

    @classmethod
    def of_split(cls, split: Split, gpus: tuple[torch.device, ...]) -> "Placement":
        home = split.home or (0,) * (len(split.hot) + 1)
        return cls(
            homes=tuple(gpus[index] for index in home),
            dense_on_gpu=split.dense_on_gpu,
            head_on_gpu=split.head_on_gpu,
            hot=split.hot,
            numbers=tuple(home),
        )

    @classmethod
    def on_one_device(cls, num_layers: int, device: torch.device) -> "Placement":
        homes = (device,) * (num_layers + 1)
        return cls(
            homes=homes,
            dense_on_gpu=(True,) * num_layers,
            head_on_gpu=True,
            hot=None,
            numbers=(0,) * len(homes),
        )

    @classmethod
    def without_neurons(cls, num_layers: int, device: torch.device) -> "Placement":
        """Everything but the feed-forward neurons on the device."""
        none = np.zeros(0, np.int32)
        return replace(cls.on_one_device(num_layers, device), hot=(none,) * num_layers)

    def dense_device(self, layer: int) -> torch.device:
        return self.homes[layer] if self.dense_on_gpu[layer] else torch.device("cpu")

    def gpu(self, number: int) -> torch.device:
        """The device of the plan's GPU with this index."""
        return self.homes[self.numbers.index(number)]

    @property
    def head_device(self) -> torch.device:
        return self.homes[-1] if self.head_on_gpu else torch.device("cpu")


def load_weights(
    model: ModelFile,
    placement: Placement,
    mode: Mode,
    context_length: int,
    observers: Observers,
    traffic: Traffic,
    notice: Callable[[str], None],
    residence: Residence | None,
    uploaders: Mapping[torch.device, Uploader] | None = None,
    num_sequences: int = 1,
    cache_types: CacheTypes | None = None,
    resident_LN: Sequence[np.ndarray] | None = None,
    are_slots_joined: bool = True,
) -> Weights:
    """Loads all weights. `notice` gets messages for the user, e.g. the error of a transposed down
    projection. Without a `residence`, weights on the CPU stay in the mapped file. If a device
    has an uploader, its weights go into the uploader's memory. `cache_types` of None are the
    model's own. `resident_LN`: the neurons in the slots of a neuron cache; none for a layer without
    slots. `are_slots_joined`: on the CPU, in one block with all neurons."""
    builder = Builder(
        model, placement, mode, context_length, observers, traffic, notice, residence,
        uploaders or {}, num_sequences, cache_types, resident_LN,
        are_slots_joined,
    )  # fmt: skip
    head_device = placement.head_device
    embedding_device = head_device if model.is_tied else torch.device("cpu")
    # A step reads one row of an embedding that is not also the head: it stays on the CPU.
    entry = model.tensors["token_embd.weight"]
    embedding = (
        builder.matrix(entry, embedding_device, "head")
        if model.is_tied
        else matrix_of(entry, embedding_device)
    )
    positions = model.tensors.get("position_embd.weight")
    layers = tuple(builder.layer(index) for index in range(model.shape.num_layers))
    builder.tell_transposed()
    head = (
        embedding
        if model.is_tied
        else builder.matrix(model.tensors["output.weight"], head_device, "head")
    )
    return Weights(
        embedding=embedding,
        positions=matrix_of(positions, torch.device("cpu")) if positions else None,
        layers=layers,
        output_norm=builder.norm("output_norm", head_device, "head"),
        head=Linear(weight=head),
        head_device=head_device,
        rotary={device: builder.rotary(device) for device in {layer.device for layer in layers}}
        if model.graph.rotary
        else {},
    )


def load_predictors(model: ModelFile, device: torch.device) -> tuple[Predictor, ...]:
    """The predictors of all layers, without a running model."""
    placement = Placement.on_one_device(model.shape.num_layers, device)
    builder = Builder(model, placement, "predicted", 1, Observers(), Traffic(), lambda line: None)
    return tuple(builder.predictor(index, device) for index in range(model.shape.num_layers))


@dataclass(frozen=True)
class Builder:
    """Reads the parts of a model by their names in the file."""

    model: ModelFile
    placement: Placement
    mode: Mode
    context_length: int
    observers: Observers
    traffic: Traffic
    notice: Callable[[str], None]
    residence: Residence | None = None
    uploaders: Mapping[torch.device, Uploader] = field(default_factory=dict)
    num_sequences: int = 1
    cache_types: CacheTypes | None = None
    resident_LN: Sequence[np.ndarray] | None = None
    are_slots_joined: bool = True
    # Layers whose down projection was repacked: old type, new type, relative error.
    transposed: dict[int, tuple[str, str, float]] = field(default_factory=dict)

    @cached_property
    def table(self) -> BlockTable:
        """The block table of the layers' caches."""
        return BlockTable(self.num_sequences, self.context_length)

    def matrix(self, entry: TensorEntry, device: torch.device, item: str = "attention") -> Matrix:
        """A matrix of the file; its bytes in a slab are counted under `item`."""
        if device in self.uploaders:
            return self.uploaders[device].matrix(entry, item)
        if self.residence is None or device.type != "cpu":
            return matrix_of(entry, device)
        return self.residence.matrix(entry)

    def layer(self, index: int) -> Layer:
        device = self.placement.dense_device(index)
        attn_norm = self.norm(f"blk.{index}.attn_norm", device)
        assert attn_norm is not None
        layer = Layer(
            device=device,
            attn_norm=attn_norm,
            attn_norm_2=self.norm(f"blk.{index}.attn_norm_2", device),
            attention=self.attention(index, device),
            ffn_norm=self.norm(f"blk.{index}.ffn_norm", device),
            is_post_norm=self.model.shape.is_post_norm,
            ffn=FeedForward(
                layer=index,
                num_neurons=self.model.shape.num_neurons,
                gate=self.gate(index),
                blocks=self.blocks(index),
                down_bias_D=self.vector(f"blk.{index}.ffn_down.bias", device),
                predictor=self.predictor(index, device) if self.mode == "predicted" else None,
                mode=self.mode,
                observers=self.observers,
                traffic=self.traffic,
            ),
        )
        return limited(layer, self.model.limits.layers[index])

    def gate(self, index: int) -> Gate:
        return Gate(activation=self.model.activation, threshold=self.model.threshold_L[index])

    def entry(self, index: int, name: str) -> TensorEntry:
        return self.model.tensors[f"blk.{index}.{name}"]

    def vector(self, name: str, device: torch.device, item: str = "attention") -> Tensor | None:
        entry = self.model.tensors.get(name)
        if entry is None:
            return None
        if device in self.uploaders:
            return self.uploaders[device].vector(vector_of(entry, CPU), item)
        return vector_of(entry, device)

    def norm(self, name: str, device: torch.device, item: str = "attention") -> Norm | None:
        weight_D = self.vector(f"{name}.weight", device, item)
        if weight_D is None:
            return None
        bias_D = self.vector(f"{name}.bias", device, item)
        return Norm(weight_D=weight_D, bias_D=bias_D, epsilon=self.model.shape.norm_epsilon)

    def linear(
        self, index: int, name: str, device: torch.device, item: str = "attention"
    ) -> Linear:
        return Linear(
            weight=self.matrix(self.stored(index, name), device, item),
            bias_N=self.vector(f"blk.{index}.{name}.bias", device, item),
            is_transposed=self.model.is_transposed(index, name),
        )

    def stored(self, index: int, name: str) -> TensorEntry:
        """The entry of a matrix, which may be stored transposed."""
        suffix = "_t" if self.model.is_transposed(index, name) else ""
        return self.entry(index, f"{name}{suffix}.weight")

    def rotary(self, device: torch.device) -> Rotary:
        is_adjacent = self.model.graph.rotary == "adjacent"
        entry = self.model.tensors.get("rope_freqs.weight")
        factors = None if entry is None else vector_of(entry, device)
        return Rotary.of(self.model.shape, is_adjacent, factors, device)

    def attention(self, index: int, device: torch.device) -> Attention:
        shape = self.model.shape
        return Attention(
            inputs=self.attention_inputs(index, device),
            output=self.linear(index, "attn_output", device),
            query_norm=self.norm(f"blk.{index}.attn_q_norm", device),
            key_norm=self.norm(f"blk.{index}.attn_k_norm", device),
            cache=LayerCache.of(
                self.table,
                shape.num_kv_heads,
                shape.head_width,
                self.cache_types or CacheTypes.of(kv_kind(self.model.row_major)),
                lambda size, dtype: self.cache(size, dtype, device),
            ),
            num_heads=shape.num_heads,
            on_bytes=self.count_attention,
            on_heads=lambda heads_TH: self.observers.show("attn_heads", index, heads_TH),
        )

    def count_attention(self, num_bytes: int) -> None:
        self.traffic.attention += num_bytes

    def attention_inputs(self, index: int, device: torch.device) -> tuple[Linear, ...]:
        """Query, key and value; joined into one matrix if they are transposed and copied anyway."""
        is_fused = self.model.graph.has_fused_qkv
        names = ("attn_qkv",) if is_fused else ("attn_q", "attn_k", "attn_v")
        entries = [self.stored(index, name) for name in names]
        is_transposed = self.model.is_transposed(index, names[0])
        can_join = is_transposed and len({entry.kind for entry in entries}) == 1
        if is_fused or not can_join or self.residence is None or device != CPU:
            return tuple(self.linear(index, name, device) for name in names)
        biases = [self.vector(f"blk.{index}.{name}.bias", device) for name in names]
        has_bias = biases[0] is not None
        joined = Linear(
            weight=self.residence.joined(entries),
            bias_N=torch.cat([bias for bias in biases if bias is not None]) if has_bias else None,
            is_transposed=True,
        )
        return (joined,)

    def cache(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        if device in self.uploaders:
            return self.uploaders[device].zeros(shape, dtype, "kv_cache")
        if device == CPU:
            return huge_pages.zeros(shape, dtype)
        return torch.zeros(shape, dtype=dtype, device=device)

    def predictor(self, index: int, device: torch.device) -> Predictor:
        info = self.model.predictor
        assert info is not None
        return Predictor(
            kind=info.kind,
            down=self.linear(index, "ffn_pred_down", device, "predictor")
            if info.rank_L[index]
            else None,
            up=self.linear(index, "ffn_pred_up", device, "predictor"),
            threshold=info.threshold_L[index],
            gate=self.gate(index),
        )

    def blocks(self, index: int) -> tuple[NeuronBlock, ...]:
        """The hot and the cold neurons, or all in one block. Each block has matrices of its own,
        except that without a residence, cold neurons are rows of the file's."""
        num_neurons = self.model.shape.num_neurons
        down, gpu = self.down(index), self.placement.homes[index]
        if self.resident_LN is not None and self.are_slots_joined:
            return (self.joined_block(index, down, self.resident_LN[index]),)
        if self.placement.hot is None:
            return (self.block(index, down, gpu, np.arange(num_neurons), "all"),)
        hot = self.placement.hot[index].astype(np.int64)
        cold = np.setdiff1d(np.arange(num_neurons), hot)
        if self.resident_LN is not None and len(self.resident_LN[index]):
            block = self.block(index, down, gpu, hot, "own")
            return apart(block, self.block(index, down, CPU, cold, "shared"), cold)
        blocks = []
        if len(hot):
            blocks.append(self.block(index, down, gpu, hot, "own"))
        if len(cold):
            shared = "shared" if self.residence is None else "own"
            blocks.append(self.block(index, down, CPU, cold, shared if len(hot) else "all"))
        return tuple(blocks)

    def joined_block(self, index: int, down: TensorEntry, hot: np.ndarray) -> NeuronBlock:
        """All neurons of a layer, with slots before them for the neurons of `hot`, if any."""
        num_neurons = self.model.shape.num_neurons
        if not len(hot):
            return self.block(index, down, CPU, np.arange(num_neurons), "all")
        rows = rows_of_slots(hot, num_neurons)
        return joined(self.block(index, down, CPU, rows, "own"), hot, num_neurons)

    def block(
        self, index: int, down: TensorEntry, device: torch.device, ids: np.ndarray, rows: str
    ) -> NeuronBlock:
        """A block. `rows`: "own" copies the rows of `ids`, "shared" refers to them in the file's
        matrices, "all" takes all."""
        chosen = ids if rows == "own" else None
        has_up = self.model.graph.is_gated
        names = [self.model.gate_name, *(["ffn_up"] if has_up else [])]
        entries = [*(self.stored(index, name) for name in names), down]
        is_transposed = self.model.is_transposed(index, names[0])
        if is_transposed:
            assert rows == "all"
            matrices = self.transposed_matrices(entries, device)
        else:
            matrices = self.neuron_matrices(entries, device, chosen)

        def linear(number: int) -> Linear:
            bias = self.neuron_bias(f"blk.{index}.{names[number]}.bias", device, chosen)
            return Linear(weight=matrices[number], bias_N=bias, is_transposed=is_transposed)

        id_N = self.ids(ids, device, is_all=rows == "all")
        return NeuronBlock(
            gate=linear(0),
            up=linear(1) if has_up else None,
            down=matrices[-1],
            id_N=id_N,
            row_N=id_N if rows == "shared" else None,
            is_whole=rows == "all",
        )

    def neuron_bias(
        self, name: str, device: torch.device, chosen: np.ndarray | None
    ) -> Tensor | None:
        bias = self.vector(name, CPU)
        if bias is None:
            return None
        bias = bias if chosen is None else bias[torch.from_numpy(chosen)]
        if device in self.uploaders:
            return self.uploaders[device].vector(bias, "neurons")
        return self.kept(bias, is_weight=True) if device == CPU else bias.to(device)

    def ids(self, ids: np.ndarray, device: torch.device, *, is_all: bool) -> Tensor:
        """Neuron ids as a block stores them."""
        if device not in self.uploaders:
            id_N = torch.from_numpy(ids)
            return self.kept(id_N, is_weight=False) if device == CPU else id_N.to(device)
        uploader = self.uploaders[device]
        return uploader.range(len(ids)) if is_all else uploader.ids(ids)

    def kept(self, values: Tensor, *, is_weight: bool) -> Tensor:
        """Copies values into the weights' memory on the CPU if GPUs copy from there."""
        if self.residence is None or not self.uploaders:
            return values
        return self.residence.keep(values, is_weight=is_weight)

    def neuron_matrices(
        self, entries: list[TensorEntry], device: torch.device, chosen: np.ndarray | None
    ) -> list[Matrix]:
        """Gate, up (if there is one) and down of some neurons (None: all), interleaved where they
        are read together. Mode "exact" reads every gate but few of the others; mode "dense" reads
        each matrix to its end, except in divided layers, where a streamed piece is one copy."""
        if device in self.uploaders:
            uploader = self.uploaders[device]
            return [uploader.matrix(entry, "neurons", chosen) for entry in entries]
        if self.residence is None or device.type != "cpu":
            return [matrix_of(entry, device, chosen) for entry in entries]
        is_whole = self.placement.hot is None
        apart = {"dense": len(entries) if is_whole else 0, "exact": 1, "predicted": 0}[self.mode]
        found = [self.residence.matrix(entry, chosen) for entry in entries[:apart]]
        return found + (
            self.residence.side_by_side(entries[apart:], chosen) if entries[apart:] else []
        )

    def transposed_matrices(self, entries: list[TensorEntry], device: torch.device) -> list[Matrix]:
        """Gate and up (if there is one) interleaved input by input; and down."""
        if self.residence is None or device.type != "cpu":
            return [matrix_of(entry, device) for entry in entries]
        return [
            *self.residence.side_by_side(entries[:-1], None),
            self.residence.matrix(entries[-1]),
        ]

    def down(self, index: int) -> TensorEntry:
        """The neuron-major down projection; that of a stock file is transposed here."""
        if self.model.layout == "sparse":
            return self.entry(index, "ffn_down_t.weight")
        stock = self.entry(index, "ffn_down.weight")
        entry, error = transpose(stock, transposed_kind(self.model))
        if error > 0:
            self.transposed[index] = (stock.kind, entry.kind, error)
        return entry

    def tell_transposed(self) -> None:
        """One line for all down projections that were transposed and packed again."""
        if self.transposed:
            kinds = {(old, new) for old, new, _ in self.transposed.values()}
            how = ", ".join(f"{old} to {new}" for old, new in sorted(kinds))
            most = max(error for *_, error in self.transposed.values())
            self.notice(
                f"down projections of {len(self.transposed)} layers transposed from {how}, relative"
                f" error up to {most:.1e}; sparkinfer convert {self.model.path} -o model.gguf does so"
                " once and for all"
            )


def limited(layer: Layer, limits: LayerLimits) -> Layer:
    """The layer with these limits instead of its own; in mode "dense" with none."""
    is_dense = layer.ffn.mode == "dense"

    def on_device(limit: np.ndarray | None) -> Tensor | None:
        if limit is None or is_dense:
            return None
        return torch.from_numpy(limit.copy()).to(layer.device)

    gate_F, hidden_F = (
        None if limit is None or is_dense else torch.from_numpy(limit.copy())
        for limit in (limits.gate_F, limits.hidden_F)
    )
    attention = replace(
        layer.attention,
        input_limit_D=on_device(limits.qkv_D),
        output_limit_H=on_device(limits.output_H),
    )
    ffn = replace(
        layer.ffn,
        input_limit_D=on_device(limits.ffn_D),
        blocks=tuple(block.limited(gate_F, hidden_F) for block in layer.ffn.blocks),
    )
    return replace(layer, attention=attention, ffn=ffn)


def transpose(entry: TensorEntry, kind: str) -> tuple[TensorEntry, float]:
    """A [D, F] matrix as [F, D] of a float type, and its relative error |new - old| / |old|."""
    old = torch.from_numpy(np.array(dequantize(entry.read(), type_of(entry.kind))))
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[kind]
    new = old.T.to(dtype).contiguous()
    error = ((new.T.float() - old).norm() / old.norm().clamp(min=1e-30)).item()
    data = (new.view(torch.uint8) if kind == "bf16" else new).numpy()
    return TensorEntry(shape=tuple(new.shape), kind=kind, read_rows=lambda a, b: data[a:b]), error
