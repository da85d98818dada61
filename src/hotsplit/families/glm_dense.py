"""GLM-4 without experts (arXiv 2406.12793): rotary embeddings of adjacent pairs in a part of each
head, gates and ups in one matrix. Those of 2025 also have norms after attention and
feed-forward."""

from functools import partial

from hotsplit.families.blueprint import Sources
from hotsplit.families.family import QKV_BIASES, Architecture, Family
from hotsplit.families.plain_decoder import decoder
from hotsplit.families.rope_scalings import Rope
from hotsplit.families.row_order import gate_rows, gates_apart, gates_joined
from hotsplit.model.arrangements import Arrangement

# By llama.cpp's name: the class, its type, and the arrangement of a layer.
GENERATIONS = {
    "glm4": ("Glm4ForCausalLM", "glm4", Arrangement.sandwich),
    "chatglm": ("GlmForCausalLM", "glm", Arrangement.pre_norm),
}
FAMILIES = tuple(
    Family(
        classes=(name,),
        title="GLM-4",
        graph=graph,
        model_types=(model_type,),
        defaults={
            "tie_word_embeddings": False,
            "attention_bias": True,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1.5625e-7,
        },
        flags={"attention_bias": QKV_BIASES},
        rope=Rope(kinds=("default",), share=0.5),
        sources=lambda spec, read: Sources(rows=gate_rows(spec.layers[0].neurons.number)),
    )
    for graph, (name, model_type, _) in GENERATIONS.items()
)
GRAPHS = tuple(
    Architecture(
        name=name,
        of_keys=partial(decoder, pairing="adjacent", is_partly_rotated=True, arrange=arrange),
        options=QKV_BIASES,
        stock_options=QKV_BIASES,
        apart=gates_apart,
        joined=gates_joined,
    )
    for name, (*_, arrange) in GENERATIONS.items()
)
