"""Every family that has a stock layout, in llama.cpp: its logits after a prompt equal those of
transformers, with which test_families compares ours, and its next tokens are ours."""

import numpy as np
import pytest
import torch
from checkpoints import random_model, save_tokenizer
from reference import rel_error
from test_families import CASES, GATED, IDS, STOCK, transformers_logits
from transformers import AutoModelForCausalLM, LlamaConfig

from hotsplit import Engine
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig

# llama.cpp looks GELU up in a table of 16-bit values of the tanh form; that of Falcon is exact.
# transformers adds 1e-6 to the squared lengths of a delta net's queries and keys, llama.cpp does not
# (with weights three times as large, and queries and keys ten times as long, the difference was 5e-6).
BOUNDS = {
    "falcon-11b": 2e-2, "gemma2-stock": 5e-3, "gemma3-stock": 5e-3, "gemma4": 5e-3,
    "gemma4-stock": 5e-3, "gemma4moe": 5e-3, "starcoder2-stock": 2e-3, "qwen3nextmoe-stock": 5e-4,
    "qwen35-stock": 5e-4, "qwen35moe": 5e-4,
}  # fmt: skip


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
