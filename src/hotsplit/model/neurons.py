"""The feed-forward block of a layer as neurons.

Letters: F neurons of the layer."""

from dataclasses import dataclass
from typing import Literal, get_args

Activation = Literal[
    "relu", "relu2", "fatrelu", "drelu", "silu", "gelu", "gelu_tanh", "swiglu_oai"
]  # fmt: skip
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)  # in the order of kernels.h's enum
ACTIVATION_WORDS = {"relu2": "ReLU squared", "silu": "SiLU", "gelu": "GELU", "gelu_tanh": "GELU"}
# What the names of the tensors of neurons end with: of a layer's own, of its experts, of experts
# that always fire.
Suffix = Literal["", "_exps", "_shexp"]
# Activations whose small values are not zero: only thresholds, limits and cutoffs silence
# neurons.
SMOOTH = ("silu", "gelu", "gelu_tanh", "swiglu_oai")


@dataclass(frozen=True, kw_only=True)
class Neurons:
    """A feed-forward block as neurons: h_j = act(gate_j . x) * (up_j . x), or act(up_j . x) without
    gates; y = the sum of h_j down_j. `biases`: names of the matrices that have one.

    Experts are ranges of neurons that fire together, `number` is that of all of them: y = the sum of
    weight * y of the chosen experts. `has_output_gate`: y is multiplied by sigmoid(w . x). With a
    `cutoff` k, the activation takes max(0, g - m - k s) of a gate g, where m and s are the mean and the
    standard deviation (the sum of squares divided by F) of the token's gates of the layer: of normally distributed
    gates a share of 1 - Phi(k) is left (Gemma 3n)."""

    number: int
    activation: Activation
    cutoff: float | None = None
    is_gated: bool = True
    biases: frozenset[str] = frozenset()
    suffix: Suffix = ""
    num_experts: int = 1
    has_output_gate: bool = False
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
        """The down projection, as llama.cpp stores it; if it has a row for each neuron, its name ends
        in _t."""
        return f"ffn_down{self.suffix}"

    @property
    def matrices(self) -> tuple[str, ...]:
        """The matrices with a row for each neuron, without the down projection."""
        names = ("ffn_gate", "ffn_up") if self.is_gated else ("ffn_up",)
        return tuple(f"{name}{self.suffix}" for name in names)

    @property
    def needs_all_gates(self) -> bool:
        """True if an activation depends on all gates of the layer: its neurons are on one device, and all
        gates are known before the first activation."""
        return self.cutoff is not None

    @property
    def silences(self) -> bool:
        """True if the activation alone makes neurons silent, so that skipping them loses nothing."""
        return self.activation not in SMOOTH or self.cutoff is not None

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
