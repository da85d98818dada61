"""Some neurons of a layer on one device, and what their activation does.

What this module does not know: layers, modes, who runs them.

Letters: A active neurons, N neurons of a block."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from sparkinfer.architecture import SMOOTH, Activation
from sparkinfer.runtime.weights.matrix import Linear, Matrix

Mode = Literal["dense", "exact", "predicted"]


@dataclass(frozen=True, kw_only=True)
class Gate:
    """What the activation of a layer does; `threshold` as in model_file.ModelFile."""

    activation: Activation
    threshold: float

    def act(self, gate: Tensor, *, is_dense: bool) -> tuple[Tensor, Tensor]:
        """(activation, whether the neuron fires). A neuron that does not fire gives zero.

        The threshold of SiLU and GELU is an approximation, so `dense` does without it; that of
        FATReLU is a part of the model (ProSparse, arXiv 2402.13516). What is no number fires, or it
        would vanish."""
        value = self.before_threshold(gate)
        if is_dense and self.activation in SMOOTH:
            return value, torch.ones_like(value, dtype=torch.bool)
        fires = self._fires(value)
        return value * fires, fires

    def before_threshold(self, gate: Tensor) -> Tensor:
        """What is compared with a threshold: SiLU or GELU of the gate, else the gate."""
        return self.smooth(gate) if self.activation in SMOOTH else gate

    def above_threshold(self, value: Tensor) -> Tensor:
        """And what is left of it."""
        return value * self._fires(value)

    def _fires(self, value: Tensor) -> Tensor:
        if self.activation in SMOOTH:
            return ~(value.abs() <= self.threshold)
        return ~(value <= self.opens_above)

    @property
    def opens_above(self) -> float:
        """Where a neuron with a ReLU fires; SiLU and GELU compare what comes out instead."""
        assert self.activation not in SMOOTH, self.activation
        return self.threshold if self.activation == "fatrelu" else 0.0

    def smooth(self, gate: Tensor) -> Tensor:
        """SiLU or GELU, without a threshold."""
        if self.activation == "silu":
            return F.silu(gate)
        return F.gelu(gate, approximate="tanh" if self.activation == "gelu_tanh" else "none")

    def hidden(self, activated: Tensor, up: Tensor | None) -> Tensor:
        """act(gate) * up, where dReLU takes the ReLU of both (TurboSparse, arXiv 2406.05955)."""
        if up is None:
            return activated
        return activated * (F.relu(up) if self.activation == "drelu" else up)


@dataclass(frozen=True, kw_only=True)
class NeuronBlock:
    """Some neurons of a layer on one device.

    `row_N` are their rows in the matrices: None where the block has matrices of its own, the
    neuron ids where the matrices are those of the whole layer."""

    gate: Linear
    up: Linear | None  # None: the model has no gates, and `gate` is its up projection
    down: Matrix  # neuron-major: row j is what neuron j adds
    id_N: Tensor  # on the device of the block: int64 on the CPU, int32 on a GPU
    row_N: Tensor | None
    is_whole: bool = False  # all neurons of the layer, in order

    @property
    def device(self) -> torch.device:
        return self.gate.weight.data.device

    @property
    def is_native(self) -> bool:
        """Whether the C++ kernels take all of it."""
        matrices = [self.gate.weight, self.down] + ([self.up.weight] if self.up else [])
        return all(matrix.is_native for matrix in matrices)

    def part(self, start: int, stop: int) -> "NeuronBlock":
        """Some of its neurons that follow one another; nothing is copied."""
        ids = self.id_N[start:stop]
        if self.row_N is not None:
            return replace(self, id_N=ids, row_N=self.row_N[start:stop], is_whole=False)
        return replace(
            self,
            gate=self.gate.part(start, stop),
            up=None if self.up is None else self.up.part(start, stop),
            down=self.down.part(start, stop),
            id_N=ids,
            is_whole=False,
        )

    def rows(self, position_A: Tensor) -> Tensor:
        """int32 rows of the neurons at these positions of the block."""
        chosen = position_A if self.row_N is None else self.row_N[position_A]
        return chosen.to(torch.int32)
