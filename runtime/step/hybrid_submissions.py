"""Lowers a step program to submissions to the streams of GPUs: kernels, copies, and functions that
are handed over to the CPU.

A submission is one or more operations: a sum on a GPU is fused with a norm that reads it next, and
consecutive operations of the host in one layer, or in layers wholly on the host, become one
function. What a divided layer exchanges with the CPU is not copied: the kernel that writes the
input of the neurons, or their bits, writes it to pinned memory as well, and the kernel that adds
the CPU's output reads it there. From what submissions read and write, `joins` derives where a
stream waits."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from hotsplit.model.blocks import PLAIN_SUM, SumFactors
from hotsplit.model.latent_experts import HOT_SUM, LATENT_SUM
from hotsplit.runtime.device.streams import HostNode
from hotsplit.runtime.model.layers import Weights
from hotsplit.runtime.ops.device import Rounded
from hotsplit.runtime.ops.head import launch_head
from hotsplit.runtime.ops.norm import launch_add_norm
from hotsplit.runtime.step.hybrid_device import DeviceKernels, DividedLayer
from hotsplit.runtime.step.native_parts import HostBuffers, NativeParts, beginning
from hotsplit.runtime.step.native_step import overwritten
from hotsplit.runtime.step.pass_device import PassKernels
from hotsplit.runtime.step.program import HOST, Op, at, device_of, edges, is_added, is_read, name_of


@dataclass(frozen=True)
class Submission:
    """Work for the stream of GPU `home`, in the order of the program: a function that submits it,
    or a function for the CPU."""

    name: str
    home: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    work: Callable[[], None] | HostNode
    is_graph: bool = True


@dataclass(frozen=True, kw_only=True)
class _Sum:
    """A sum on a GPU that has not been submitted yet."""

    target: str
    base: str
    terms: tuple[str, ...]
    layer: int
    factors: SumFactors

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.base, *self.terms)


@dataclass(kw_only=True)
class Lowering:
    program: Sequence[Op]
    weights: Weights
    devices: Mapping[str, DeviceKernels]
    divided: Sequence[DividedLayer]
    host: HostBuffers
    parts: NativeParts
    bits_of_gpu: Callable[[int], tuple[Tensor, Tensor] | None]
    is_whole_L: Sequence[bool]  # layers that are wholly on the host
    streamed: Container[int] = ()  # layers whose cold neurons are streamed, in a pass

    def submissions(self) -> list[Submission]:
        self.found: list[Submission] = []
        self.pending: dict[str, _Sum] = {}  # by target
        # Outputs of layers that a sum or norm has made one row; else neurons leave partial sums.
        self.summed: set[str] = set()
        self.copied: set[Op] = set()  # copies to the host that a kernel makes
        self.away: dict[str, str] = {}  # values of a GPU that are read on the host
        self.rounded: dict[str, Rounded] = {}  # norms in a pass that were written for tiles alone
        ops = [op for op in self.program if op.home != HOST]
        index = 0
        while index < len(ops):
            op, stop = ops[index], index + 1
            if op in self.copied:
                index = stop
                continue
            self._settle_before(op)
            if is_in_line(op):
                while stop < len(ops) and self._are_together(op, ops[stop]):
                    stop += 1
                self._host(ops[index:stop])
            elif op.kind == "add":
                self._add(op)
            elif op.kind == "norm":
                self._norm(op, ops[stop:])
            elif op.kind in ("predict", "route"):
                self._name(op, ops[stop:])
            elif _is_return(op) and is_added(op.writes[0], ops[stop:]):
                self.away[op.writes[0]] = op.reads[0]
            else:
                if op.layer is not None and op.kind in self.weights.layers[op.layer].own:
                    self._join(op)
                self._submit(op, self._run(op))
            index = stop
        for pending in list(self.pending.values()):  # before the head, which is apart in a pass
            self._settle(pending)
        assert not self.away and not self.rounded, (self.away, self.rounded)
        return self.found

    def _are_together(self, op: Op, other: Op) -> bool:
        if not is_in_line(other) or other.home != op.home:
            return False
        layers = (op.layer, other.layer)
        return op.layer == other.layer or all(self.is_whole_L[i] for i in layers if i is not None)

    def _submit(self, op: Op, work: Callable[[], None] | HostNode) -> None:
        self.summed -= set(op.writes)
        name = "host" if isinstance(work, HostNode) else op.kind
        is_graph = not (op.is_between_gpus or self._is_streamed(op))
        self.found.append(Submission(name, op.home, op.reads, op.writes, work, is_graph))

    def _host(self, ops: Sequence[Op]) -> None:
        layer, named_W = ops[0].layer, None
        if layer is not None and not self.is_whole_L[layer]:
            has_named = any(op.kind == "predict" for op in ops)
            named_W = self.divided[layer].named_W if has_named else None
        node = self.parts.node(ops, named_W)
        reads = tuple(dict.fromkeys(value for op in ops for value in op.reads))
        writes = tuple(dict.fromkeys(v for op in ops for v in (*op.writes, *overwritten(op))))
        self.found.append(Submission("host", ops[0].home, reads, writes, node))

    def _add(self, op: Op) -> None:
        """Defers a sum until it is read. A sum that adds to a deferred one is merged with it."""
        base, *terms = (self.away.pop(value, value) for value in op.reads)
        assert op.layer is not None
        before = self.pending.get(base)
        if before is not None and self._are_one(before, op, terms):
            base, terms = before.base, [*before.terms, *terms]
        elif before is not None:
            self._settle(before)
        self.pending[op.writes[0]] = _Sum(
            target=op.writes[0], base=base, terms=tuple(terms), layer=op.layer, factors=op.factors
        )

    def _settle_before(self, op: Op) -> None:
        """Submits the deferred sums that an operation needs but is not fused with, and those whose
        rows it writes as other values."""
        written = set() if op.layer is None else self.divided[op.layer].rows_of(op.writes)
        for pending in list(self.pending.values()):
            takes_it = op.kind in ("add", "norm") and op.reads[0] == pending.target
            touched, rows = {pending.target, *pending.reads}, self.divided[pending.layer].rows_of
            is_touched = pending.target in op.reads or not touched.isdisjoint(op.writes)
            if not takes_it and (is_touched or not written.isdisjoint(rows(pending.reads))):
                self._settle(pending)

    def _settle(self, pending: _Sum) -> None:
        """Submits a deferred sum."""
        target, device = pending.target, device_of(pending.target)
        del self.pending[target]
        x_D, sum_PD, term_D = self._summands(pending.reads, pending.layer)
        target_D = self._tensor(target, pending.layer)
        self.summed.add(target)
        given = self.devices[device], x_D, sum_PD, None, None, target_D, term_D
        work = partial(launch_add_norm, *given, factors=self._factors(pending))
        self.found.append(Submission("add", device, pending.reads, (target,), work))

    def _join(self, op: Op) -> None:
        """Adds up partial sums of neurons that an operation with a room of its own reads."""
        assert op.layer is not None
        for value in op.reads:
            name = name_of(value)
            if name not in _OF_NEURONS or value in self.summed or device_of(value) == HOST:
                continue
            first_D, *more = rows_PD = self._rows([value], op.layer)
            if more:
                given = self.devices[op.home], first_D, rows_PD[1:], None, None, first_D
                work = partial(launch_add_norm, *given)
                self.found.append(Submission("add", op.home, (value,), (value,), work))
            self.summed.add(value)

    def _are_one(self, pending: _Sum, op: Op, terms: Sequence[str]) -> bool:
        """True if a deferred sum can take the terms of one that adds to it."""
        if (pending.layer, (pending.target,)) != (op.layer, op.writes):
            return False
        if not pending.factors.can_go_on(op.factors):
            return False
        values = [v for v in (*pending.terms, *terms) if device_of(v) != HOST]
        summed = self.summed.intersection(values)
        divided = self.divided[pending.layer]
        return divided.summands(map(name_of, values), map(name_of, summed)) is not None

    def _factors(self, pending: _Sum) -> SumFactors:
        """The factors of the first of `_summands` and of the others."""
        is_row = self.divided[pending.layer].has_rows(name_of(pending.base))
        assert pending.factors.treats_alike or not is_row, pending
        return pending.factors

    def _norm(self, op: Op, later: Sequence[Op]) -> None:
        """Submits a norm, fused with the deferred sum if there is one; the sum is also written if
        it is read again, and the norm also to the host if it is copied there."""
        ((value,), (out,)) = op.reads, op.writes
        pending = self.pending.pop(value, None)
        norm = self.weights.output_norm
        if op.layer is not None:
            norm = self.weights.layers[op.layer].norms[op.part]
        out_D, kept_D = self._tensor(out, op.layer), None
        reads, writes = op.reads, op.writes
        if pending is None:
            x_D, sum_PD, term_D = self._summands([value], op.layer)
        else:
            reads = pending.reads
            is_last = op.layer is None and self.weights.shows_hidden
            if value != out and (is_last or is_read(value, later)):
                kept_D, writes = self._tensor(value, op.layer), (*writes, value)
            x_D, sum_PD, term_D = self._summands(pending.reads, pending.layer)
        copies = self._copies(op, later)
        copy_D = self._tensor(copies[0], op.layer) if copies else None
        factors = PLAIN_SUM if pending is None else self._factors(pending)
        self.summed |= set(writes)
        device, dtype = self.devices[op.device], None
        is_plain = term_D is None and not copies and factors == PLAIN_SUM
        if is_plain and (sum_PD is None or len(sum_PD) == 1):
            dtype = self._type_read(out, later)
        work: Callable[[], None]
        if dtype is not None and isinstance(device, PassKernels):
            target = self.rounded[out] = device.room_for(out_D, dtype)
            added_TD = None if sum_PD is None else sum_PD[0]
            assert norm is not None
            weights = norm.weight_D, norm.bias_D, norm.epsilon
            work = partial(device.round, x_D, added_TD, *weights, target, kept_D)
        else:
            given = device, x_D, sum_PD, norm, out_D, kept_D, term_D, copy_D
            work = partial(launch_add_norm, *given, factors=factors)
        self.found.append(Submission("norm", op.home, reads, (*writes, *copies), work))

    def _type_read(self, value: str, later: Sequence[Op]) -> torch.dtype | None:
        """The type of 16 bits in which the next operation of a pass takes a value in tiles; None if
        it does not, or another reads the value, too."""
        if not later or is_read(value, later[1:]):
            return None
        op, device = later[0], self.devices.get(later[0].home)
        if not isinstance(device, PassKernels) or op.layer is None or op.is_beside:
            return None
        if not op.reads or op.reads[0] != value:
            return None
        if value in op.reads[1:] or self._is_streamed(op):
            return None
        (dtype, *others) = device.types_read(op, self.divided[op.layer])
        return None if others or dtype == torch.float32 else dtype

    def _name(self, op: Op, later: Sequence[Op]) -> None:
        """Submits a GPU's predictor or router, which also writes to the host if its result is
        copied there."""
        assert op.layer is not None
        copies = self._copies(op, later)
        copy = self._tensor(copies[0], op.layer) if copies else None
        x_D, layer = self._tensor(op.reads[0], op.layer), self.weights.layers[op.layer]
        device = self.devices[op.home]
        if op.kind == "route":
            work = partial(device.route, layer, x_D, copy)
        else:
            work = partial(device.predict, layer.ffn, x_D, copy)
        self._submit(replace(op, writes=(*op.writes, *copies)), work)

    def _copies(self, op: Op, later: Sequence[Op]) -> tuple[str, ...]:
        """The value on the host to which a divided layer copies what `op` writes, if nothing else
        uses it before the copy, which then is not submitted."""
        (value,) = op.writes
        target = at(name_of(value), HOST)
        for other in later:
            if other.is_beside and (other.reads, other.writes) == ((value,), (target,)):
                self.copied.add(other)
                return (target,)
            used = (*other.reads, *other.writes, *overwritten(other))
            if value in other.writes or target in used:
                break
        return ()

    def _summands(
        self, values: Sequence[str], layer: int | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The vectors that sum to the sum of these values: (the first, the others, the one on the
        host)."""
        term_D = None
        for value in values:
            if device_of(value) == HOST:
                term_D = self._tensor(value, layer)
        first, *others = [value for value in values if device_of(value) != HOST]
        if layer is not None and self.divided[layer].has_rows(name_of(first)):
            rows_PD = self._rows([first, *others], layer)
            return rows_PD[0], rows_PD[1:] if len(rows_PD) > 1 else None, term_D
        return self._tensor(first, layer), self._rows(others, layer) if others else None, term_D

    def _rows(self, values: Sequence[str], layer: int | None) -> Tensor:
        """The rows that sum to these outputs of a layer, [P, D]."""
        assert layer is not None, values
        names = [name_of(value) for value in values]
        summed = [name_of(value) for value in values if value in self.summed]
        return self.devices[device_of(values[0])].sums(names, self.divided[layer], summed)

    def _run(self, op: Op) -> Callable[[], None] | HostNode:
        """The function that submits a single operation, or that runs it on the CPU."""
        device, weights = self.devices[op.home], self.weights
        if op.kind == "copy":
            return self._copy(op)
        if op.kind == "embed":
            scale, has_positions = weights.spec.embedding_scale, len(op.reads) > 1
            return partial(device.embed, weights.embedding, scale, has_positions=has_positions)
        if op.kind == "head":
            x_D, logits_V = (self._tensor(value, None) for value in (*op.reads, *op.writes))
            return partial(launch_head, device, weights.head, weights.spec, x_D, logits_V)
        assert op.layer is not None
        layer, divided = weights.layers[op.layer], self.divided[op.layer]
        if op.kind == "bias":
            bias_D = layer.ffn.down_bias_D
            assert bias_D is not None
            return partial(_copy_to_rows, device, self._tensor(op.writes[0], op.layer), bias_D)
        if op.is_beside:
            assert op.kind == "neurons" and divided.cold is not None, op
            return divided.cold.node
        rounded = self.rounded.pop(op.reads[0], None)
        if rounded is not None:
            assert isinstance(device, PassKernels)
            if op.kind == "neurons":
                return partial(device.hot, divided, rounded, are_named=False)
            if op.kind == "attention":
                return partial(device.attention, layer, rounded)
            written = [self._tensor(op.writes[0], op.layer)]
            return partial(device.own, layer.own[op.kind], [rounded], written)
        x_D = self._tensor(op.reads[0], op.layer)
        if op.kind == "attention":
            return partial(device.attention, layer, x_D)
        if op.kind in layer.own:
            block = layer.own[op.kind].block
            read, written = (
                [self._tensor(value, op.layer) for value in values]
                for values in (op.reads[: len(block.inputs)], op.writes[: len(block.outputs)])
            )
            return partial(device.own, layer.own[op.kind], read, written)
        if op.kind == "project":
            project = device.inputs if op.part == "qkv" else device.output
            return partial(project, layer, x_D)
        if op.kind == "shared":
            return partial(device.shared, divided, x_D)
        assert op.kind == "neurons", op
        if self._is_streamed(op):
            assert isinstance(device, PassKernels)
            are_named = any(name_of(value) == "named" for value in op.reads)
            return partial(device.streamed, divided, x_D, are_named=are_named)
        return partial(device.hot, divided, x_D, are_named=len(op.reads) > 1)

    def _is_streamed(self, op: Op) -> bool:
        """True for a layer's neurons if they are streamed, at least some of those of a router."""
        if op.kind != "neurons" or op.device == HOST or op.layer is None:
            return False
        if op.layer not in self.streamed:
            return False
        divided = self.divided[op.layer]
        return op.part == "cold" or divided.hot is None or divided.layer.router is not None

    def _copy(self, op: Op) -> Callable[[], None]:
        ((source,), (target,)) = op.reads, op.writes
        device = self.devices[op.home]
        if name_of(source) == "bits":
            assert op.layer is not None
            found = self.bits_of_gpu(op.layer)
            assert found is not None
            return partial(device.main.copy, found[1], found[0])
        if name_of(source) == "position":
            return partial(self._place, device)
        target_D, source_D = (self._tensor(value, op.layer) for value in (target, source))
        if device_of(source) != HOST and name_of(source) in _OF_NEURONS:
            first_D, *more = rows_PD = self._rows([source], op.layer)
            if more:
                return partial(launch_add_norm, device, first_D, rows_PD[1:], None, None, target_D)
        return partial(device.main.copy, target_D, source_D)

    def _place(self, device: DeviceKernels) -> None:
        """Copies the rows' positions to a GPU, with a cache in blocks also the rows' sequences and
        the block tables, and with recurrent states the runs of rows and their slots."""
        b, host = device.buffers, self.host
        names = ["position", *(["sequence"] if b.tables else [])]
        if b["runs"].numel():
            device.main.copy(b["runs"], host["runs"][: len(b["runs"])])
            names.append("writes")
        for name in names:
            device.main.copy(b[name], host[name])
        for table, blocks_SN in b.tables.items():
            device.main.copy(blocks_SN, host.tables[table])

    def _tensor(self, value: str, layer: int | None) -> Tensor:
        name, device = name_of(value), device_of(value)
        divided = None if layer is None else self.divided[layer]
        if device != HOST:
            return self.devices[device].value(name, divided)
        found = self.host.shared(name)
        if name == "named":
            assert divided is not None
            found = divided.named_W
        elif name == "routed" and divided and divided.routed_R is not None:
            found = divided.routed_R
        assert found is not None, value
        if name not in ("named", "routed", "qkv", "heads"):
            return found
        assert layer is not None
        own = self.weights.layers[layer]
        if name in ("qkv", "heads"):
            size = own.attention.widths[name == "heads"]
        elif name == "named":
            size = -(-own.ffn.num_neurons // 32)
        else:
            assert own.router is not None
            size = 2 * own.router.spec.num_used
        return beginning(found, 1 if found.dim() == 1 else len(found), size)


# Outputs of neurons, of which there may be partial sums.
_OF_NEURONS = ("ffn_out", "hot_out", HOT_SUM, LATENT_SUM)


def _copy_to_rows(device: DeviceKernels, target: Tensor, values_D: Tensor) -> None:
    for row_D in target.view(-1, len(values_D)):
        device.main.copy(row_D, values_D)


def is_in_line(op: Op) -> bool:
    """True for operations that the host runs as a part of the native step."""
    return op.device == HOST and op.kind != "copy" and not op.is_beside and op.part != "positions"


def _is_return(op: Op) -> bool:
    """True if an operation copies the output of the CPU's part of a divided layer to the GPU."""
    return op.kind == "copy" and op.is_beside and device_of(op.reads[0]) == HOST


def joins(submissions: Sequence[Submission]) -> dict[int, int]:
    """For submissions to a GPU, the last function of the CPU that must have run before; both are
    indices. The CPU runs its functions in order, so the earlier ones have run, too."""
    found: dict[int, int] = {}
    for first, second in edges([(each.reads, each.writes) for each in submissions]):
        is_for_cpu = [isinstance(submissions[i].work, HostNode) for i in (first, second)]
        if is_for_cpu == [True, False]:
            found[second] = max(first, found.get(second, first))
    return found
