"""The forward pass, from token ids to logits, and its reference in torch, layer by layer.

Letters: T tokens, R rows with logits, D model width, V vocabulary."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial, reduce
from itertools import chain, groupby
from operator import add
from typing import Any

import torch
from torch import Tensor

from hotsplit.costs.pass_length import SHORT_CHUNK
from hotsplit.model.position_wise import TOKEN
from hotsplit.model.spec import LayerSpec, Neurons
from hotsplit.runtime.cache.state_slots import StateRun
from hotsplit.runtime.device.device_memory import is_out_of_memory, out_of_memory_as_error
from hotsplit.runtime.model.layers import Layer, Weights
from hotsplit.runtime.ops.attention.rotary import Turns
from hotsplit.runtime.ops.embed import embed
from hotsplit.runtime.ops.head import logits
from hotsplit.runtime.ops.neurons.mixture import run_mixture
from hotsplit.runtime.ops.norm import HiddenState, Normed
from hotsplit.runtime.ops.observers import Observers
from hotsplit.runtime.ops.position_wise import run_in_turn
from hotsplit.runtime.ops.sums import summed
from hotsplit.runtime.step.batch import Row, is_decoded, prepared, runs_of, slots_of
from hotsplit.runtime.step.captured_passes import CapturedPasses
from hotsplit.runtime.step.decode_step import DecodeStep
from hotsplit.runtime.step.host_mixers import HostMixers
from hotsplit.runtime.step.hybrid_step import HybridStep
from hotsplit.runtime.step.native_layers import NativeLayers, shows_all
from hotsplit.runtime.step.native_step import NativeStep
from hotsplit.runtime.step.pass_length import PassLength
from hotsplit.runtime.step.program import LayerPlace, Op, ffn_in, layer_ops, name_of
from hotsplit.runtime.step.value_order import last_reads
from hotsplit.runtime.weights import gpu_products
from hotsplit.runtime.weights.gpu_products import Factor


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A model's forward pass: by the decode step where possible, else in torch."""

    weights: Weights
    observers: Observers
    native: DecodeStep | str  # the decode step, or the reason why there is none
    chunk: int = SHORT_CHUNK  # tokens per pass without observers, at most
    length: PassLength = field(default_factory=PassLength)
    captured: CapturedPasses | None = None
    # In torch's passes, attention and delta nets on the host beside a GPU; None: torch does.
    host: HostMixers | None = None

    def step(self, token: int, position: int, sequence: int = 0) -> Tensor:
        """Logits f32 [V] after one token, by the decode step if there is one and no active
        observer, else in torch. The two paths differ in the order of summation."""
        native = None if self.observers.active or self.weights.states else self.native
        if native is not None and not isinstance(native, str):
            self.weights.cache.reserve(sequence, position, position + 1)
            return native.run(token, position, sequence)
        row = Row(token=token, position=position, sequence=sequence, has_logits=True)
        return self.run([row])[0]

    @property
    def vocab_size(self) -> int:
        return self.weights.head.weight.num_rows

    @property
    def _native_rows(self) -> NativeStep | None:
        """The native step, whose rows are bit-identical to single steps; None if it cannot be
        used."""
        native = self.native
        return native if isinstance(native, NativeStep) and not self.observers.active else None

    @property
    def has_hybrid_steps(self) -> bool:
        """True if decode steps are hybrid, and prompts are computed otherwise."""
        return isinstance(self.native, HybridStep) and not self.observers.active

    @property
    def most_tokens(self) -> int:
        """Maximum tokens per pass."""
        if self._native_rows is not None:
            return self._native_rows.max_rows
        chunk = SHORT_CHUNK if self.observers.active else self.chunk
        return min(chunk, self.length.most)

    def run(self, rows: Sequence[Row]) -> Tensor:
        """Logits f32 [R, V] of the rows that have them, on the CPU; appends keys and values to the
        cache.

        Computed rows beyond `most_tokens` are divided among passes."""
        native = self._native_rows
        if native is not None:
            with prepared(self.weights.cache, self.weights.states, rows) as slotted:
                return native.run_rows(slotted)
        if isinstance(self.native, HybridStep) and not self.observers.active:
            return self._run_hybrid(self.native, rows)
        return self._run_in_torch(rows)

    @out_of_memory_as_error()
    @torch.inference_mode()
    def _run_in_torch(self, rows: Sequence[Row]) -> Tensor:
        """`run` by passes, one or more for each run of rows."""
        return self._joined([self._pass(rows, run) for run in runs_of(rows)])

    @out_of_memory_as_error()
    @torch.inference_mode()
    def _run_hybrid(self, hybrid: HybridStep, rows: Sequence[Row]) -> Tensor:
        """`run` with a hybrid step, which computes consecutive runs of decoded rows together; each
        other run is a pass of its own."""
        pieces: list[Tensor] = []
        for is_step, runs in groupby(runs_of(rows), key=is_decoded):
            if is_step:
                pieces.append(hybrid.run_rows(list(chain.from_iterable(runs))))
            else:
                pieces += [self._pass(rows, run) for run in runs]
        return self._joined(pieces)

    def _joined(self, pieces: Sequence[Tensor]) -> Tensor:
        """The logits of all pieces, [R, V]."""
        return pieces[0] if len(pieces) == 1 else torch.cat([self._no_logits(), *pieces])

    def _no_logits(self) -> Tensor:
        return torch.empty(0, self.weights.head.weight.num_rows)

    def _pass(self, rows: Sequence[Row], run: Sequence[Row]) -> Tensor:
        """Computes consecutive rows of one sequence; see `run`."""
        for row in run:
            if row.source is not None:
                self.weights.cache.reserve(row.sequence, row.position, row.position + 1)
                self._copy(rows[row.source], row)
        computed = [row for row in run if row.source is None]
        pieces: list[Tensor] = []
        done = 0
        while done < len(computed):
            piece = computed[done : done + self.most_tokens]
            logits_RV = self._tried(piece)
            if logits_RV is None:
                self.length.shorten(len(piece))
                continue
            pieces.append(logits_RV)
            done += len(piece)
        return self._joined(pieces or [self._no_logits()])

    def _tried(self, rows: Sequence[Row]) -> Tensor | None:
        """Logits of consecutive rows of one sequence, computed in one pass; None if it does not fit
        into a GPU's memory. Then it may be repeated: it rewrites the same positions."""
        try:
            with prepared(self.weights.cache, self.weights.states, rows) as slotted:
                return self._computed(slotted)
        except RuntimeError as error:
            if len(rows) == 1 or not is_out_of_memory(error):
                raise
        for layer in self.weights.layers:
            for stream in (layer.ffn.cold, layer.ffn.cold_experts):
                if stream is not None:
                    stream.abandon()
        return None

    def _computed(self, rows: Sequence[Row]) -> Tensor:
        native = self._native_layers if self._is_seen_natively() else None
        if native is not None:
            return native.logits(rows, self.observers)
        ids_T = torch.tensor([row.token for row in rows])
        hidden_TD = self.forward(ids_T, rows[0].position, rows[0].sequence, slots_of(rows))
        wanted_T = torch.tensor([row.has_logits for row in rows])
        if not wanted_T.any():
            return self._no_logits()
        return self.logits(hidden_TD[wanted_T.to(hidden_TD.device)])

    def _copy(self, source: Row, target: Row) -> None:
        """Copies a row's keys and values to the same position of another sequence."""
        start = source.position
        for layer in self.weights.cache.layers:
            layer.write(target.sequence, start, *layer.read(source.sequence, start, start + 1))

    def forward(
        self, ids_T: Tensor, start: int, sequence: int = 0, slots: StateRun | None = None
    ) -> Tensor:
        """Hidden states [T, D] before the head, for tokens of a sequence at positions from `start`.

        Takes at most `most_tokens` tokens; appends keys and values to the cache. `slots`: of recurrent
        states, if the model has any."""
        assert 1 <= len(ids_T) <= self.most_tokens, len(ids_T)
        weights = self.weights
        x: Tensor | HiddenState = embed(
            weights.embedding, weights.positions, ids_T, start, scale=weights.embedding_scale
        )
        self.observers.show("embedding", None, as_tensor(x))
        if self.captured is not None and not self.observers.active:
            run = partial(self._run_layers, sequence=sequence, start=start, slots=slots)
            found = self.captured.run(as_tensor(x), sequence, start, run)
            if found is not None:
                return found.to(weights.head_device)
        beside: dict[str, Tensor] = {}
        if weights.first:
            beside = run_in_turn(weights.first, {weights.spec.embedded: as_tensor(x), TOKEN: ids_T})
        handed = [beside.pop("x", x)]
        del x  # else it would be kept until the last layer
        turns = Turns(start, len(ids_T))
        found = self._run_layers(
            handed.pop(), turns, sequence=sequence, start=start, slots=slots, beside=beside
        )
        return found.to(weights.head_device)

    def _run_layers(
        self,
        x: Tensor | HiddenState,
        turns: Turns,
        *,
        sequence: int,
        start: int,
        slots: StateRun | None,
        beside: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """The hidden state [T, D] after all layers. `beside`: values that layers read, of operations before
        them."""
        weights, host = self.weights, self.host
        before: Tensor | Factor | None = None
        for index, layer in enumerate(weights.layers):
            predict = layer.spec.predict
            before = before if predict and predict.input_layer_offset else None
            x, before = run_layer(
                index,
                layer,
                x,
                sequence=sequence,
                start=start,
                turns=turns,
                slots=slots,
                predictor_input=before,
                beside=beside or {},
                observers=self.observers,
                on_host=None
                if host is None or index not in host.calls
                else partial(host.run, index, sequence=sequence, start=start),
            )
        return self.joined(as_tensor(x))

    def joined(self, x: Tensor) -> Tensor:
        """The hidden state [T, D] from what the last layer has written."""
        weights = self.weights
        return run_in_turn(weights.last, {"x": x})[weights.spec.joined] if weights.last else x

    def _is_seen_natively(self) -> bool:
        """True if native operations are to show what observers want."""
        is_asked = bool(self.observers.active) and not self.observers.in_torch
        return is_asked and shows_all(self.observers.wanted_in_layers(len(self.weights.layers)))

    @property
    def has_native_layers(self) -> bool:
        """True if passes that observers see can be native."""
        return self._native_layers is not None

    @cached_property
    def _native_layers(self) -> NativeLayers | None:
        """Layers whose tensors observers see; None if the model does not support them."""
        if not isinstance(self.native, NativeStep):
            return None
        return NativeLayers.of(self.weights)

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Logits f32 [T, V] on the CPU."""
        weights = self.weights
        return logits(hidden_TD, weights.output_norm, weights.head, self.observers, weights.spec)


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
    sequence: int = 0,
    start: int,
    turns: Turns,
    slots: StateRun | None = None,
    predictor_input: Tensor | Factor | None,
    beside: Mapping[str, Tensor],
    observers: Observers,
    on_host: Callable[..., Tensor] | None = None,
) -> tuple[Tensor | HiddenState, Tensor | Factor]:
    """Runs one layer in torch; returns the hidden state after it and the input of its feed-forward
    block, both [T, D].

    This is the reference for the operations of a layer; its spec has their order. The layer's cache,
    or its slots, hold the tokens before `start`. `predictor_input`: the previous layer's feed-forward
    input, if the layer's predictor reads that; `beside`: values of operations before the layers. All
    blocks of neurons are one: see FeedForward.

    On a GPU, unless observers see the values, sums and norms are left to the products that read
    them: see HiddenState and Normed."""
    ops, unread = plain_ops(index, layer.spec)
    is_lazy = gpu_products.is_gpu(layer.device) and not observers.active
    moved = _moved(x, layer.device, is_lazy)
    values: dict[str, Any] = {**beside, "x": _state(moved) if is_lazy else moved}
    if predictor_input is not None:
        values[ffn_in(index - 1)] = _moved(predictor_input, layer.device, is_lazy)
    del x, moved, predictor_input
    mix = _mixing(layer, sequence, start, turns, slots, on_host, is_seen=bool(observers.active))

    def run(op: Op, read: list[Any]) -> Any:
        if op.kind in ("norm", "add", "route", "shared"):
            return _run_simple(op, layer, read, is_lazy, observers)
        read = [x.values() if isinstance(x, HiddenState) else x for x in read]
        if layer.router is not None and op.kind == "neurons":
            read[0] = as_tensor(read[0])
        if op.kind in ("attention", "delta"):
            observers.show("attn_norm", index, read[0])
            on_heads = partial(observers.show, "attn_heads", index)
            out_TD = mix(read[0], on_heads)
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


def _mixing(
    layer: Layer,
    sequence: int,
    start: int,
    turns: Turns,
    slots: StateRun | None,
    on_host: Callable[..., Tensor] | None,
    *,
    is_seen: bool,
) -> Callable[[Tensor | Factor, Callable[[Tensor], None]], Tensor]:
    """Attention, or the delta net, as a function of its input and of the receiver of heads. `on_host`: that of
    the CPU, for a layer there as a whole (unless what is within is seen), else without projections."""
    is_whole = layer.device.type == "cpu"
    if on_host is not None and is_whole and not is_seen:
        return lambda x, _: on_host(as_tensor(x), slots=slots)
    attend = None if is_whole else on_host
    if layer.delta is None:
        return partial(
            layer.attention.forward, sequence=sequence, start=start, turns=turns, attend=attend
        )
    assert slots is not None
    return partial(layer.delta.forward, slots=slots)


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
