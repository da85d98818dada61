"""The choice of a token's experts."""

from dataclasses import dataclass
from typing import Literal

from hotsplit.model.operations import Shapes

# Its tensors' names, which are llama.cpp's: of the matrix and its bias, of what is added for the
# choice alone, and of the experts' own scales.
ROUTER, CHOICE_BIAS, OWN_SCALES = "ffn_gate_inp", "exp_probs_b.bias", "ffn_down_exps.scale"
Gating = Literal["softmax", "sigmoid", "softmax_of_chosen"]


@dataclass(frozen=True, kw_only=True)
class Route:
    """Chooses the experts of a token and their weights, in f32, and never approximately:

        score_E = gating(W_ED x_D + bias_E), or the logits themselves if "softmax_of_chosen"
        chosen  = the `num_used` experts with the largest score_E + choice_bias_E; of equal ones the
                  first. With groups, only of the `num_used_groups` groups whose two largest sum to
                  most, or with `groups_by_largest` whose largest is
        weight  = the scores of the chosen ("softmax_of_chosen": their softmax), divided by their
                  sum if `renormalises`, times `scale`, times the expert's own scale

    as in llama.cpp's build_moe_ffn (src/llama-graph.cpp) and in transformers. `has_choice_bias`: a
    bias for the choice alone (DeepSeek-V3, arXiv 2412.19437). `has_own_scales`: each expert has a
    scale (Gemma 4)."""

    num_experts: int
    num_used: int
    gating: Gating = "softmax"
    renormalises: bool = True
    scale: float = 1.0
    has_bias: bool = False
    has_choice_bias: bool = False
    has_own_scales: bool = False
    num_groups: int = 1
    num_used_groups: int = 1
    groups_by_largest: bool = False  # DeepSeek-V2, arXiv 2405.04434
    reads: str = "ffn_in"
    writes: str = "routed"

    @property
    def vectors(self) -> tuple[str, ...]:
        """The names of its vectors beside the bias, with a number for each expert."""
        has = {CHOICE_BIAS: self.has_choice_bias, OWN_SCALES: self.has_own_scales}
        return tuple(name for name, is_there in has.items() if is_there)

    def shapes(self, hidden_size: int) -> Shapes:
        """The shapes of its tensors, by name within the layer."""
        bias = (f"{ROUTER}.bias",) if self.has_bias else ()
        vectors = dict.fromkeys((*bias, *self.vectors), (self.num_experts,))
        return {f"{ROUTER}.weight": (self.num_experts, hidden_size), **vectors}
