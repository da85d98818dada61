"""Embeddings of layers: what each layer gets from the token itself, beside the hidden state (Gemma
3n and the E-models of Gemma 4).

Letters: L layers, D model width, P values of a layer's input, V vocabulary."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from hotsplit.model.blocks import Shapes
from hotsplit.model.neurons import Activation
from hotsplit.model.operations import TOKEN, PositionWise

# Of a model, and of a layer; llama.cpp's names.
TABLE, PROJECTION, INPUT_NORM = (
    "per_layer_token_embd",
    "per_layer_model_proj",
    "per_layer_proj_norm",
)
GATE, OUTPUT = "inp_gate", "proj"
INPUTS = "per_layer"  # the value that has the inputs of all layers, [T, L, P]


@dataclass(frozen=True, kw_only=True)
class LayerInputs(PositionWise):
    """The inputs of all layers, e_LP = (norm(D^-1/2 W x) + sqrt(P) t) / sqrt(2), where x is the
    token's embedding as the first layer reads it, W the projection [L P, D], t the token's row of
    the table [V, L P], and the norm an RMS norm of the P values of each layer (transformers,
    modeling_gemma4.py)."""

    kind: ClassVar[str] = "layer inputs"
    room: ClassVar[str] = "per_layer"
    tables: ClassVar[tuple[str, ...]] = (f"{TABLE}.weight",)
    words: ClassVar[str] = "the embeddings of layers"
    unquantised: ClassVar[tuple[str, ...]] = (f"{PROJECTION}.weight",)
    outputs: ClassVar[tuple[str, ...]] = (INPUTS,)
    size: int  # P
    epsilon: float  # of the norm
    num_layers: int
    vocab_size: int
    reads: str = "x"

    @property
    def inputs(self) -> tuple[str, ...]:
        return self.reads, TOKEN

    @property
    def total(self) -> int:
        """Values of a token, of all layers."""
        return self.num_layers * self.size

    def shapes(self, hidden_size: int) -> Shapes:
        return {
            f"{TABLE}.weight": (self.vocab_size, self.total),
            f"{PROJECTION}.weight": (self.total, hidden_size),
            f"{INPUT_NORM}.weight": (self.size,),
        }

    def values(self, hidden_size: int) -> Mapping[str, int]:
        return {INPUTS: self.total}

    @property
    def facts(self) -> Mapping[str, str]:
        return {"inputs of layers": f"{self.size:,} values each"}


@dataclass(frozen=True, kw_only=True)
class PerLayer(PositionWise):
    """y = W_DP (act(W_PD x) * e), where e_P is this layer's input (LayerInputs)."""

    kind: ClassVar[str] = "per layer"
    room: ClassVar[str] = "per_layer"
    num_kernels: ClassVar[int] = 3  # gate, activation with product, output
    size: int  # P
    activation: Activation
    reads: str = "x"
    writes: str = "per_layer_out"

    @property
    def inputs(self) -> tuple[str, ...]:
        return self.reads, INPUTS

    @property
    def outputs(self) -> tuple[str, ...]:
        return (self.writes,)

    def shapes(self, hidden_size: int) -> Shapes:
        return {
            f"{GATE}.weight": (self.size, hidden_size),
            f"{OUTPUT}.weight": (hidden_size, self.size),
        }

    def scratch(self, hidden_size: int) -> int:
        return self.size
