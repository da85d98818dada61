"""Submits the kernels of a GPU's operations to its stream: those of a step for some rows, and a
pass's products, of as many rows as a prompt has, in tiles.

In tiles, a matrix multiplies values in a type of 16 bits, or in f32 (tile_dtype). Where they may
exceed what f16 takes, a row's values are divided by a power of two first, which is exact.

Letters: T rows, D columns, N rows of a matrix."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ParamSpec

import torch
from torch import Tensor

from hotsplit.model.weight_types import file_kind
from hotsplit.runtime.device.streams import Stream
from hotsplit.runtime.kernels.gpu.expert_pairs import Pairs
from hotsplit.runtime.kernels.stored import StoredMatrix
from hotsplit.runtime.weights.matrix import Linear

if TYPE_CHECKING:
    from hotsplit.runtime.kernels.gpu.gpu_kernel import OneVersion
    from hotsplit.runtime.kernels.gpu.kernels import Kernels

Parameters = ParamSpec("Parameters")


def tile_dtype(kind: str) -> torch.dtype:
    """The type in which a matrix of this kind is multiplied: bf16 stays, because its values may
    exceed f16's range, and so does f32, whose results are compared with other programs'."""
    return {"f32": torch.float32, "bf16": torch.bfloat16}.get(file_kind(kind), torch.float16)


LEAST_TILE_ROWS = 16  # of a matrix whose products are tiles; smaller ones have row kernels


@dataclass(frozen=True)
class Rounded:
    """Values [T, D] in the type of a product, and the powers of two [T] that they are divided
    by."""

    values_TD: Tensor
    power_T: Tensor | None

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None]:
        return self.values_TD, self.power_T

    def __len__(self) -> int:
        return len(self.values_TD)


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """The kernels of a GPU and its main stream."""

    kernels: "Kernels"
    main: Stream

    def run(
        self,
        kernel: "OneVersion[Parameters]",
        *arguments: Parameters.args,
        **options: Parameters.kwargs,
    ) -> None:
        """Submits a kernel, of which its declaration says what it reads and writes."""
        reads, writes = kernel.uses(*arguments, **options)
        self.launch(lambda: kernel(*arguments, **options), reads, writes)

    def launch(
        self, run: Callable[[], None], reads: Sequence[Tensor], writes: Sequence[Tensor]
    ) -> None:
        """Submits what torch computes on the GPU, or a kernel of no record."""
        self.main.launch(run, reads=reads, writes=writes)

    def project(self, linears: Sequence[Linear], x_D: Tensor | Rounded, out: Tensor) -> None:
        """The products of several matrices with the same vector, side by side."""
        assert isinstance(x_D, Tensor)
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
        num_heads: int = 1,
    ) -> None:
        """out = the matrix times x, plus its bias; `has_relu`: the ReLU of that; see
        kernels.gpu.rows.dot."""
        given = linear.weight, linear.bias_N, x_D, out_N
        self.run(self.kernels.dot, *given, has_relu=has_relu, cap=cap, num_heads=num_heads)


@dataclass(frozen=True, kw_only=True)
class TileLauncher(Launcher):
    """`rounded_room` and `power_T`: memory for rounded values of the widest product, and for their
    powers."""

    rounded_room: Tensor  # f32, flat
    power_T: Tensor  # f32
    hidden_power_T: Tensor  # likewise, of hidden values; one for each pair

    def rounded(self, x: Tensor | Rounded, kind: str) -> Rounded:
        """The values in the type of a matrix of this kind, valid until the next call."""
        dtype = tile_dtype(kind)
        if isinstance(x, Rounded):
            assert x.values_TD.dtype == dtype, (x.values_TD.dtype, kind)
            return x
        if x.dtype == dtype:
            return Rounded(x, None)
        target = self.room_for(x, dtype)
        self.round(x, None, None, None, 0.0, target, None)
        return target

    def room_for(self, x_TD: Tensor, dtype: torch.dtype) -> Rounded:
        """Memory for rounded values; all of it is the same."""
        has_power = dtype == torch.float16 and x_TD.dtype == torch.float32
        return Rounded(
            self.rounded_room.view(dtype)[: x_TD.numel()].view(x_TD.shape),
            self.power_T[: len(x_TD)] if has_power else None,
        )

    def round(
        self,
        x_TD: Tensor,
        added_TD: Tensor | None,
        weight_D: Tensor | None,
        bias_D: Tensor | None,
        epsilon: float,
        target: Rounded,
        sum_TD: Tensor | None,
    ) -> None:
        """sum = x + added; target = the norm of that, if it has weights, rounded."""
        weights, round_tokens = (weight_D, bias_D, epsilon), self.kernels.round_tokens
        self.run(round_tokens, x_TD, added_TD, *weights, *target.tensors, sum_TD)

    def multiply(
        self,
        linear: Linear,
        x: Rounded,
        out_TN: Tensor,
        pairs: Pairs | None = None,
        num_heads: int = 1,
    ) -> None:
        given, multiply = (linear.weight, linear.bias_N, *x.tensors, out_TN), self.kernels.multiply
        if pairs is None:
            self.run(multiply, *given, num_heads=num_heads)
        else:
            tile_G3, row_2P, size = pairs.tile_G3, pairs.in_2P, pairs.tile_size
            self.run(multiply, *given, tile_G3=tile_G3, row_2P=row_2P, tile_size=size)

    def multiply_down(
        self, matrix: StoredMatrix, hidden: Rounded, out_TD: Tensor, *, is_added: bool
    ) -> None:
        multiply_down = self.kernels.multiply_down
        self.run(multiply_down, matrix, *hidden.tensors, out_TD, is_added=is_added)

    def project(self, linears: Sequence[Linear], x_D: Tensor | Rounded, out: Tensor) -> None:
        start, rounded = 0, dict[torch.dtype, Rounded]()
        for linear in linears:
            stop = start + linear.weight.num_rows
            if isinstance(x_D, Rounded) or self.is_tiled(linear):
                dtype = tile_dtype(linear.weight.kind)
                if dtype not in rounded:
                    rounded = {dtype: self.rounded(x_D, linear.weight.kind)}
                self.multiply(linear, rounded[dtype], out[:, start:stop])
            else:
                self.dot(linear, x_D, out[:, start:stop])
            start = stop

    def dot(
        self,
        linear: Linear,
        x_D: Tensor,
        out_N: Tensor,
        *,
        has_relu: bool = False,
        cap: float | None = None,
        num_heads: int = 1,
    ) -> None:
        if has_relu or cap is not None or not self.is_tiled(linear):
            super().dot(linear, x_D, out_N, has_relu=has_relu, cap=cap, num_heads=num_heads)
        else:
            rounded = self.rounded(x_D, linear.weight.kind)
            self.multiply(linear, rounded, out_N, num_heads=num_heads)

    def is_tiled(self, linear: Linear) -> bool:
        return linear.weight.num_rows >= LEAST_TILE_ROWS
