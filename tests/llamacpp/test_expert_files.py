"""Mixtures of experts that llama.cpp has quantised: its logits and its greedy text in our runtime.

All experts are used, with the weights that the router gives: llama.cpp rounds activations to 8
bits, by which a router may choose others. Choices are compared in f32 (test_stock_families)."""

import numpy as np
import pytest
import test_smallthinker
import torch
from checkpoints import random_model, save_tokenizer
from reference import rel_error
from test_families import GATED
from test_smallthinker import checkpoint, logits_ref
from transformers import Glm4MoeConfig, MixtralConfig, Qwen3MoeConfig

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig

IDS = np.random.default_rng(0).integers(1, 320, 24).tolist()
COUNT = 8
# Rows that are whole blocks of K-quants.
WIDE = GATED | {
    "hidden_size": 256,
    "num_experts_per_tok": 4,
    "initializer_range": 0.05,
    "head_dim": 64,
}
CASES = {
    "mixtral": MixtralConfig(**WIDE | {"intermediate_size": 256}, num_local_experts=4),
    "qwen3moe": Qwen3MoeConfig(
        **WIDE, num_experts=4, moe_intermediate_size=512, norm_topk_prob=True
    ),
    "glm4moe": Glm4MoeConfig(
        **WIDE | {"intermediate_size": 512},
        n_routed_experts=4,
        moe_intermediate_size=256,
        first_k_dense_replace=1,
        routed_scaling_factor=1.5,
    ),
}
# |ours - theirs| / |theirs|; measured maxima: 2.2e-2, 3.0e-2.
BOUNDS = {"q8_0": 4e-2, "q4_k_m": 6e-2}


@pytest.fixture(scope="module", params=CASES)
def stock(request, tmp_path_factory):
    """A file in the stock layout."""
    folder = random_model(tmp_path_factory.mktemp(request.param) / "hf", CASES[request.param])
    save_tokenizer(folder, 320)
    path = folder.parent / "f32.gguf"
    convert(ConvertConfig(source=folder, output=path, layout="stock", outtype="f32"))
    return path


@pytest.mark.parametrize("kind", BOUNDS)
def test_files_of_llama_cpps_quantiser(llama_cpp, stock, tmp_path, kind):
    path = tmp_path / f"{kind}.gguf"
    llama_cpp("quantize", source=stock, target=path, kind=kind)
    theirs = llama_cpp(
        "greedy", model=path, prompt=IDS, count=COUNT, kv_kind="f16", logits=tmp_path / "logits.npy"
    )["ids"]
    want_TV = torch.from_numpy(np.load(tmp_path / "logits.npy"))
    with Engine.load(path, mode="dense", device="cpu") as engine:
        got_TV = engine.logits(IDS + theirs[:-1])[len(IDS) - 1 :]
        errors = [rel_error(got, want) for got, want in zip(got_TV, want_TV, strict=True)]
        assert max(errors) < BOUNDS[kind], errors
        assert rel_error(got_TV.roll(1, 0), want_TV) > 0.3  # rejects another token's logits
        ours = [token.id for token in engine.generate(IDS, COUNT, temperature=0.0)]
    best_T = want_TV.topk(2).values
    open_T = (best_T[:, 0] - best_T[:, 1]) < 2 * BOUNDS[kind] * want_TV.abs().max()
    same = next((t for t in range(COUNT) if ours[t : t + 1] != [theirs[t]]), COUNT)
    assert same == COUNT or open_T[same], (ours, theirs)
    converted = tmp_path / "sparse.gguf"
    convert(ConvertConfig(source=path, output=converted))
    assert ModelFile.load(converted).layout == "sparse"
    with Engine.load(converted, mode="dense", device="cpu") as engine:
        assert rel_error(engine.logits(IDS)[-1], want_TV[0]) < BOUNDS[kind]


def test_llama_cpp_computes_smallthinker(llama_cpp, tmp_path):
    folder = checkpoint(tmp_path / "hf", {})
    path = tmp_path / "m.gguf"
    convert(ConvertConfig(source=folder, output=path, layout="stock", outtype="f32"))
    llama_cpp(
        "greedy",
        model=path,
        prompt=test_smallthinker.IDS,
        count=1,
        kv_kind="f32",
        logits=tmp_path / "logits.npy",
    )
    want_TV, got_V = logits_ref(folder), np.load(tmp_path / "logits.npy")[-1]
    assert rel_error(got_V, want_TV[-1]) < 1e-5
    assert rel_error(got_V, want_TV[-2]) > 1e-2
