"""Every family that has a stock layout, in llama.cpp: its logits after a prompt equal those of
transformers, with which test_families compares ours, and its next tokens are ours. Mixtures of
experts that llama.cpp has quantised: its logits and its greedy text in our runtime.

All experts are used there, with the weights that the router gives: llama.cpp rounds activations to
8 bits, by which a router may choose others. Choices are compared in f32."""

import numpy as np
import pytest
import test_smallthinker
import torch
from checkpoints import random_model, save_tokenizer
from reference import rel_error
from test_families import CASES, GATED, IDS, STOCK, transformers_logits
from test_smallthinker import checkpoint, logits_ref
from transformers import (
    AutoModelForCausalLM,
    Gemma3nTextConfig,
    Glm4MoeConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.families.gemma3n import SPARSE_LAYERS, STOCK_CUTOFF

# transformers adds 1e-6 to the squared lengths of a delta net's queries and keys, llama.cpp does
# not (with weights three times as large, and queries and keys ten times as long, the difference was
# 5e-6). Rounding moves some values to the next entry of GELU's table, which is 5e-4 away: then
# logits are up to 3e-4 apart, and 4e-7 if no value moves.
LESS_EXACT = """
falcon-11b gemma gpt-neox gemma2-stock gemma3-stock gemma4 gemma4-stock gemma4moe
qwen3nextmoe-stock qwen35-stock qwen35moe starcoder2-stock
"""
BOUNDS = dict.fromkeys(LESS_EXACT.split(), 5e-4)


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


QUANTISED_IDS = np.random.default_rng(0).integers(1, 320, 24).tolist()
COUNT = 8
# Rows that are whole blocks of K-quants.
WIDE = GATED | {"hidden_size": 256, "num_experts_per_tok": 4, "initializer_range": 0.05}
WIDE |= {"head_dim": 64}
QWEN3 = {"num_experts": 4, "moe_intermediate_size": 512, "norm_topk_prob": True}
GLM4 = {"n_routed_experts": 4, "moe_intermediate_size": 256, "first_k_dense_replace": 1}
MIXTURES = {
    "mixtral": MixtralConfig(**WIDE | {"intermediate_size": 256}, num_local_experts=4),
    "qwen3moe": Qwen3MoeConfig(**WIDE, **QWEN3),
    "glm4moe": Glm4MoeConfig(
        **WIDE | {"intermediate_size": 512}, **GLM4, routed_scaling_factor=1.5
    ),
}
# |ours - theirs| / |theirs|; measured maxima: 2.2e-2, 3.0e-2.
QUANTISED_BOUNDS = {"q8_0": 4e-2, "q4_k_m": 6e-2}


@pytest.fixture(scope="module", params=MIXTURES)
def stock(request, tmp_path_factory):
    """A file in the stock layout."""
    folder = random_model(tmp_path_factory.mktemp(request.param) / "hf", MIXTURES[request.param])
    save_tokenizer(folder, 320)
    path = folder.parent / "f32.gguf"
    convert(ConvertConfig(source=folder, output=path, layout="stock", outtype="f32"))
    return path


@pytest.mark.parametrize("kind", QUANTISED_BOUNDS)
def test_files_of_llama_cpps_quantiser(llama_cpp, stock, tmp_path, kind):
    path = tmp_path / f"{kind}.gguf"
    llama_cpp("quantize", source=stock, target=path, kind=kind)
    theirs = llama_cpp(
        "greedy",
        model=path,
        prompt=QUANTISED_IDS,
        count=COUNT,
        kv_kind="f16",
        logits=tmp_path / "logits.npy",
    )["ids"]
    want_TV = torch.from_numpy(np.load(tmp_path / "logits.npy"))
    with Engine.load(path, mode="dense", device="cpu") as engine:
        got_TV = engine.logits(QUANTISED_IDS + theirs[:-1])[len(QUANTISED_IDS) - 1 :]
        errors = [rel_error(got, want) for got, want in zip(got_TV, want_TV, strict=True)]
        assert max(errors) < QUANTISED_BOUNDS[kind], errors
        assert rel_error(got_TV.roll(1, 0), want_TV) > 0.3  # rejects another token's logits
        ours = [token.id for token in engine.generate(QUANTISED_IDS, COUNT, temperature=0.0)]
    best_T = want_TV.topk(2).values
    noise = 2 * QUANTISED_BOUNDS[kind] * want_TV.abs().max()
    open_T = (best_T[:, 0] - best_T[:, 1]) < noise
    same = next((t for t in range(COUNT) if ours[t : t + 1] != [theirs[t]]), COUNT)
    assert same == COUNT or open_T[same], (ours, theirs)
    converted = tmp_path / "sparse.gguf"
    convert(ConvertConfig(source=path, output=converted))
    assert ModelFile.load(converted).layout == "sparse"
    with Engine.load(converted, mode="dense", device="cpu") as engine:
        assert rel_error(engine.logits(QUANTISED_IDS)[-1], want_TV[0]) < QUANTISED_BOUNDS[kind]


def test_llama_cpp_computes_smallthinker(llama_cpp, tmp_path):
    folder = checkpoint(tmp_path / "hf", {})
    path = tmp_path / "m.gguf"
    convert(ConvertConfig(source=folder, output=path, layout="stock", outtype="f32"))
    given = {"prompt": test_smallthinker.IDS, "count": 1, "kv_kind": "f32"}
    llama_cpp("greedy", model=path, **given, logits=tmp_path / "logits.npy")
    want_TV, got_V = logits_ref(folder), np.load(tmp_path / "logits.npy")[-1]
    assert rel_error(got_V, want_TV[-1]) < 1e-5
    assert rel_error(got_V, want_TV[-2]) > 1e-2
