"""Blocks of a layer: norms, sums and predictors, and what others keep; model/spec.py has what a
layer is.

Letters: D hidden size, F neurons of a layer, R predictor rank."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

PredictorKind = Literal["linear", "relu"]
Shapes = dict[str, tuple[int, ...]]
NormKind = Literal["rms", "layer", "layer_without_bias"]


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What a layer keeps of a text from token to token, as a value of the step program: `what` it
    is, and whether this layer writes it; otherwise an earlier one does, and this one reads it."""

    name: str
    what: str
    is_written: bool = True


@dataclass(frozen=True, kw_only=True)
class Norm:
    """A layer norm (Ba et al. 2016) or an RMS norm (Zhang and Sennrich 2019), over `size` values.
    `name`: of its tensors within the layer, or in the model for the output norm; that of its
    weights ends with `part`, and `factor` multiplies them; without a `part`, they are 1."""

    name: str
    kind: NormKind
    size: int
    epsilon: float
    part: str = "weight"
    factor: float = 1.0
    reads: str = "x"
    writes: str = "x"


@dataclass(frozen=True, kw_only=True)
class Predict:
    """Names the neurons that are computed: logits_F = up_FR act(down_RD x_D + bias) + bias, where
    act is the identity ("linear") or ReLU ("relu", DejaVu's form). Of rank 0: one matrix
    up_FD. `input_layer_offset` 1: x is the previous layer's feed-forward input."""

    kind: PredictorKind
    rank: int
    threshold: float
    input_layer_offset: int = 0
    reads: str = "ffn_in"
    writes: str = "named"


@dataclass(frozen=True, kw_only=True)
class SumFactors:
    """The factors of a sum: times * (the first term + factor * the sum of the others)."""

    factor: float = 1.0
    times: float = 1.0

    @property
    def treats_alike(self) -> bool:
        """True if the first term is as the others."""
        return self.factor == 1.0

    def can_go_on(self, later: "SumFactors") -> bool:
        """True if a sum that begins with this one's is one with it, by the later's factors."""
        return self.factor == later.factor and self.times == 1.0


PLAIN_SUM = SumFactors()


@dataclass(frozen=True, kw_only=True)
class Add(SumFactors):
    """writes = times * (the first term + factor * the sum of the others). `scale`: the name of a
    tensor of one number, which the loader multiplies `times` by."""

    terms: tuple[str, ...]
    writes: str = "x"
    scale: str = ""

    @property
    def factors(self) -> SumFactors:
        return SumFactors(factor=self.factor, times=self.times)

    def shapes(self, hidden_size: int) -> Shapes:
        """The shape of its tensor, by name within the layer."""
        return {f"{self.scale}.weight": (1,)} if self.scale else {}

    def with_numbers(self, number_of: Callable[[str], float]) -> "Add":
        """The sum with the number of its tensor, by the name within the layer."""
        found = [number_of(name) for name in self.shapes(0)]
        return replace(self, times=self.times * found[0]) if found else self
