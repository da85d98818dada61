"""Loads a model file into layers on the devices of a placement.

A device's store (`runtime.weights.store`) decides where its weights are kept;
`runtime.model.neuron_loader` decides which neurons form a block."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.files.gguf_file import TensorEntry, joined_rows
from hotsplit.model.attention import KEY_NORM, QUERY_NORM
from hotsplit.model.latent import KEY_A_NORM, KEY_B, QUERY_A_NORM, QUERY_B, VALUE_B
from hotsplit.model.modes import Mode, computes_all
from hotsplit.model.operations import Stateful
from hotsplit.model.spec import Attention as AttentionSpec
from hotsplit.model.spec import ModelSpec
from hotsplit.model.spec import Norm as NormSpec
from hotsplit.model.spec import Rotary as RotarySpec
from hotsplit.model.tensors import HEAD_BIAS
from hotsplit.options.cache_types import CacheTypes
from hotsplit.runtime.cache.block_table import BlockTable, block_tables
from hotsplit.runtime.cache.kv_cache import LayerCache
from hotsplit.runtime.cache.state_slots import LayerState, StateSlots
from hotsplit.runtime.kernels.gate import Gate
from hotsplit.runtime.kernels.tiled import TILE_ROWS
from hotsplit.runtime.model.expert_loader import ExpertLoader
from hotsplit.runtime.model.layers import Layer, Weights
from hotsplit.runtime.model.neuron_loader import NeuronLoader
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.ops.attention.block import Attention, LatentMatrices
from hotsplit.runtime.ops.attention.rotary import Rotary
from hotsplit.runtime.ops.loaded_op import load_all
from hotsplit.runtime.ops.neurons.feed_forward import FeedForward
from hotsplit.runtime.ops.norm import Norm
from hotsplit.runtime.ops.predict import Predictor
from hotsplit.runtime.weights.drive import Drive
from hotsplit.runtime.weights.matrix import Linear, Matrix, matrix_of, vector_of
from hotsplit.runtime.weights.resident import Residence
from hotsplit.runtime.weights.store import CPU, Stores
from hotsplit.runtime.weights.upload import Uploader


def load_weights(
    model: ModelFile,
    placement: Placement,
    mode: Mode,
    context_length: int,
    *,
    notice: Callable[[str], None],
    residence: Residence | None = None,
    uploaders: Mapping[torch.device, Uploader] | None = None,
    num_sequences: int = 1,
    cache_types: CacheTypes | None = None,
    resident_LN: Sequence[np.ndarray] | None = None,
    draft_placement: Placement | None = None,
    drive: Drive | None = None,
    num_slots_L: Sequence[int] = (),
) -> Weights:
    """Loads all weights. `notice` gets messages for the user, e.g. the error of a transposed down
    projection. Without a `residence`, weights on the CPU stay in the mapped file. If a device has
    an uploader, its weights go into the uploader's memory. `cache_types`: None for the model's own.
    `resident_LN`: the neurons or experts in the slots of a neuron cache, none in a layer without
    slots. `draft_placement`: of the draft block; None: it is not loaded. `drive`: experts are read
    from there to `num_slots_L` slots of each layer, with a residence."""
    builder = Builder(
        model,
        placement,
        mode,
        context_length,
        stores=Stores.of(residence, uploaders, drive),
        num_sequences=num_sequences,
        cache_types=cache_types,
        resident_LN=resident_LN,
        num_slots_L=num_slots_L,
    )
    weights = replace(builder.weights(), drive=drive)
    if draft_placement is not None:
        weights = replace(weights, draft=builder.draft(weights, draft_placement))
    builder.neurons.report_transposed(notice)
    return weights


def load_predictors(model: ModelFile, device: torch.device) -> tuple[Predictor, ...]:
    """Loads the predictors of all layers without the rest of the model."""
    placement = Placement.on_one_device(model.spec.num_layers, device)
    builder = Builder(model, placement, "predicted", 1)
    return tuple(builder.predictor(index, device) for index in range(model.spec.num_layers))


@dataclass(frozen=True)
class Builder:
    """Reads the parts of a model by their names in the file."""

    model: ModelFile
    placement: Placement
    mode: Mode
    context_length: int
    stores: Stores = Stores()
    num_sequences: int = 1
    cache_types: CacheTypes | None = None
    resident_LN: Sequence[np.ndarray] | None = None
    num_slots_L: Sequence[int] = ()  # of experts that are read from a drive
    zeros: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict)  # shared biases
    own_tables: dict[int | None, BlockTable] | None = None  # those of the model, for a draft block

    @cached_property
    def spec(self) -> ModelSpec:
        """The model's spec, with predictors only if they are run, and with the numbers of its
        sums."""
        spec = self.model.spec.in_mode(self.mode)
        return spec.with_layers(
            [layer.with_numbers(partial(self._number, i)) for i, layer in enumerate(spec.layers)]
        )

    def _number(self, layer: int, name: str) -> float:
        return float(vector_of(self.model.tensors[f"blk.{layer}.{name}"], CPU))

    @cached_property
    def tables(self) -> dict[int | None, BlockTable]:
        """The block tables of the layers' caches, by window."""
        if self.own_tables is not None:
            return self.own_tables
        windows = [attention.window for attention in self.spec.attentions]
        return block_tables(windows, self.num_sequences, self.context_length)

    @cached_property
    def neurons(self) -> NeuronLoader:
        return NeuronLoader(
            model=self.model,
            spec=self.spec,
            placement=self.placement,
            mode=self.mode,
            stores=self.stores,
            resident_LN=None if self.spec.has_experts else self.resident_LN,
        )

    def weights(self) -> Weights:
        """The whole model. An embedding that is not also the head, or that operations on the CPU
        read, stays in the file on the CPU: a token reads only one row of it."""
        model, head_device = self.model, self.placement.head_device
        entry, learned = model.tensors["token_embd.weight"], "position_embd.weight"
        if model.is_tied and (not self.spec.first or head_device == CPU):
            embedding = head = self.matrix(entry, head_device, "head")
            layers = self.layers()
        else:
            embedding, layers = matrix_of(entry, CPU), self.layers()
            head = self.matrix(model.tensors[model.head_name], head_device, "head")
        return Weights(
            spec=self.spec,
            embedding=embedding,
            positions=matrix_of(model.tensors[learned], CPU) if learned in model.tensors else None,
            layers=layers,
            output_norm=self.output_norm(head_device, "head"),
            head=Linear(weight=head, bias_N=self.vector(HEAD_BIAS, head_device, "head")),
            head_device=head_device,
            first=load_all(self, self.spec.first, None, CPU),
            last=load_all(self, self.spec.last, None, CPU),
            states=StateSlots(self.num_sequences) if self.spec.has_states else None,
        )

    def draft(self, weights: Weights, placement: Placement) -> Weights:
        """The draft block, which shares the model's block table and, unless it has its own, or is
        on another device, the embedding and the head."""
        file, head_device = self.model.draft, placement.head_device
        assert file is not None
        own = replace(
            self,
            model=file,
            placement=placement,
            resident_LN=None,
            num_slots_L=(),
            own_tables=self.tables,
        )
        embedding, head = weights.embedding, weights.head
        tensors, is_apart = self.model.tensors, weights.head_device != head_device
        entry, own_head = file.tensors["token_embd.weight"], file.tensors[file.head_name]
        if entry is not tensors["token_embd.weight"] or weights.head_device != CPU:
            embedding = matrix_of(entry, CPU)
        if own_head is not tensors[self.model.head_name] or is_apart:
            head = Linear(weight=own.matrix(own_head, head_device, "head"))
        return Weights(
            spec=own.spec,
            embedding=embedding,
            positions=None,
            layers=own.layers(),
            output_norm=own.output_norm(head_device, "head"),
            head=head,
            head_device=head_device,
            first=load_all(own, own.spec.first, None, CPU),
        )

    def layers(self) -> tuple[Layer, ...]:
        return tuple(self.layer(index) for index in range(self.model.spec.num_layers))

    def matrix(self, entry: TensorEntry, device: torch.device, item: str = "attention") -> Matrix:
        """A matrix of the file; if it is in a slab, its bytes are counted under `item`."""
        return self.stores.on(device).matrix(entry, item)

    def layer(self, index: int) -> Layer:
        device, spec = self.placement.dense_device(index), self.spec.layers[index]
        experts, own = self.expert_loader(index), load_all(self, spec.operations, index, device)
        return Layer(
            spec=spec,
            device=device,
            norms=self.norms(index, device),
            attending=None
            if spec.attention is None
            else self.attention(index, spec.attention, device),
            ffn=FeedForward(
                layer=index,
                num_neurons=self.model.spec.layers[index].neurons.number,
                gate=self.gate(index),
                blocks=experts.experts() or self.neurons.blocks(index),
                down_bias_D=self.vector(f"blk.{index}.ffn_down.bias", device),
                predictor=None if spec.predict is None else self.predictor(index, device),
            ),
            router=experts.router(),
            shared=experts.shared(self.gate(index)),
            own=own,
        )

    def expert_loader(self, index: int) -> ExpertLoader:
        return ExpertLoader(
            model=self.model,
            layer=index,
            placement=self.placement,
            stores=self.stores,
            computes_all=computes_all(self.mode),
            resident_N=None if self.resident_LN is None else self.resident_LN[index],
            num_slots=self.num_slots_L[index] if self.num_slots_L else 0,
        )

    def gate(self, index: int) -> Gate:
        return Gate.of(
            self.model.spec.layers[index].neurons,
            threshold=self.model.threshold_L[index],
            computes_all=self.model.spec.computes_all(index, self.mode),
        )

    def vector(self, name: str, device: torch.device, item: str = "attention") -> Tensor | None:
        return self.own_vector(name, device, item) if name in self.model.tensors else None

    def own_vector(self, name: str, device: torch.device, item: str = "attention") -> Tensor:
        """A vector that the model must have."""
        values = vector_of(self.model.tensors[name], CPU)
        return self.stores.on(device).vector(values, item)

    def norms(self, index: int, device: torch.device) -> dict[str, Norm]:
        """The norms of a layer, by name."""
        return {
            name: self.norm(norm, f"blk.{index}.{name}", device)
            for name, norm in self.spec.layers[index].norms.items()
        }

    def output_norm(self, device: torch.device, item: str = "attention") -> Norm | None:
        """It also scales the logits."""
        if self.spec.output_norm is None:
            return None
        norm = self.norm(self.spec.output_norm, self.spec.output_norm.name, device, item)
        scale = self.spec.logit_scale
        return norm if scale == 1.0 else norm.times(scale)

    def norm(
        self, norm: NormSpec, name: str, device: torch.device, item: str = "attention"
    ) -> Norm:
        if norm.part:
            weight_D = self.own_vector(f"{name}.{norm.part}", device, item)
        else:
            weight_D = torch.ones(norm.size, device=device)
        bias_D = self.vector(f"{name}.bias", device, item) if norm.kind == "layer" else None
        if norm.kind == "layer_without_bias":
            place = norm.size, device
            bias_D = self.zeros.setdefault(place, torch.zeros(norm.size, device=device))
        weight_D = weight_D if norm.factor == 1.0 else weight_D * norm.factor
        return Norm(weight_D=weight_D, bias_D=bias_D, epsilon=norm.epsilon)

    def linear(self, name: str, device: torch.device, item: str = "attention") -> Linear:
        return Linear(
            weight=self.matrix(self.model.tensors[f"{name}.weight"], device, item),
            bias_N=self.vector(f"{name}.bias", device, item),
        )

    @cached_property
    def rotaries(self) -> dict[tuple[RotarySpec, int, torch.device], Rotary]:
        """The rotary embeddings made so far."""
        return {}

    def rotary(self, block: AttentionSpec, device: torch.device) -> Rotary | None:
        """The rotary embedding of a layer, on this device; equal ones are one object."""
        if block.rotary is None:
            return None
        key = block.rotary, block.num_rotated, device
        if key not in self.rotaries:
            factors = None
            if block.rotary.factors is not None:
                factors = vector_of(self.model.tensors[block.rotary.factors], device)
            made = Rotary.of(block.rotary, block.num_rotated, factors, device)
            self.rotaries[key] = replace(made, ahead=int(self.model.graph.is_assistant))
        return self.rotaries[key]

    def state(self, block: Stateful, device: torch.device) -> LayerState:
        """The slots of a layer's states."""
        zeros, keeps_rows = self.stores.on(device).cache, device.type == "cpu"
        return LayerState.of(self.num_sequences, block, zeros, keeps_rows=keeps_rows)

    def attention(self, index: int, block: AttentionSpec, device: torch.device) -> Attention:
        attends_on = self.placement.cache_device(index)
        norms = {
            name: self.norm(block.head_norm, f"blk.{index}.{name}", attends_on)
            for name in block.normed
            if block.head_norm
        }
        return Attention(
            spec=block,
            inputs=self.attention_inputs(index, block, device),
            output=self.linear(f"blk.{index}.attn_output", device),
            query_norm=norms.get(QUERY_NORM),
            key_norm=norms.get(KEY_NORM),
            vectors={
                name: self.own_vector(f"blk.{index}.{vector.name}", attends_on)
                for name, vector in block.vectors.items()
            },
            cache=self.cache(index, block),
            rotary=self.rotary(block, attends_on),
            latent=self.latent(index, block, device),
        )

    def latent(
        self, index: int, block: AttentionSpec, device: torch.device
    ) -> LatentMatrices | None:
        if block.latent is None:
            return None
        own, prefix = block.latent, f"blk.{index}."
        norms = {name: self.norm(norm, prefix + name, device) for name, norm in own.norms().items()}
        has_rank = own.query_rank is not None
        return LatentMatrices(
            query=self.linear(prefix + QUERY_B, device) if has_rank else None,
            key=self.of_heads(prefix + KEY_B, device),
            value=self.of_heads(prefix + VALUE_B, device),
            query_norm=norms.get(QUERY_A_NORM),
            key_norm=norms[KEY_A_NORM],
        )

    def of_heads(self, name: str, device: torch.device) -> Linear:
        """A matrix of each head, [H, N, M], as one with the rows of all heads. Where a tile of the
        CPU's would have rows of two heads, it stays as it is in the file."""
        entry = self.model.tensors[f"{name}.weight"]
        rows, is_whole = joined_rows(entry), entry.shape[1] % TILE_ROWS == 0
        if device.type == "cpu" and not is_whole:
            return Linear(weight=matrix_of(rows, device))
        return Linear(weight=self.matrix(rows, device))

    @cached_property
    def caches(self) -> dict[str, LayerCache]:
        """The caches made so far, by the names of their values."""
        return {}

    def cache(self, index: int, block: AttentionSpec) -> LayerCache:
        """The keys and values of a layer, which others may read."""
        name = block.kept(index).name
        if name not in self.caches:
            types = self.cache_types or CacheTypes.of(self.model.kv_kind)
            zeros = self.stores.on(self.placement.cache_device(index)).cache
            self.caches[name] = LayerCache.of(
                self.tables[block.window],
                block.num_kv_heads,
                block.head_dim,
                types,
                zeros,
                stores_values=block.stores_values,
            )
        return self.caches[name]

    def attention_inputs(
        self, index: int, block: AttentionSpec, device: torch.device
    ) -> tuple[Linear, ...]:
        """The matrices of query, key, value and gate, or the model's fused one; one for all if they
        are of one kind, have biases all or none, and are copied anyway, to a GPU."""
        is_fused, names = block.is_fused, tuple(block.projections)
        entries = [self.model.tensors[f"blk.{index}.{name}.weight"] for name in names]
        store, joined = self.stores.on(device), None
        biases = [self.model.tensors.get(f"blk.{index}.{name}.bias") for name in names]
        is_alike = len({(e.kind, b is None) for e, b in zip(entries, biases, strict=True)}) == 1
        if not is_fused and is_alike:
            joined = store.stacked(entries, "attention")
        if joined is None:
            return tuple(self.linear(f"blk.{index}.{name}", device) for name in names)
        parts = [vector_of(entry, CPU) for entry in biases if entry is not None]
        bias_N = store.vector(torch.cat(parts), "attention") if parts else None
        return (Linear(weight=joined, bias_N=bias_N),)

    def predictor(self, index: int, device: torch.device) -> Predictor:
        info = self.model.predictor
        assert info is not None
        down = None
        if info.rank_L[index]:
            down = self.linear(f"blk.{index}.ffn_pred_down", device, "predictor")
        return Predictor(
            kind=info.kind,
            down=down,
            up=self.linear(f"blk.{index}.ffn_pred_up", device, "predictor"),
            threshold=info.threshold_L[index],
        )
