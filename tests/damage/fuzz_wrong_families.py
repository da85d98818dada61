"""Tables of invalid content, as in fuzz_wrong: configs of other families and with other RoPE
scalings, and model files of other families."""

import random

import numpy as np
from fuzz_wrong import INF, NAN, Change, one_of, without
from gguf import TokenType

NOT_POSITIVE = (0, -1, NAN, INF, "x", True, [], {}, 10**400)
R = "rope_parameters/"
ROTATION: dict[str, Change] = {
    "unknown rotation": one_of(R + "rope_type", "dynamic", "longrope", "x" * 5000, 1, None, []),
    "no base": one_of(R + "rope_theta", *NOT_POSITIVE),
    "some of the pairs": one_of("partial_rotary_factor", 0.5, 0.25, "x", [1.0]),
    "no parameters": one_of("rope_parameters", "x", [1], 1, True),
}
YARN: dict[str, Change] = ROTATION | {
    "no factor": one_of(R + "factor", *NOT_POSITIVE),
    "a factor beyond every context": one_of(R + "factor", 1e9, 10**30),
    "no length": one_of(R + "original_max_position_embeddings", 1.5, *NOT_POSITIVE),
    "no fast border": one_of(R + "beta_fast", *NOT_POSITIVE),
    "no slow border": one_of(R + "beta_slow", *NOT_POSITIVE),
    "no magnitude": one_of(R + "attention_factor", *NOT_POSITIVE),
    "no scale of the magnitude": one_of(R + "mscale", -1.0, NAN, "x", True),
    "no scale of all": one_of(R + "mscale_all_dim", INF, [1.0], "x"),
    "borders within a pair": one_of(R + "truncate", False, "x", 0),
    "a base below 1": one_of(R + "rope_theta", 1.0, 0.5, 1e-9),
}
LLAMA3: dict[str, Change] = ROTATION | {
    "no factor": one_of(R + "factor", *NOT_POSITIVE),
    "no low border": one_of(R + "low_freq_factor", *NOT_POSITIVE),
    "no high border": one_of(R + "high_freq_factor", *NOT_POSITIVE),
    "a low border above the high one": one_of(R + "low_freq_factor", 4.0, 5.0, 1e30),
    "no length": one_of(R + "original_max_position_embeddings", *NOT_POSITIVE),
    "a parameter is missing": without(R + "factor"),
    "a border is missing": without(R + "low_freq_factor"),
}
NOT_SIZES = (0, -1, 1.5, "x", [], {}, True, 10**30, 10**9)


def _sizes(keys: str) -> dict[str, Change]:
    return {f"invalid {key}": one_of(key, *NOT_SIZES) for key in keys.split()}


FALCON: dict[str, Change] = {
    **_sizes(
        "num_hidden_layers hidden_size vocab_size ffn_hidden_size num_attention_heads num_kv_heads"
    ),
    "biased by distance": one_of("alibi", True, "x", 1, []),
    "no epsilon": one_of("layer_norm_epsilon", *NOT_POSITIVE),
    "unknown activation": one_of("activation", "x", "tanh", 1, None, ["relu"], "x" * 5000),
    "invalid flag": one_of("new_decoder_architecture", "x", 1, []),
    "invalid biases": one_of("bias", True, "x", 1, []),
    "key heads in no groups": one_of("num_kv_heads", 3, 5),
    "other norms": one_of("num_ln_in_parallel_attn", 3, 0, "x"),
}
OPT: dict[str, Change] = {
    **_sizes(
        "num_hidden_layers hidden_size vocab_size ffn_dim num_attention_heads"
        " max_position_embeddings"
    ),
    "embeddings of another width": one_of("word_embed_proj_dim", 16, 0, "x", True, []),
    "no last norm": one_of("_remove_final_layer_norm", True, "x", [True]),
    "invalid order": one_of("do_layer_norm_before", "x", 1, [], None),
    "no biases": one_of("enable_bias", False, "x", 1),
    "no norms": one_of("layer_norm_elementwise_affine", False, "x", 1),
    "unknown activation": one_of("activation_function", "x", "tanh", 1, None, ["relu"]),
}
PHI: dict[str, Change] = {
    **_sizes(
        "num_hidden_layers hidden_size vocab_size intermediate_size num_attention_heads"
        " num_key_value_heads"
    ),
    "biases": one_of("attention_bias", True, "x"),
    "the long context": one_of("rope_scaling", {"type": "longrope"}, {"rope_type": "su"}, "x", [1]),
    "some of the pairs": one_of(R + "partial_rotary_factor", 1.5, "x", 0.01, [1.0]),
    "no window": one_of("sliding_window", 0, -1, "x", 1.5, [], True),
    "heads of another width": one_of("head_dim", 4, 10, 16, "x", 0, 7),
}
QWEN: dict[str, Change] = {
    "heads of another width": one_of("head_dim", 8, 15, 32, "x", 0, -2),
    "invalid window": one_of("use_sliding_window", "x", 1, []),
    "layers that look elsewhere": one_of("layer_types", ["x"], "x", ["linear_attention"], 1),
    "biases": one_of("attention_bias", True, "x", 1, []),
    "no groups": one_of("num_key_value_heads", 3, *NOT_SIZES),
}


def with_missing_part(rng: random.Random, values: dict, arrays: dict) -> None:
    """Replaces a normal token with a text that no two tokens make up; control and user-defined
    tokens need no parts."""
    tokens, types = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    number = rng.choice([i for i, kind in enumerate(types) if kind == TokenType.NORMAL])
    tokens[number] = rng.choice(["\u4e01a", "a\u4e02"])


SCORES: dict[str, Change] = {
    "the same score for all": one_of("tokenizer.ggml.scores", [0.0] * 420, [-1.0] * 420),
    "scores of other tokens": one_of(
        "tokenizer.ggml.scores", [0.0], [0.0] * 421, "x", np.uint32(1)
    ),
    "scores that are no numbers": one_of("tokenizer.ggml.scores/*", NAN, INF, -INF),
    "no scores": without("tokenizer.ggml.scores"),
    "a token twice": one_of("tokenizer.ggml.tokens/*", "he", "the", "<0x41>"),
    "a token with a missing part": with_missing_part,
    "a token of other bytes": one_of("tokenizer.ggml.tokens/*", "\udcb2a"),
    "other types": one_of(
        "tokenizer.ggml.token_type", [1], "x", np.uint32(1), [1] * 421, [NAN] * 420, [INF] * 420
    ),
}
