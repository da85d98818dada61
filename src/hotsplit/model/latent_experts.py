"""Experts that read and write a latent of the token, narrower than the hidden state (Nemotron 3
Super and Ultra, arXiv 2512.20848): a product makes the latent, and another the output from the
experts' weighted sum. The router and the shared experts read the hidden state.

Letters: D hidden size, Z values of a latent."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from hotsplit.model.blocks import Shapes
from hotsplit.model.operations import PositionWise

TO_LATENT, FROM_LATENT = "ffn_latent_down", "ffn_latent_up"  # llama.cpp's names
# What experts read and write; in a layer whose experts are divided, each device has a sum.
LATENT, LATENT_SUM, HOT_SUM, COLD_SUM = "latent", "latent_sum", "latent_hot", "latent_cold"


@dataclass(frozen=True, kw_only=True)
class ToLatent(PositionWise):
    """z = W_ZD x."""

    kind: ClassVar[str] = "to latent"
    room: ClassVar[str] = "latent_experts"
    num_kernels: ClassVar[int] = 1
    outputs: ClassVar[tuple[str, ...]] = (LATENT,)
    size: int  # Z
    reads: str = "ffn_in"

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.reads,)

    def shapes(self, hidden_size: int) -> Shapes:
        return {f"{TO_LATENT}.weight": (self.size, hidden_size)}

    def values(self, hidden_size: int) -> Mapping[str, int]:
        return {LATENT: self.size}


@dataclass(frozen=True, kw_only=True)
class FromLatent(PositionWise):
    """y = W_DZ s, where s is the weighted sum of the chosen experts."""

    kind: ClassVar[str] = "from latent"
    room: ClassVar[str] = "latent_experts"
    num_kernels: ClassVar[int] = 1
    inputs: ClassVar[tuple[str, ...]] = (LATENT_SUM,)
    size: int  # Z
    writes: str = "ffn_out"

    @property
    def outputs(self) -> tuple[str, ...]:
        return (self.writes,)

    def shapes(self, hidden_size: int) -> Shapes:
        return {f"{FROM_LATENT}.weight": (hidden_size, self.size)}

    def values(self, hidden_size: int) -> Mapping[str, int]:
        of_experts = dict.fromkeys((LATENT_SUM, HOT_SUM, COLD_SUM), self.size)
        return {self.writes: hidden_size, **of_experts}
