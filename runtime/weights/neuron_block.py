"""A block of neurons of a layer on one device, and their activation.

Letters: T tokens, A active neurons, N neurons of a block, or slots, F neurons of a layer, C cold
neurons."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hotsplit.model.neurons import SMOOTH
from hotsplit.model.spec import Activation
from hotsplit.runtime.weights import gpu_products
from hotsplit.runtime.weights.matrix import Linear, Matrix

# "hot": the plan's hot neurons, and all neurons of undivided layers; "cold": on the CPU, while the
# rest of the layer may be elsewhere.
Role = Literal["hot", "cold"]
SWIGLU_LIMIT, SWIGLU_ALPHA = 7.0, 1.702  # of swiglu_oai


@dataclass(frozen=True, kw_only=True)
class Gate:
    """The activation of a layer; `threshold` as in model_file.ModelFile. `computes_all`: neurons that
    do not fire are computed too, so that the thresholds of SiLU and GELU, and limits, which are
    approximations, have no effect."""

    activation: Activation
    threshold: float
    computes_all: bool = False
    cutoff: float | None = None  # see model.spec.Neurons

    def cut(self, gate_TF: Tensor) -> Tensor:
        """What the cutoff leaves of the gates of all neurons of a layer."""
        if self.cutoff is None:
            return gate_TF
        exact_TF = gate_TF.double()
        deviation_T1, mean_T1 = torch.std_mean(exact_TF, dim=-1, correction=0, keepdim=True)
        return F.relu(gate_TF - (mean_T1 + self.cutoff * deviation_T1).to(gate_TF.dtype))

    def act(self, gate: Tensor, *, limit: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Applies the activation; returns (activated values, whether the neuron fires). Neurons
        that do not fire give zero. A `limit` per neuron, for SiLU and GELU only, replaces the
        threshold.

        ReLU squared is that of Primer (So et al. 2021). The threshold of FATReLU is part of the model (ProSparse, arXiv 2402.13516), so it always
        counts. NaN fires, so that it is not lost."""
        value = self.before_threshold(gate)
        if self.computes_all and self.activation in SMOOTH:
            return value, torch.ones_like(value, dtype=torch.bool)
        fires = self._fires(value) if limit is None else above(value, limit)
        value = torch.where(fires, value, 0.0)  # a product would turn -inf into NaN
        return value.square_() if self.activation == "relu2" else value, fires

    def hidden_factor(
        self, gate_TN: Tensor, up_TN: Tensor | None, named_TN: Tensor | None, dtype: torch.dtype
    ) -> gpu_products.Factor:
        """The hidden values on a GPU, in one launch, as a factor of products in a type; those of
        neurons that are not named are 0."""
        out_TN, power_T = gpu_products.new_rounded(gate_TN, dtype)
        with gpu_products.made_current(gate_TN.device):
            gpu_products.kernels().hidden_tokens(
                gate_TN, up_TN, named_TN, self.activation, self.threshold, self.computes_all,
                out_TN, power_T, self.cutoff,
            )  # fmt: skip
        return gpu_products.Factor.of_rounded(out_TN, power_T)

    def before_threshold(self, gate: Tensor) -> Tensor:
        """The value compared with a threshold: SiLU or GELU of the gate, else the gate."""
        return self.smooth(gate) if self.activation in SMOOTH else gate

    def _fires(self, value: Tensor) -> Tensor:
        if self.activation in SMOOTH:
            return ~(value.abs() <= self.threshold)
        return ~(value <= self.opens_above)

    @property
    def opens_above(self) -> float:
        """The gate value above which a ReLU neuron fires; SiLU and GELU compare their output."""
        assert self.activation not in SMOOTH, self.activation
        return self.threshold if self.activation == "fatrelu" else 0.0

    def smooth(self, gate: Tensor) -> Tensor:
        """SiLU or GELU, without a threshold."""
        if self.activation == "silu":
            return F.silu(gate)
        if self.activation == "swiglu_oai":
            gate = gate.clamp(max=SWIGLU_LIMIT)
            return gate * (SWIGLU_ALPHA * gate).sigmoid()
        return F.gelu(gate, approximate="tanh" if self.activation == "gelu_tanh" else "none")

    def hidden(self, activated: Tensor, up: Tensor | None) -> Tensor:
        """act(gate) * up; dReLU takes the ReLU of both (TurboSparse, arXiv 2406.05955), gpt-oss's
        SwiGLU adds 1 to a clamped up (transformers, modeling_gpt_oss.py)."""
        if up is None:
            return activated
        if self.activation == "swiglu_oai":
            return activated * (up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1.0)
        return activated * (F.relu(up) if self.activation == "drelu" else up)


@dataclass(frozen=True, kw_only=True)
class NeuronBlock:
    """Some neurons of a layer on one device.

    `row_N`: their rows in the matrices; None if the block has matrices of its own, in the order of
    `id_N`."""

    role: Role
    gate: Linear
    up: Linear | None  # None: the model has no gates, and `gate` is its up projection
    # Neuron-major: row j is what neuron j adds. If `is_by_output`, [D, N] as in llama.cpp's files, of
    # a layer that computes all neurons.
    down: Matrix
    # On the device of the block. int32 in a GPU's slab, and for the cold neurons of a layer with
    # slots there; otherwise int64.
    id_N: Tensor
    row_N: Tensor | None
    is_whole: bool = False  # all neurons of the layer, in order
    is_by_output: bool = False
    # f32 limits at or below which |act(gate)| counts as silent.
    gate_limit_N: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.gate.weight.data.device

    @property
    def is_native(self) -> bool:
        """True if the C++ kernels support the whole block."""
        return all(matrix.is_native for matrix in self.matrices)

    @property
    def matrices(self) -> list[Matrix]:
        """Gate, up (if there is one) and down."""
        up = [] if self.up is None else [self.up.weight]
        return [self.gate.weight, *up, self.down]

    @property
    def tensors(self) -> list[Tensor]:
        """The data of its matrices and its biases, with a row or a value per neuron."""
        linears = [self.gate] if self.up is None else [self.gate, self.up]
        biases = [linear.bias_N for linear in linears if linear.bias_N is not None]
        return [*(matrix.data for matrix in self.matrices), *biases]

    @property
    def width(self) -> int:
        """D."""
        return self.down.num_rows if self.is_by_output else self.down.width

    def limited(self, gate_F: Tensor | None) -> "NeuronBlock":
        """The block with these limits, given for all neurons of the layer."""
        if gate_F is None:
            return replace(self, gate_limit_N=None)
        own_N = gate_F[self.id_N.cpu().long()].contiguous().to(self.device)
        return replace(self, gate_limit_N=own_N)

    def gate_limit(self, position_A: Tensor | None) -> Tensor | None:
        """Limits of the neurons at these positions of the block (None: all)."""
        limit_N = self.gate_limit_N
        return limit_N if limit_N is None or position_A is None else limit_N[position_A]

    def part(self, start: int, stop: int) -> "NeuronBlock":
        """A range of consecutive neurons, as a view."""
        assert not self.is_by_output
        limit_N = None if self.gate_limit_N is None else self.gate_limit_N[start:stop]
        block = replace(self, id_N=self.id_N[start:stop], gate_limit_N=limit_N, is_whole=False)
        if self.row_N is not None:
            return replace(block, row_N=self.row_N[start:stop])
        return replace(
            block,
            gate=self.gate.part(start, stop),
            up=None if self.up is None else self.up.part(start, stop),
            down=self.down.part(start, stop),
        )

    def rows(self, position_A: Tensor) -> Tensor:
        """int32 rows of the neurons at these positions of the block."""
        chosen = position_A if self.row_N is None else self.row_N[position_A]
        return chosen.to(torch.int32)


class HasRole(Protocol):
    """A block of neurons or of experts."""

    @property
    def role(self) -> Role: ...


B = TypeVar("B", bound=HasRole)


def by_role(blocks: Sequence[B]) -> tuple[B | None, B | None]:
    """The hot and the cold block of a layer; None for one that it does not have."""
    found = {block.role: block for block in blocks}
    assert len(found) == len(blocks), [block.role for block in blocks]
    return found.get("hot"), found.get("cold")


def above(value: Tensor, limit: Tensor) -> Tensor:
    """True where a magnitude is above its limit or NaN."""
    return ~(value.abs() <= limit)


def rows_of_slots(hot_N: np.ndarray, num_neurons: int) -> np.ndarray:
    """The neuron in each row of a block of slots and all neurons, at load time."""
    return np.concatenate([hot_N, np.arange(num_neurons)])


def joined(block: NeuronBlock, hot_N: np.ndarray, num_neurons: int) -> NeuronBlock:
    """The block of a layer whose hot neurons are in slots, which other neurons can take, if one
    processor reads both memories; made from one with the rows of `rows_of_slots`:

        row    0 .. N - 1      the slots, in the fast memory
               N .. N + F - 1  all neurons of the layer, in order

    Neuron j is read at row `row_N[j]`: its slot, or N + j. The order of the block's neurons never
    changes, so no sum depends on which of them have a slot."""
    num_slots = len(hot_N)
    assert block.down.num_rows == num_slots + num_neurons, block.down.num_rows
    row_F = torch.arange(num_slots, num_slots + num_neurons, dtype=torch.int32)
    row_F[torch.from_numpy(hot_N).long()] = torch.arange(num_slots, dtype=torch.int32)
    return replace(block, id_N=torch.arange(num_neurons), row_N=row_F, is_whole=True)


def apart(hot: NeuronBlock, cold: NeuronBlock, cold_C: np.ndarray) -> tuple[NeuronBlock, ...]:
    """The hot block, whose rows are the slots on a GPU, and the cold one, which refers to rows of
    the whole layer. Ids are int32; the cold block's ids and rows are one tensor, which swaps change
    in place."""
    id_C = torch.from_numpy(cold_C.astype(np.int32))
    hot_id_N = hot.id_N.to(torch.int32)
    return replace(hot, id_N=hot_id_N), replace(cold, id_N=id_C, row_N=id_C)
