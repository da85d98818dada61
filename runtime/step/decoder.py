"""The forward pass of rows: by the native step on the CPU, or by its layers if observers see them;
on GPUs by the hybrid step.

Layers that are observed are the native step's operations, with its bits. A call of the C++ library
ends where a value is wanted, or where torch chooses experts.

Letters: T tokens, K experts of a token, R rows with logits, V vocabulary."""

from collections.abc import Mapping, Sequence
from ctypes import Array, addressof, c_int64, pointer
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, groupby

import torch
from torch import Tensor

from hotsplit.errors import HotsplitError
from hotsplit.model.latent_experts import LATENT
from hotsplit.runtime.device.device_memory import out_of_memory_as_error
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.model.layers import Layer, Weights
from hotsplit.runtime.ops.observers import NAMES, Observers
from hotsplit.runtime.step.assistant_step import AssistantStep
from hotsplit.runtime.step.batch import Row, is_decoded, prepared, runs_of
from hotsplit.runtime.step.draft_step import DraftStep
from hotsplit.runtime.step.hybrid_step import HybridStep
from hotsplit.runtime.step.native_parts import PartStruct
from hotsplit.runtime.step.native_step import (
    ALIASES,
    NativeStep,
    RowStruct,
    StepStruct,
    row_struct,
    take_traffic,
)
from hotsplit.runtime.step.program import Op, ffn_in, name_of

# Tensors within operations, with the field of the step that says where they are written.
_WITHIN = {
    "attn_heads": "seen_heads",
    "ffn_predicted": "seen_predicted",
    "ffn_gate": "seen_gate",
    "ffn_hidden": "seen_hidden",
    "ffn_shared_hidden": "seen_shared",
}


@dataclass(frozen=True, kw_only=True)
class SeenLayer:
    """A layer's native operations, `begin` to `end`, and what observers can see of it: of `values`
    the operation before which they are complete, and the buffers that sum to them; of `widths` the
    values of a token. `route`: the operation that chooses experts, and the value that it reads."""

    begin: int
    end: int
    values: Mapping[str, tuple[int, Sequence[str]]]
    widths: Mapping[str, int]
    route: tuple[int, str] | None = None


@dataclass(kw_only=True)
class NativeLayers:
    weights: Weights
    step: StepStruct
    layers: Sequence[SeenLayer]
    values: Mapping[str, Tensor]  # f32 [max_rows, size], by the step program's name
    seen: Mapping[str, Tensor]  # flat: max_rows rows of the widest layer, by observers' name
    native: NativeStep
    rows: Array[RowStruct] = field(default_factory=lambda: (RowStruct * 0)(), repr=False)

    @classmethod
    def of(cls, native: NativeStep, weights: Weights) -> "NativeLayers":
        """The layers of a step, whose workspace they share."""
        spec, step = weights.spec, StepStruct.from_buffer_copy(native.step)
        step.max_rows = min(native.max_rows, step.context_length)
        step.times = None
        sizes = native.values.own | {"x": spec.x_size, "routed": 2 * spec.most_used}
        used = {name_of(v) for op, _ in native.placed for v in (*op.reads, *op.writes)}
        used |= {ALIASES[name] for name in used & ALIASES.keys()} | {ALIASES["head_in"]}
        values = {
            name: torch.zeros(step.max_rows, sizes.get(name, spec.hidden_size))
            for name in native.values.names
            if name in used and name != "named"
        }
        for name, value in values.items():
            step.vector[native.values.number(name)] = value.data_ptr()
        layers = [
            _seen_layer(index, layer, [each for each in native.placed if each[0].layer == index])
            for index, layer in enumerate(weights.layers)
        ]
        most = {name: max(layer.widths.get(name, 0) for layer in layers) for name in _WITHIN}
        return cls(
            weights=weights,
            step=step,
            layers=layers,
            values=values,
            seen={name: torch.empty(step.max_rows * size) for name, size in most.items()},
            native=native,
        )

    def logits(self, rows: Sequence[Row], observers: Observers) -> Tensor:
        """Logits f32 [R, V] of consecutive rows of one sequence that have them; appends to the
        cache, which must have room."""
        self.rows = (RowStruct * len(rows))(*map(row_struct, rows))
        first, last = self.layers[0].begin, self.layers[-1].end
        self._run(0, min(1, first))
        observers.show("embedding", None, self._value(self.weights.spec.embedded))
        self._run(1, first)
        for index in range(len(self.layers)):
            self._layer(index, observers)
        logits_RV = torch.empty(sum(row.has_logits for row in rows), self.weights.spec.vocab_size)
        self._run(last, self.step.num_ops, logits_RV)
        if len(logits_RV):
            observers.show("output_norm", None, self.values["attn_in"][: len(logits_RV)].clone())
            observers.show("logits", None, logits_RV)
        return logits_RV

    def _run(self, begin: int, end: int, logits_RV: Tensor | None = None) -> None:
        if begin >= end:
            return
        count = c_int64(len(self.rows))
        library.run_part(
            PartStruct(
                step=pointer(self.step),
                row=addressof(self.rows),
                num_rows=addressof(count),
                logits=None if logits_RV is None else logits_RV.data_ptr(),
                begin=begin,
                end=end,
            )
        )
        if self.weights.drive is not None:
            self.weights.drive.check()

    def _value(self, name: str) -> Tensor:
        """A copy of a value, [T, size]."""
        return self.values[ALIASES.get(name, name)][: len(self.rows)].clone()

    def _layer(self, index: int, observers: Observers) -> None:
        own, layer, found = self.layers[index], self.weights.layers[index], dict[str, Tensor]()
        wanted = [name for name in NAMES if observers.want(name, index)]
        for name, place in _WITHIN.items():
            is_wanted = name in wanted and name in own.widths
            setattr(self.step, place, self.seen[name].data_ptr() if is_wanted else None)
        stops = {own.values[name][0] for name in wanted if name in own.values} | {own.end}
        route = own.route if any(each.routes_in_torch for each in observers.active) else None
        begin = own.begin
        for stop in sorted(stops if route is None else stops | {route[0]}):
            self._run(begin, stop)
            begin = stop
            for name in wanted:
                if name in own.values and own.values[name][0] == stop:
                    first, *others = map(self._value, own.values[name][1])
                    found[name] = sum(others, first)
            if route is not None and stop == route[0]:
                # Triton, which its module imports, takes a second.
                from hotsplit.runtime.kernels.gpu.routing import choose_experts

                router = layer.router
                assert router is not None
                logit_TE = router.linear.apply(self._value(route[1]))
                given = router.spec, self._routed(layer), None, router.scale_E
                choose_experts.reference(logit_TE, router.choice_bias_E, *given)
                begin += 1
        take_traffic(self.step, self.native.traffic)
        T = len(self.rows)
        if "ffn_out" in found and layer.ffn.down_bias_D is not None:
            found["ffn_out"] += layer.ffn.down_bias_D
        if layer.router is not None:
            found["ffn_experts"] = self._routed(layer)[:, : layer.router.spec.num_used].long()
        for name in own.widths.keys() & wanted:
            found[name] = self.seen[name][: T * own.widths[name]].view(T, own.widths[name])
        for name in wanted:
            if name in found:
                observers.show(name, index, found[name])

    def _routed(self, layer: Layer) -> Tensor:
        """The numbers of a layer's experts and their weights, f32 [T, 2 K]."""
        assert layer.router is not None
        T, size = len(self.rows), 2 * layer.router.spec.num_used
        return self.values["routed"].flatten()[: T * size].view(T, size)


def _seen_layer(
    index: int, layer: Layer, placed: Sequence[tuple[Op, tuple[int, int]]]
) -> SeenLayer:
    """`placed`: the operations of the layer, and the native ones of each."""
    begin, end = placed[0][1][0], placed[-1][1][1]
    recurrent = layer.spec.recurrent and layer.spec.recurrent.kind
    values: dict[str, tuple[int, Sequence[str]]] = {}
    values |= {"ffn_norm": (end, [ffn_in(index)])} if layer.spec.neurons.number else {}
    values |= {"ffn_latent": (end, [LATENT])} if layer.spec.neurons.latent_size else {}
    values |= {"layer_out": (end, ["x"])}
    route = None
    for op, (first, last) in placed:
        read, written = name_of(op.reads[0]) if op.reads else "", name_of(op.writes[0])
        if op.kind == "attention" or op.kind == recurrent:
            values |= {"attn_norm": (first, [read]), "attn_out": (last, [written])}
        elif op.kind == "neurons":
            before = values.get("ffn_out", (0, ()))[1]
            values["ffn_out"] = last, [*before, written]
        elif op.kind == "route":
            route = first, read
    num_neurons = layer.spec.neurons.of_expert
    if layer.router is not None:
        num_neurons *= layer.router.spec.num_used
    widths = {
        "attn_heads": layer.spec.query_size,
        "ffn_gate": num_neurons,
        "ffn_hidden": num_neurons,
    }
    if layer.spec.predict:
        widths["ffn_predicted"] = num_neurons
    if layer.shared is not None:
        widths["ffn_shared_hidden"] = layer.shared.block.num_units
    return SeenLayer(begin=begin, end=end, values=values, widths=widths, route=route)


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A model's forward pass."""

    weights: Weights
    observers: Observers
    native: NativeStep | HybridStep
    draft: DraftStep | AssistantStep | None = None

    def __post_init__(self) -> None:
        if isinstance(self.native, HybridStep):
            self.native.on_hidden = None if self.draft is None else self.draft.saw

    def step(self, token: int, position: int, sequence: int = 0) -> Tensor:
        """Logits f32 [V] after one token."""
        row = Row(token=token, position=position, sequence=sequence, has_logits=True)
        return self.run([row])[0]

    @property
    def vocab_size(self) -> int:
        return self.weights.head.weight.num_rows

    @property
    def has_hybrid_steps(self) -> bool:
        """True if decode steps are hybrid, and prompts are passes of their own."""
        return isinstance(self.native, HybridStep)

    @property
    def most_tokens(self) -> int:
        """Maximum tokens per pass."""
        if isinstance(self.native, NativeStep):
            return self.native.max_rows
        return self.native.most_tokens

    @cached_property
    def _native_layers(self) -> NativeLayers:
        if not isinstance(self.native, NativeStep):
            raise HotsplitError(
                "observers see the values of the CPU; load the model with device='cpu' (--device"
                " cpu)"
            )
        return NativeLayers.of(self.native, self.weights)

    def run(self, rows: Sequence[Row]) -> Tensor:
        """Logits f32 [R, V] of the rows that have them, on the CPU; appends keys and values to the
        cache. Rows of the native step are bit-identical to single steps.

        Computed rows beyond `most_tokens` are divided among passes, unless the native step has
        them. Raises HotsplitError for observers of a model on a GPU."""
        if isinstance(self.native, NativeStep) and not self.observers.active:
            weights = self.weights
            with prepared(weights.cache, weights.states, rows, keeps_rows=True) as slotted:
                logits_RV = self.native.run_rows(slotted)
            if self.draft is not None:
                self.draft.saw(rows, self.native.shared["x"].numpy())
            return logits_RV
        return self._run_in_passes(rows)

    @out_of_memory_as_error()
    @torch.inference_mode()
    def _run_in_passes(self, rows: Sequence[Row]) -> Tensor:
        """`run` by the hybrid step for consecutive runs of decoded rows together, and by one or
        more passes for each other run."""
        steps = None if self.observers.active else self.native
        pieces: list[Tensor] = []
        for is_step, runs in groupby(runs_of(rows), key=is_decoded):
            if is_step and isinstance(steps, HybridStep):
                pieces.append(steps.run_rows(list(chain.from_iterable(runs))))
            else:
                pieces += [self._pass(rows, run) for run in runs]
        return self._joined(pieces)

    def _joined(self, pieces: Sequence[Tensor]) -> Tensor:
        """The logits of all pieces, [R, V]."""
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat([torch.empty(0, self.vocab_size), *pieces])

    def _pass(self, rows: Sequence[Row], run: Sequence[Row]) -> Tensor:
        """Computes consecutive rows of one sequence; see `run`."""
        cache = self.weights.cache
        for row in run:
            if row.source is not None:  # its keys and values are those of another sequence
                source, at = rows[row.source], (row.position, row.position + 1)
                cache.reserve(row.sequence, *at)
                for layer in cache.layers:
                    layer.write(row.sequence, row.position, *layer.read(source.sequence, *at))
        computed = [row for row in run if row.source is None]
        most = self.most_tokens
        pieces = (computed[start : start + most] for start in range(0, len(computed), most))
        return self._joined([self._computed(piece) for piece in pieces])

    def _computed(self, rows: Sequence[Row]) -> Tensor:
        if isinstance(self.native, HybridStep) and not self.observers.active:
            return self.native.run_pass(rows)
        with prepared(self.weights.cache, self.weights.states, rows) as slotted:
            return self._native_layers.logits(slotted, self.observers)
