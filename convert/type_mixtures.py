"""llama.cpp's mixtures of types, such as q4_k_m: the type of each matrix by its role in the model.
Some have the name of the type of most matrices, such as q5_0, with a better one for the output
head.

The choices are those of llama_tensor_get_type in llama-quant.cpp of ggml-org/llama.cpp."""

import re
from dataclasses import dataclass
from typing import Literal, get_args

from hotsplit.model.spec import ModelSpec
from hotsplit.model.weight_types import TYPES

MixtureName = Literal["q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m"]
NAMES: tuple[MixtureName, ...] = get_args(MixtureName)
NAMED_AS_TYPES = tuple(t.name for t in TYPES if re.fullmatch(r"q[45]_[01]", t.name))


def main_type(name: str) -> str:
    """The type of most matrices: that of a mixture, or the type of this name itself."""
    return name[:-2] if name in NAMES else name


@dataclass(frozen=True, kw_only=True)
class Roles:
    """What the choice depends on beside a matrix's name. llama.cpp knows Mixtral by its eight
    experts, and Llama 70B and Qwen 72B by their 80 layers."""

    is_falcon: bool
    is_70b: bool
    is_tied: bool  # the embedding is the output head too
    num_layers: int
    num_experts: int
    tables: tuple[str, ...] = ("token_embd.weight",)  # matrices of which a token reads one row
    unquantised: frozenset[str] = frozenset()  # matrices that stay in 16 or 32 bits

    @classmethod
    def of(cls, spec: ModelSpec, *, is_tied: bool) -> "Roles":
        heads = spec.attentions[0]
        is_grouped = heads.num_heads != heads.num_kv_heads
        has_70b = spec.architecture == "qwen2" or (spec.architecture == "llama" and is_grouped)
        return cls(
            is_falcon=spec.architecture == "falcon",
            is_70b=has_70b and spec.num_layers == 80,
            is_tied=is_tied,
            num_layers=spec.num_layers,
            num_experts=max((x.route.num_experts for x in spec.layers if x.route), default=1),
            tables=spec.tables,
            unquantised=frozenset(name for block in spec.first for name in block.unquantised),
        )

    def type_in(self, mixture: str, name: str) -> str:
        """The type of a matrix in one of NAMES or NAMED_AS_TYPES; its rows may not fit it."""
        if name == "output.weight" or (self.is_tied and name in self.tables):
            return "q8_0" if self.is_falcon else "q6_k"
        found = re.match(r"blk\.(\d+)\.(\w+)\.weight$", name)
        if found is None:
            return _MAIN[mixture]
        layer, role = int(found[1]), found[2]
        if role in ("attn_v", "attn_qkv"):
            return self._of_values(mixture, layer)
        if role == "attn_k" and self.num_experts == 8:
            return "q8_0"
        if role == "attn_output":
            return self._of_output(mixture)
        if role.startswith("ffn_down"):
            return self._of_down(mixture, layer)
        return _MAIN[mixture]

    def _has_more_bits(self, layer: int) -> bool:
        """True in the first and the last eighth of the layers, and in a third of the others."""
        eighth = self.num_layers // 8
        return layer < eighth or layer >= 7 * self.num_layers // 8 or (layer - eighth) % 3 == 2

    def _of_values(self, mixture: str, layer: int) -> str:
        if self.num_experts == 8:
            return "q8_0"
        kind = _MAIN[mixture]
        if mixture == "q3_k_m":
            kind = "q5_k" if layer < 2 else "q4_k"
        elif mixture == "q3_k_l" or (mixture == "q4_k_s" and layer < 4):
            kind = "q5_k"
        elif mixture in ("q4_k_m", "q5_k_m") and self._has_more_bits(layer):
            kind = "q6_k"
        return "q5_k" if self.is_70b and kind in ("q3_k", "q4_k") else kind

    def _of_output(self, mixture: str) -> str:
        if self.is_falcon:
            return "q4_k" if mixture == "q3_k_l" else _MAIN[mixture]
        if self.num_experts == 8:
            is_small = mixture in ("q3_k_s", "q3_k_m", "q4_k_s", "q4_k_m")
            return "q5_k" if is_small else _MAIN[mixture]
        return "q4_k" if mixture == "q3_k_m" else "q5_k" if mixture == "q3_k_l" else _MAIN[mixture]

    def _of_down(self, mixture: str, layer: int) -> str:
        is_first = layer < self.num_layers // 16
        has_more = self._has_more_bits(layer)
        if mixture == "q3_k_m":
            return "q5_k" if is_first else "q4_k" if not self.is_falcon or has_more else "q3_k"
        if mixture == "q3_k_l":
            return "q4_k" if self.is_falcon else "q5_k"
        if mixture == "q4_k_m" and self.is_falcon:
            return "q6_k" if is_first else "q5_k" if has_more else "q4_k"
        if mixture in ("q4_k_m", "q5_k_m"):
            return "q6_k" if has_more else _MAIN[mixture]
        if mixture == "q4_k_s" and not self.is_falcon and layer < self.num_layers // 8:
            return "q5_k"
        return _MAIN[mixture]


_MAIN: dict[str, str] = {name: main_type(name) for name in (*NAMES, *NAMED_AS_TYPES)}
