"""Every family that has a stock layout, in llama.cpp: its logits after a prompt equal those of
transformers, with which test_families compares ours, and its next tokens are ours."""

import numpy as np
import pytest
import torch
from checkpoints import random_model, save_tokenizer
from reference import rel_error
from test_families import CASES, GATED, IDS, STOCK, transformers_logits
from transformers import AutoModelForCausalLM, Gemma3nTextConfig, LlamaConfig
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP

from hotsplit import Engine
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.families.gemma3n import SPARSE_LAYERS, STOCK_CUTOFF

# transformers adds 1e-6 to the squared lengths of a delta net's queries and keys, llama.cpp does
# not (with weights three times as large, and queries and keys ten times as long, the difference was
# 5e-6). Rounding moves some values to the next entry of GELU's table, which is 5e-4 away: then
# logits are up to 3e-4 apart, and 4e-7 if no value moves.
BOUNDS = dict.fromkeys(
    (
        "falcon-11b",
        "gemma2-stock",
        "gemma3-stock",
        "gemma4",
        "gemma4-stock",
        "gemma4moe",
        "qwen3nextmoe-stock",
        "qwen35-stock",
        "qwen35moe",
        "starcoder2-stock",
    ),
    5e-4,
)


@pytest.fixture
def transformers_as_llama_cpp(monkeypatch):
    """GELU of the tanh form from llama.cpp's table of 16-bit values, and Gemma 3n's deviations over
    F - 1."""
    gelu = torch.nn.functional.gelu

    def looked_up(x, approximate="none"):
        y = gelu(x.half().double(), approximate="tanh").half().to(x.dtype)
        return torch.where(x.abs() < 10, y, x.relu())

    def cut_off(self, gate):
        spread = gate.std(-1, keepdim=True, correction=1)
        return (gate - gate.mean(-1, keepdim=True) - STOCK_CUTOFF * spread).relu()

    monkeypatch.setattr(torch.nn.functional, "gelu", looked_up)
    monkeypatch.setattr(Gemma3nTextMLP, "_gaussian_topk", cut_off)


@pytest.mark.usefixtures("transformers_as_llama_cpp")
@pytest.mark.parametrize("case", STOCK)
def test_llama_cpp_computes_the_same(llama_cpp, tmp_path, case):
    folder = random_model(tmp_path / "hf", CASES[case])
    save_tokenizer(folder, 320)
    path = tmp_path / "m.gguf"
    convert(ConvertConfig(source=folder, output=path, layout="stock", outtype="f32"))
    found = llama_cpp(
        "greedy", model=path, prompt=IDS, count=40, kv_kind="f32", logits=tmp_path / "logits.npy"
    )
    got_V = np.load(tmp_path / "logits.npy")[0]
    want_TV = transformers_logits(folder)
    bound = BOUNDS.get(case, 5e-6)
    assert rel_error(got_V, want_TV[-1]) < bound
    assert rel_error(got_V, want_TV[-2]) > 10 * bound  # rejects another token's logits
    with Engine.load(path, mode="dense") as engine, engine.sequence() as text:
        rows = [text.extend(ids) for ids in (IDS, *([token] for token in found["ids"]))]
    assert [int(row.argmax()) for row in rows[:-1]] == found["ids"]


def test_llama_cpp_computes_gemma3n_with_deviations_over_one_less(llama_cpp, tmp_path, request):
    """Its graph has fixed numbers of planes, of layers with keys and values of their own, and of
    layers that cut gates off. That many random layers enlarge a rounding a hundred times."""
    config = Gemma3nTextConfig(
        **GATED | {"num_hidden_layers": 22},
        head_dim=16,
        sliding_window=5,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=320,
        activation_sparsity_pattern=[0.95] * SPARSE_LAYERS + [0.0] * 12,
    )
    folder = random_model(tmp_path / "hf", config)
    save_tokenizer(folder, 320)
    path, logits = tmp_path / "m.gguf", tmp_path / "logits.npy"
    convert(ConvertConfig(source=folder, output=path, layout="stock", outtype="f32"))
    want_TV = transformers_logits(folder)
    with Engine.load(path, mode="exact") as engine:
        assert rel_error(engine.logits(IDS), want_TV) < 1e-4
    llama_cpp("follow", model=path, ids=IDS, count=len(IDS), kv_kind="f32", logits=logits)
    got_TV = np.load(logits)
    assert rel_error(got_TV, want_TV) > 0.05  # of 160 neurons a layer
    request.getfixturevalue("transformers_as_llama_cpp")
    assert rel_error(got_TV, transformers_logits(folder)) < 2e-3


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("more", [{}, {"attention_factor": 1.5}, {"beta_fast": 4.0}], ids=str)
def test_llama_cpp_reads_the_keys_of_yarn(llama_cpp, tmp_path, more):
    config = LlamaConfig(**GATED, rope_parameters=YARN | more | {"rope_theta": 1e4})
    folder = random_model(tmp_path / "hf", config)
    save_tokenizer(folder, 320)
    path = tmp_path / "m.gguf"
    convert(ConvertConfig(source=folder, output=path, layout="stock", outtype="f32"))
    ids = 16 * IDS
    llama_cpp(
        "greedy", model=path, prompt=ids, count=1, kv_kind="f32", logits=tmp_path / "logits.npy"
    )
    got_V = np.load(tmp_path / "logits.npy")[-1]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        want_V = model(torch.tensor([ids])).logits[0, -1]
    assert rel_error(got_V, want_V) < 1e-5
