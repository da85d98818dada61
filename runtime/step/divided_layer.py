"""A layer's neurons or experts divided by device, and which of its outputs a GPU has in rows of
DeviceBuffers.sum_PD, where the summands of a sum are adjacent.

Row 0 is attention's output, and the rows after it are those of neurons. Values of position-wise
operations are in rows while these are free, from 1 before the neurons, and from 0 after the last
read of both; other such values have buffers of their own.

Letters: F neurons of a layer, W words of F bits, N hot neurons, K experts of a row."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from hotsplit.model.spec import Block, LayerSpec, ModelSpec, Neurons, read_by, written_by
from hotsplit.runtime.kernels.gpu.ranges import down_parts, expert_parts
from hotsplit.runtime.model.layers import Layer
from hotsplit.runtime.ops.neurons.chosen import NativeExperts
from hotsplit.runtime.ops.neurons.native import NativeNeurons
from hotsplit.runtime.step.program import HOST, device_of, name_of
from hotsplit.runtime.weights.expert_block import ExpertBlock
from hotsplit.runtime.weights.neuron_block import NeuronBlock

CORE = (
    "attn_out",
    "hot_out",
    "cold_out",
    "ffn_out",
    "bias",
    "shared_out",
)  # the rows of all other operations


@dataclass(frozen=True, kw_only=True)
class DividedLayer:
    """A layer's neurons or experts divided by device; `hot_id_N` is None if all neurons are hot, or
    none."""

    index: int
    layer: Layer
    hot: NeuronBlock | ExpertBlock | None
    hot_id_N: Tensor | None  # int32
    cold: NativeNeurons | NativeExperts | None
    num_parts: int  # S, the partial sums of the hot neurons, or of the outputs of all hot experts
    num_shared: int = 0  # partial sums of shared experts
    num_cold: int = 0  # 1: cold neurons or experts are streamed to the GPU, in a pass
    named_W: Tensor  # bits of the predicted neurons on the host, int32 [F / 32 rounded up] per row
    # With a neuron cache and no predictor, int32 on the device: the slot of each neuron, and the
    # bits of the hot neurons that fired, which a step writes.
    hot_bits: tuple[Tensor, Tensor] | None = None
    # With a neuron cache of experts: where the host gets the router's result of this layer, which
    # others do not overwrite.
    routed_R: Tensor | None = None
    own_rows: Mapping[str, int] = field(default_factory=dict)  # of position-wise operations

    def has_rows(self, name: str) -> bool:
        """True for a value in DeviceBuffers.sum_PD."""
        return name in CORE or name in self.own_rows

    def rows(self, name: str) -> range:
        """The rows of an output in DeviceBuffers.sum_PD; the summands of a sum are adjacent."""
        end = 1 + self.num_parts
        assert self.has_rows(name), name
        if name == "cold_out":
            return range(end, end + self.num_cold)
        if name in self.own_rows:
            return range(self.own_rows[name], self.own_rows[name] + 1)
        if name == "attn_out":
            return range(0, 1)
        if name == "hot_out" or (name == "ffn_out" and self.num_parts):
            return range(1, end)
        end += self.num_cold
        if name == "bias":
            return range(end, end + 1)
        if name == "shared_out":  # after the experts', wherever they are
            begin = end + (not self.num_parts)
            return range(begin, begin + self.num_shared)
        return range(end, end + 1)  # "ffn_out", the CPU's alone, copied

    def summands(self, names: Iterable[str], summed: Iterable[str]) -> range | None:
        """The rows of these outputs; None unless they are adjacent. Of those in `summed`, the first
        row is the sum of all."""
        first, rows = set(summed), list[int]()
        for name in names:
            if not self.has_rows(name):
                return None
            rows += self.rows(name)[:1] if name in first else self.rows(name)
        found = range(rows[0], rows[0] + len(rows)) if rows else range(0)
        return found if rows == list(found) else None

    def rows_of(self, values: Iterable[str]) -> set[tuple[str, int]]:
        """The rows of values of the step program, each with the GPU that has it."""
        found = {value for value in values if device_of(value) != HOST}
        found = {value for value in found if self.has_rows(name_of(value))}
        return {(device_of(value), row) for value in found for row in self.rows(name_of(value))}


def hot_sizes(
    layer: LayerSpec, num_hot: int, width: int, *, is_by_output: bool = False
) -> tuple[int, int]:
    """(hidden values of a row, partial sums) of the neurons or experts of a layer that are on a
    GPU. `is_by_output`: experts have a row of `down` for each output."""
    if not num_hot:
        return 0, 0
    if layer.route is None:  # and the gates, if all are needed
        return num_hot * (1 + layer.neurons.needs_all_gates), down_parts(num_hot, width)
    used, own = layer.route.num_used, layer.neurons.of_expert
    return used * own, used * expert_parts(used, own, width, is_by_output=is_by_output)


def shared_parts(layer: LayerSpec, width: int, *, is_by_output: bool) -> int:
    """Partial sums of the shared experts of a layer on a GPU; 0 without any."""
    if layer.shared is None:
        return 0
    return 1 if is_by_output else down_parts(layer.shared.number, width)


def output_rows(spec: ModelSpec) -> tuple[Mapping[str, int], ...]:
    """For each layer, the rows of values that are as wide as the hidden state, and of the layer
    alone."""
    outer = _outer(spec)
    return tuple(_rows(layer, spec.hidden_size, outer) for layer in spec.layers)


def own_sizes(spec: ModelSpec) -> dict[str, int]:
    """f32 values of a token, of each value that has a buffer of its own."""
    apart = set(_outer(spec))
    for layer, rows in zip(spec.layers, output_rows(spec), strict=True):
        apart |= {name for block in layer.position_wise for name in block.outputs} - rows.keys()
    return {name: size for name, size in spec.value_sizes.items() if name in apart - {"x"}}


def _outer(spec: ModelSpec) -> frozenset[str]:
    """The values that operations outside the layers read or write."""
    blocks = (*spec.first, *spec.last)
    return frozenset(name for block in blocks for name in (*block.inputs, *block.outputs))


def _rows(layer: LayerSpec, hidden_size: int, outer: frozenset[str]) -> Mapping[str, int]:
    blocks = layer.blocks
    neurons = [block for block in blocks if isinstance(block, Neurons)]
    core = {layer.mixer.writes, *(n for each in neurons for n in (each.reads, each.writes))}
    begin, end = blocks.index(neurons[0]), max(_last_read(blocks, name) for name in core)
    before, after = list[str](), list[str]()
    for block in layer.position_wise:
        at, sizes = blocks.index(block), block.values(hidden_size)
        for name in block.outputs:
            is_alone = name not in ("x", *outer) and _first_use(blocks, name) == at
            if not is_alone or sizes[name] != hidden_size or name in block.inputs:
                continue
            if max(at, _last_read(blocks, name)) < begin:
                before.append(name)
            elif at > end:
                after.append(name)
    return {name: row for row, name in (*enumerate(before, start=1), *enumerate(after))}


def _first_use(blocks: Sequence[Block], name: str) -> int:
    found = (i for i, b in enumerate(blocks) if name in (*read_by(b), *written_by(b)))
    return next(found, len(blocks))


def _last_read(blocks: Sequence[Block], name: str) -> int:
    return max((i for i, block in enumerate(blocks) if name in read_by(block)), default=-1)
