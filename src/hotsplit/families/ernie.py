"""ERNIE 4.5 without experts: a Llama whose rotary pairs are neighbours in checkpoints, too."""

from functools import partial

from hotsplit.families.family import QKV_BIASES, Architecture, Family
from hotsplit.families.llama import OPTIONS, without_windows
from hotsplit.families.plain_decoder import decoder
from hotsplit.families.rope_scalings import Rope

FAMILIES = (
    Family(
        classes=("Ernie4_5ForCausalLM",),
        title="ERNIE 4.5",
        graph="ernie4_5",
        defaults={
            "tie_word_embeddings": True,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "use_bias": False,
            "num_key_value_heads": 2,
            "head_dim": 128,
        },
        flags={"use_bias": OPTIONS},
        # llama.cpp's graph reads no divisors of frequencies, as Llama 3's scaling has.
        rope=Rope(kinds=("default", "linear", "yarn"), theta=500_000.0),
        keys=without_windows,
    ),
)
GRAPHS = (
    Architecture(
        name="ernie4_5",
        of_keys=partial(decoder, pairing="adjacent"),
        options=OPTIONS,
        stock_options=QKV_BIASES,
    ),
)
