"""StarCoder 2 (arXiv 2402.19173): layer norms, biases everywhere, neurons without gates, and
windows in all layers of the smaller models."""

from functools import partial

from hotsplit.families.family import ATTN_BIASES, UNGATED, UNGATED_BIASES, Architecture, Family
from hotsplit.families.plain_decoder import decoder
from hotsplit.families.rope_scalings import Rope
from hotsplit.families.windows import KEYS, config_window_keys, no_windows_in_stock
from hotsplit.model.spec import ModelSpec

OPTIONS = (*ATTN_BIASES, *UNGATED_BIASES)


def not_in_stock(spec: ModelSpec) -> str | None:
    lacks_biases = not spec.layers[0].neurons.biases
    return "has biases, this model none" if lacks_biases else no_windows_in_stock(spec)


FAMILIES = (
    Family(
        classes=("Starcoder2ForCausalLM",),
        title="StarCoder 2",
        graph="starcoder2",
        defaults={
            "tie_word_embeddings": True,
            "num_key_value_heads": 2,
            "use_bias": True,
            "hidden_act": "gelu_pytorch_tanh",
            "norm_epsilon": 1e-5,
        },
        fields={"attention.layer_norm_epsilon": "norm_epsilon"},
        flags={"use_bias": OPTIONS},
        activations=UNGATED,
        rope=Rope(kinds=("default", "linear", "yarn")),
        keys=config_window_keys,
    ),
)
GRAPHS = (
    Architecture(
        name="starcoder2",
        of_keys=partial(decoder, norm="layer", is_gated=False),
        known_keys=KEYS,
        options=OPTIONS,
        stock_activations=("gelu_tanh",),
        stock_options=OPTIONS,
        not_in_stock=not_in_stock,
    ),
)
