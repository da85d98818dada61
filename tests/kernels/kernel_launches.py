"""The kernel launches of a plan's step, recorded by submitting a step whose kernels do nothing.

Launches that the compiler turns into the same machine code are one variant: a kernel with the
kinds, types, widths, alignment and flags of its arguments, and for a matrix the number of rows per
Triton program, which follows from its number of rows. Steps of several rows have variants of their
own.

Letters: see runtime.kernels.gpu.kernels."""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from hotsplit.model.attention import Heads, HeadVector
from hotsplit.model.blocks import SumFactors
from hotsplit.model.rope import Rotary
from hotsplit.model.spec import Attention, Norm, Route
from hotsplit.runtime.device.streams import HostNode, PlainStream
from hotsplit.runtime.kernels.gate import Gate
from hotsplit.runtime.kernels.gpu.gpu_kernel import GpuKernel
from hotsplit.runtime.kernels.gpu.kernels import Kernels
from hotsplit.runtime.kernels.gpu.launch import rows_of_program
from hotsplit.runtime.kernels.stored import StoredMatrix
from hotsplit.runtime.model.layers import Weights
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.ops.neurons.feed_forward import Traffic
from hotsplit.runtime.step import hybrid_builder
from hotsplit.runtime.step.backend import Backend
from hotsplit.runtime.step.hybrid_device import Take
from hotsplit.runtime.step.pass_device import PassSetup

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
# Rows of passes that take different tiles.
_PASSES = (32, 64)


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
    also those that passes need. No kernel is run. Buffers are those of a step for `max_rows`."""
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
    passes = PassSetup(num_rows=max(_PASSES), take=take)
    step = hybrid_builder.build(
        weights, placement, Traffic(), backend, max_rows=max_rows, passes=passes
    )
    if num_rows > 1:
        found.clear()
        assert step.prepare is not None
        step.prepare(num_rows)
        return tuple(found.values())
    for length in step.passes.lengths:
        step.passes.prepare(length, False)
    return tuple(found.values())
