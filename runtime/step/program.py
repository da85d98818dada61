"""A model's decode step as a list of operations, and where each runs: a fold over the blocks of the
model's spec, which has their order, and over the places of its layers.

Executors walk the list: `native_ops` lowers it to one C++ call, `hybrid_submissions` to submissions
to GPU streams, and `decoder` ends a call where a value is observed. No executor has an order of its
own: they take that of the list, and streams wait for each other where reads and writes require
it.

A value is a name and a device, `x@host`, and stands for a buffer: a later operation may overwrite
it, but only after all earlier reads (`edges`).

    x           the hidden state
    attn_in     the input of attention, if it has a norm of its own
    qkv, heads  input and output of the heads, where the host attends and a GPU projects
    ffn_in.0/1  the input of the neurons of even and odd layers: alternating buffers, because a
                predictor may take the previous layer's
    route_in, shared_in  the inputs of a router and of shared experts that have norms of their own;
                after these experts the latter is the norm of their output, and its sum with that
                of the others
    named       the neurons that the predictor selects
    routed      the experts that the router chooses, and their weights
    shared_out  the output of experts that fire for every token
    ffn_out     the neurons' output; in a layer with divided neurons, hot_out and cold_out, which
                are summed into it, with the bias of the down projection, only if a norm reads it.
                Experts that read a latent have others, which are summed before the product
                that writes ffn_out (OUTPUTS)
    others      values of position-wise operations (ModelSpec.value_sizes), which may also widen
                x"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from hotsplit.model.blocks import PLAIN_SUM, SumFactors
from hotsplit.model.latent_experts import COLD_SUM, HOT_SUM, LATENT_SUM
from hotsplit.model.operations import BlockOp, Stateful
from hotsplit.model.spec import Add, Attention, LayerSpec, ModelSpec, Neurons, Norm, Predict, Route
from hotsplit.model.spec import Block as SpecBlock

# "embed", "norm", "attention", "project", "attend", "predict", "route", "neurons",
# "shared", "bias", "add", "copy", "head", and those of blocks with rooms of their own.
Kind = str
Block = Literal["all", "hot", "cold"]

HOST = "host"
# The values that blocks of neurons write, by that of the whole layer.
OUTPUTS: Mapping[str, Mapping[Block, str]] = {
    "ffn_out": {"all": "ffn_out", "hot": "hot_out", "cold": "cold_out"},
    LATENT_SUM: {"all": LATENT_SUM, "hot": HOT_SUM, "cold": COLD_SUM},
}


def gpu(number: int) -> str:
    """The name of the device that is the GPU with this number in a plan."""
    return f"gpu{number}"


def at(name: str, device: str) -> str:
    return f"{name}@{device}"


def name_of(value: str) -> str:
    return value.partition("@")[0]


def device_of(value: str) -> str:
    return value.partition("@")[2]


@dataclass(frozen=True, kw_only=True)
class Op:
    """One operation. `part` names the weights that it reads, as in `LayerPlace.weight_bytes`."""

    kind: Kind
    layer: int | None  # None: outside the layers
    device: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    part: str = ""
    home: str = HOST  # the GPU to whose streams it is submitted; HOST before and after all GPUs
    is_beside: bool = False  # a part of the host's work that is concurrent with that GPU's kernels
    weight_bytes: int = 0  # of its weights in full; a sparse mode reads fewer bytes of neurons
    factors: SumFactors = PLAIN_SUM  # of a sum

    @property
    def is_between_gpus(self) -> bool:
        return self.kind == "copy" and HOST not in {device_of(v) for v in self.reads + self.writes}


@dataclass(frozen=True, kw_only=True)
class LayerPlace:
    """Where a layer runs. By default all of it is on the host."""

    device: str = HOST  # of attention, norms and predictor
    attends_on_host: bool = False  # the host has the keys and values; `device` projects
    home: str = HOST  # the GPU whose streams run the layer
    blocks: tuple[tuple[Block, str], ...] = (("all", HOST),)  # of neurons, and the device of each
    has_bits: bool = False  # the bits of its hot neurons are written for a neuron cache
    copies_bits: bool = False  # after it, the bits of all layers of this GPU are copied to the host
    weight_bytes: Mapping[str, int] = field(default_factory=dict, hash=False)  # by part

    @property
    def is_whole_on_host(self) -> bool:
        return self.device == HOST and all(device == HOST for _, device in self.blocks)


@dataclass(frozen=True, kw_only=True)
class StepForm:
    """What determines the operations of a step: the model, without the predictors that are not run,
    and where its parts are."""

    spec: ModelSpec
    places: tuple[LayerPlace, ...]
    embedding: str = HOST  # the device
    head: str = HOST
    head_home: str = HOST  # the GPU to whose streams the head's operations are submitted
    weight_bytes: Mapping[str, int] = field(default_factory=dict)  # embedding, output_norm, head

    @property
    def attends_on_host(self) -> bool:
        """True if the host has the keys and values of all layers."""
        return any(place.attends_on_host for place in self.places)


def layer_ops(index: int, spec: LayerSpec, place: LayerPlace) -> Iterator[Op]:
    """The operations of a layer, from x to x on its device, in the order of its blocks."""
    writer = _LayerWriter(index, place)
    for block in spec.blocks:
        yield from writer.block(block)


class _LayerWriter:
    """Writes the operations of a layer's blocks, and tracks in which values neurons leave their
    output, and whether neurons have been named."""

    def __init__(self, index: int, place: LayerPlace) -> None:
        self.index, self.place = index, place
        self.named: tuple[str, ...] = ()  # the value that names neurons, if any
        self.routed: tuple[str, ...] = ()  # the value that names experts, if any
        self.terms: dict[str, tuple[str, ...]] = {}  # the values that sum to an output of neurons

    def block(self, block: SpecBlock) -> Iterator[Op]:
        match block:
            case Norm():
                read, written = self._value(block.reads), self._value(block.writes)
                yield from self._joined(block.reads)
                yield self._op("norm", [read], [written], block.name)
            case Attention():
                yield from self._attention(block)
            case Predict():
                is_of_previous = bool(block.input_layer_offset and self.index)
                read = ffn_in(self.index - 1) if is_of_previous else self._value(block.reads)
                self.named = (block.writes,)
                yield self._op("predict", [read], self.named, "predictor")
            case Route():
                yield self._op("route", [self._value(block.reads)], [block.writes], "router")
                self.routed = (block.writes,)
            case Neurons() if block.suffix == "_shexp":
                yield self._op("shared", [self._value(block.reads)], [block.writes], "shared")
            case Neurons():
                yield from self._neurons(block)
            case Add():
                left = (self.terms.get(term) or (self._value(term),) for term in block.terms)
                parts = [part for term in left for part in term]
                op = self._op("add", parts, [self._value(block.writes)])
                yield replace(op, factors=block.factors)
            case BlockOp():
                for name in block.inputs:
                    yield from self._joined(name)
                names = block.inputs, block.outputs
                reads, writes = (list(map(self._value, each)) for each in names)
                if isinstance(block, Stateful):
                    kept = block.kept(self.index).name
                    reads, writes = [*reads, kept], [*writes, kept]
                yield self._op(block.kind, reads, writes, block.part())

    def _joined(self, name: str) -> Iterator[Op]:
        """The sum of the values that neurons have left of this one, if there are several."""
        terms = self.terms.pop(name, ())
        if len(terms) > 1:
            yield self._op("add", terms, [self._value(name)])

    def _value(self, name: str) -> str:
        """The value of this layer that the spec calls by this name."""
        return ffn_in(self.index) if name == "ffn_in" else name

    def _op(
        self,
        kind: Kind,
        reads: Iterable[str],
        writes: Iterable[str],
        part: str = "",
        device: str | None = None,
        is_beside: bool = False,
    ) -> Op:
        """Values without a device are on `device`, by default the layer's."""
        place = self.place
        device = device or place.device
        return Op(
            kind=kind,
            layer=self.index,
            device=device,
            reads=tuple(v if "@" in v else at(v, device) for v in reads),
            writes=tuple(v if "@" in v else at(v, device) for v in writes),
            part=part,
            home=place.home,
            is_beside=is_beside,
            weight_bytes=place.weight_bytes.get(part, 0),
        )

    def _attention(self, block: Attention) -> Iterator[Op]:
        """Attention; if the host has the keys and values, the layer's device only projects."""
        device, x, y = self.place.device, self._value(block.reads), block.writes
        kept = block.kept(self.index)
        cache, written = kept.name, [kept.name] if kept.is_written else []
        if not self.place.attends_on_host:
            yield self._op("attention", [x, "position", cache], [y, *written], "attention")
            return
        yield self._op("project", [x], ["qkv"], "qkv")
        yield self._copy("qkv", device, HOST, is_beside=False)
        reads, writes = ["qkv", "position", cache], ["heads", *written]
        yield self._op("attend", reads, writes, "head_norms", HOST)
        yield self._copy("heads", HOST, device, is_beside=False)
        yield self._op("project", ["heads"], [y], "attn_output")

    def _neurons(self, neurons: Neurons) -> Iterator[Op]:
        """The neurons on all devices; their outputs end up on the layer's device. In a layer that
        is not wholly on the host, neurons on the host run concurrently with the GPU's kernels."""
        place, out = self.place, OUTPUTS[neurons.writes]
        if len(place.blocks) == 1:  # a block that streams the others writes the sum of all, too
            out = dict.fromkeys(out, neurons.writes)
        inputs = [self._value(neurons.reads), *self.named, *self.routed]
        is_shared = not place.is_whole_on_host
        beside = [b for b, device in place.blocks if device == HOST and is_shared]
        others = [(b, device) for b, device in place.blocks if b not in beside]
        for block in beside:
            yield from self._block(block, HOST, inputs, out[block], is_beside=True)
        for block, device in others:
            yield from self._block(block, device, inputs, out[block], is_beside=False)
            yield from self._returned(out[block], device, is_beside=False)
        for block in beside:
            yield from self._returned(out[block], HOST, is_beside=True)
        outs = [out[block] for block, _ in place.blocks]
        if neurons.down_name in neurons.biases and not neurons.are_experts:  # each has its own
            yield self._op("bias", [], ["bias"], "down_bias")
            outs.append("bias")
        self.terms[neurons.writes] = tuple(outs)

    def _block(
        self, block: Block, device: str, inputs: Sequence[str], out: str, *, is_beside: bool
    ) -> Iterator[Op]:
        place = self.place
        for name in inputs if device != place.device else ():
            yield self._copy(name, place.device, device, is_beside)
        bits = ["bits"] if place.has_bits and block != "cold" else []
        yield self._op("neurons", inputs, [out, *bits], block, device, is_beside)

    def _returned(self, out: str, device: str, *, is_beside: bool) -> Iterator[Op]:
        """Copies the output of a block to the layer's device."""
        if device != self.place.device:
            yield self._copy(out, device, self.place.device, is_beside)

    def _copy(self, name: str, source: str, target: str, is_beside: bool) -> Op:
        device = source if target == HOST else target
        return self._op("copy", [at(name, source)], [at(name, target)], "", device, is_beside)


def ffn_in(layer: int) -> str:
    return f"ffn_in.{layer % 2}"


def step_program(form: StepForm) -> tuple[Op, ...]:
    """The operations of a step, from token and position to logits; these three are on the host."""
    layers, head = pass_programs(form)
    return (*layers, *head)


def pass_programs(form: StepForm) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    """A step's operations up to the last layer, and those after it, which a pass runs for the rows
    with logits alone."""
    writer = _StepWriter(form)
    writer.embed()
    for index in range(len(form.places)):
        writer.layer(index)
    last = len(writer.ops)
    writer.head()
    return tuple(writer.ops[:last]), tuple(writer.ops[last:])


class _StepWriter:
    """Writes the program, and tracks which device has the hidden state."""

    def __init__(self, form: StepForm) -> None:
        self.form = form
        self.ops: list[Op] = []
        self.place = form.embedding  # of the hidden state
        self.x = "x"  # its name
        self.visited = HOST  # the GPU to which operations are being submitted

    def embed(self) -> None:
        positions = ["position"] if self.form.spec.has_positions else []
        home = self.place
        if home == HOST:
            spec = self.form.spec
            self._outer("embed", HOST, ["token", *positions], spec.embedded, "embedding", HOST)
            self._position_wise(spec.first, HOST)
            return
        if positions:
            self._outer("embed", HOST, positions, "x", "positions", HOST)
        self._copy("token", HOST, home, home, None)
        if positions:
            self._copy("x", HOST, home, home, None)
        has_x = ["x"] if positions else []
        self._outer("embed", home, ["token", *has_x], "x", "embedding", home)

    def layer(self, index: int) -> None:
        place = self.form.places[index]
        self._move(place.device, index)
        for op in layer_ops(index, self.form.spec.layers[index], place):
            self._submit(op)
        if place.copies_bits:
            self._copy("bits", place.home, HOST, place.home, index)

    def head(self) -> None:
        form, home = self.form, self.form.head_home
        outer = HOST if form.head == HOST else home
        if form.spec.last:  # the host has their matrices
            self._move(HOST, None)
            self._position_wise(form.spec.last, outer)
            self.x = form.spec.joined
        self._move(form.head, None)
        head_in = self.x
        if form.spec.output_norm is not None:
            head_in = "head_in"
            self._outer("norm", form.head, [self.x], head_in, "output_norm", outer)
        self._outer("head", form.head, [head_in], "logits", "head", outer)
        if form.head != HOST:
            self._copy("logits", form.head, HOST, home, None)

    def _position_wise(self, blocks: Iterable[BlockOp], home: str) -> None:
        for block in blocks:
            self._outer(block.kind, HOST, block.inputs, block.outputs, block.part(), home)

    def _outer(
        self,
        kind: Kind,
        device: str,
        reads: Sequence[str],
        writes: str | Sequence[str],
        part: str,
        home: str,
    ) -> None:
        names = [writes] if isinstance(writes, str) else writes
        self._submit(
            Op(
                kind=kind,
                layer=None,
                device=device,
                reads=tuple(at(name, device) for name in reads),
                writes=tuple(at(name, device) for name in names),
                part=part,
                home=home,
                weight_bytes=self.form.weight_bytes.get(part, 0),
            )
        )

    def _move(self, target: str, layer: int | None) -> None:
        """Moves the hidden state and, if the layer's predictor reads it, the previous layer's
        feed-forward input."""
        source, self.place = self.place, target
        if source == target:
            return
        carried = [self.x]
        predict = self.form.spec.layers[layer].predict if layer else None
        if layer and predict is not None and predict.input_layer_offset:
            sides = {device for _, device in self.form.places[layer - 1].blocks}
            # For neurons of that layer on `target`, it is there already.
            carried += [ffn_in(layer - 1)] * (target not in sides)
        for name in carried:
            self._copy(name, source, target, source if target == HOST else target, None)

    def _copy(self, name: str, source: str, target: str, home: str, layer: int | None) -> None:
        reads, writes = (at(name, source),), (at(name, target),)
        self._submit(
            Op(kind="copy", layer=layer, device=home, reads=reads, writes=writes, home=home)
        )

    def _read_on(self, device: str) -> list[str]:
        """Values of operations before the layers, but the hidden state, that layers on a device
        read."""
        form = self.form
        made = {name for block in form.spec.first for name in block.outputs} - {"x"}
        on_it = (
            x for x, p in zip(form.spec.layers, form.places, strict=True) if p.device == device
        )
        read = {name for layer in on_it for each in layer.position_wise for name in each.inputs}
        return sorted(made & read)

    def _submit(self, op: Op) -> None:
        """Appends an operation. A visit to a GPU begins by copying the position there, unless the
        host attends and no layer has a state, and values of operations before the layers; a copy
        between GPUs ends it."""
        if op.is_between_gpus:
            self.visited = HOST
        elif op.home not in (HOST, self.visited):
            self.visited = op.home
            if self.form.spec.has_states or not self.form.attends_on_host:
                self._copy("position", HOST, op.home, op.home, None)
            for name in self._read_on(op.home):
                self._copy(name, HOST, op.home, op.home, None)
        self.ops.append(op)


def edges(ops: Sequence[tuple[Sequence[str], Sequence[str]]]) -> list[tuple[int, int]]:
    """Pairs (earlier, later) of indices of `ops`, given as (reads, writes), that must keep their
    order: read after write, write after read, write after write."""
    found: set[tuple[int, int]] = set()
    written: dict[str, int] = {}
    read: dict[str, list[int]] = {}
    for number, (reads, writes) in enumerate(ops):
        for value in reads:
            found |= {(written[value], number)} if value in written else set()
        for value in writes:
            found |= {(before, number) for before in read.pop(value, ())}
            found |= {(written[value], number)} if value in written else set()
            written[value] = number
        for value in reads:
            read.setdefault(value, []).append(number)
    return sorted((a, b) for a, b in found if a != b)


def is_added(value: str, later: Sequence[Op]) -> bool:
    """True if a value is next read as a summand."""
    reader = next((op for op in later if value in op.reads), None)
    return reader is not None and reader.kind == "add"


def is_read(value: str, later: Sequence[Op]) -> bool:
    """True if the value is read before it is written again."""
    for op in later:
        if value in op.reads:
            return True
        if value in op.writes:
            return False
    return False
