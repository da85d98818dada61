"""Keys and configs as published files have them, where they differ from those that convert
writes."""

from pathlib import Path

import numpy as np
import pytest

from hotsplit.errors import HotsplitError
from hotsplit.families.from_config import read_blueprint
from hotsplit.families.key_reader import KeyReader
from hotsplit.files.gguf_file import TensorEntry
from hotsplit.model.mamba2 import Mamba2
from hotsplit.model.spec import ModelSpec

WHERE = Path("theirs.gguf")


def spec_of(name: str, **own: object) -> ModelSpec:
    """The spec of a file with four layers, by its keys alone."""
    keys = {
        "block_count": np.uint32(4),
        "context_length": np.uint32(65536),
        "embedding_length": np.uint32(32),
        "feed_forward_length": np.uint32(48),
        "attention.head_count": np.uint32(2),
        "attention.layer_norm_rms_epsilon": np.float32(1e-6),
    }
    keys |= {key.replace("__", "."): value for key, value in own.items()}
    entry = TensorEntry(shape=(8, 32), kind="f32", read_rows=lambda start, stop: np.zeros(0))
    named = {f"{name}.{key}": value for key, value in keys.items()} | {"general.architecture": name}
    tensors = dict.fromkeys(("token_embd.weight", *map(str, range(64))), entry)
    return KeyReader(WHERE, named, tensors).graph.of_keys(KeyReader(WHERE, named, tensors))


def test_the_first_files_of_gemma_2_have_the_window_and_the_caps_of_the_published_models():
    spec = spec_of("gemma2")
    assert [a.window for a in spec.attentions] == [4096, None, 4096, None]
    assert {a.score_cap for a in spec.attentions} == {50.0}
    assert spec.logit_cap == 30.0
    assert spec == spec_of("gemma2", attention__sliding_window=np.uint32(4096))


def test_a_gemma_3_without_a_window_has_one_rotary_base():
    """llama.cpp does so too: its converter leaves the key out for a period of 1."""
    spec = spec_of("gemma3", rope__freq_base=np.float32(1e6))
    assert {a.window for a in spec.attentions} == {None}
    assert {a.rotary.theta for a in spec.attentions} == {1e6}


def test_an_exaone_4_of_64_layers_has_the_window_of_the_published_model():
    """llama.cpp has it in no others; in ours the key is what counts."""
    spec = spec_of("exaone4", block_count=np.uint32(64))
    assert [a.window for a in spec.attentions] == [4096, 4096, 4096, None] * 16
    assert [a.rotary is None for a in spec.attentions] == [False, False, False, True] * 16
    (plain,) = set(spec_of("exaone4").attentions)
    assert (plain.window, plain.rotary is None) == (None, False)
    own = spec_of("exaone4", attention__sliding_window=np.uint32(5)).attentions
    assert [a.window for a in own] == [5, 5, 5, None]


@pytest.mark.parametrize("key", ["attn_factor", "yarn_attn_factor"])
def test_both_spellings_of_the_magnitude_of_olmo_3_are_the_whole(key):
    """allenai/Olmo-3-7B-Think: attention_factor 1.2079441541679836, a factor of 8."""
    rope = {
        "rope__freq_base": np.float32(5e5),
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": np.float32(8),
        f"rope__scaling__{key}": np.float32(1.2079441541679836),
        "rope__scaling__original_context_length": np.uint32(8192),
        "attention__sliding_window": np.uint32(4096),
        "attention__sliding_window_pattern": [True, True, True, False],
    }
    spec = spec_of("olmo2", **rope)
    assert [a.rotary.scaling.magnitude for a in spec.attentions] == pytest.approx(
        [1.0, 1.0, 1.0, 1.2079441541679836]
    )
    if key == "attn_factor":  # in a file of ours it is a factor on YaRN's own
        ours = spec_of("olmo2", **rope, rope__freq_base_swa=np.float32(5e5))
        assert ours.attentions[3].rotary.scaling.magnitude == pytest.approx(1.2079441541679836**2)


def test_a_granite_4_without_recurrent_layers_has_the_keys_of_a_hybrid():
    """ibm-granite/granite-4.0-micro, as llama.cpp's converter writes it (conversion/granite.py)."""
    plain = {"attention__scale": np.float32(0.015625), "rope__freq_base": np.float32(1e7)}
    hybrid = {
        "ssm__conv_kernel": np.uint32(4),
        "ssm__state_size": np.uint32(128),
        "ssm__group_count": np.uint32(1),
        "ssm__inner_size": np.uint32(64),
        "ssm__time_step_rank": np.uint32(2),
        "expert_count": np.uint32(0),
        "expert_used_count": np.uint32(0),
        "expert_shared_feed_forward_length": np.uint32(48),
        "rope__scaling__finetuned": True,
    }
    one = spec_of("granite", **plain, attention__head_count_kv=np.uint32(1))
    assert spec_of("granite", **plain, **hybrid, attention__head_count_kv=[1] * 4) == one
    with pytest.raises(HotsplitError, match="head_count_kv' is"):
        spec_of("granite", **plain, **hybrid, attention__head_count_kv=[0, 1, 1, 1])


def test_the_context_of_the_first_command_r_is_that_of_its_training():
    """CohereForAI/c4ai-command-r-v01."""
    config = {
        "architectures": ["CohereForCausalLM"],
        "model_type": "cohere",
        "hidden_size": 32,
        "intermediate_size": 64,
        "logit_scale": 0.0625,
        "max_position_embeddings": 8192,
        "model_max_length": 131072,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rope_theta": 8e6,
        "use_qk_norm": False,
        "vocab_size": 99,
    }
    assert read_blueprint(Path("config.json"), config, 99).spec.context_length == 131072


def test_queries_of_devstral_2_do_not_grow():
    """mistralai/Devstral-2-123B-Instruct-2512: a beta of 0, and one of two scales, which is
    ignored."""
    rope = {
        "beta_fast": 4.0,
        "beta_slow": 1.0,
        "factor": 64.0,
        "llama_4_scaling_beta": 0.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.0,
        "original_max_position_embeddings": 4096,
        "rope_theta": 1e6,
        "rope_type": "yarn",
        "type": "yarn",
    }
    config = {
        "architectures": ["Ministral3ForCausalLM"],
        "model_type": "ministral3",
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 48,
        "intermediate_size": 64,
        "max_position_embeddings": 262144,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_parameters": rope,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 99,
    }
    spec = read_blueprint(Path("config.json"), config, 99).spec
    assert spec.architecture == "llama"
    assert spec.rotary.scaling.magnitude == pytest.approx(1.0 + 0.1 * np.log(64.0))


def test_a_granite_4_with_recurrent_layers_says_them_as_transformers_4():
    """ibm-granite/granite-4.0-h-micro."""
    config = {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "layer_types": ["mamba"] * 5 + ["attention"],
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": 64,
        "mamba_d_head": "auto",
        "mamba_d_state": 8,
        "mamba_n_heads": 4,
        "max_position_embeddings": 131072,
        "num_attention_heads": 2,
        "num_hidden_layers": 6,
        "num_local_experts": 0,
        "position_embedding_type": "nope",
        "rms_norm_eps": 2.0**-20,
        "shared_intermediate_size": 48,
        "vocab_size": 99,
    }
    spec = read_blueprint(Path("config.json"), config, 200).spec
    assert (spec.architecture, spec.rotary) == ("granitehybrid", None)
    mixers = [layer.recurrent for layer in spec.layers]
    mamba = Mamba2(num_heads=4, head_dim=16, num_groups=1, state_size=8, epsilon=2.0**-20)
    assert mixers == [mamba] * 5 + [None]
