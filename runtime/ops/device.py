"""Submits the kernels of a GPU's operations to its stream."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from hotsplit.runtime.device.streams import Stream
from hotsplit.runtime.weights.matrix import Linear

if TYPE_CHECKING:
    from hotsplit.runtime.kernels.gpu.kernels import Kernels


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """The kernels of a GPU and its main stream."""

    kernels: "Kernels"
    main: Stream

    def launch(
        self,
        run: Callable[[], None],
        reads: Sequence[Tensor | None],
        writes: Sequence[Tensor | None],
    ) -> None:
        """Submits a kernel; None: an operand that it does not have."""
        self.main.launch(
            run,
            reads=[t for t in reads if t is not None],
            writes=[t for t in writes if t is not None],
        )

    def project(self, linears: Sequence[Linear], x_D: Tensor, out: Tensor) -> None:
        """The products of several matrices with the same vector, side by side."""
        start = 0
        for linear in linears:
            stop = start + linear.weight.num_rows
            self.dot(linear, x_D, out[..., start:stop])
            start = stop

    def dot(
        self,
        linear: Linear,
        x_D: Tensor,
        out_N: Tensor,
        *,
        has_relu: bool = False,
        cap: float | None = None,
    ) -> None:
        """out = the matrix times x, plus its bias; `has_relu`: the ReLU of that; see
        kernels.gpu.rows.dot."""
        weight, bias_N = linear.weight, linear.bias_N
        self.launch(
            lambda: self.kernels.dot(weight, bias_N, x_D, out_N, has_relu=has_relu, cap=cap),
            [weight.data, bias_N, x_D],
            [out_N],
        )
