"""The loaded parts of a model that a forward pass needs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from hotsplit.model.draft_block import EMBEDDED
from hotsplit.model.spec import LayerSpec, ModelSpec
from hotsplit.runtime.cache.kv_cache import KVCache
from hotsplit.runtime.cache.state_slots import LayerState, StateSlots
from hotsplit.runtime.ops.attention.block import Attention
from hotsplit.runtime.ops.loaded_op import LoadedOp, RecurrentOp, StatefulOp
from hotsplit.runtime.ops.neurons.feed_forward import FeedForward, SharedNeurons
from hotsplit.runtime.ops.norm import Norm
from hotsplit.runtime.ops.route import Router
from hotsplit.runtime.weights.drive import Drive
from hotsplit.runtime.weights.matrix import Linear, Matrix


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer."""

    spec: LayerSpec  # without a predictor that is not run
    device: torch.device  # of attention's matrices, norms, predictor, and cache unless offloaded
    norms: dict[str, Norm]  # those of the spec, by name
    attending: Attention | None  # in a layer that attends
    ffn: FeedForward
    router: Router | None = None  # with one, the layer has experts
    shared: SharedNeurons | None = None
    # Those of the spec's operations, by kind.
    own: Mapping[str, LoadedOp] = field(default_factory=dict)

    @property
    def attention(self) -> Attention:
        """The attention of a layer that has it."""
        assert self.attending is not None, self.spec.mixers
        return self.attending

    @property
    def recurrent(self) -> RecurrentOp | None:
        return next((each for each in self.own.values() if isinstance(each, RecurrentOp)), None)


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Everything a forward pass needs."""

    spec: ModelSpec  # without predictors that are not run
    embedding: Matrix
    positions: Matrix | None  # learned positions, on the CPU; None if positions are rotary
    layers: tuple[Layer, ...]
    output_norm: Norm | None
    head: Linear
    head_device: torch.device
    # Operations before the layers, and those after them, on the CPU, by kind.
    first: Mapping[str, LoadedOp] = field(default_factory=dict)
    last: Mapping[str, LoadedOp] = field(default_factory=dict)
    states: StateSlots | None = None  # of the layers with a recurrent state, if there are any
    drive: Drive | None = None  # that steps read experts from
    draft: "Weights | None" = None  # of the draft block, a model of one layer

    @property
    def outer(self) -> Mapping[str, LoadedOp]:
        """Operations outside the layers, by kind."""
        return {**self.first, **self.last}

    @property
    def shows_hidden(self) -> bool:
        """True if a draft block reads the last layer's output: the model's, or the block itself."""
        return self.draft is not None or self.spec.embedded == EMBEDDED

    @cached_property
    def layer_states(self) -> tuple[LayerState, ...]:
        """The states of the operations that have one."""
        each = (op for ops in (self.first, *(x.own for x in self.layers)) for op in ops.values())
        return tuple(op.state for op in each if isinstance(op, StatefulOp))

    @cached_property
    def cache(self) -> KVCache:
        """The cache of the layers that store keys and values."""
        found = (self.layers[index].attention for index in self.spec.storing)
        beside = () if self.draft is None else self.draft.cache.layers
        return KVCache(layers=tuple(attention.cache for attention in found), beside=beside)
