"""The text models of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, dense and mixture. Their rotary embeddings
have a place in time and two in an image, which are one position in a text, so they are Qwen 2, 3
and 3 MoE, and their model files say that. What their layers add to tokens of images (deepstack) is
nothing in a text. llama.cpp's files of them become the same when they are read."""

from dataclasses import replace

from hotsplit.families.blueprint import Sources
from hotsplit.families.config_reader import ConfigReader
from hotsplit.families.family import Architecture
from hotsplit.families.llama import without_windows
from hotsplit.families.mixtures import GRAPHS as MIXTURES
from hotsplit.families.mixtures import QWEN3_MOE, qwen_keys, with_dense
from hotsplit.families.qwen import GRAPHS as DENSE
from hotsplit.families.qwen import QWEN2, QWEN3
from hotsplit.families.rope_scalings import Rope
from hotsplit.files.gguf_file import Value
from hotsplit.model.spec import ModelSpec

OF_IMAGES = ("rope.dimension_sections", "n_deepstack_layers")
THETA_2, THETA_3 = 1e6, 500_000.0
_OF_SECOND = replace(
    QWEN2,
    defaults={**QWEN2.defaults, "num_key_value_heads": 8, "max_window_layers": 80},
    rope=Rope(kinds=(*Rope().kinds, "mrope"), theta=THETA_2),
)
# Without the keys of windows, which these do not have.
_OF_THIRD = replace(
    QWEN3,
    defaults={
        "tie_word_embeddings": False,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "attention_bias": False,
    },
    rope=Rope(theta=THETA_3),
    keys=without_windows,
)


def keys_of_mixture(read: ConfigReader) -> dict[str, Value]:
    """transformers renormalises whatever `norm_topk_prob` says, as llama.cpp does."""
    return without_windows(read) | qwen_keys(read, renormalises=True)


def transposed(spec: ModelSpec, read: ConfigReader) -> Sources:
    """Experts are transposed as published, and not as transformers 5 saves them."""
    return replace(with_dense(spec, read), expert_form="rows or transposed")


_MIXTURE = replace(
    QWEN3_MOE,
    defaults={
        "tie_word_embeddings": True,
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "num_experts_per_tok": 4,
        "num_experts": 60,
        "num_key_value_heads": 16,
    },
    rope=Rope(theta=THETA_3),
    keys=keys_of_mixture,
    sources=transposed,
)


FAMILIES = tuple(
    replace(base, title=title).with_images(f"{name}ForConditionalGeneration", model_type)
    for title, base, name, model_type in (
        ("Qwen 2-VL", _OF_SECOND, "Qwen2VL", "qwen2_vl"),
        ("Qwen 2.5-VL", _OF_SECOND, "Qwen2_5_VL", "qwen2_5_vl"),
        ("Qwen 3-VL", _OF_THIRD, "Qwen3VL", "qwen3_vl"),
        ("Qwen 3-VL MoE", _MIXTURE, "Qwen3VLMoe", "qwen3_vl_moe"),
    )
)


def without_images(spec: ModelSpec, keys: dict[str, Value]) -> dict[str, Value]:
    return {key: value for key, value in keys.items() if key not in OF_IMAGES}


def _of_images(name: str, plain: Architecture) -> Architecture:
    """llama.cpp's architecture `name`, which is `plain` in a text."""
    return replace(
        plain,
        name=name,
        of_keys=lambda read: replace(plain.of_keys(read), architecture=plain.name),
        known_keys=(*plain.known_keys, *OF_IMAGES),
        usual_keys=without_images,
    )


_PLAIN = {graph.name: graph for graph in (*DENSE, *MIXTURES)}
GRAPHS = (
    _of_images("qwen2vl", _PLAIN["qwen2"]),
    _of_images("qwen3vl", _PLAIN["qwen3"]),
    _of_images("qwen3vlmoe", _PLAIN["qwen3moe"]),
)
