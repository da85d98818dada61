"""The feed-forward block of a layer as neurons.

Letters: F neurons of the layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

Activation = Literal["relu", "relu2", "fatrelu", "drelu", "silu", "gelu", "gelu_tanh", "swiglu_oai"]
# What the names of the tensors of neurons end with: of a layer's own, of its experts, of experts
# that always fire.
Suffix = Literal["", "_exps", "_shexp"]


@dataclass(frozen=True, kw_only=True)
class ActivationFacts:
    """`names`: transformers' names of it; () if the graphs that have it give none. `is_smooth`: its
    small values are not zero, and only a cutoff silences neurons. `needs_gates`: layers without
    gates cannot have it."""

    title: str
    names: tuple[str, ...] = ()
    is_smooth: bool = False
    needs_gates: bool = False


# In the order of the enum in kernels.h.
ACTIVATIONS: Mapping[Activation, ActivationFacts] = {
    "relu": ActivationFacts(title="ReLU", names=("relu",)),
    "relu2": ActivationFacts(title="ReLU squared", names=("relu2",)),
    "fatrelu": ActivationFacts(title="FATReLU", names=("fatrelu",)),
    "drelu": ActivationFacts(title="dReLU", names=("drelu",), needs_gates=True),
    "silu": ActivationFacts(title="SiLU", names=("silu",), is_smooth=True),
    "gelu": ActivationFacts(title="GELU", names=("gelu",), is_smooth=True),
    "gelu_tanh": ActivationFacts(
        title="GELU", names=("gelu_new", "gelu_pytorch_tanh"), is_smooth=True
    ),
    "swiglu_oai": ActivationFacts(title="a clamped SwiGLU", is_smooth=True, needs_gates=True),
}
SMOOTH = tuple(name for name, facts in ACTIVATIONS.items() if facts.is_smooth)


@dataclass(frozen=True, kw_only=True)
class Neurons:
    """A feed-forward block as neurons: h_j = act(gate_j . x) * (up_j . x), or act(up_j . x) without
    gates; y = the sum of h_j down_j. `biases`: names of the matrices that have one.

    Experts are ranges of neurons that fire together, `number` is that of all of them: y = the sum
    of weight * y of the chosen experts. `has_output_gate`: y is multiplied by sigmoid(w . x). With
    a `cutoff` k, the activation takes max(0, g - m - k s) of a gate g, where m and s are the mean
    and the standard deviation (the sum of squares divided by F) of the token's gates of the layer:
    of normally distributed gates a share of 1 - Phi(k) is left (Gemma 3n). `latent_size`: values of
    x and y, if they are not those of the hidden state (model/latent_experts.py)."""

    number: int
    activation: Activation
    cutoff: float | None = None
    is_gated: bool = True
    biases: frozenset[str] = frozenset()
    suffix: Suffix = ""
    num_experts: int = 1
    has_output_gate: bool = False
    latent_size: int | None = None
    reads: str = "ffn_in"
    writes: str = "ffn_out"

    @property
    def gate_name(self) -> str:
        """The matrix whose product decides which neurons fire: without gates, the up projection."""
        return self.matrices[0]

    @property
    def up_name(self) -> str:
        return self.matrices[-1]

    @property
    def down_name(self) -> str:
        """The down projection, as llama.cpp stores it; with a row a neuron, its name ends in _t."""
        return f"ffn_down{self.suffix}"

    @property
    def matrices(self) -> tuple[str, ...]:
        """The matrices with a row for each neuron, without the down projection."""
        if not self.number:
            return ()
        names = ("ffn_gate", "ffn_up") if self.is_gated else ("ffn_up",)
        return tuple(f"{name}{self.suffix}" for name in names)

    def width(self, hidden_size: int) -> int:
        """Values of its input and of its output."""
        return self.latent_size or hidden_size

    @property
    def needs_all_gates(self) -> bool:
        """True if an activation depends on all gates of the layer: its neurons are on one device,
        and all gates are known before the first activation."""
        return self.cutoff is not None

    @property
    def silences(self) -> bool:
        """True if the activation makes neurons silent, so that skipping them loses nothing."""
        return self.number > 0 and (self.activation not in SMOOTH or self.cutoff is not None)

    @property
    def most_share(self) -> float:
        """The largest share of the neurons that fires for a token, as far as the activation alone
        tells; behind a cutoff, of normally distributed gates."""
        return 1.0 if self.cutoff is None else NormalDist().cdf(-self.cutoff)

    @property
    def are_experts(self) -> bool:
        return self.suffix == "_exps"

    @property
    def num_units(self) -> int:
        """What a plan places: neurons, or experts."""
        return self.num_experts if self.are_experts else self.number

    @property
    def of_expert(self) -> int:
        """Neurons of an expert; of the whole layer if it has none."""
        return self.number // self.num_experts


# Of a layer without a feed-forward block.
NO_NEURONS = Neurons(number=0, activation="relu", is_gated=False)
