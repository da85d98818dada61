"""Every family that `convert` takes: logits of a random checkpoint against transformers'.

transformers lacks Bamboo, whose oracle is a Mistral with an MLP of the test's own. ProSparse is a
Llama, so only what its config adds is tested."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from checkpoints import auto_class, edit_config, random_model, save_tokenizer
from gguf import MODEL_ARCH, GGMLQuantizationType
from gguf.quants import dequantize
from reference import rel_error
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Mistral3ForConditionalGeneration

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.model_gguf import read_model_gguf
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.errors import HotsplitError
from hotsplit.families.blueprint import gguf_names
from hotsplit.files.gguf_file import array_entry, write_gguf
from hotsplit.measure.evaluate.verify_conversion import verify
from hotsplit.model.spec_facts import spec_facts
from hotsplit.model.tensors import is_neuron_major
from hotsplit.runtime.step.batch import rows_of
from hotsplit.runtime.step.workspace import workspace_bytes
from hotsplit.solver.solve import SolveConfig, solve

IDS = [5, 17, 300, 4, 99, 5, 5, 210, 33, 0, 250, 7]
SIZES = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 320,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
GATED = SIZES | {"intermediate_size": 160, "num_key_value_heads": 2, "initializer_range": 0.1}
OPT = SIZES | {"ffn_dim": 192, "init_std": 0.1, "word_embed_proj_dim": 64}
FALCON = SIZES | {"ffn_hidden_size": 192, "initializer_range": 0.1}
ODD = {"vocab_size": 331}
MQA = {"num_key_value_heads": 1}
# Experts of 37 neurons: no width of theirs is a multiple of anything.
MOE = GATED | {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 37}
GRANITE = MOE | {
    "intermediate_size": 37,
    "num_local_experts": 6,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.5,
}
FACTORS = {key: value for key, value in GRANITE.items() if "multip" in key or "scaling" in key}
del GRANITE["num_experts"], GRANITE["moe_intermediate_size"]
OSS = GATED | {
    "intermediate_size": 35,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "head_dim": 24,
    "sliding_window": 5,
    "initializer_range": 0.3,
}
GLM = MOE | {"n_routed_experts": 7, "routed_scaling_factor": 1.8}
del GLM["num_experts"]
EXAONE = MOE | {"num_shared_experts": 2, "head_dim": 24, "sliding_window": 5}
HUNYUAN3 = MOE | {"num_shared_experts": 1, "router_scaling_factor": 1.8}
MINIMAX = MOE | {"intermediate_size": 37, "num_hidden_layers": 2, "head_dim": 24}
del MINIMAX["moe_intermediate_size"]
# As llama.cpp's converter wants it: shared experts of intermediate_size / num_key_value_heads.
ERNIE = {"moe_num_experts": 7, "moe_k": 3, "moe_intermediate_size": 37, "intermediate_size": 148}
# Key heads that are shared by three value heads each, and values wider than keys.
DELTA = {
    "num_hidden_layers": 5,
    "head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "rms_norm_eps": 1e-3,
}
# Three streams, and n-grams of up to three tokens in the second layer.
FLASH_NEXT = (
    MOE
    | DELTA
    | {
        "shared_expert_intermediate_size": 43,
        "hc_count": 3,
        "hc_lowrank": 10,
        "ple_layer_ids": [2],
        "ple_embed_dim": 24,
        "ple_conv_kernel_size": 3,
        "ngram_size": 3,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 101,
        "make_ngram_vocab_size_divisible_by": 16,
        "split_ngram_parts": 4,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 12,
        "indexer_budget": 60,
        "indexer_compress_ratio": 4,
        "output_gate_type": "sigmoid",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        },
    }
)
# Five streams, and n-grams of up to four tokens in the first layer.
FIRST = {
    "hc_count": 5,
    "hc_lowrank": 7,
    "ple_layer_ids": [1],
    "ple_embed_dim": 30,
    "ple_conv_kernel_size": 2,
    "ngram_size": 4,
    "heads_per_ngram": 1,
    "split_ngram_parts": 1,
    "norm_topk_prob": False,
    "linear_conv_kernel_dim": 3,
}
# Four streams, and pairs of tokens in the third layer; a text has up to 14 tokens.
PAIRS = {
    "hidden_size": 60,
    "hc_count": 4,
    "ple_layer_ids": [3],
    "ple_embed_dim": None,
    "ple_conv_kernel_size": 4,
    "ngram_size": 2,
    "heads_per_ngram": 3,
    "indexer_budget": 10,
    "indexer_compress_ratio": 5,
}
# As llama.cpp has them.
EQUAL = DELTA | {"num_hidden_layers": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
# Heads of 16 values, groups of one and of several heads, chunks shorter than a text.
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 20,
    "mamba_chunk_size": 8,
    "shared_intermediate_size": 96,
}
# Heads whose values are not twice as many as those of a token.
FALCON_H1 = {
    "num_hidden_layers": 2,
    "mamba_d_ssm": 40,
    "mamba_n_heads": 5,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 20,
    "mamba_chunk_size": 8,
    "lm_head_multiplier": 0.1,
    "embedding_multiplier": 5.6,
    "key_multiplier": 0.5,
    "attention_in_multiplier": 1.1,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.7,
    "mlp_multipliers": [0.8, 0.3],
    "ssm_multipliers": [0.35, 0.25, 0.17, 0.5, 0.35],
}
NEMOTRON_H = {
    "head_dim": 24,
    "mamba_num_heads": 6,
    "mamba_head_dim": 12,
    "n_groups": 3,
    "ssm_state_size": 20,
    "chunk_size": 8,
    "time_step_min": 1e-30,
}
NEMOTRON_3 = MOE | NEMOTRON_H | MQA | {"n_routed_experts": 6}
del NEMOTRON_3["num_experts"]
SHARED = {"shared_expert_intermediate_size": 43}
# Heads of 12 values under delta attention, and of 20 under latent attention, of which 8 are shared.
KIMI = SIZES | {
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "intermediate_size": 160,
    "initializer_range": 0.1,
    "rms_norm_eps": 1e-6,
    "num_local_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 37,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
KIMI_LAYERS = {
    "kda_layers": [1],
    "full_attn_layers": [2],
    "head_dim": 12,
    "num_heads": 3,
    "short_conv_kernel_size": 4,
}
# No width is a multiple of anything; the layers after the first have experts.
LATENT = SIZES | {
    "intermediate_size": 160,
    "num_key_value_heads": 4,
    "initializer_range": 0.1,
    "q_lora_rank": 28,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
DEEPSEEK = LATENT | {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
}
GROUPED = {"n_group": 4, "topk_group": 2}
INDEXED = {"index_topk": 12, "index_head_dim": 16, "index_n_heads": 4}
LFM2 = {
    "num_hidden_layers": 5,
    "layer_types": ["conv", "full_attention", "conv", "conv", "full_attention"],
    "norm_eps": 1e-3,
}
# Factors for a context above the training's, which is shorter than IDS and than the model's
# context.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.5, 2.0, 3.0, 5.0, 7.0, 9.0],
    "partial_rotary_factor": 0.75,
}
WHOLE = LONGROPE | {
    "short_factor": [1.0] * 8,
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 7.0, 9.0, 11.0],
}
del WHOLE["partial_rotary_factor"]
ALPHA = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
HALF = {"rope_theta": 1e4, "partial_rotary_factor": 0.5}
WHOLE_HEADS = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
# Queries grow at the 4th token, and a second time at the 8th.
GROWING = YARN | {
    "original_max_position_embeddings": 4,
    "rope_theta": 1e4,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}
# With and without YaRN's scale of scores, as of cosines and sines.
MSCALE = YARN | {"rope_theta": 1e4, "original_max_position_embeddings": 8}
MSCALE |= {"mscale": 0.707, "mscale_all_dim": 0.707}
UNEQUAL = MSCALE | {"mscale": 1.2}
GEMMA4 = {"sliding_window": 5, "hidden_size_per_layer_input": 0}
OWN_INPUTS = {"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": ODD["vocab_size"]}
# Three planes; numbers of neurons, windows and cutoffs that differ; tokens without embeddings of
# layers.
GEMMA3N = {
    "num_hidden_layers": 4,
    "intermediate_size": [160, 96, 131, 160],
    "altup_num_inputs": 3,
    "laurel_rank": 5,
    "sliding_window": 5,
    "activation_sparsity_pattern": [0.8, 0.5, 0.0, 0.3],
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 310,
}
GEMMA4_MOE = {"enable_moe_block": True, "num_experts": 7, "top_k_experts": 3}
GEMMA4_MOE |= {"moe_intermediate_size": 37}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
BIASES = {"attention_bias": True, "mlp_bias": True}


def linear(factor: float, theta: float = 1e4) -> dict:
    return {"rope_type": "linear", "factor": factor, "rope_theta": theta}


def layers(kinds: str) -> dict:
    """The layers' attention: full, sliding windows, or linear."""
    names = {"f": "full_attention", "s": "sliding_attention", "l": "linear_attention"}
    return {"num_hidden_layers": len(kinds), "layer_types": [names[kind] for kind in kinds]}


def blocks(pattern: str) -> list[str]:
    """The only block of each layer of a Nemotron-H."""
    names = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    return [names[letter] for letter in pattern]


def by_attention(full: dict, sliding_theta: float = 5e3) -> dict:
    """Rotary embeddings of layers with full attention, and ordinary ones of those with windows."""
    plain = {"rope_type": "default", "rope_theta": sliding_theta}
    return {"full_attention": full, "sliding_attention": plain}


# Models for images beside text models of width 64.
IMAGES = {"depth": 1, "intermediate_size": 16, "num_heads": 2, "patch_size": 4}
IMAGES_2 = IMAGES | {"embed_dim": 16, "hidden_size": 64}
IMAGES_2_5 = IMAGES | {"hidden_size": 16, "out_hidden_size": 64, "fullatt_block_indexes": [0]}
IMAGES_3 = IMAGES | {"hidden_size": 16, "out_hidden_size": 64, "deepstack_visual_indexes": [0]}
IMAGES_3 |= {"num_position_embeddings": 16}
IMAGES_MUSE = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16}
IMAGES_MUSE |= {"num_attention_heads": 2}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}

CASES = {
    "llama": hf.LlamaConfig(**GATED | ODD, hidden_act="relu"),
    "llama-mqa-tied": hf.LlamaConfig(**GATED | MQA | TIED, hidden_act="silu"),
    "llama-biases": hf.LlamaConfig(**GATED | BIASES, hidden_act="relu"),
    "llama-gelu": hf.LlamaConfig(**GATED, hidden_act="gelu_pytorch_tanh", head_dim=32),
    "mistral": hf.MistralConfig(**GATED | ODD, sliding_window=None, head_dim=16),
    "mistral-window": hf.MistralConfig(**GATED, sliding_window=5, head_dim=32),
    "ministral": hf.MinistralConfig(**GATED | ODD | layers("fss"), head_dim=16, sliding_window=3),
    "ministral3": hf.Ministral3Config(**GATED | ODD, head_dim=24, rope_parameters=GROWING),
    "nemotron": hf.NemotronConfig(**GATED | ODD),
    "nemotron-biases-tied": hf.NemotronConfig(
        **GATED | MQA | TIED | BIASES, head_dim=32, rope_parameters=HALF | linear(2.0)
    ),
    "arcee": hf.ArceeConfig(**GATED | ODD),
    # YaRN as in AFM's config, where one scale alone changes nothing.
    "arcee-biases": hf.ArceeConfig(
        **GATED | MQA | TIED | BIASES, rope_parameters=YARN | {"rope_theta": 1e4, "mscale": 1.3}
    ),
    "starcoder2": hf.Starcoder2Config(**GATED | ODD, sliding_window=5),
    "starcoder2-stock": hf.Starcoder2Config(**GATED | UNTIED),
    "command-r": hf.CohereConfig(**GATED | ODD, logit_scale=0.3),
    "command-r-plus": hf.CohereConfig(**GATED | MQA, use_qk_norm=True, attention_bias=True),
    "cohere2": hf.Cohere2Config(**GATED | ODD | {"num_hidden_layers": 5}, sliding_window=5),
    "cohere2-others": hf.Cohere2Config(
        **GATED | MQA | layers("fsf"), sliding_window=3, attention_bias=True
    ),
    "qwen2": hf.Qwen2Config(**GATED | ODD),
    "qwen2-mqa-tied-relu": hf.Qwen2Config(**GATED | MQA | TIED, hidden_act="relu"),
    "qwen2-window": hf.Qwen2Config(
        **GATED, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen3": hf.Qwen3Config(**GATED | ODD, head_dim=32),
    "qwen3-biases-tied": hf.Qwen3Config(**GATED | TIED, head_dim=16, attention_bias=True),
    "qwen2vl": hf.Qwen2VLConfig(
        text_config=GATED | ODD | {"rope_parameters": SECTIONS}, vision_config=IMAGES_2
    ),
    "qwen25vl-tied": hf.Qwen2_5_VLConfig(
        text_config=GATED | MQA | {"rope_parameters": YARN | SECTIONS | {"rope_type": "yarn"}},
        vision_config=IMAGES_2_5,
        tie_word_embeddings=True,
    ),
    "qwen3vl": hf.Qwen3VLConfig(
        text_config=GATED
        | ODD
        | {"head_dim": 32, "rope_parameters": SECTIONS | {"mrope_section": [6, 5, 5]}},
        vision_config=IMAGES_3,
    ),
    "qwen3vlmoe": hf.Qwen3VLMoeConfig(
        text_config=MOE | ODD | {"head_dim": 16, "rope_parameters": SECTIONS},
        vision_config=IMAGES_3,
    ),
    "opt": hf.OPTConfig(**OPT | ODD),
    "opt-norm-after": hf.OPTConfig(**OPT, do_layer_norm_before=False),
    "opt-untied-plain": hf.OPTConfig(
        **OPT | UNTIED, enable_bias=False, layer_norm_elementwise_affine=False
    ),
    "opt-gelu": hf.OPTConfig(**OPT, activation_function="gelu"),
    "falcon-7b": hf.FalconConfig(**FALCON | ODD, activation="relu"),
    "falcon-40b": hf.FalconConfig(
        **FALCON, new_decoder_architecture=True, num_kv_heads=2, activation="relu"
    ),
    "falcon-11b": hf.FalconConfig(
        **FALCON, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1
    ),
    "falcon-one-after-the-other": hf.FalconConfig(
        **FALCON | UNTIED, parallel_attn=False, bias=True
    ),
    "falcon-many-keys": hf.FalconConfig(**FALCON, multi_query=False, bias=True, activation="relu"),
    "phi3": hf.Phi3Config(
        **GATED | ODD,
        sliding_window=None,
        original_max_position_embeddings=10,
        rope_parameters=WHOLE,
    ),
    "phi4-mini": hf.Phi3Config(
        **GATED | ODD | TIED,
        sliding_window=7,
        original_max_position_embeddings=10,
        rope_parameters=LONGROPE,
    ),
    # Contexts beyond the window, which is no multiple of a block.
    "gemma3": hf.Gemma3TextConfig(
        **GATED | ODD | layers("sfs"), head_dim=32, sliding_window=5, query_pre_attn_scalar=48
    ),
    "gemma3-biases-untied": hf.Gemma3TextConfig(
        **GATED | MQA | UNTIED | {"num_hidden_layers": 7, "head_dim": 16, "sliding_window": 3},
        attention_bias=True,
        query_pre_attn_scalar=16,
        hidden_activation="silu",
        rope_parameters=by_attention(linear(8.0, 1e5)),
    ),
    "gemma3-stock": hf.Gemma3TextConfig(
        **GATED | {"num_hidden_layers": 7, "head_dim": 16, "sliding_window": 5},
        query_pre_attn_scalar=16,
        rope_parameters=by_attention(linear(8.0, 1e5)),
    ),
    # Caps that scores and logits come near to.
    "gemma2": hf.Gemma2Config(
        **GATED | ODD | {"head_dim": 24, "sliding_window": 5},
        query_pre_attn_scalar=10,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=2.5,
    ),
    "gemma2-plain": hf.Gemma2Config(
        **GATED | MQA | UNTIED | layers("fffs") | {"head_dim": 16, "sliding_window": 3},
        attention_bias=True,
        hidden_activation="relu",
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        rope_parameters=linear(4.0, 1e5),
    ),
    "gemma2-stock": hf.Gemma2Config(
        **GATED, head_dim=32, sliding_window=7, query_pre_attn_scalar=32, attn_logit_softcapping=0.8
    ),
    "olmo2": hf.Olmo2Config(**GATED | ODD),
    "olmo2-mqa-tied": hf.Olmo2Config(**GATED | MQA | TIED, attention_bias=True, hidden_act="relu"),
    "olmo3": hf.Olmo3Config(
        **GATED | ODD | {"num_hidden_layers": 6},
        sliding_window=5,
        rope_parameters=by_attention(
            YARN | {"rope_theta": 3e3, "attention_factor": 1.2, "beta_fast": 8.0}
        ),
    ),
    "olmo3-stock": hf.Olmo3Config(
        **GATED | layers("sff"),
        sliding_window=3,
        rope_parameters={"full_attention": YARN | {"attention_factor": 1.3}},
    ),
    "exaone4": hf.Exaone4Config(
        **GATED | ODD | {"num_hidden_layers": 2, "head_dim": 24, "sliding_window": 5},
        sliding_window_pattern=2,
        rope_parameters=LLAMA3,
    ),
    "exaone4-stock": hf.Exaone4Config(
        **GATED | TIED | layers("ff"), sliding_window=None, rope_parameters=LLAMA3
    ),
    "ernie": hf.Ernie4_5Config(**GATED | ODD | {"num_hidden_layers": 2}, head_dim=24),
    "ernie-biases": hf.Ernie4_5Config(
        **GATED | MQA | UNTIED | {"num_hidden_layers": 2},
        head_dim=16,
        use_bias=True,
        rope_parameters=linear(2.0),
    ),
    "erniemoe": hf.Ernie4_5_MoeConfig(**GATED | ODD | ERNIE, head_dim=24),
    "erniemoe-plain": hf.Ernie4_5_MoeConfig(
        **GATED | UNTIED | ERNIE, moe_num_shared_experts=0, moe_layer_start_index=0
    ),
    "seed-oss": hf.SeedOssConfig(**GATED | ODD, head_dim=24),
    "seed-oss-biases": hf.SeedOssConfig(
        **GATED | MQA | {"num_hidden_layers": 2},
        attention_bias=False,
        attention_out_bias=True,
        rope_parameters=linear(2.0),
    ),
    "gemma": hf.GemmaConfig(**GATED | ODD, head_dim=24, hidden_act="gelu"),
    "gemma-biases": hf.GemmaConfig(
        **GATED | MQA | UNTIED, head_dim=16, attention_bias=True, hidden_act="silu"
    ),
    "stablelm": hf.StableLmConfig(**GATED | ODD, use_qkv_bias=True),
    "stablelm-parallel": hf.StableLmConfig(
        **GATED | MQA | TIED, use_parallel_residual=True, rope_parameters=HALF
    ),
    "phi2": hf.PhiConfig(**GATED | ODD | {"num_key_value_heads": 4, "intermediate_size": 256}),
    "phi2-grouped": hf.PhiConfig(**GATED, hidden_act="relu", rope_parameters=WHOLE_HEADS),
    "gpt-neox": hf.GPTNeoXConfig(**SIZES | ODD, intermediate_size=160, initializer_range=0.1),
    "gpt-neox-sequential": hf.GPTNeoXConfig(
        **SIZES | TIED,
        intermediate_size=160,
        initializer_range=0.1,
        use_parallel_residual=False,
        attention_bias=False,
        hidden_act="relu",
        rope_parameters=HALF,
    ),
    "glm4": hf.Glm4Config(**GATED | ODD, head_dim=24),
    "glm4-plain-tied": hf.Glm4Config(
        **GATED | TIED | MQA,
        head_dim=16,
        attention_bias=False,
        hidden_act="relu",
        rope_parameters=WHOLE_HEADS | {"rope_theta": 1e5},
    ),
    "glm": hf.GlmConfig(**GATED | ODD, head_dim=16),
    "granite": hf.GraniteConfig(**GATED | ODD | FACTORS, mlp_bias=True),
    "granite-mqa-tied": hf.GraniteConfig(
        **GATED | TIED | MQA | FACTORS, attention_bias=True, hidden_act="relu"
    ),
    "granite4": hf.GraniteMoeHybridConfig(
        **GATED | ODD | FACTORS | layers("fff"),
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=96,
        position_embedding_type="rope",
        mamba_n_heads=4,
    ),
    "granite4-hybrid": hf.GraniteMoeHybridConfig(
        **GATED | ODD | FACTORS | layers("lflll") | MAMBA, num_local_experts=0, attention_bias=True
    ),
    "granite4moe-hybrid": hf.GraniteMoeHybridConfig(
        **GRANITE | MAMBA | TIED | MQA | layers("llf") | {"mamba_n_groups": 2},
        position_embedding_type="rope",
        mamba_d_conv=3,
    ),
    # Steps are clamped in transformers' prompts alone.
    "nemotron-h": hf.NemotronHConfig(
        **GATED | ODD | NEMOTRON_H, layers_block_type=blocks("MM-*-M-")
    ),
    "nemotron-3moe": hf.NemotronHConfig(
        **NEMOTRON_3 | {"n_group": 3, "topk_group": 2},
        layers_block_type=blocks("MEM*EME"),
        moe_shared_expert_intermediate_size=45,
        routed_scaling_factor=2.5,
    ),
    # As Nemotron 3 Super: its experts read 40 of 64 values.
    "nemotron-3moe-latent": hf.NemotronHConfig(
        **NEMOTRON_3,
        layers_block_type=blocks("ME*E"),
        moe_latent_size=40,
        moe_shared_expert_intermediate_size=45,
    ),
    "falcon-h1": hf.FalconH1Config(**GATED | ODD | FALCON_H1, mamba_rms_norm=False),
    "falcon-h1-norm": hf.FalconH1Config(
        **GATED | MQA | FALCON_H1 | {"mamba_n_groups": 5},
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
    ),
    "bamba": hf.BambaConfig(
        **GATED | ODD | MAMBA | {"mamba_n_groups": 4}, attn_layer_indices=[1], attention_bias=True
    ),
    "bamba-attending": hf.BambaConfig(
        **GATED | MQA | TIED | MAMBA, attn_layer_indices=[0, 1, 2, 3, 4, 5]
    ),
    # Uneven heads; full layers whose values are their keys, and their first pairs rotate; inputs of
    # layers.
    "gemma4": hf.Gemma4TextConfig(
        **GATED | ODD | GEMMA4 | OWN_INPUTS | layers("sff"),
        head_dim=24,
        global_head_dim=40,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        final_logit_softcapping=2.5,
    ),
    "gemma3n": hf.Gemma3nTextConfig(
        **GATED | ODD | GEMMA3N | layers("sfsf"), head_dim=24, final_logit_softcapping=2.5
    ),
    # As its E-models: three layers that read the keys and values of the first two, with wider
    # neurons.
    "gemma4-stock": hf.Gemma4TextConfig(
        **GATED | GEMMA4 | OWN_INPUTS | layers("sfsff") | {"vocab_size_per_layer_input": 320},
        head_dim=16,
        global_head_dim=32,
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
        rope_parameters=by_attention(
            {"rope_type": "proportional", "partial_rotary_factor": 0.4, "rope_theta": 1e5}
        ),
    ),
    "gemma4moe": hf.Gemma4TextConfig(
        **GATED | ODD | GEMMA4 | GEMMA4_MOE | layers("ssf"),
        head_dim=24,
        global_head_dim=32,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
    ),
    "muse-glimmer": hf.MuseGlimmerConfig(
        text_config=GATED | ODD | {"num_hidden_layers": 6, "head_dim": 24, "sliding_window": 5},
        vision_config=IMAGES_MUSE,
    ),
    "muse-glimmer-others": hf.MuseGlimmerConfig(
        text_config=GATED
        | MQA
        | {"num_hidden_layers": 2, "layer_rope_theta": [1.0, 0], "qk_scale_factor": 1.7}
        | {"head_dim": 16, "sliding_window": 3, "attention_bias": True, "output_multiplier": 0.7}
        | {"final_logit_softcapping": 2.5},
        vision_config=IMAGES_MUSE,
    ),
    "smollm3": hf.SmolLM3Config(**GATED | ODD | {"num_hidden_layers": 5}),
    "smollm3-biases-untied": hf.SmolLM3Config(
        **GATED | UNTIED | BIASES | {"num_hidden_layers": 4},
        use_sliding_window=True,
        sliding_window=3,
    ),
    "mixtral": hf.MixtralConfig(**GATED | ODD | {"intermediate_size": 53}, num_local_experts=5),
    "mixtral-window": hf.MixtralConfig(
        **GATED | MQA | {"intermediate_size": 32}, num_local_experts=3, sliding_window=4
    ),
    "olmoe": hf.OlmoeConfig(**MOE | ODD | {"intermediate_size": 53, "num_key_value_heads": 4}),
    "olmoe-grouped": hf.OlmoeConfig(**MOE | {"intermediate_size": 53}),
    "olmoe-renormalised": hf.OlmoeConfig(
        **MOE | {"intermediate_size": 64, "num_key_value_heads": 4},
        attention_bias=True,
        norm_topk_prob=True,
    ),
    "qwen2moe": hf.Qwen2MoeConfig(**MOE | SHARED),
    "qwen2moe-plain": hf.Qwen2MoeConfig(
        **MOE | MQA | TIED,
        shared_expert_intermediate_size=32,
        qkv_bias=False,
        norm_topk_prob=True,
        hidden_act="relu",
        mlp_only_layers=[0],
        use_sliding_window=True,
        sliding_window=4,
    ),
    "qwen3moe": hf.Qwen3MoeConfig(**MOE | ODD, head_dim=32, norm_topk_prob=True),
    # As North-Mini, and as Command A+.
    "cohere2moe": hf.Cohere2MoeConfig(
        **MOE | ODD | {"num_hidden_layers": 6, "head_dim": 24, "intermediate_size": 37},
        sliding_window=5,
        expert_selection_fn="sigmoid",
        norm_topk_prob=False,
        first_k_dense_replace=1,
        prefix_dense_intermediate_size=96,
        rms_norm_eps=1e-3,
        logit_scale=0.3,
    ),
    "cohere2moe-average": hf.Cohere2MoeConfig(
        **MOE | MQA | UNTIED | layers("sfs") | {"head_dim": 16, "intermediate_size": 32},
        sliding_window=3,
        num_shared_experts=2,
        layer_norm_eps=1e-3,
    ),
    "granitemoe": hf.GraniteMoeConfig(**GRANITE | ODD),
    "granitemoe-shared": hf.GraniteMoeSharedConfig(
        **GRANITE | TIED | MQA, shared_intermediate_size=45, attention_bias=True
    ),
    "glm4moe": hf.Glm4MoeConfig(**GLM | ODD, head_dim=32, first_k_dense_replace=1),
    "glm4moe-groups": hf.Glm4MoeConfig(
        **GLM | {"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "n_shared_experts": 2},
        use_qk_norm=True,
        attention_bias=True,
        first_k_dense_replace=0,
        head_dim=16,
        rope_parameters=WHOLE_HEADS,
    ),
    "minimaxmoe": hf.MiniMaxM2Config(**MINIMAX | ODD, rotary_dim=16),
    "dotsmoe": hf.Dots1Config(
        **GLM | ODD | {"num_key_value_heads": 4, "n_shared_experts": 2, "head_dim": 24},
        first_k_dense_replace=1,
        norm_topk_prob=True,
    ),
    "dotsmoe-window": hf.Dots1Config(
        **GLM | {"n_shared_experts": 1, "n_routed_experts": 12, "n_group": 4, "topk_group": 2},
        sliding_window=5,
        max_window_layers=1,
        attention_bias=True,
    ),
    "hunyuan": hf.HunYuanDenseV1Config(**GATED | ODD, head_dim=16, rope_parameters=ALPHA),
    "hunyuan-plain": hf.HunYuanDenseV1Config(
        **GATED | MQA | TIED | {"num_hidden_layers": 2},
        head_dim=24,
        attention_bias=True,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    ),
    "hunyuanmoe": hf.HunYuanMoEV1Config(
        **GATED | ODD | {"intermediate_size": 37, "num_experts": 7}, moe_topk=3, head_dim=16
    ),
    "hunyuanmoe-lists": hf.HunYuanMoEV1Config(
        **GATED | TIED | {"intermediate_size": 32, "num_experts": 5},
        moe_topk=[2, 2, 2],
        head_dim=24,
        rope_parameters=ALPHA,
    ),
    "hunyuan3moe": hf.HYV3Config(**HUNYUAN3 | ODD, head_dim=24),
    "exaonemoe": hf.ExaoneMoeConfig(
        **EXAONE | ODD | {"num_hidden_layers": 5}, n_group=1, rope_parameters=LLAMA3
    ),
    "exaonemoe-plain": hf.ExaoneMoeConfig(
        **EXAONE | layers("sf"), mlp_layer_types=["sparse", "sparse"], norm_topk_prob=False
    ),
    "solarmoe": hf.SolarOpenConfig(
        **GLM | ODD, head_dim=24, rope_parameters=YARN | {"rope_theta": 1e4}
    ),
    "gpt-oss": hf.GptOssConfig(
        **OSS | ODD,
        rope_parameters=YARN
        | {
            "factor": 8.0,
            "original_max_position_embeddings": 8,
            "rope_theta": 150000.0,
            "truncate": False,
        },
    ),
    "gpt-oss-plain": hf.GptOssConfig(
        **OSS | TIED | layers("ffs"),
        attention_bias=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "qwen3nextmoe": hf.Qwen3NextConfig(
        **MOE | ODD | DELTA | SHARED | TIED,
        norm_topk_prob=False,
        mlp_only_layers=[0],
        linear_conv_kernel_dim=3,
    ),
    "qwen3nextmoe-stock": hf.Qwen3NextConfig(**MOE | EQUAL | SHARED),
    "qwen35": hf.Qwen3_5TextConfig(**GATED | ODD | DELTA | TIED, linear_conv_kernel_dim=3),
    "qwen35-stock": hf.Qwen3_5TextConfig(
        **GATED | MQA | EQUAL | layers("fllf") | {"linear_num_value_heads": 2},
        rope_parameters=YARN | HALF,
    ),
    "qwen35moe": hf.Qwen3_5MoeTextConfig(**MOE | EQUAL | SHARED),
    "flashnextmoe": hf.Qwen4ExpTextConfig(**FLASH_NEXT | ODD),
    "flashnextmoe-first": hf.Qwen4ExpTextConfig(**FLASH_NEXT | MQA | layers("lffl") | FIRST),
    "flashnextmoe-pairs": hf.Qwen4ExpTextConfig(**FLASH_NEXT | TIED | PAIRS),
    "flashnextmoe-alone": hf.Qwen4ExpTextConfig(**FLASH_NEXT | {"ple_layer_ids": None}),
    "lfm2": hf.Lfm2Config(**GATED | ODD | LFM2, block_multiple_of=24, conv_L_cache=5),
    "lfm2-ends-in-conv": hf.Lfm2Config(
        **GATED | MQA | UNTIED | LFM2 | {"num_hidden_layers": 3, "layer_types": None},
        full_attn_idxs=[0],
        block_auto_adjust_ff_dim=False,
        conv_L_cache=2,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    ),
    "lfm2-one-tap": hf.Lfm2Config(
        **GATED | LFM2, block_multiple_of=10, block_ffn_dim_multiplier=0.77, conv_L_cache=1
    ),
    "lfm2moe": hf.Lfm2MoeConfig(**MOE | ODD | LFM2, num_dense_layers=1),
    "lfm2moe-plain": hf.Lfm2MoeConfig(
        **MOE | MQA | UNTIED | LFM2,
        num_dense_layers=0,
        use_expert_bias=False,
        norm_topk_prob=False,
        routed_scaling_factor=1.7,
        conv_L_cache=4,
    ),
    "deepseek2moe": hf.DeepseekV2Config(
        **DEEPSEEK | GROUPED | {"n_shared_experts": 2},
        topk_method="group_limited_greedy",
        routed_scaling_factor=1.5,
        rope_parameters=UNEQUAL,
    ),
    # As V2-Lite is.
    "deepseek2moe-lite": hf.DeepseekV2Config(
        **DEEPSEEK | ODD | {"q_lora_rank": None}, rope_parameters=MSCALE
    ),
    # Texts of as many tokens as their indexers choose.
    "deepseek32moe": hf.DeepseekV32Config(
        **DEEPSEEK | GROUPED | INDEXED | ODD, rope_parameters=MSCALE
    ),
    "glm5moe": hf.GlmMoeDsaConfig(
        **DEEPSEEK | INDEXED, rms_norm_eps=1e-3, indexer_types=["full", "shared", "full"]
    ),
    "deepseek3moe": hf.DeepseekV3Config(**DEEPSEEK | GROUPED | ODD, rope_parameters=MSCALE),
    "deepseek3moe-other-epsilon": hf.DeepseekV3Config(
        **DEEPSEEK | {"n_shared_experts": 2, "first_k_dense_replace": 0},
        n_group=1,
        topk_group=1,
        rms_norm_eps=1e-3,
        rope_interleave=False,
        norm_topk_prob=False,
    ),
    "kimilinearmoe": hf.KimiLinearConfig(**KIMI | ODD, linear_attn_config=KIMI_LAYERS),
    "kimilinearmoe-ranks": hf.KimiLinearConfig(
        **KIMI
        | {"num_local_experts": 12, "n_group": 4, "topk_group": 2, "q_lora_rank": 26}
        | {"rms_norm_eps": 1e-3},
        layer_types=["full_attention", "linear_attention"],
        mlp_layer_types=["sparse", "sparse"],
        linear_head_dim=5,
        linear_num_heads=3,
        linear_conv_kernel_dim=3,
        norm_topk_prob=False,
        n_shared_experts=2,
    ),
    "glm47moe": hf.Glm4MoeLiteConfig(**DEEPSEEK | {"v_head_dim": 16, "rms_norm_eps": 1e-6}),
    "mistral4moe": hf.Mistral4Config(
        **DEEPSEEK | {"first_k_dense_replace": 0},
        rope_parameters=GROWING | {"partial_rotary_factor": 0.4},
    ),
    "minicpm3": hf.MiniCPM3Config(
        **LATENT | {"v_head_dim": None},
        dim_model_base=16,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "factor": 1.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.5, 2.0, 3.0, 5.0],
            "original_max_position_embeddings": 64,
        },
    ),
    "minicpm3-plain": hf.MiniCPM3Config(
        **LATENT | UNTIED, scale_depth=None, scale_emb=3, dim_model_base=None
    ),
    "qwen3moe-first-dense": hf.Qwen3MoeConfig(
        **MOE | TIED,
        head_dim=16,
        mlp_only_layers=[0, 1],
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=5,
    ),
}

MIXTURES = [case for case in CASES if "moe" in case or "mixtral" in case or "oss" in case]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A function that returns the folder of a case's checkpoint, made on first use."""
    made: dict[str, Path] = {}

    def get(case: str) -> Path:
        if case not in made:
            made[case] = random_model(tmp_path_factory.mktemp(case) / "hf", CASES[case])
            save_tokenizer(made[case], 320)
        return made[case]

    return get


def transformers_logits(folder: Path) -> torch.Tensor:
    model = auto_class(AutoConfig.from_pretrained(folder)).from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    )
    model.eval()
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0]


def equals_transformers_with_its_weights(folder: Path, output: Path, outtype: str) -> None:
    """Converts, and compares with transformers' graph of the weights as they are in the file."""
    found = []

    def check(written):
        found.append(verify(written))
        return [found[-1].line]

    convert(ConvertConfig(source=folder, output=output, outtype=outtype), verify=check)
    assert found[0].relative_error is not None and found[0].relative_error < 1e-5


def converted(folder: Path, output: Path, **options) -> Path:
    convert(ConvertConfig(source=folder, output=output, **options))
    return output


def decoded(engine: Engine, ids: list[int]) -> torch.Tensor:
    """Logits after the last of `ids`, which are decoded one at a time after a prefill of two."""
    with torch.inference_mode():
        engine._live.run(rows_of(ids[:2], 0))
        for position, token in enumerate(ids[2:], start=2):
            logits_V = engine._step(token, position)
        return logits_V


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(checkpoints, tmp_path, case):
    """f32 in modes dense and exact, for a prompt and token by token; every other case f16, the rest
    bf16, in mode dense, to within their rounding."""
    folder = checkpoints(case)
    want = transformers_logits(folder)
    path = converted(folder, tmp_path / "f32.gguf", outtype="f32")
    for mode in ("dense", "exact"):
        with Engine.load(path, mode=mode) as engine:
            assert rel_error(engine.logits(IDS), want) < 1e-5
            assert rel_error(decoded(engine, IDS), want[-1]) < 1e-5
            assert rel_error(engine.logits(IDS[::-1]), want) > 0.1  # the measure sees a difference
    outtype, dtype = [("f16", torch.float16), ("bf16", torch.bfloat16)][[*CASES].index(case) % 2]
    if case in MIXTURES:  # a router may choose others by rounded weights
        equals_transformers_with_its_weights(folder, tmp_path / f"{outtype}.gguf", outtype)
        return
    path = converted(folder, tmp_path / f"{outtype}.gguf", outtype=outtype)
    with Engine.load(path, mode="dense") as engine:
        assert 1e-6 < rel_error(engine.logits(IDS), want) < 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("case", CASES)
def test_rows_at_once_equal_single_steps(checkpoints, tmp_path, case):
    """Bit for bit, however a layer arranges attention, feed-forward and norms."""
    path = converted(checkpoints(case), tmp_path / "q8_0.gguf", outtype="q8_0")
    with Engine.load(path, mode="exact") as engine:
        got = engine.logits(IDS)
        for position, token in enumerate(IDS):
            assert torch.equal(engine._step(token, position), got[position])


_STOCK = """
    llama-mqa-tied mistral qwen2 qwen3 qwen2vl qwen3vl qwen3vlmoe
    phi3 falcon-11b gemma3-stock gemma4 gemma4-stock gemma4moe muse-glimmer
    smollm3 ministral3 nemotron arcee starcoder2-stock command-r cohere2 gemma2-stock olmo2
    olmo3-stock exaone4-stock ernie glm4 glm granite granite4-hybrid granite4moe-hybrid bamba
    nemotron-h nemotron-3moe-latent falcon-h1 falcon-h1-norm mixtral olmoe qwen2moe qwen3moe
    granitemoe cohere2moe
    cohere2moe-average glm4moe gpt-oss qwen3nextmoe-stock qwen35-stock qwen35moe lfm2 lfm2moe
    minimaxmoe dotsmoe hunyuan3moe exaonemoe solarmoe erniemoe seed-oss gemma stablelm kimilinearmoe
    stablelm-parallel gpt-neox phi2 hunyuan hunyuanmoe deepseek3moe glm47moe mistral4moe
"""
STOCK = _STOCK.split()


@pytest.mark.parametrize("case", STOCK)
def test_the_stock_layout_gives_the_same_logits(checkpoints, tmp_path, case):
    folder = checkpoints(case)
    path = converted(folder, tmp_path / "m.gguf", outtype="f32", layout="stock")
    assert not any(is_neuron_major(name) for name in ModelFile.load(path).tensors)
    with Engine.load(path, mode="dense") as engine:
        assert rel_error(engine.logits(IDS), transformers_logits(folder)) < 1e-5


@pytest.mark.parametrize(
    "case, words",
    [
        ("llama", "computes SiLU, this model is relu"),
        ("qwen2-mqa-tied-relu", "computes SiLU, this model is relu"),
        ("qwen3-biases-tied", "has no attn_k.bias"),
        ("falcon-7b", "computes GELU, this model is relu"),
        ("falcon-one-after-the-other", "graph has no"),
        ("opt", "llama.cpp has no opt graph"),
        ("mistral-window", "attends to all tokens, this model to the latest 5"),
        ("nemotron-biases-tied", "has heads of 64 values together, this model of 128"),
        ("arcee-biases", "has no attn_output.bias|has no ffn_down.bias"),
        ("qwen2-window", "attends to all tokens, this model to the latest 5"),
        ("starcoder2", "attends to all tokens, this model to the latest 5"),
        ("command-r-plus", "norms heads in models of 64 layers and more"),
        ("cohere2-others", "has windows in all layers but each 4th, this model in others"),
        ("gemma3", "has windows in all layers but each 6th, this model in others"),
        ("phi4-mini", "rotates whole heads, this model 12 of 16 values"),
        ("gemma3n", "has 4 planes, .* this model 3 planes"),
        ("gemma3-biases-untied", "computes GELU, this model is silu"),
        ("gemma2-plain", "computes GELU, this model is relu"),
        ("olmo3", "rotates with a theta of 3000 everywhere, this model with 5000 in some layers"),
        ("exaone4", "has heads of 64 values together, this model of 96"),
        ("ernie-biases", "has no attn_output.bias|has no ffn_down.bias"),
        ("gemma2", "multiplies scores by 0.204124, this model by 0.316228"),
        ("olmoe-renormalised", "does not divide the weights of experts by their sum"),
        ("olmoe-grouped", "has norms of 64 keys, this model of 32"),
        ("qwen2moe-plain", "computes SiLU, this model is relu"),
        ("qwen3moe-first-dense", "has experts in every layer"),
        ("qwen35", "has values of 12 in delta nets, as wide as keys, this model of 20"),
        ("dotsmoe-window", "has 4 heads of keys, this model 2"),
        ("seed-oss-biases", "has no attn_output.bias"),
        ("gpt-neox-sequential", "computes GELU, this model is relu"),
        (
            "deepseek2moe",
            "groups of experts by their two largest scores, this model by the largest",
        ),
        ("deepseek2moe-lite", "has latents of queries, too, but in models of 26 or 27 layers"),
        ("minicpm3", "has keys and values of all heads in one matrix"),
        ("lfm2moe-plain", "divides the weights of experts by their sum and does not scale them"),
    ],
)
def test_the_stock_layout_refuses_what_llama_cpp_would_run_wrongly(
    checkpoints, tmp_path, case, words
):
    with pytest.raises(HotsplitError, match=words):
        converted(checkpoints(case), tmp_path / "m.gguf", layout="stock")
    assert not list(tmp_path.iterdir())


def test_gates_and_ups_of_two_types_are_not_joined(checkpoints, tmp_path):
    model = ModelFile.load(converted(checkpoints("glm4"), tmp_path / "m.gguf", layout="stock"))
    up = dataclasses.replace(model.tensors["blk.2.ffn_up.weight"], kind="bf16")
    mixed = dataclasses.replace(model, tensors=model.tensors | {"blk.2.ffn_up.weight": up})
    with pytest.raises(
        HotsplitError, match="ffn_gate.weight is .* and the ups are bf16, but llama"
    ):
        mixed.save(tmp_path / "n.gguf")


def test_a_plan_with_offloaded_keys_is_refused_for_windows(checkpoints, tmp_path):
    """Before anything but the model is read."""
    model = converted(checkpoints("gemma3-stock"), tmp_path / "m.gguf")
    config = SolveConfig(
        model=model,
        profile=tmp_path / "none",
        machine=tmp_path / "none",
        output=tmp_path / "plan",
        vram_budget_bytes=1 << 20,
        kv_offload="on",
    )
    with pytest.raises(HotsplitError, match=r"layers have windows.* leave --kv-offload out$"):
        solve(config, workspace_bytes)
    assert not (tmp_path / "plan").exists()


@pytest.mark.parametrize("case", ["phi3", "phi4-mini"])
def test_longrope_takes_the_factors_of_the_context(tmp_path, case):
    """transformers takes those of the text's length, which is the context here, or a plan's."""
    from test_runtime import make_split

    rope = WHOLE | {"attention_factor": 1.3} if case == "phi3" else LONGROPE
    folder = random_model(
        tmp_path / "hf", hf.Phi3Config(**CASES[case].to_dict() | {"rope_parameters": rope})
    )
    save_tokenizer(folder, 320)
    path = converted(folder, tmp_path / "m.gguf", outtype="f32")
    want = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts = []
    for length in (9, 10, 11):
        ids = IDS[:length]
        with torch.no_grad():
            want_TV = want(torch.tensor([ids])).logits[0]
        with Engine.load(path, mode="dense", context_length=length) as engine:
            assert rel_error(engine.logits(ids), want_TV) < 1e-5
            assert rel_error(decoded(engine, ids), want_TV[-1]) < 1e-5
            with engine.observe(lambda name, layer, tensor: None):
                assert rel_error(engine.logits(ids), want_TV) < 1e-5
            texts.append(engine.model.spec.rope_scaling.words)
        half = [np.arange(0, 160, 2)] * 3
        split = make_split(ModelFile.load(path), half, dense_on_gpu=True, context_length=length)
        split.save(tmp_path / f"{length}.gguf")
        with Engine.load(path, split=tmp_path / f"{length}.gguf", mode="exact") as engine:
            assert rel_error(engine.logits(ids), want_TV) < 1e-5
    assert [words.split()[1] for words in texts] == ["short", "short", "long"]


def as_phi3(folder: Path, path: Path) -> Path:
    """A checkpoint of Phi-3 as llama.cpp's converter writes it, with fused matrices
    (conversion/phi.py)."""
    config, weights = (
        json.loads((folder / "config.json").read_text()),
        load_file(folder / "model.safetensors"),
    )
    rope, length = config["rope_parameters"], config["max_position_embeddings"]
    keys = {
        "general.architecture": "phi3",
        "hotsplit.model_id": "x",
        "phi3.context_length": length,
        "phi3.rope.scaling.original_context_length": config["original_max_position_embeddings"],
        "phi3.embedding_length": config["hidden_size"],
        "phi3.block_count": config["num_hidden_layers"],
        "phi3.feed_forward_length": config["intermediate_size"],
        "phi3.attention.head_count": config["num_attention_heads"],
        "phi3.attention.head_count_kv": config["num_key_value_heads"],
        "phi3.rope.dimension_count": int(16 * rope["partial_rotary_factor"]),
        "phi3.attention.sliding_window": config["sliding_window"] or 0,
    }
    keys = {
        name: np.uint32(value) if isinstance(value, int) else value for name, value in keys.items()
    }
    keys["phi3.attention.layer_norm_rms_epsilon"] = np.float32(config["rms_norm_eps"])
    keys["phi3.rope.freq_base"] = np.float32(rope["rope_theta"])
    name_of = gguf_names(MODEL_ARCH.PHI3, config["num_hidden_layers"])
    tensors = {name_of(name): array_entry(each.numpy(), "f32") for name, each in weights.items()}
    if rope["rope_type"] == "longrope":
        ratio = length / config["original_max_position_embeddings"]
        factor = math.sqrt(1 + math.log(ratio) / math.log(length / ratio))
        keys["phi3.rope.scaling.attn_factor"] = np.float32(factor)
        for size in ("long", "short"):
            numbers = np.array(rope[f"{size}_factor"])
            tensors[f"rope_factors_{size}.weight"] = array_entry(numbers, "f32")
    write_gguf(
        path, "phi3", {k: v for k, v in keys.items() if k != "general.architecture"}, tensors
    )
    return path


@pytest.mark.parametrize("case", ["phi3", "phi4-mini", "plain"])
def test_a_phi3_of_llama_cpp_is_a_llama(tmp_path, case):
    """It runs as it is, and in another layout and type."""
    plain = hf.Phi3Config(**GATED, sliding_window=5)
    folder = random_model(tmp_path / "hf", CASES.get(case, plain))
    path, want = as_phi3(folder, tmp_path / "phi3.gguf"), transformers_logits(folder)
    assert ModelFile.load(path).architecture == "llama"
    other = converted(path, tmp_path / "m.gguf")
    for file in (path, other):
        with Engine.load(file, mode="dense") as engine:
            assert rel_error(engine.logits(IDS), want) < 1e-5
    keys, tensors = read_model_gguf(path)
    if case == "phi3":
        del tensors["rope_factors_short.weight"]
        with pytest.raises(HotsplitError, match="no tensor 'rope_factors_short.weight' for"):
            ModelFile.of(path, keys, tensors)
        kind = {"phi3.rope.scaling.type": "dynamic"}
        with pytest.raises(HotsplitError, match="rope.scaling.type is 'dynamic'"):
            ModelFile.of(path, keys | kind, tensors)
        tensors["blk.1.ffn_up.weight"] = array_entry(np.zeros((319, 64)), "f32")
        with pytest.raises(HotsplitError, match="no tensor 'blk.1.ffn_gate.weight'"):
            ModelFile.of(path, keys, tensors)


def test_bamboo_is_a_mistral_with_relu_on_both_projections(tmp_path):
    folder = random_model(
        tmp_path / "hf", hf.MistralConfig(**GATED, sliding_window=None, head_dim=16)
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for layer in model.model.layers:
        mlp = layer.mlp
        layer.mlp.forward = lambda x, m=mlp: m.down_proj(
            m.gate_proj(x).relu() * m.up_proj(x).relu()
        )
    with torch.no_grad():
        want = model(torch.tensor([IDS])).logits[0]
    edit_config(
        folder,
        lambda c: c.update(
            architectures=["BambooForCausalLM"],
            hidden_act="relu",
            auto_map={"AutoConfig": "configuration_bamboo.BambooConfig"},
        ),
    )
    (folder / "configuration_bamboo.py").write_text("raise SystemExit('this must never run')")
    path = converted(folder, tmp_path / "m.gguf", outtype="f32")
    assert ModelFile.load(path).activation == "drelu"
    with Engine.load(path, mode="exact") as engine:
        assert rel_error(engine.logits(IDS), want) < 1e-5
    edit_config(folder, lambda c: c.update(hidden_act="silu"))
    with pytest.raises(HotsplitError, match="hidden_act 'silu' is unknown"):
        converted(folder, tmp_path / "n.gguf")


@pytest.mark.parametrize("has_biases", [False, True])
def test_internlm_3_is_a_llama_with_other_names_of_biases(tmp_path, has_biases):
    """By a config as published: what transformers saves has Llama's class and names."""
    own = {"attention_bias": has_biases, "mlp_bias": has_biases, "head_dim": 24}
    folder = random_model(tmp_path / "hf", hf.InternLM3Config(**GATED | ODD | own))
    save_tokenizer(folder, 320)
    published = {"qkv_bias": has_biases, "bias": has_biases, "rope_theta": 1e4}
    published |= {"rope_scaling": {"rope_type": "dynamic", "factor": 6.0}}

    def publish(config: dict) -> None:
        for key in ("attention_bias", "mlp_bias", "rope_parameters"):
            del config[key]
        config.update(of_class("InternLM3", **published))

    edit_config(folder, publish)
    want = transformers_logits(folder)
    equals_transformers_with_its_weights(folder, tmp_path / "m.gguf", "f32")
    converted(folder, tmp_path / "stock.gguf", outtype="f32", layout="stock")
    for name in ("m", "stock"):
        with Engine.load(tmp_path / f"{name}.gguf", mode="dense") as engine:
            assert rel_error(engine.logits(IDS), want) < 1e-5
            assert rel_error(decoded(engine, IDS), want[-1]) < 1e-5
    edit_config(folder, lambda c: c.update(qkv_bias=not has_biases))
    with pytest.raises(HotsplitError, match=f"qkv_bias is {not has_biases}, wanted {has_biases}"):
        converted(folder, tmp_path / "n.gguf")


def as_internlm2(folder: Path) -> None:
    """A Llama as InternLM 2 has it: for each head of keys its queries, the keys and the values are
    one matrix."""
    weights, own = load_file(folder / "model.safetensors"), {}
    names = {
        "embed_tokens": "tok_embeddings",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "lm_head": "output",
    }
    for name, values in weights.items():
        stem, _, which = name.partition(".self_attn.")
        if which == "q_proj.weight":
            parts = [values, *(weights[f"{stem}.self_attn.{x}_proj.weight"] for x in "kv")]
            grouped = [part.unflatten(0, (2, -1)) for part in parts]
            own[f"{stem}.attention.wqkv.weight"] = torch.cat(grouped, 1).flatten(0, 1)
        elif which not in ("k_proj.weight", "v_proj.weight"):
            for theirs, new in names.items():
                name = name.replace(theirs, new)
            own[name] = values.clone()
    save_file(own, folder / "model.safetensors", {"format": "pt"})


def as_ling2(folder: Path) -> None:
    """A GLM-4.5 as Ling 2 has it: queries, keys and values are one matrix, one after the other."""
    weights, own = load_file(folder / "model.safetensors"), {}
    names = {
        "model.embed_tokens": "model.word_embeddings",
        "self_attn.o_proj": "attention.dense",
        "self_attn.q_norm": "attention.query_layernorm",
        "self_attn.k_norm": "attention.key_layernorm",
        "gate.e_score_correction_bias": "gate.expert_bias",
    }
    for name, values in weights.items():
        stem, _, which = name.partition(".self_attn.")
        if which == "q_proj.weight":
            parts = [values, *(weights[f"{stem}.self_attn.{x}_proj.weight"] for x in "kv")]
            own[f"{stem}.attention.query_key_value.weight"] = torch.cat(parts)
        elif which not in ("k_proj.weight", "v_proj.weight"):
            for theirs, new in names.items():
                name = name.replace(theirs, new)
            own[name] = values.clone()
    save_file(own, folder / "model.safetensors", {"format": "pt"})


# By class: a family of the same graph, the form of its checkpoint, and what the config says.
OF_OTHERS = {
    "InternLM2": (
        hf.LlamaConfig(**GATED | ODD),
        as_internlm2,
        {"bias": False, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    ),
    "BailingMoeV2": (
        hf.Glm4MoeConfig(
            **GLM | ODD | {"n_routed_experts": 12, "n_group": 4, "topk_group": 2},
            use_qk_norm=True,
            first_k_dense_replace=1,
        ),
        as_ling2,
        {
            "num_experts": 12,
            "num_shared_experts": 1,
            "moe_shared_expert_intermediate_size": 37,
            "score_function": "sigmoid",
            "use_qk_norm": True,
            "partial_rotary_factor": 0.5,
        },
    ),
}


@pytest.mark.parametrize("name", OF_OTHERS)
def test_families_that_transformers_lacks_are_others_of_it(tmp_path, name):
    config, renamed, changes = OF_OTHERS[name]
    folder = random_model(tmp_path / "hf", config)
    save_tokenizer(folder, 320)
    want = transformers_logits(folder)
    renamed(folder)
    edit_config(
        folder,
        lambda c: c.update(of_class(name), model_type=name, n_routed_experts=None, **changes),
    )
    for layout in ("sparse", "stock"):
        path = converted(folder, tmp_path / f"{layout}.gguf", outtype="f32", layout=layout)
        with Engine.load(path, mode="dense") as engine:
            assert rel_error(engine.logits(IDS), want) < 1e-5
            assert rel_error(decoded(engine, IDS), want[-1]) < 1e-5


@pytest.mark.parametrize(
    "kind, own", [("ministral3", {"rope_parameters": GROWING}), ("mistral", {"sliding_window": 5})]
)
def test_the_text_model_of_mistral_3_beside_one_for_images(tmp_path, kind, own):
    text = GATED | own | {"model_type": kind, "head_dim": 24, "pad_token_id": 0}
    images = {
        "model_type": "pixtral",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 16,
        "image_size": 28,
        "patch_size": 14,
    }
    config = hf.Mistral3Config(text_config=text, vision_config=images, tie_word_embeddings=False)
    Mistral3ForConditionalGeneration(config).save_pretrained(tmp_path / "hf")
    save_tokenizer(tmp_path / "hf", 320)
    equals_transformers_with_its_weights(tmp_path / "hf", tmp_path / "m.gguf", "f32")
    name = "llama" if kind == "mistral" else "mistral3"
    assert ModelFile.load(tmp_path / "m.gguf").architecture == name
    edit_config(tmp_path / "hf", lambda c: c["text_config"].update(model_type="mistral4"))
    with pytest.raises(
        HotsplitError, match="model_type is 'mistral4', wanted 'mistral' or 'ministral3'"
    ):
        converted(tmp_path / "hf", tmp_path / "n.gguf")


def test_prosparse_is_a_llama_with_its_threshold(tmp_path):
    folder = random_model(tmp_path / "hf", hf.LlamaConfig(**GATED, hidden_act="relu"))
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for layer in oracle.model.layers:
        layer.mlp.act_fn = torch.nn.Threshold(0.01, 0.0)
    edit_config(
        folder,
        lambda c: c.update(
            architectures=["SparseLlamaForCausalLM"], hidden_act="fatrelu", hidden_act_param=0.01
        ),
    )
    path = converted(folder, tmp_path / "m.gguf", outtype="f32")
    model = ModelFile.load(path)
    assert (model.activation, set(model.threshold_L)) == ("fatrelu", {float(np.float32(0.01))})
    with torch.no_grad():
        want = oracle(torch.tensor([IDS])).logits[0]
    for mode in ("dense", "exact"):
        with Engine.load(path, mode=mode) as engine:
            assert rel_error(engine.logits(IDS), want) < 1e-5
    edit_config(folder, lambda c: c.update(hidden_act="silu"))
    with pytest.raises(HotsplitError, match="hidden_act 'silu' is unknown; known: fatrelu"):
        converted(folder, tmp_path / "n.gguf")


def rope(parameters: dict, **changes: object) -> dict:
    return {"rope_parameters": parameters | changes}


def of_class(name: str, **changes: object) -> dict:
    return {"architectures": [f"{name}ForCausalLM"]} | changes


REFUSED = {
    "word_embed_proj_dim is 32": ("opt", {"word_embed_proj_dim": 32}),
    "_remove_final_layer_norm": ("opt", {"_remove_final_layer_norm": True}),
    "max_position_embeddings is 1000000002": ("opt", {"max_position_embeddings": 10**9}),
    "do_layer_norm_before is None": ("opt", {"do_layer_norm_before": None}),
    "ALiBi": ("falcon-7b", {"alibi": True}),
    "num_ln_in_parallel_attn is 2": ("falcon-7b", {"num_ln_in_parallel_attn": 2}),
    "parallel_attn false": ("falcon-40b", {"parallel_attn": False}),
    "known: relu, relu2, fatrelu, silu, gelu, gelu_new": ("falcon-7b", {"activation": "drelu"}),
    "no tensor for 'blk.0.ffn_norm": ("falcon-7b", {"parallel_attn": None}),
    "long_factor is .*, wanted 6 positive numbers": (
        "phi4-mini",
        rope(LONGROPE, long_factor=[1.0] * 8),
    ),
    "long_factor is .*1e.39.*, wanted 6 positive numbers": (
        "phi4-mini",
        rope(LONGROPE, long_factor=[1.5, 2.0, 3.0, 5.0, 7.0, 1e39]),
    ),
    "short_factor is .*, wanted 6 positive numbers": (
        "phi4-mini",
        rope(LONGROPE, short_factor=[1e-60, 2.0, 3.0, 5.0, 7.0, 9.0]),
    ),
    "rope_parameters.factor is 1e.39, wanted a positive number": (
        "phi4-mini",
        rope(LONGROPE, factor=1e39),
    ),
    "short_factor is .*, wanted 8 positive": ("phi3", rope({"type": "su"})),
    "original_max_position_embeddings is 1, wanted at least 2": (
        "phi3",
        {"original_max_position_embeddings": 1},
    ),
    "longrope', which is not supported; supported for this family: ordinary": (
        "llama",
        rope(WHOLE),
    ),
    "partial_rotary_factor is 0.7: 11 of 16 values": (
        "phi3",
        rope(WHOLE, partial_rotary_factor=0.7),
    ),
    "type 'linear', which is not supported": (
        "phi3",
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
    ),
    "no tensor for 'blk.0.attn_k.bias'": ("llama", of_class("Qwen2")),
    "no tensor for 'blk.0.attn_k_norm.weight'": ("llama", of_class("Qwen3")),
    "has 'full_attention', wanted sliding_attention: transformers' Mistral ignores": (
        "mistral-window",
        layers("fff"),
    ),
    "wanted 3 of full_attention or sliding_attention": ("ministral", {"layer_types": ["x"] * 3}),
    "rope_parameters.llama_4_scaling_beta is missing": (
        "ministral3",
        rope({k: v for k, v in GROWING.items() if not k.startswith("llama")}),
    ),
    "hidden_act 'drelu' is unknown; known: relu, relu2": ("nemotron", {"hidden_act": "drelu"}),
    "partial_rotary_factor is 0.2": ("nemotron", rope(HALF, partial_rotary_factor=0.2)),
    r"no tensor for 'blk.0.attn_k.bias' \(12": ("arcee", {"attention_bias": True}),
    "tie_word_embeddings is False": ("command-r", {"tie_word_embeddings": False}),
    "logit_scale is 0": ("command-r", {"logit_scale": 0}),
    "no tensor for 'blk.0.attn_k_norm.weight'|no tensor for 'blk.0.attn_q_norm": (
        "command-r",
        {"use_qk_norm": True},
    ),
    "rotary_pct is 0.5": ("cohere2", {"rotary_pct": 0.5}),
    "sliding_window is None": ("cohere2", {"sliding_window": None}),
    "use_bias is None": ("starcoder2", {"use_bias": None}),
    "attention_bias is True": ("mistral", {"attention_bias": True}),
    "has 'sliding_attention', wanted full_attention:": ("qwen2", layers("sss")),
    "no rule for tensor": ("qwen2", of_class("Llama")),
    "num_local_experts is 0, wanted a number of experts": ("mixtral", {"num_local_experts": 0}),
    "num_experts is 65536, wanted a number of experts": ("qwen3moe", {"num_experts": 65536}),
    "12 experts do not divide into 5 groups": ("glm4moe-groups", {"n_group": 5}),
    "8 experts a token of 7": ("qwen3moe", {"num_experts_per_tok": 8}),
    "no expert 7 for 'blk.0.ffn_down_exps.weight'": ("qwen3moe", {"num_experts": 8}),
    "7 experts for 'blk.0.ffn_down_exps.weight'": ("qwen3moe", {"num_experts": 6}),
    "supported only before all others": ("qwen3moe", {"mlp_only_layers": [1]}),
    "clipped queries": ("olmoe", {"clip_qkv": 8.0}),
    "5 value heads of delta nets do not divide among 2": ("qwen35", {"linear_num_value_heads": 5}),
    "a convolution of 1 taps": ("qwen35", {"linear_conv_kernel_dim": 1}),
    r"conv1d.weight' is \[168, 1, 3\], wanted \[168, 4\]": (
        "qwen35",
        {"linear_conv_kernel_dim": 4},
    ),
    "channels of the delta nets is 6024": ("qwen35", {"linear_value_head_dim": 996}),
    "none of 5 layers has attention": ("qwen35", layers("lllll")),
    "hidden_act 'relu' is unknown": ("qwen35", {"hidden_act": "relu"}),
    "conv_bias is True": ("lfm2", {"conv_bias": True}),
    "a convolution of 17 taps": ("lfm2", {"conv_L_cache": 17}),
    r"conv.weight' is \[64, 1, 5\], wanted \[64, 3\]": ("lfm2", {"conv_L_cache": 3}),
    "wanted 5 of full_attention or conv": ("lfm2", {"layer_types": ["sliding_attention"] * 5}),
    r"\[0, 0, 0, 0, 0\], wanted a number": ("lfm2", {"layer_types": ["conv"] * 5}),
    "layer_types is missing, wanted each layer's": ("lfm2moe", {"layer_types": None}),
    "use_bidirectional_attention is True": ("gemma2", {"use_bidirectional_attention": True}),
    "attn_logit_softcapping is -1.0": ("gemma2", {"attn_logit_softcapping": -1.0}),
    "attn_logit_softcapping is 20.0, wanted none: scores with a soft cap": (
        "gemma3",
        {"attn_logit_softcapping": 20.0},
    ),
    "sliding_window_pattern is 4, wanted 2": ("gemma2", {"sliding_window_pattern": 4}),
    "rope_parameters.partial_rotary_factor is None": (
        "glm4",
        rope(HALF, partial_rotary_factor=None),
    ),
    "rope_parameters.rope_theta is None": ("glm4", rope(HALF, rope_theta=None)),
    "partial_rotary_factor is 0.3: 7 of 24 values": (
        "glm4",
        rope({"rope_type": "default", "partial_rotary_factor": 0.3}),
    ),
    "no tensor for 'blk.0.post_attention_norm.weight'": ("glm", of_class("Glm4")),
    "of type 'longrope'": ("olmo3", rope({"full_attention": {"rope_type": "longrope"}})),
    "sliding_window is 5, but no layer has it": ("exaone4", layers("ff")),
    "expert_selection_fn is 'tanh'": ("cohere2moe", {"expert_selection_fn": "tanh"}),
    "expert_selection_fn is null": ("cohere2moe", {"expert_selection_fn": None}),
    "combination_strategy is 'sum', wanted 'average'": (
        "cohere2moe",
        {"shared_expert_combination_strategy": "sum"},
    ),
    "no key of a GGUF says that layers without experts do not": (
        "cohere2moe",
        {"prefix_dense_sliding_window_pattern": 2},
    ),
    "wanted dense for the first of 6 layers": ("cohere2moe", {"mlp_layer_types": ["sparse"] * 5}),
    "wanted 0 for the layers without a window": (
        "muse-glimmer",
        {"layer_rope_theta": [1e4, 1e4, 0, 1e4, 1e4, 0]},
    ),
    "post_norm_eps is 1e-06, wanted 1e-08": ("muse-glimmer", {"post_norm_eps": 1e-6}),
    "moe_layer_interval is 2, wanted 1: layers without": ("erniemoe", {"moe_layer_interval": 2}),
    "moe_layer_end_index is 1, wanted -1 or 2": ("erniemoe", {"moe_layer_end_index": 1}),
    r"moe_topk is \[2, 3, 2\], wanted one number": ("hunyuanmoe-lists", {"moe_topk": [2, 3, 2]}),
    "num_shared_expert is 2, wanted 1": ("hunyuanmoe", {"num_shared_expert": [2, 2, 2]}),
    "mlp_layer_types.* are supported only before all others": (
        "hunyuan3moe",
        {"mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "mlp_layer_types is .*, wanted 5 of dense or sparse": (
        "exaonemoe",
        {"mlp_layer_types": ["dense", "sparse"]},
    ),
    "qk_layernorm is True": ("stablelm", {"qk_layernorm": True}),
    "rope_parameters.alpha is -1": ("hunyuan", rope(ALPHA, alpha=-1.0)),
    "topk_method is 'noaux_tc'": ("deepseek2moe", {"topk_method": "noaux_tc"}),
    "num_key_value_heads is 2, wanted 4": ("deepseek3moe", {"num_key_value_heads": 2}),
    r"kv_b_proj.weight' is \[88, 20\], wanted \[92, 20\]": ("deepseek3moe", {"v_head_dim": 11}),
    "q_lora_rank is 28, wanted none: attention over latent": ("deepseek3moe", of_class("Glm4Moe")),
    "logits_scaling is 0": ("granite", {"logits_scaling": 0.0}),
    "wanted one of .* and not mlp beside moe": (
        "nemotron-h",
        {"layers_block_type": blocks("ME-*EM-")},
    ),
    "wanted attention and neurons in one layer each": (
        "nemotron-h",
        {"layers_block_type": blocks("MM-MM-M-")},
    ),
    "mamba_norm_before_gate is True": ("falcon-h1-norm", {"mamba_norm_before_gate": True}),
    "mamba_d_ssm is 48, wanted mamba_n_heads times mamba_d_head": (
        "falcon-h1",
        {"mamba_d_ssm": 48},
    ),
    "mamba_conv_bias is False": ("granite4-hybrid", {"mamba_conv_bias": False}),
    "hidden_act is 'gelu', wanted 'silu': Mamba-2": ("granite4-hybrid", {"hidden_act": "gelu"}),
    "hidden_act is 'relu', wanted 'silu': Mamba-2": ("bamba", {"hidden_act": "relu"}),
    "hidden_act is 'gelu_new', wanted 'silu': M": ("falcon-h1", {"hidden_act": "gelu_new"}),
    r"time_step_limit is \[0.01, 0.1\]": ("granite4-hybrid", {"time_step_limit": [0.01, 0.1]}),
    r"time_step_limit is \[0, 0.1\]": ("bamba", {"time_step_limit": [0, 0.1]}),
    r"time_step_limit is \[0.01, inf\]": ("falcon-h1", {"time_step_limit": [0.01, math.inf]}),
    "linear_num_heads is 2, wanted 3": ("kimilinearmoe-ranks", {"linear_num_heads": 2}),
    r"no layer attends \(layer_types\), wanted": ("kimilinearmoe-ranks", {"layer_types": None}),
    "kda_layers .*, wanted each of 1 to 2 in one of them": (
        "kimilinearmoe",
        {"layer_types": None, "linear_attn_config": KIMI_LAYERS | {"kda_layers": [2]}},
    ),
    "mla_use_nope is False": ("kimilinearmoe", {"mla_use_nope": False}),
    r"time_step_limit is \[0.01, 1\]": ("nemotron-h", {"time_step_limit": [0.01, 1]}),
    "no layer attends": ("bamba", {"attn_layer_indices": []}),
    "rope_interleave is False": ("deepseek2moe", {"rope_interleave": False}),
    "scoring_func is 'softmax'": ("deepseek3moe", {"scoring_func": "softmax"}),
    "scoring_func is 'sigmoid'": ("deepseek2moe", {"scoring_func": "sigmoid"}),
    "moe_layer_freq is 2": ("deepseek3moe", {"moe_layer_freq": 2}),
    "embedding_multiplier is 2.0": ("granite", of_class("Llama", embedding_multiplier=2.0)),
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_graph_that_would_be_computed_wrongly_is_refused(checkpoints, tmp_path, words):
    case, change = REFUSED[words]
    folder = Path(shutil.copytree(checkpoints(case), tmp_path / "hf"))
    edit_config(folder, lambda c: c.get("text_config", c).update(change))
    with pytest.raises(HotsplitError, match=words):
        converted(folder, tmp_path / "m.gguf")
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_texts_are_as_long_as_what_an_indexer_chooses(checkpoints, tmp_path):
    """The tensors of indexers in a GGUF are left out, too."""
    path = converted(checkpoints("glm5moe"), tmp_path / "m.gguf", outtype="f32")
    model = ModelFile.load(path)
    keys = {**model._own_keys(), **model.extra_keys}
    assert keys["glm-dsa.context_length"] == 64 and model.spec.context_length == 12
    indexer = {
        f"blk.{layer}.indexer.{name}": array_entry(np.ones(shape, np.float32), "f32")
        for layer in range(3)
        for name, shape in (("attn_k.weight", (16, 64)), ("k_norm.bias", (16,)))
    }
    write_gguf(path := tmp_path / "all.gguf", "glm-dsa", keys, {**model.tensors, **indexer})
    with Engine.load(path, mode="dense") as engine:
        assert engine.context_length == 12
        assert rel_error(engine.logits(IDS), transformers_logits(checkpoints("glm5moe"))) < 1e-5
    words = "beyond 12 tokens an indexer chooses what is attended to"
    for more in ({"context_length": 13}, {"rope_scaling": "yarn", "rope_scale": 2.0}):
        with pytest.raises(HotsplitError, match=words):
            Engine.load(path, **more)
    assert words in dict(spec_facts(model.spec))["context"]


def test_a_file_whose_layers_all_attend_is_refused(checkpoints, tmp_path):
    """A layer with keys has no neurons, whatever their number."""
    model = ModelFile.load(converted(checkpoints("nemotron-h"), tmp_path / "m.gguf"))
    name = "nemotron_h.attention.head_count_kv"
    keys = {**model._own_keys(), **model.extra_keys, name: [np.uint32(2)] * model.spec.num_layers}
    write_gguf(tmp_path / "all.gguf", "nemotron_h", keys, dict(model.tensors))
    with pytest.raises(HotsplitError, match="no layer has neurons and no keys"):
        ModelFile.load(tmp_path / "all.gguf")


@pytest.mark.parametrize("wrong", ["twice", "router"])
def test_experts_that_contradict_each_other_are_refused(checkpoints, tmp_path, wrong):
    """All experts in one tensor and also one by one; a router for fewer experts than there are."""
    folder = Path(shutil.copytree(checkpoints("qwen3moe"), tmp_path / "hf"))
    weights = load_file(folder / "model.safetensors")
    at = "model.layers.1.mlp"
    if wrong == "twice":
        one = [
            weights[f"{at}.experts.{e}.{n}_proj.weight"] for e in range(7) for n in ("gate", "up")
        ]
        weights[f"{at}.experts.gate_up_proj"] = torch.cat(one).unflatten(0, (7, -1))
        words = "expert 0 of 'blk.1.ffn_gate_exps.weight' is in .* and in .*; only one of them"
    else:
        weights[f"{at}.gate.weight"] = weights[f"{at}.gate.weight"][:6].clone()
        words = r"'model.layers.1.mlp.gate.weight' is \[6, \d+\], wanted \[7, \d+\]"
    (folder / "model.safetensors").unlink()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(HotsplitError, match=words):
        converted(folder, tmp_path / "m.gguf")


def test_experts_of_qwen_3_vl_are_transposed_as_published(checkpoints, tmp_path):
    folder = Path(shutil.copytree(checkpoints("qwen3vlmoe"), tmp_path / "hf"))
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if ".experts." in name]:
        weights[name] = weights[name].transpose(1, 2).contiguous()
    (folder / "model.safetensors").unlink()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    equals_transformers_with_its_weights(folder, tmp_path / "m.gguf", "f32")
    want = converted(checkpoints("qwen3vlmoe"), tmp_path / "n.gguf", outtype="f32")
    tensors, others = (ModelFile.load(p).tensors for p in (tmp_path / "m.gguf", want))
    for name, entry in others.items():
        assert np.array_equal(tensors[name].read(), entry.read()), name


def test_old_falcon_keys_and_short_names(checkpoints, tmp_path):
    """RWForCausalLM spelt heads and layers differently."""
    folder = Path(shutil.copytree(checkpoints("falcon-40b"), tmp_path / "hf"))
    renames = {
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "num_kv_heads": "n_head_kv",
    }

    def rename(config):
        for new, old in renames.items():
            config[old] = config.pop(new)
        config["architectures"] = ["RWForCausalLM"]

    edit_config(folder, rename)
    old = converted(folder, tmp_path / "old.gguf", outtype="f32")
    with Engine.load(old, mode="dense") as engine:
        assert rel_error(engine.logits(IDS), transformers_logits(checkpoints("falcon-40b"))) < 1e-5


def test_a_file_that_lacks_some_biases_is_refused(checkpoints, tmp_path):
    model = ModelFile.load(converted(checkpoints("opt"), tmp_path / "m.gguf"))
    tensors = {name: e for name, e in model.tensors.items() if name != "blk.1.ffn_up.bias"}
    with pytest.raises(HotsplitError, match=r"no tensor 'blk.1.ffn_up.bias'"):
        dataclasses.replace(model, tensors=tensors).validate()
    keys, _ = read_model_gguf(tmp_path / "m.gguf")
    with pytest.raises(HotsplitError, match="ffn_up.bias is in layer 0 or in layer 1"):
        ModelFile.of(tmp_path / "m.gguf", keys, tensors)


def test_experts_in_mxfp4_stay_in_it_or_are_unpacked(tmp_path):
    """The published form of gpt-oss, against transformers' own unpacking. Without an outtype they
    stay in MXFP4, except those that are transposed."""
    from safetensors.torch import load_file, save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = hf.GptOssConfig(**OSS | {"intermediate_size": 64, "num_hidden_layers": 1})
    folder = random_model(tmp_path / "hf", config)
    save_tokenizer(folder, 320)
    weights, packed = load_file(folder / "model.safetensors"), {}
    chance = torch.Generator().manual_seed(0)
    for name in [n for n in weights if n.endswith(("gate_up_proj", "down_proj"))]:
        rows = weights[name].shape[2]
        blocks = torch.randint(0, 256, (6, rows, 2, 16), generator=chance, dtype=torch.uint8)
        scales = torch.randint(120, 126, (6, rows, 2), generator=chance, dtype=torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        weights[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    want = ModelFile.load(converted(folder, tmp_path / "f32.gguf", outtype="f32"))
    others = {name: values for name, values in weights.items() if f"{name}_blocks" not in packed}
    save_file(others | packed, folder / "model.safetensors", {"format": "pt"})
    edit_config(folder, lambda c: c.update(quantization_config={"quant_method": "mxfp4"}))
    got = ModelFile.load(converted(folder, tmp_path / "packed.gguf", outtype="f32"))
    assert got.tensors.keys() == want.tensors.keys()
    for name, entry in want.tensors.items():
        assert np.array_equal(got.tensors[name].read(), entry.read()), name
    for layout in ("stock", "sparse"):
        kept = ModelFile.load(converted(folder, tmp_path / layout, layout=layout))
        for name in (n for n in kept.tensors if n.endswith("_exps.weight")):
            whole = want.tensors[name.replace("down_exps.", "down_exps_t.")].read()
            entry = kept.tensors[name]
            assert entry.kind == "mxfp4"
            values = dequantize(entry.read(), GGMLQuantizationType.MXFP4)
            assert np.array_equal(values, whole.swapaxes(1, 2) if "down" in name else whole)
        assert len(kept.tensors) == len(want.tensors)


ONE_SIZE = GATED | ODD | GEMMA4 | {"head_dim": 32, "global_head_dim": 32}  # per_layer_config: {}
ALIKE = {
    "gemma4 of one size": hf.Gemma4TextConfig(**ONE_SIZE | layers("sff")),
    "gemma4 without windows": hf.Gemma4TextConfig(**ONE_SIZE | layers("fff")),
    "gemma4 without windows, values are keys": hf.Gemma4TextConfig(
        **ONE_SIZE | layers("fff"), attention_k_eq_v=True
    ),
    "gemma4moe of one size": hf.Gemma4TextConfig(**ONE_SIZE | GEMMA4_MOE | layers("fff")),
    "cohere2 without windows": hf.Cohere2Config(**GATED | ODD | layers("fff"), sliding_window=5),
    "qwen35 without states": hf.Qwen3_5TextConfig(**GATED | ODD | DELTA | layers("fffff")),
    "qwen35moe without states": hf.Qwen3_5MoeTextConfig(**MOE | EQUAL | SHARED | layers("ffff")),
    "qwen3next without states": hf.Qwen3NextConfig(**MOE | EQUAL | SHARED | layers("ffff")),
    "gpt-oss, experts of one neuron": hf.GptOssConfig(**OSS | {"intermediate_size": 1}),
    "mixtral, experts of one neuron": hf.MixtralConfig(
        **GATED | {"intermediate_size": 1}, num_local_experts=5
    ),
    "qwen2moe, one shared neuron": hf.Qwen2MoeConfig(**MOE, shared_expert_intermediate_size=1),
    "llama of one neuron": hf.LlamaConfig(**GATED | {"intermediate_size": 1}),
}


@pytest.mark.parametrize("case", ALIKE)
def test_what_no_layer_has_need_not_be_there(tmp_path, case):
    """Layers that are all of one kind or size, and single neurons: converted, read and converted
    again."""
    folder = random_model(tmp_path / "hf", ALIKE[case])
    equals_transformers_with_its_weights(folder, tmp_path / "m.gguf", "f32")
    config = ConvertConfig(source=tmp_path / "m.gguf", output=tmp_path / "q.gguf", outtype="q8_0")
    report = convert(config, verify=lambda made: [verify(made).line])
    assert report.verified.startswith("verified: logits equal the source's")


def test_a_config_without_windows_need_not_say_how_long_they_are(tmp_path):
    """Nor how their layers rotate."""
    folder = random_model(tmp_path / "hf", ALIKE["gemma4 without windows"])
    equals_transformers_with_its_weights(folder, tmp_path / "m.gguf", "f32")

    def without_windows(config):
        config.update(sliding_window=None)
        config["rope_parameters"].pop("sliding_attention")

    edit_config(folder, without_windows)
    convert(ConvertConfig(source=folder, output=tmp_path / "n.gguf", outtype="f32"))
    want, got = (ModelFile.load(tmp_path / name).bare_spec for name in ("m.gguf", "n.gguf"))
    assert got == want


def test_kimi_linear_as_llama_cpps_converter_writes_it(checkpoints, tmp_path):
    """With more dimensions of 1, which its quantiser drops, and, as before 2026, with the second
    matrices of keys and values as one and as many key heads as heads."""
    folder = checkpoints("kimilinearmoe")
    path = converted(folder, tmp_path / "m.gguf", outtype="f32", layout="stock")
    keys, tensors = read_model_gguf(path)
    values = {name: entry.read() for name, entry in tensors.items()}
    for name in ("ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v"):
        values[f"blk.0.{name}.weight"] = values[f"blk.0.{name}.weight"][None]
    values["blk.0.ssm_a"] = values["blk.0.ssm_a"][None, None]
    both = values.pop("blk.1.attn_k_b.weight").swapaxes(1, 2), values.pop("blk.1.attn_v_b.weight")
    values["blk.1.attn_kv_b.weight"] = np.concatenate(both, axis=1).reshape(-1, 20)
    keys = {**keys, "kimi-linear.attention.head_count_kv": [0, 3]}
    old = {name: array_entry(each, "f32") for name, each in values.items()}
    write_gguf(tmp_path / "old.gguf", "kimi-linear", keys, old)
    with Engine.load(tmp_path / "old.gguf", mode="dense") as engine:
        assert rel_error(engine.logits(IDS), transformers_logits(folder)) < 1e-5
