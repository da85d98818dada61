"""The gated short convolution as a block of a layer (hotsplit.model.spec)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from hotsplit.model.blocks import Shapes
from hotsplit.model.operations import Recurrent

# llama.cpp's names.
INPUT, CONV, OUTPUT = "shortconv.in_proj", "shortconv.conv.weight", "shortconv.out_proj"


@dataclass(frozen=True, kw_only=True)
class ShortConv(Recurrent):
    """A gated convolution over the latest tokens, for each channel alone, as in LFM2 (transformers,
    modeling_lfm2.py); its state are the inputs of the convolution that later tokens read.

        b_D, c_D, u_D = shortconv.in_proj x
        y_D = shortconv.out_proj (c * sum over taps j of conv_DJ[j] * (b u) of the token J - 1 - j
              before)

    Inputs before the first token are zeros. Letters: D hidden size, J taps."""

    kind: ClassVar[str] = "short conv"
    room: ClassVar[str] = "short_conv"
    output: ClassVar[str] = OUTPUT
    num_kernels: ClassVar[int] = 3
    size: int  # D
    num_taps: int
    reads: str = "attn_in"
    writes: str = "attn_out"

    @property
    def query_size(self) -> int:
        return self.size

    @property
    def projected_size(self) -> int:
        return 3 * self.size

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.num_taps - 1, self.size),)

    @property
    def kept_size(self) -> int:
        return self.size

    def shapes(self, hidden_size: int) -> Shapes:
        return {
            f"{INPUT}.weight": (3 * self.size, hidden_size),
            CONV: (self.size, self.num_taps),
            f"{OUTPUT}.weight": (hidden_size, self.size),
        }

    @property
    def facts(self) -> Mapping[str, str]:
        return {"short convolutions": f"over {self.num_taps} tokens"}
