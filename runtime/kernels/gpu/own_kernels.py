"""Kernels that only one kind of operation launches. Their module declares each of them beside its float64
reference, with what a check must know; records of kernels (kernels.py) find them by that."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Generic, ParamSpec, Protocol

from hotsplit.runtime.kernels.gpu.step_rows import over_rows

Parameters = ParamSpec("Parameters")


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnKernel(Generic[Parameters]):
    """`reference` computes it in float64, on any device. `module` has Triton's, under the same name.
    `reads`, `writes`: the arguments with values of each row of a step, whose first axis are the rows if there
    are several. All others are weights."""

    reference: Callable[Parameters, None]
    module: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.reference.__name__

    @property
    def axes(self) -> dict[str, int]:
        """The axis of rows of each argument that has one (step_rows.AXES)."""
        return dict.fromkeys((*self.reads, *self.writes), 0)

    @cached_property
    def triton(self) -> Callable[Parameters, None]:
        found: Callable[Parameters, None] = getattr(import_module(self.module), self.name)
        return found


class Own(Protocol):
    """Finds a record's own version of such a kernel."""

    def __call__(self, kernel: OwnKernel[Parameters], /) -> Callable[Parameters, None]: ...


def own_kernel(
    module: str, *, reads: tuple[str, ...], writes: tuple[str, ...]
) -> Callable[[Callable[Parameters, None]], OwnKernel[Parameters]]:
    """Declares a kernel by its float64 reference for one row; see OwnKernel."""

    def declared(one_row: Callable[Parameters, None]) -> OwnKernel[Parameters]:
        axes = dict.fromkeys((*reads, *writes), 0)
        return OwnKernel(
            reference=over_rows(one_row, axes), module=module, reads=reads, writes=writes
        )

    return declared
