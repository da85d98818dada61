"""The kernel launches of a plan's step, recorded by submitting a step whose kernels do nothing.

Launches that the compiler turns into the same machine code are one variant: a kernel with the
kinds, types, widths, alignment and flags of its arguments, and for a matrix the number of rows per
Triton program, which follows from its number of rows. Steps of several rows have variants of their
own.

Letters: see runtime.kernels.gpu.kernels."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from hotsplit.model.attention import Heads, HeadVector
from hotsplit.model.blocks import SumFactors
from hotsplit.model.rope import Rotary
from hotsplit.model.spec import Attention, Norm, Route
from hotsplit.runtime.cache.state_slots import NO_SLOT, StateRun
from hotsplit.runtime.device.streams import HostNode, PlainStream
from hotsplit.runtime.kernels.gate import Gate
from hotsplit.runtime.kernels.gpu.expert_pairs import LARGE_TILE, SMALL_TILE
from hotsplit.runtime.kernels.gpu.gpu_kernel import GpuKernel
from hotsplit.runtime.kernels.gpu.kernels import Kernels
from hotsplit.runtime.kernels.gpu.launch import rows_of_program
from hotsplit.runtime.kernels.stored import FLOATS, StoredMatrix, rows_together
from hotsplit.runtime.model.layers import Layer, Weights
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.ops.attention.gpu_pass import run_kernels
from hotsplit.runtime.ops.attention.rotary import Places
from hotsplit.runtime.ops.delta.block import DeltaNet
from hotsplit.runtime.ops.delta.gpu import calls
from hotsplit.runtime.ops.neurons.feed_forward import Traffic
from hotsplit.runtime.step import hybrid_builder
from hotsplit.runtime.step.hybrid_device import Take
from hotsplit.runtime.step.hybrid_step import Backend
from hotsplit.runtime.weights import gpu_products
from hotsplit.runtime.weights.expert_block import ExpertBlock
from hotsplit.runtime.weights.neuron_block import NeuronBlock, by_role

# Kernels of prompts alone.
PROMPTS = ("unpack", "multiply", "multiply_down", "round_tokens", "hidden_tokens", "attend_tokens")
SLOTS = ("conv_SJC", "state_SVNM")
_SHORT = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float64: "f64",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "bool",
}
_COMPILED = {each.name for each in fields(Heads)}
_WIDE_LOAD = 16  # bytes; pointers with a smaller alignment make another variant
_UNPACKED_ROWS = 64
_NEURONS = 3000  # hidden values of a check, at most: more than a chunk
# Tokens of passes that take different tiles. No step has as many rows as the first.
_PASSES = (3, 64)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A launch of a kernel with its arguments by name. `variant` names its machine code."""

    declared: GpuKernel[Any]
    arguments: dict[str, Any]
    variant: str
    device: torch.device
    num_rows: int  # of the step

    @property
    def kernel(self) -> str:
        return self.declared.name

    @classmethod
    def of(cls, declared: GpuKernel[Any], *arguments: Any, **options: Any) -> "Launch":
        kernel, axes = declared.name, declared.axes
        bound = inspect.signature(declared.reference).bind(*arguments, **options)
        bound.apply_defaults()
        num_rows = declared.num_rows(bound.arguments) or 1
        words = [
            _words(name, value, axes.get(name) if num_rows > 1 else None)
            for name, value in bound.arguments.items()
        ]
        words += [f"{num_rows} rows"] if num_rows > 1 else []
        # A factor of one is compiled out, and so is a cap of none.
        words += ["scale"] if kernel == "embed" and bound.arguments["scale"] != 1.0 else []
        words += ["cap"] if bound.arguments.get("cap") is not None else []
        words += ["strided"] if _is_norm_strided(kernel, bound.arguments) else []
        tensors = [value for value in bound.arguments.values() if isinstance(value, Tensor)]
        return cls(
            declared=declared,
            arguments=dict(bound.arguments),
            variant=" ".join([kernel, *(word for word in words if word)]),
            device=tensors[0].device,
            num_rows=num_rows,
        )

    def run(self, kernels: Kernels) -> None:
        kernels.of(self.declared)(**self.arguments)


def _is_norm_strided(kernel: str, given: Mapping[str, Any]) -> bool:
    """True for a norm of rows that other values lie between."""
    out = given.get({"add_norm": "out_D", "round_tokens": "out_TD"}.get(kernel, ""))
    return isinstance(out, Tensor) and not out.is_contiguous()


def _words(name: str, value: Any, rows_axis: int | None) -> str:
    """The properties of an argument that distinguish variants, "" if none do. The axis of a step's
    rows does not count."""
    if isinstance(value, StoredMatrix):
        stride = (
            ""
            if value.stride_bytes % _WIDE_LOAD == 0
            else f"/{math.gcd(value.stride_bytes, _WIDE_LOAD)}"
        )
        return f"{value.kind}[{value.width}]{stride}x{rows_of_program(value.num_rows)}"
    if isinstance(value, Tensor):
        dims = [size for axis, size in enumerate(value.shape) if axis != rows_axis]
        dims = dims if len(dims) > 1 else []
        dims = dims[1:] if name in ("out_AD", *SLOTS) else dims
        size = f"[{'x'.join(map(str, dims))}]" if dims else ""
        aligned = "" if value.data_ptr() % _WIDE_LOAD == 0 else " unaligned"
        return f"{name.partition('_')[0]}:{_SHORT[value.dtype]}{size}{aligned}"
    if isinstance(value, Mapping):
        return " ".join(_words(key, each, None) for key, each in value.items())
    if isinstance(value, (Attention, Gate, Route)):
        return " ".join(
            filter(None, (_field_words(f.name, getattr(value, f.name)) for f in fields(value)))
        )
    if isinstance(value, SumFactors):
        return " ".join(f.name for f in fields(value) if getattr(value, f.name) != 1.0)
    if value is None or isinstance(value, float):  # thresholds and epsilons are not compiled in
        return ""
    return (name if value else "") if isinstance(value, bool) else f"{value}"


def _field_words(name: str, value: Any) -> str:
    """The part of a number of a block that may be compiled in."""
    if isinstance(value, Rotary):
        return f"{value.pairing} {value.scaling.magnitude:g}"
    if isinstance(value, Norm):
        return value.kind
    if isinstance(value, HeadVector) or name in ("reads", "writes", "biases", "threshold"):
        return ""
    if isinstance(value, float) and name in _COMPILED:
        return f"{name} {value:g}"
    return name if isinstance(value, float) else _words(name, value, None)


class NoStream(PlainStream):
    """Runs launches, and does nothing else."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        pass

    def host(self, node: HostNode) -> None:
        pass


def launches_of(
    weights: Weights,
    placement: Placement,
    take: Callable[[torch.device], Take],
    max_rows: int = 1,
    num_rows: int = 1,
) -> tuple[Launch, ...]:
    """One launch of each variant, per device, that a step of `num_rows` rows needs; for one row,
    also those that prompts need. No kernel is run. Buffers are those of a step for `max_rows`."""
    found: dict[tuple[str, torch.device], Launch] = {}

    def note(kernel: GpuKernel[Any]) -> Callable[..., None]:
        def noted(*arguments: Any, **options: Any) -> None:
            launch = Launch.of(kernel, *arguments, **options)
            found.setdefault((launch.variant, launch.device), launch)

        return noted

    noting = Kernels(note)
    has_gpu = any(device.type == "cuda" for device in placement.homes)
    backend = Backend(
        kernels=noting,
        stream=lambda device: NoStream(),
        take=take,
        prepare=lambda stream, submit: submit,
        is_pinned=has_gpu,
    )
    step = hybrid_builder.build(weights, placement, Traffic(), backend, max_rows=max_rows)
    if num_rows > 1:
        found.clear()
        assert step.prepare is not None
        step.prepare(num_rows)
        return tuple(found.values())
    for matrix, device, is_down in _multiplied(weights, placement):
        _note_products(noting, matrix, device, is_down=is_down)
    for index, layer in enumerate(weights.layers):
        if placement.dense_on_gpu[index]:
            _note_norms(noting, layer, placement.homes[index])
            if layer.delta is None:
                _note_attention(noting, layer, placement.homes[index])
            else:
                _note_delta(noting, layer.delta, placement.homes[index])
        _note_tokens(noting, layer, placement.homes[index], is_on_gpu=placement.dense_on_gpu[index])
        for experts in layer.ffn.experts:
            _note_experts(noting, experts, layer.ffn.gate, placement.homes[index])
    return tuple(found.values())


def _multiplied(
    weights: Weights, placement: Placement
) -> Iterable[tuple[StoredMatrix, torch.device, bool]]:
    """Matrices that prompts multiply on a GPU, with that GPU, and whether their rows are added:
    those stored there, and the cold neurons that are streamed to it."""
    for index, layer in enumerate(weights.layers):
        home = placement.homes[index]
        own = [linear for each in layer.own.values() for linear in each.linears]
        for linear in (*layer.mixer.inputs, layer.mixer.output, *own):
            if placement.dense_on_gpu[index]:
                yield linear.weight, home, False
        for block in _blocks_of(layer, is_on_gpu=placement.dense_on_gpu[index]):
            for matrix in block.matrices:
                yield matrix, home, matrix is block.down and not block.is_by_output
    if placement.head_on_gpu:
        yield weights.head.weight, placement.homes[-1], False


def _blocks_of(layer: Layer, *, is_on_gpu: bool) -> Iterable[NeuronBlock]:
    """The blocks of neurons that prompts compute on the layer's GPU: those stored there, one of its
    experts, and neurons that are streamed to it. `is_on_gpu`: so are shared experts."""
    yield from layer.ffn.blocks
    hot, _ = by_role(layer.ffn.experts)
    if hot is not None:
        yield hot.expert(0)
    if layer.shared is not None and is_on_gpu:
        yield from layer.shared.ffn.blocks


def _note_products(
    kernels: Kernels, matrix: StoredMatrix, device: torch.device, *, is_down: bool
) -> None:
    """Notes the products of a prompt with the first rows of a matrix, copied to the device if they
    are elsewhere, and their unpacking to a tile, which replaces a wrong product."""
    data = matrix.data[:_UNPACKED_ROWS].to(device)
    part = type(matrix)(data=data, kind=matrix.kind, width=matrix.width)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    kernels.unpack(part, new(len(data), part.width, dtype=gpu_products.tile_dtype(part.kind)))
    is_in_rows = part.kind not in FLOATS and rows_together(part.kind) == 1
    if not (is_in_rows and gpu_products.multiplies_blocks(device)):
        return
    for tokens in _PASSES:
        if not is_down:
            x_TD = new(tokens, part.width, dtype=torch.float16)
            kernels.multiply(part, None, x_TD, new(tokens), new(tokens, len(data)))
            continue
        hidden_TN = new(tokens, len(data), dtype=torch.float16)
        out_TD = new(tokens, part.width)
        kernels.multiply_down(part, hidden_TN, new(tokens), out_TD, is_added=True)


def _note_experts(kernels: Kernels, block: ExpertBlock, gate: Gate, device: torch.device) -> None:
    """Notes a prompt's products with the first rows of two experts, stored on the device or streamed
    to it, and the hidden values between."""
    if not gpu_products.multiplies_blocks(device):
        return
    is_streamed, pairs = not gpu_products.is_on(block, device), _PASSES[0]
    row_2P = torch.tensor([[0, 1, 2], [2, 0, 1]], dtype=torch.int32, device=device)
    factor_P = torch.linspace(0.5, 1.0, pairs).to(device)
    for matrix in block.matrices:
        flat, count = matrix.flat, min(matrix.data.shape[1], _UNPACKED_ROWS)
        data = flat.weight.data[: 2 * count].to(device)
        part = type(flat.weight)(data=data, kind=matrix.kind, width=matrix.width)
        last = len(data) // count - 1
        dtype, is_down = gpu_products.tile_dtype(matrix.kind), matrix is block.down
        power_T = _new(device) if dtype == torch.float16 else None
        bias_N = flat.bias_N
        for size in (SMALL_TILE,) if is_streamed else (SMALL_TILE, LARGE_TILE):
            given: dict[str, Any] = {
                "row_2P": row_2P,
                "tile_size": size,
                "factor_P": factor_P if is_down else None,
                "tile_G3": torch.tensor(
                    [[0, 0, 2], [last, 2, 1]], dtype=torch.int32, device=device
                ),
            }
            if is_down and not block.is_by_output:
                bias_N = None if bias_N is None else bias_N[: 2 * matrix.width].to(device)
                hidden_TN, out_TD = _new(device, count, dtype=dtype), _new(device, matrix.width)
                kernels.multiply_down(
                    part, hidden_TN, power_T, out_TD, is_added=False, bias_D=bias_N, **given
                )
                continue
            bias_N = None if bias_N is None else bias_N[: 2 * count].to(device)
            x_TD = _new(device, matrix.width, dtype=dtype)
            kernels.multiply(part, bias_N, x_TD, power_T, _new(device, count), **given)
    number, dtype = min(len(block.id_F), _NEURONS), gpu_products.tile_dtype(block.down.kind)
    kernels.hidden_tokens(
        _new(device, number),
        _new(device, number) if block.up else None,
        None,
        gate,
        _new(device, number, dtype=dtype),
        _new(device) if dtype == torch.float16 else None,
    )


def _new(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A value, or a row of them, for each token of a pass."""
    return torch.empty(_PASSES[0], *shape, dtype=dtype, device=device)


def _note_norms(kernels: Kernels, layer: Layer, device: torch.device) -> None:
    """Notes the norms of a prompt, in the types of the products that read them."""
    first = layer.ffn.blocks[0].gate if layer.router is None else layer.router.linear
    readers = [linear.weight for linear in (*layer.mixer.inputs, first)]
    if (predictor := layer.ffn.predictor) is not None:
        readers.append((predictor.down or predictor.up).weight)
    for dtype in dict.fromkeys(gpu_products.tile_dtype(matrix.kind) for matrix in readers):
        for norm in layer.norms.values():
            width, has_power = len(norm.weight_D), dtype == torch.float16 and not norm.fits_f16
            x_TD, added_TD, sum_TD = (_new(device, width) for _ in range(3))
            kernels.round_tokens(
                x_TD,
                added_TD,
                norm.weight_D,
                norm.bias_D,
                norm.epsilon,
                _new(device, width, dtype=dtype),
                _new(device) if has_power else None,
                sum_TD,
            )


def _note_tokens(kernels: Kernels, layer: Layer, device: torch.device, *, is_on_gpu: bool) -> None:
    """Notes the hidden values of a prompt, and values that are rounded as they are: those of heads,
    of the last hidden state, of layers whose norms are elsewhere, and hidden values of experts."""
    blocks = list(_blocks_of(layer, is_on_gpu=is_on_gpu))
    hidden = [len(block.id_N) for block in blocks if block.is_by_output]
    own = (linear for each in layer.own.values() for linear in each.linears)
    hidden += [linear.weight.width for linear in own] if is_on_gpu else []
    for width in (layer.mixer.widths[1], *(block.width for block in blocks[:1]), *hidden):
        x_TD, out_TD = _new(device, width), _new(device, width, dtype=torch.float16)
        kernels.round_tokens(x_TD, None, None, None, 0.0, out_TD, _new(device), None)
    block = next((each for each in blocks if not each.is_by_output), None)
    if block is None:
        return
    gate = layer.ffn.gate
    number, dtype = min(len(block.id_N), _NEURONS), gpu_products.tile_dtype(block.down.kind)
    named_TN = _new(device, number, dtype=torch.bool) if layer.ffn.predictor else None
    kernels.hidden_tokens(
        _new(device, number),
        _new(device, number) if block.up else None,
        named_TN,
        gate,
        _new(device, number, dtype=dtype),
        _new(device) if dtype == torch.float16 else None,
    )


def _note_attention(kernels: Kernels, layer: Layer, device: torch.device) -> None:
    """Notes the rotation of a prompt's heads, with queries in the type of the keys, and attention."""
    attention, tokens = layer.attention, _PASSES[0]
    table = attention.cache.table
    if not gpu_products.is_on(attention.cache.key_BKPX, device):
        return
    sequence_T = table_SN = None
    if not table.is_whole:
        sequence_T = torch.zeros(tokens, dtype=torch.int32, device=device)
        table_SN = torch.zeros(1, table.block_SN.shape[1], dtype=torch.int32, device=device)
    places = Places(torch.arange(tokens, device=device), sequence_T, table_SN)
    run_kernels(kernels, attention, torch.empty(tokens, attention.widths[0], device=device), places)


def _note_delta(kernels: Kernels, delta: DeltaNet, device: torch.device) -> None:
    """Notes the kernels of a delta net for the tokens of a prompt."""
    slots = StateRun(NO_SLOT, (NO_SLOT,) * _PASSES[0]).on(device)
    projected, heads = delta.widths
    mixed = _new(device, delta.spec.mixed_size)
    for call in calls(kernels, delta, _new(device, projected), slots, mixed, _new(device, heads)):
        call.run()
