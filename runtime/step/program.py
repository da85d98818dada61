"""A model's decode step as a list of operations, declared once: their order, and where each runs.

Executors walk the list: `native_ops` lowers it to one C++ call, `hybrid_lowering` to submissions to
GPU streams, and `decoder` runs one layer of it in torch. No executor has an order of its own: they
take that of the list, and streams wait for each other where reads and writes require it.

A value is a name and a device, `x@host`, and stands for a buffer: a later operation may overwrite
it, but only after all earlier reads (`edges`).

    x           the hidden state
    attn_in     the input of attention, if it has a norm of its own
    qkv, heads  input and output of the heads, where the host attends and a GPU projects
    ffn_in.0/1  the input of the neurons of even and odd layers: alternating buffers, because a
                predictor may take the previous layer's
    named       the neurons that the predictor selects
    ffn_out     the neurons' output; in a layer with divided neurons, hot_out and cold_out"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

Order = Literal["pre-norm", "post-norm", "parallel"]
Kind = Literal[
    "embed", "norm", "attention", "project", "attend", "predict", "neurons", "bias", "add", "copy",
    "head",
]  # fmt: skip
Block = Literal["all", "hot", "cold"]

HOST = "host"
# The value that a block of neurons writes.
OUT = {"all": "ffn_out", "hot": "hot_out", "cold": "cold_out"}


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
    """One operation. `part` names the weights that it reads, as in `LayerForm.weight_bytes`."""

    kind: Kind
    layer: int | None  # None: outside the layers
    device: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    part: str = ""
    home: str = HOST  # the GPU to whose streams it is submitted; HOST before and after all GPUs
    is_beside: bool = False  # on that GPU's side stream, concurrent with its kernels
    weight_bytes: int = 0  # of its weights in full; a sparse mode reads fewer bytes of neurons

    @property
    def is_between_gpus(self) -> bool:
        return self.kind == "copy" and HOST not in {device_of(v) for v in self.reads + self.writes}


@dataclass(frozen=True, kw_only=True)
class LayerForm:
    """The properties of a layer that determine its operations."""

    order: Order
    has_second_norm: bool = False  # parallel: attention has a norm of its own
    has_predictor: bool = False  # one that is run
    has_down_bias: bool = False
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
    """The properties of a model and its placement that determine the operations of a step."""

    layers: tuple[LayerForm, ...]
    input_layer_offset: int = (
        0  # whose FFN input predictors take: 0 this layer's, 1 the previous one's
    )
    embedding: str = HOST  # the device
    head: str = HOST
    head_home: str = HOST  # the GPU to whose streams the head's operations are submitted
    has_positions: bool = False  # learned ones, which are on the host
    has_output_norm: bool = True
    weight_bytes: Mapping[str, int] = field(default_factory=dict)  # embedding, output_norm, head

    @property
    def attends_on_host(self) -> bool:
        """True if the host has the keys and values of all layers."""
        return any(form.attends_on_host for form in self.layers)


def in_line(layers: Iterable[LayerForm]) -> tuple[LayerForm, ...]:
    """Gives neighbouring layers that are wholly on the host the same home."""
    found: list[LayerForm] = []
    for form in layers:
        if found and found[-1].is_whole_on_host and form.is_whole_on_host:
            form = replace(form, home=found[-1].home)
        found.append(form)
    return tuple(found)


def layer_ops(index: int, form: LayerForm, input_layer_offset: int) -> Iterator[Op]:
    """The operations of a layer, from x to x on its device. Defines the three orders of blocks."""
    write = _LayerWriter(index, form, input_layer_offset)
    ffn_in, outs = write.ffn_in, write.outs
    if form.order == "parallel":
        own = "attn_in" if form.has_second_norm else ffn_in
        yield write.norm("attn_norm", "x", ffn_in)
        if form.has_second_norm:
            yield write.norm("attn_norm_2", "x", own)
        yield from write.attention(own)
        yield write.add(("x", "attn_out"), "x")
        yield from write.feed_forward()
        yield write.add(("x", *outs), "x")
    elif form.order == "post-norm":
        yield from write.attention("x")
        yield write.add(("x", "attn_out"), "x")
        yield write.norm("attn_norm", "x", ffn_in)
        yield from write.feed_forward()
        yield write.add((ffn_in, *outs), "x")
        yield write.norm("ffn_norm", "x", "x")
    else:
        yield write.norm("attn_norm", "x", "attn_in")
        yield from write.attention("attn_in")
        yield write.add(("x", "attn_out"), "x")
        yield write.norm("ffn_norm", "x", ffn_in)
        yield from write.feed_forward()
        yield write.add(("x", *outs), "x")


class _LayerWriter:
    def __init__(self, index: int, form: LayerForm, input_layer_offset: int) -> None:
        self.index, self.form = index, form
        self.ffn_in = ffn_in(index)
        self.named_by = ffn_in(index - 1) if input_layer_offset and index else self.ffn_in
        biases = ["bias"] if form.has_down_bias else []
        self.outs = [*(OUT[block] for block, _ in form.blocks), *biases]

    def _op(
        self, kind: Kind, reads: Iterable[str], writes: Iterable[str], part: str = "",
        device: str | None = None, is_beside: bool = False,
    ) -> Op:  # fmt: skip
        """Values without a device are on `device`, by default the layer's."""
        form = self.form
        device = device or form.device
        return Op(
            kind=kind,
            layer=self.index,
            device=device,
            reads=tuple(v if "@" in v else at(v, device) for v in reads),
            writes=tuple(v if "@" in v else at(v, device) for v in writes),
            part=part,
            home=form.home,
            is_beside=is_beside,
            weight_bytes=form.weight_bytes.get(part, 0),
        )

    def norm(self, part: str, x: str, y: str) -> Op:
        return self._op("norm", [x], [y], part)

    def attention(self, x: str) -> Iterator[Op]:
        """Attention; if the host has the keys and values, the layer's device only projects."""
        device, cache = self.form.device, f"cache.{self.index}"
        if not self.form.attends_on_host:
            yield self._op("attention", [x, "position", cache], ["attn_out", cache], "attention")
            return
        yield self._op("project", [x], ["qkv"], "qkv")
        yield self._copy("qkv", device, HOST, is_beside=False)
        reads, writes = ["qkv", "position", cache], ["heads", cache]
        yield self._op("attend", reads, writes, "head_norms", HOST)
        yield self._copy("heads", HOST, device, is_beside=False)
        yield self._op("project", ["heads"], ["attn_out"], "attn_output")

    def add(self, terms: Sequence[str], y: str) -> Op:
        """y = the first term + the sum of the others."""
        return self._op("add", terms, [y])

    def feed_forward(self) -> Iterator[Op]:
        """The neurons on all devices; their outputs end up on the layer's device. In a layer that
        is not wholly on the host, neurons on the host run concurrently with the GPU's kernels."""
        form = self.form
        if form.has_predictor:
            yield self._op("predict", [self.named_by], ["named"], "predictor")
        inputs = [self.ffn_in, *(["named"] if form.has_predictor else [])]
        is_shared = form.device != HOST or not form.is_whole_on_host
        beside = [b for b, device in form.blocks if device == HOST and is_shared]
        others = [(b, device) for b, device in form.blocks if b not in beside]
        for block in beside:
            yield from self._block(block, HOST, inputs, is_beside=True)
        for block, device in others:
            yield from self._block(block, device, inputs, is_beside=False)
        if form.has_down_bias:
            yield self._op("bias", [], ["bias"], "down_bias")

    def _block(
        self, block: Block, device: str, inputs: Sequence[str], *, is_beside: bool
    ) -> Iterator[Op]:
        form, out = self.form, OUT[block]
        is_away = device != form.device
        for name in inputs if is_away else ():
            yield self._copy(name, form.device, device, is_beside)
        bits = ["bits"] if form.has_bits and block != "cold" else []
        yield self._op("neurons", inputs, [out, *bits], block, device, is_beside)
        if is_away:
            yield self._copy(out, device, form.device, is_beside)

    def _copy(self, name: str, source: str, target: str, is_beside: bool) -> Op:
        device = source if target == HOST else target
        return self._op("copy", [at(name, source)], [at(name, target)], "", device, is_beside)


def ffn_in(layer: int) -> str:
    return f"ffn_in.{layer % 2}"


def step_program(form: StepForm) -> tuple[Op, ...]:
    """The operations of a step, from token and position to logits; these three are on the host."""
    writer = _StepWriter(form)
    writer.embed()
    for index in range(len(form.layers)):
        writer.layer(index)
    writer.head()
    return tuple(writer.ops)


class _StepWriter:
    """Writes the program, and tracks which device has the hidden state."""

    def __init__(self, form: StepForm) -> None:
        self.form = form
        self.ops: list[Op] = []
        self.place = form.embedding  # of the hidden state
        self.visited = HOST  # the GPU to which operations are being submitted

    def embed(self) -> None:
        positions = ["position"] if self.form.has_positions else []
        home = self.place
        if home == HOST:
            self._outer("embed", HOST, ["token", *positions], "x", "embedding", HOST)
            return
        if positions:
            self._outer("embed", HOST, positions, "x", "positions", HOST)
        self._copy("token", HOST, home, home, None)
        if positions:
            self._copy("x", HOST, home, home, None)
        has_x = ["x"] if positions else []
        self._outer("embed", home, ["token", *has_x], "x", "embedding", home)

    def layer(self, index: int) -> None:
        form = self.form.layers[index]
        self._move(form.device, form.home, index)
        for op in layer_ops(index, form, self.form.input_layer_offset):
            self._submit(op)
        if form.copies_bits:
            self._copy("bits", form.home, HOST, form.home, index)

    def head(self) -> None:
        form, home = self.form, self.form.head_home
        self._move(form.head, home, None)
        outer = HOST if form.head == HOST else home
        head_in = "x"
        if form.has_output_norm:
            head_in = "head_in"
            self._outer("norm", form.head, ["x"], head_in, "output_norm", outer)
        self._outer("head", form.head, [head_in], "logits", "head", outer)
        if form.head != HOST:
            self._copy("logits", form.head, HOST, home, None)

    def _outer(
        self, kind: Kind, device: str, reads: Sequence[str], y: str, part: str, home: str
    ) -> None:
        self._submit(
            Op(
                kind=kind,
                layer=None,
                device=device,
                reads=tuple(at(name, device) for name in reads),
                writes=(at(y, device),),
                part=part,
                home=home,
                weight_bytes=self.form.weight_bytes.get(part, 0),
            )
        )

    def _move(self, target: str, home: str, layer: int | None) -> None:
        """Moves the hidden state and, if the layer's predictor reads it, the previous layer's
        feed-forward input."""
        source, self.place = self.place, target
        if source == target:
            return
        carried = ["x"]
        if layer and self._needs_input_of_previous(target, layer):
            carried.append(ffn_in(layer - 1))
        for name in carried:
            self._copy(name, source, target, source if target == HOST else target, None)

    def _needs_input_of_previous(self, target: str, layer: int) -> bool:
        """True if a predictor on `target` reads the previous layer's feed-forward input, and no
        neurons of that layer are on `target`, for which the input would be there already."""
        if not (self.form.input_layer_offset and self.form.layers[layer].has_predictor):
            return False
        return all(device != target for _, device in self.form.layers[layer - 1].blocks)

    def _copy(self, name: str, source: str, target: str, home: str, layer: int | None) -> None:
        self._submit(
            Op(
                kind="copy",
                layer=layer,
                device=home,
                reads=(at(name, source),),
                writes=(at(name, target),),
                home=home,
            )
        )

    def _submit(self, op: Op) -> None:
        """Appends an operation. A visit to a GPU begins by copying the position there, unless the
        host attends; a copy between GPUs ends it."""
        if op.is_between_gpus:
            self.visited = HOST
        elif op.home not in (HOST, self.visited):
            self.visited = op.home
            if not self.form.attends_on_host:
                self._copy("position", HOST, op.home, op.home, None)
        self.ops.append(op)


def last_reads(ops: Sequence[Op], kept: Sequence[str]) -> list[tuple[str, ...]]:
    """For each operation, the names of the values that it is the last to read, except those in
    `kept`."""
    seen, found = set(kept), []
    for op in reversed(ops):
        names = dict.fromkeys(map(name_of, op.reads))
        found.append(tuple(name for name in names if name not in seen))
        seen |= names.keys()
    return found[::-1]


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
