"""Logits of prompts whose cold weights are streamed to the GPU, against those of the CPU."""

import dataclasses

import numpy as np
import pytest
import torch
from reference import rel_error
from test_runtime import make_split

from hotsplit import Engine

pytestmark = pytest.mark.gpu
BOUND = 4 * torch.finfo(torch.float16).eps


def last_logits(engine, ids):
    """Logits f32 [1, V] after a prompt."""
    with engine.sequence() as text:
        return text.extend(ids, "last")


@pytest.mark.parametrize("chunk", [128, 512])
@pytest.mark.parametrize("mode", ["dense", "exact", "predicted"])
def test_streamed_prompts_agree_with_the_cpus(
    tmp_path, cuda, large_model, some_neurons, mode, chunk
):
    """250 tokens are one pass or two: the second attends to more keys than it has queries, and the
    neurons streamed for the first are streamed again."""
    split = make_split(large_model, some_neurons, context_length=256)
    split = dataclasses.replace(split, vram_budget_bytes=split.vram_budget_bytes + (256 << 20))
    split.save(tmp_path / "s.gguf")
    ids = np.random.default_rng(0).integers(0, 512, 250).tolist()
    with Engine.load(large_model.path, split=tmp_path / "s.gguf", mode=mode, device=cuda) as engine:
        streams = [layer.ffn.cold for layer in engine.layers if layer.ffn.cold is not None]
        assert len(streams) == 6, "no cold weights are streamed"
        engine._sequences.decoder = dataclasses.replace(engine._live, chunk=chunk)
        found = []
        for least_tokens in (1, 1 << 30, 1):
            for stream in streams:
                stream.least_tokens = least_tokens
            found.append(last_logits(engine, ids))
    with Engine.load(large_model.path, mode=mode, device="cpu", context_length=256) as engine:
        want = last_logits(engine, ids)
    streamed, computed, again = found
    assert rel_error(streamed, want) < BOUND
    assert rel_error(computed, want) < BOUND
    assert torch.equal(streamed, again)
    assert not torch.equal(streamed, computed)  # different rounding: it was a different path
