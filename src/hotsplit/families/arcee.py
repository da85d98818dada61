"""Arcee's AFM: a Llama without gates under ReLU squared, so that most neurons are silent."""

from functools import partial

from hotsplit.families.family import (
    ATTN_BIASES,
    QKV_BIASES,
    UNGATED,
    UNGATED_BIASES,
    Architecture,
    Family,
)
from hotsplit.families.llama import adjacent
from hotsplit.families.plain_decoder import decoder

FAMILIES = (
    Family(
        classes=("ArceeForCausalLM",),
        title="Arcee",
        graph="arcee",
        defaults={
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
            "hidden_act": "relu2",
            "rms_norm_eps": 1e-5,
        },
        flags={"attention_bias": ATTN_BIASES, "mlp_bias": UNGATED_BIASES},
        activations=UNGATED,
        sources=adjacent,
    ),
)
GRAPHS = (
    Architecture(
        name="arcee",
        of_keys=partial(decoder, pairing="adjacent", is_gated=False),
        options=(*ATTN_BIASES, *UNGATED_BIASES),
        stock_activations=("relu2",),
        stock_options=QKV_BIASES,
    ),
)
