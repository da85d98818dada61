"""Nemotron and Minitron (arXiv 2402.16819, 2407.14679): layer norms, a rotary embedding of half of
each head, and neurons without gates under ReLU squared, so that most of them are silent. Its norms
multiply by 1 + weight; a model file has that sum."""

from functools import partial

from hotsplit.families.blueprint import ADD_ONE, Sources
from hotsplit.families.family import ATTN_BIASES, UNGATED, UNGATED_BIASES, Architecture, Family
from hotsplit.families.plain_decoder import decoder
from hotsplit.families.rope_scalings import Rope
from hotsplit.families.windows import other_head_size

OPTIONS = (*ATTN_BIASES, *UNGATED_BIASES)
FAMILIES = (
    Family(
        classes=("NemotronForCausalLM",),
        title="Nemotron",
        graph="nemotron",
        defaults={
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
            "hidden_act": "relu2",
            "norm_eps": 1e-5,
        },
        fields={"attention.layer_norm_epsilon": "norm_eps"},
        flags={"attention_bias": ATTN_BIASES, "mlp_bias": UNGATED_BIASES},
        activations=UNGATED,
        rope=Rope(kinds=("default", "linear"), share=0.5),
        sources=lambda spec, read: Sources(changes={"norm.weight": ADD_ONE}),
    ),
)
GRAPHS = (
    Architecture(
        name="nemotron",
        of_keys=partial(decoder, norm="layer", is_partly_rotated=True, is_gated=False),
        options=OPTIONS,
        stock_activations=("relu2",),
        stock_options=OPTIONS,
        not_in_stock=other_head_size,
    ),
)
