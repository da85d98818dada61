"""Embeddings of layers: what each layer gets from the token itself, beside the hidden state (Gemma 3n and the
E-models of Gemma 4).

Letters: L layers, P values of a layer's input, V vocabulary, D hidden size."""

from dataclasses import dataclass

from hotsplit.model.neurons import Activation

# Of a model, and of a layer; llama.cpp's names.
TABLE, PROJECTION, INPUT_NORM = (
    "per_layer_token_embd",
    "per_layer_model_proj",
    "per_layer_proj_norm",
)
GATE, OUTPUT = "inp_gate", "proj"


@dataclass(frozen=True, kw_only=True)
class PerLayerInputs:
    """The inputs of all layers, e_LP = (norm(D^-1/2 W x) + sqrt(P) t) / sqrt(2), where x is the token's
    embedding as the first layer reads it, W the projection [L P, D], t the token's row of the table [V, L P],
    and the norm an RMS norm of the P values of each layer (transformers, modeling_gemma4.py)."""

    size: int  # P
    epsilon: float  # of the norm


@dataclass(frozen=True, kw_only=True)
class PerLayer:
    """y = W_DP (act(W_PD x) * e), where e_P is this layer's input (PerLayerInputs)."""

    size: int  # P
    activation: Activation
    reads: str = "x"
    writes: str = "per_layer_out"
