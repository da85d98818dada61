"""Logits of prompts whose cold weights are streamed to the GPU, against those of the CPU."""

import dataclasses

import numpy as np
import pytest
import torch
from models import make_model, make_sizes
from reference import rel_error
from test_runtime import make_split

from hotsplit import Engine

pytestmark = pytest.mark.gpu
BOUND = 4 * torch.finfo(torch.float16).eps


def last_logits(engine, ids):
    """Logits f32 [1, V] after a prompt."""
    with engine.sequence() as text:
        return text.extend(ids, "last")


@pytest.mark.parametrize("mode", ["dense", "exact", "predicted"])
def test_streamed_prompts_agree_with_the_cpus(tmp_path, cuda, large_model, some_neurons, mode):
    split = make_split(large_model, some_neurons, context_length=256)
    split = dataclasses.replace(split, vram_budget_bytes=split.vram_budget_bytes + (256 << 20))
    split.save(tmp_path / "s.gguf")
    ids = np.random.default_rng(0).integers(0, 512, 250).tolist()
    with Engine.load(large_model.path, split=tmp_path / "s.gguf", mode=mode, device=cuda) as engine:
        passes = engine._live.native.passes
        assert passes.least_streamed is not None, "no cold weights are streamed"
        found = []
        for least in (1, 1 << 30, 1):
            passes.least_streamed = least
            found.append(last_logits(engine, ids))
    with Engine.load(large_model.path, mode=mode, device="cpu", context_length=256) as engine:
        want = last_logits(engine, ids)
    streamed, computed, again = found
    assert rel_error(streamed, want) < BOUND
    assert rel_error(computed, want) < BOUND
    assert torch.equal(streamed, again)
    assert not torch.equal(streamed, computed)  # different rounding: it was a different path


@pytest.mark.parametrize("kind", ["q8_0", "q4_k", "f16"])
def test_passes_as_graphs_have_the_bits_of_launched_ones(tmp_path, cuda, kind):
    sizes = make_sizes(num_layers=3, width=512, num_neurons=1536, context_length=512)
    model = make_model(sizes=sizes, kind=kind, activation="silu")
    path = tmp_path / "m.gguf"
    model.save(path)
    found = []
    for graph in (False, True):
        with (
            Engine.load(path, mode="dense", device=cuda, graph=graph) as engine,
            engine.sequence() as text,
        ):
            rng = np.random.default_rng(0)
            lengths = (5, 32, 100, 33, 128, 7, 60)
            logits = [text.extend(rng.integers(0, 50, n).tolist()) for n in lengths]
            found.append(torch.cat(logits))
    assert torch.equal(*found)
