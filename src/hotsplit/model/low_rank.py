"""A product of low rank beside attention (LAuReL, arXiv 2411.07501)."""

from dataclasses import dataclass
from typing import ClassVar

from hotsplit.model.blocks import Shapes
from hotsplit.model.operations import PositionWise

LEFT, RIGHT = "laurel_l", "laurel_r"  # llama.cpp's names


@dataclass(frozen=True, kw_only=True)
class LowRank(PositionWise):
    """y = W_DR W_RD x."""

    kind: ClassVar[str] = "low rank"
    room: ClassVar[str] = "low_rank"
    num_kernels: ClassVar[int] = 2
    rank: int
    reads: str = "attn_in"
    writes: str = "laurel_out"

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.reads,)

    @property
    def outputs(self) -> tuple[str, ...]:
        return (self.writes,)

    def shapes(self, hidden_size: int) -> Shapes:
        return {
            f"{LEFT}.weight": (self.rank, hidden_size),
            f"{RIGHT}.weight": (hidden_size, self.rank),
        }

    def scratch(self, hidden_size: int) -> int:
        return self.rank
