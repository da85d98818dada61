"""An assistant of Gemma 4: a draft model in a file of its own, which has no keys and values and
reads those of its main model (transformers, modeling_gemma4_assistant.py;
src/models/gemma4-assistant.cpp of llama.cpp).

After token t at position p it reads the main model's embedding of t and hidden state at p - 1 after
the output norm; its queries rotate as at p, and see the positions before p. Its logits are a guess
of the token at p + 1. A further guess reads the guessed token and what `AssistantOutput` has
projected, at the same position.

Letters: D hidden size, M that of the main model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from hotsplit.model.blocks import Norm, Shapes
from hotsplit.model.operations import PositionWise
from hotsplit.model.spec import ModelSpec

PRE, POST = "nextn.pre_projection", "nextn.post_projection"
JOINED, PROJECTED = "joined", "projected"
# The source of a layer's keys and values, by whether it has a window: the main model's last layer
# of this kind. A layer of the same model has a number from 0.
SOURCES = {False: -1, True: -2}


def has_assistants(spec: ModelSpec) -> bool:
    """True for a model of a family whose models have such assistants."""
    return spec.architecture == "gemma4"


@dataclass(frozen=True, kw_only=True)
class AssistantInput(PositionWise):
    """x_D = W [e_M ; h_M], of the main model's embedding and hidden state, in place of the
    embedding of its own."""

    kind: ClassVar[str] = "assistant input"
    room: ClassVar[str] = "assistant"
    inputs: ClassVar[tuple[str, ...]] = ("x", JOINED)
    outputs: ClassVar[tuple[str, ...]] = ("x",)
    main_size: int  # M

    def shapes(self, hidden_size: int) -> Shapes:
        return {f"{PRE}.weight": (hidden_size, 2 * self.main_size)}

    def values(self, hidden_size: int) -> Mapping[str, int]:
        return {"x": hidden_size, JOINED: 2 * self.main_size}


@dataclass(frozen=True, kw_only=True)
class AssistantOutput(PositionWise):
    """The output norm, and what the next guess reads as a hidden state: W norm(x)_D."""

    kind: ClassVar[str] = "assistant output"
    room: ClassVar[str] = "assistant"
    inputs: ClassVar[tuple[str, ...]] = ("x",)
    outputs: ClassVar[tuple[str, ...]] = ("x", PROJECTED)
    norm: Norm
    main_size: int  # M

    def shapes(self, hidden_size: int) -> Shapes:
        norm = {f"{self.norm.name}.{self.norm.part}": (hidden_size,)}
        return norm | {f"{POST}.weight": (self.main_size, hidden_size)}

    def values(self, hidden_size: int) -> Mapping[str, int]:
        return {"x": hidden_size, PROJECTED: self.main_size}
