"""A pass of a prompt on GPUs, layer by layer in torch, from token ids to logits: the one caller of the torch
forms of operations. What layers have on the CPU beside a GPU is native: attention and delta nets
(host_mixers), neurons and experts (ops.neurons).

Letters: T tokens, R rows with logits, D model width, V vocabulary."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial, reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from hotsplit.model.position_wise import TOKEN
from hotsplit.model.spec import LayerSpec, Neurons
from hotsplit.runtime.cache.state_slots import StateRun
from hotsplit.runtime.model.layers import Layer, Weights
from hotsplit.runtime.ops.attention.rotary import PassPlaces
from hotsplit.runtime.ops.embed import embed
from hotsplit.runtime.ops.head import logits
from hotsplit.runtime.ops.neurons.mixture import run_mixture
from hotsplit.runtime.ops.norm import HiddenState, Normed
from hotsplit.runtime.ops.observers import Observers
from hotsplit.runtime.ops.position_wise import run_in_turn
from hotsplit.runtime.ops.sums import summed
from hotsplit.runtime.step.batch import Row, slots_of
from hotsplit.runtime.step.captured_passes import CapturedPasses
from hotsplit.runtime.step.host_mixers import HostMixers, host_ways
from hotsplit.runtime.step.program import LayerPlace, Op, ffn_in, layer_ops, name_of
from hotsplit.runtime.step.value_order import last_reads
from hotsplit.runtime.weights import gpu_products
from hotsplit.runtime.weights.gpu_products import Factor


@dataclass(frozen=True, kw_only=True)
class GpuPass:
    weights: Weights
    observers: Observers
    captured: CapturedPasses | None = None

    @cached_property
    def host(self) -> HostMixers | None:
        """Attention and delta nets on the CPU, if any."""
        ways = host_ways(self.weights)
        return HostMixers.of(self.weights, ways) if ways else None

    def logits(self, rows: Sequence[Row]) -> Tensor:
        """Logits f32 [R, V], on the CPU, of consecutive rows of one sequence that have them; appends keys
        and values to the cache, which must have room."""
        ids_T = torch.tensor([row.token for row in rows])
        wanted_T = torch.tensor([row.has_logits for row in rows])
        hidden_TD = self.forward(ids_T, rows[0].position, rows[0].sequence, slots_of(rows))
        weights = self.weights
        if not wanted_T.any():
            return torch.empty(0, weights.spec.vocab_size)
        wanted_RD = hidden_TD[wanted_T.to(hidden_TD.device)]
        return logits(wanted_RD, weights.output_norm, weights.head, self.observers, weights.spec)

    def forward(
        self, ids_T: Tensor, start: int, sequence: int = 0, slots: StateRun | None = None
    ) -> Tensor:
        """Hidden states [T, D] before the head, for tokens of a sequence at positions from `start`.
        `slots`: of recurrent states, if the model has any."""
        weights = self.weights
        x: Tensor | HiddenState = embed(
            weights.embedding, weights.positions, ids_T, start, scale=weights.embedding_scale
        )
        self.observers.show("embedding", None, as_tensor(x))
        if self.captured is not None and not self.observers.active:
            run = partial(self._run_layers, sequence=sequence, start=start, slots=slots)
            replayed_TD = self.captured.run(as_tensor(x), sequence, start, run)
            if replayed_TD is not None:
                return replayed_TD.to(weights.head_device)
        beside: dict[str, Tensor] = {}
        if weights.first:
            beside = run_in_turn(weights.first, {weights.spec.embedded: as_tensor(x), TOKEN: ids_T})
        handed = [beside.pop("x", x)]
        del x  # else it would be kept until the last layer
        places = PassPlaces(start, len(ids_T))
        x_TD = self._run_layers(
            handed.pop(), places, sequence=sequence, start=start, slots=slots, beside=beside
        )
        return x_TD.to(weights.head_device)

    def _run_layers(
        self,
        x: Tensor | HiddenState,
        places: PassPlaces,
        *,
        sequence: int,
        start: int,
        slots: StateRun | None,
        beside: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """The hidden state [T, D] after all layers. `beside`: values that layers read, of operations before
        them."""
        before: Tensor | Factor | None = None
        for index, layer in enumerate(self.weights.layers):
            predict = layer.spec.predict
            before = before if predict and predict.input_layer_offset else None
            mix = self._mixing(index, sequence=sequence, start=start, places=places, slots=slots)
            x, before = run_layer(
                index,
                layer,
                x,
                mix=mix,
                predictor_input=before,
                beside=beside or {},
                observers=self.observers,
            )
        return joined(self.weights, as_tensor(x))

    def _mixing(
        self, index: int, *, sequence: int, start: int, places: PassPlaces, slots: StateRun | None
    ) -> "Mix":
        """Attention or the delta net of a layer; what of it is on the CPU is the host's."""
        layer, on_host = self.weights.layers[index], None
        if self.host is not None and index in self.host.calls:
            on_host = partial(self.host.run, index, sequence=sequence, start=start)
            if self.host.calls[index].is_whole:
                is_seen = bool(self.observers.active)
                return lambda x, on_heads: on_host(
                    as_tensor(x), slots=slots, on_heads=on_heads if is_seen else None
                )
        if layer.delta is None:
            return partial(
                layer.attention.forward, sequence=sequence, places=places, attend=on_host
            )
        assert slots is not None
        return partial(layer.delta.forward, slots=slots)


# Attention or a delta net as a function of its input and of the receiver of its heads.
Mix = Callable[[Tensor | Factor, Callable[[Tensor], None]], Tensor]


def joined(weights: Weights, x: Tensor) -> Tensor:
    """The hidden state [T, D] from what the last layer has written."""
    return run_in_turn(weights.last, {"x": x})[weights.spec.joined] if weights.last else x


@cache
def plain_ops(index: int, spec: LayerSpec) -> tuple[tuple[Op, ...], list[tuple[str, ...]]]:
    """(operations of a layer, for each the values that no later one reads). All neurons are one
    operation, which adds the bias of the down projection."""
    blocks = tuple(
        replace(block, biases=block.biases - {"ffn_down"}) if isinstance(block, Neurons) else block
        for block in spec.blocks
    )
    ops = tuple(layer_ops(index, LayerSpec(blocks=blocks), LayerPlace()))
    return ops, last_reads(ops, kept=("x", ffn_in(index)))


def run_layer(
    index: int,
    layer: Layer,
    x: Tensor | HiddenState,
    *,
    mix: Mix,
    predictor_input: Tensor | Factor | None,
    beside: Mapping[str, Tensor],
    observers: Observers,
) -> tuple[Tensor | HiddenState, Tensor | Factor]:
    """Runs one layer; returns the hidden state after it and the input of its feed-forward block, both
    [T, D]. `mix`: its attention or delta net; `predictor_input`: the previous layer's feed-forward input, if
    the layer's predictor reads that; `beside`: values of operations before the layers. All blocks of neurons
    are one: see FeedForward.

    On a GPU, unless observers see the values, sums and norms are left to the products that read
    them: see HiddenState and Normed."""
    ops, unread = plain_ops(index, layer.spec)
    is_lazy = gpu_products.is_gpu(layer.device) and not observers.active
    moved = _moved(x, layer.device, is_lazy)
    values: dict[str, Any] = {**beside, "x": _state(moved) if is_lazy else moved}
    if predictor_input is not None:
        values[ffn_in(index - 1)] = _moved(predictor_input, layer.device, is_lazy)
    del x, moved, predictor_input

    def run(op: Op, read: list[Any]) -> Any:
        if op.kind in ("norm", "add", "route", "shared"):
            return _run_simple(op, layer, read, is_lazy, observers)
        read = [x.values() if isinstance(x, HiddenState) else x for x in read]
        if layer.router is not None and op.kind == "neurons":
            read[0] = as_tensor(read[0])
        if op.kind in ("attention", "delta"):
            observers.show("attn_norm", index, read[0])
            out_TD = mix(read[0], partial(observers.show, "attn_heads", index))
            observers.show("attn_out", index, out_TD)
            return out_TD
        if op.kind == "predict" or layer.spec.predict is None:  # once, before any scores
            observers.show("ffn_norm", index, values[ffn_in(index)])
        if op.kind == "predict":
            return layer.ffn.named(read[0], observers=observers)
        run_neurons = layer.ffn.forward if layer.router is None else partial(run_mixture, layer.ffn)
        out_TD = run_neurons(*read, observers=observers)
        observers.show("ffn_out", index, out_TD)
        return out_TD

    for op, last in zip(ops, unread, strict=True):
        read = [values[name] for name in map(name_of, op.reads) if name in values]
        for name in last:
            values.pop(name, None)
        written = list(map(name_of, op.writes))
        if op.kind in layer.own:
            read = [x.values() if isinstance(x, HiddenState) else x for x in read]
            values |= zip(written, layer.own[op.kind].forward(*read), strict=True)
            continue
        values[written[0]] = run(op, read)
    observers.show("layer_out", index, values["x"])
    return values["x"], values[ffn_in(index)]


def _run_simple(op: Op, layer: Layer, read: list[Any], is_lazy: bool, observers: Observers) -> Any:
    """A norm, a sum, a router, or the neurons that all tokens share."""
    if op.kind == "norm":
        norm = layer.norms[op.part]
        return Normed(norm, _state(read[0])) if is_lazy else norm.apply(read[0])
    if op.kind == "route":
        assert layer.router is not None
        return layer.router.forward(as_tensor(read[0]))
    if op.kind == "shared":
        assert layer.shared is not None
        return layer.shared.forward(as_tensor(read[0]), observers)
    first = _state(read[0]) if is_lazy else read[0]
    others = reduce(add, map(as_tensor, read[1:]))
    total = summed(op.factors, first, others, as_tensor)
    return _state(total) if is_lazy else total


def _moved(
    x: Tensor | HiddenState | Factor, device: torch.device, is_lazy: bool
) -> Tensor | HiddenState | Factor:
    """A value on a layer's device: a tensor, unless it is there and `is_lazy`."""
    return x if is_lazy and gpu_products.is_on(x, device) else as_tensor(x).to(device)


def as_tensor(x: Tensor | HiddenState | Factor) -> Tensor:
    return x if isinstance(x, Tensor) else x.values()


def _state(x: Tensor | HiddenState | Factor) -> HiddenState:
    return x if isinstance(x, HiddenState) else HiddenState(as_tensor(x))
