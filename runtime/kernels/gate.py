"""How the products of gates become activations, and which neurons are silent: in torch, and as
numbers for C++ (gate.h). What is between a layer's spec and a kernel hands a `Gate` on whole.

Letters: T tokens, N neurons of a block, F neurons of a layer."""

from ctypes import Structure, c_float, c_int32
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from hotsplit.model.neurons import ACTIVATIONS, SMOOTH, Activation, Neurons

SWIGLU_LIMIT, SWIGLU_ALPHA = 7.0, 1.702  # of swiglu_oai
_ORDER = tuple(ACTIVATIONS)


class GateStruct(Structure):
    _fields_ = [
        ("activation", c_int32),
        ("computes_all", c_int32),
        ("threshold", c_float),
        ("cutoff", c_float),
        ("has_cutoff", c_int32),
    ]


@dataclass(frozen=True, kw_only=True)
class Gate:
    """The activation of a layer; `threshold` as in model_file.ModelFile. `computes_all`: neurons
    that do not fire are computed too."""

    activation: Activation
    threshold: float = 0.0
    computes_all: bool = False
    cutoff: float | None = None  # see model.neurons.Neurons

    @classmethod
    def of(cls, neurons: Neurons, *, threshold: float, computes_all: bool) -> "Gate":
        return cls(
            activation=neurons.activation,
            cutoff=neurons.cutoff,
            threshold=threshold,
            computes_all=computes_all,
        )

    @property
    def struct(self) -> GateStruct:
        return GateStruct(
            activation=_ORDER.index(self.activation),
            computes_all=self.computes_all,
            threshold=self.threshold,
            cutoff=self.cutoff or 0.0,
            has_cutoff=self.cutoff is not None,
        )

    @property
    def needs_all(self) -> bool:
        """True if `prepare` needs all gates of the layer at once."""
        return self.cutoff is not None

    def prepare(self, gate_TF: Tensor) -> Tensor:
        """What the activation takes, from the products: if `needs_all`, of all neurons of a
        layer."""
        if self.cutoff is None:
            return gate_TF
        exact_TF = gate_TF.double()
        deviation_T1, mean_T1 = torch.std_mean(exact_TF, dim=-1, correction=0, keepdim=True)
        return F.relu(gate_TF - (mean_T1 + self.cutoff * deviation_T1).to(gate_TF.dtype))

    def act(self, gate: Tensor) -> tuple[Tensor, Tensor]:
        """Applies the activation; returns (activated values, whether the neuron fires). Neurons
        that do not fire give zero.

        ReLU squared is that of Primer (So et al. 2021). The threshold of FATReLU is part of the
        model (ProSparse, arXiv 2402.13516), so it always counts. NaN fires, so that it is not
        lost."""
        is_smooth = self.activation in SMOOTH
        value = self.smooth(gate) if is_smooth else gate
        if self.computes_all and is_smooth:
            return value, torch.ones_like(value, dtype=torch.bool)
        fires = value != 0 if is_smooth else ~(value <= self.opens_above)
        value = torch.where(fires, value, 0.0)  # a product would turn -inf into NaN
        return value.square_() if self.activation == "relu2" else value, fires

    @property
    def opens_above(self) -> float:
        """The gate value above which a ReLU neuron fires."""
        assert self.activation not in SMOOTH, self.activation
        return self.threshold if self.activation == "fatrelu" else 0.0

    def smooth(self, gate: Tensor) -> Tensor:
        """SiLU or GELU."""
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
