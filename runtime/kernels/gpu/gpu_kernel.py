"""The declaration of a GPU kernel: a function whose signature and docstring are the contract, whose
decorator says what a check must know, and which returns two functions: the float64 reference, and
the launch of Triton's kernel, which follows.

Letters: T rows of a step."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any, Generic, ParamSpec, overload

import torch
from torch import Tensor

from hotsplit.runtime.kernels.stored import StoredMatrix

Parameters = ParamSpec("Parameters")
Versions = tuple[Callable[[], None], Callable[[], None]]  # the reference, and Triton's
# A kernel takes these as tensors of one element.
_LISTS = ("index_1", "position_1", "sequence_1")


@dataclass(kw_only=True, eq=False)
class GpuKernel(Generic[Parameters]):
    """`reference` computes it in float64, on any device; `triton` launches Triton's kernel.
    `reads`, `writes`: the arguments whose values differ from step to step, and scratch, which is
    written. All others are weights. `axes`: the axis of a step's rows, of each argument that has
    one if there are several rows."""

    reference: Callable[Parameters, None]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    axes: Mapping[str, int]
    triton: Callable[Parameters, None]

    @property
    def name(self) -> str:
        return self.reference.__name__

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self.reference).parameters)

    @overload
    def __get__(self, record: None, owner: object) -> "GpuKernel[Parameters]": ...
    @overload
    def __get__(self, record: "KernelVersion", owner: object) -> "OneVersion[Parameters]": ...
    def __get__(self, record: "KernelVersion | None", owner: object) -> Any:
        return self if record is None else OneVersion(self, record.of(self))

    def num_rows(self, given: Mapping[str, Any]) -> int | None:
        """T of a step with these arguments; None if they have no axis of rows."""
        first = next((given[name] for name in self.axes if name not in _LISTS), None)
        return None if first is None or first.dim() == 1 else len(first)


@dataclass(frozen=True)
class OneVersion(Generic[Parameters]):
    """One version of a kernel."""

    kernel: GpuKernel[Parameters]
    run: Callable[Parameters, None]

    def __call__(self, *arguments: Parameters.args, **options: Parameters.kwargs) -> None:
        self.run(*arguments, **options)

    def uses(
        self, *arguments: Parameters.args, **options: Parameters.kwargs
    ) -> tuple[list[Tensor], list[Tensor]]:
        """(what it reads, what it writes) of these arguments, by its declaration."""
        reads, writes = list[Tensor](), list[Tensor]()
        given = dict(zip(self.kernel.parameters, arguments, strict=False)) | options
        for name, value in given.items():
            tensors = list(_tensors_of(value))
            writes += tensors if name in self.kernel.writes else ()
            reads += tensors if name in self.kernel.reads or name not in self.kernel.writes else ()
        return reads, writes


def _tensors_of(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, StoredMatrix):
        yield value.data
    elif isinstance(value, Mapping):  # vectors by their names
        yield from value.values()


class KernelVersion:
    """One version of all kernels, which `version` finds: Triton's, the reference or another. As an
    attribute of a record of this class, a GpuKernel is that version of it."""

    def __init__(self, version: Callable[[GpuKernel[Any]], Callable[..., None]]) -> None:
        self._version = version

    def of(self, kernel: GpuKernel[Parameters]) -> Callable[Parameters, None]:
        """This version of a kernel, for example of one that only its operation knows."""
        return self._version(kernel)


def gpu_kernel(
    *,
    reads: tuple[str, ...],
    writes: tuple[str, ...],
    shared: tuple[str, ...] = (),
    rows_axis: Mapping[str, int] | None = None,
    is_of_step: bool = True,
    takes_rows: bool = False,
) -> Callable[[Callable[Parameters, Versions]], GpuKernel[Parameters]]:
    """Declares a kernel. Its reference is for one row of a step, and is run for each of several
    rows unless it `takes_rows`. The arguments read and written have the rows as their first axis,
    or `rows_axis`; those `shared` by rows have none. A kernel of prompts, `is_of_step` False, has
    its own number of tokens."""
    axes = {name: 0 for name in (*reads, *writes) if is_of_step and name not in shared}
    axes |= rows_axis or {}

    def declared(versions: Callable[Parameters, Versions]) -> GpuKernel[Parameters]:
        @wraps(versions)
        def reference(*arguments: Parameters.args, **options: Parameters.kwargs) -> None:
            versions(*arguments, **options)[0]()

        @wraps(versions)
        def triton(*arguments: Parameters.args, **options: Parameters.kwargs) -> None:
            versions(*arguments, **options)[1]()

        kernel = GpuKernel(
            reference=reference, triton=triton, reads=reads, writes=writes, axes=axes
        )
        if axes and not takes_rows:
            kernel.reference = _over_rows(kernel)
        return kernel

    return declared


def _over_rows(kernel: GpuKernel[Parameters]) -> Callable[Parameters, None]:
    """The reference for several rows, whose vectors may be [T, D]; runs the rows one by one."""
    one_row, axes = kernel.reference, kernel.axes
    signature = inspect.signature(one_row)

    @wraps(one_row)
    def run(*arguments: Parameters.args, **options: Parameters.kwargs) -> None:
        given = signature.bind(*arguments, **options).arguments
        num_rows = kernel.num_rows(given)
        if num_rows is None:
            return one_row(*arguments, **options)
        # In reverse, so that a row overwrites what a repetition of it has appended to the cache.
        for row in reversed(range(num_rows)):
            own = {key: _row(given[key], key, axes[key], row) for key in axes if key in given}
            one_row(**{**given, **own})  # type: ignore[call-arg]
        return None

    return run


def _row(values: Tensor | None, name: str, axis: int, row: int) -> Tensor | None:
    if values is None:
        return None
    if name in _LISTS:
        return values[row : row + 1]
    return torch.select(values, axis, row)
