"""A real chat model, SmolLM2-135M-Instruct, after `make smollm2`: `pytest -m slow`."""

from pathlib import Path

import pytest
import torch
from paths import ROOT

from hotsplit import Engine
from hotsplit.runtime.kernels.cpu import library

FOLDER = ROOT / "build" / "smollm2"
TEXT = (
    "The history of computing begins long before the modern computer. In the nineteenth century"
    " Charles Babbage designed machines that could be programmed, and Ada Lovelace wrote what is"
    " often called the first algorithm. "
)

pytestmark = [pytest.mark.slow]


def model(kind: str) -> Path:
    path = FOLDER / f"{kind}.gguf"
    assert path.exists(), f"{path} is missing: run make smollm2 first"
    return path


def loss_of(logits_TV: torch.Tensor, ids: list[int]) -> float:
    return torch.nn.functional.cross_entropy(logits_TV[:-1], torch.tensor(ids[1:])).item()


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0"])
def test_a_prompt_equals_single_steps(kind):
    with Engine.load(model(kind), mode="dense", context_length=1200) as engine:
        ids = engine.codec.encode(16 * TEXT)
        assert 2 * engine._live.most_tokens < len(ids) <= 1200
        got = engine.logits(ids)
        for position, token in enumerate(ids):
            assert torch.equal(engine._step(token, position), got[position]), position
        # It speaks English: it predicts this text better than its tokens in reverse order.
        assert loss_of(engine.logits(ids[:40]), ids[:40]) < 3.5
        assert loss_of(engine.logits(ids[:40][::-1]), ids[:40][::-1]) > 5


def test_levels_agree_on_a_text():
    before, found = library.level(), {}
    try:
        for level in library.usable_levels():
            if level == "generic":
                continue  # would take minutes
            library.set_level(level)
            with Engine.load(model("q8_0"), mode="dense", context_length=512) as engine:
                ids = engine.codec.encode(TEXT)
                found[level] = engine.logits(ids)
    finally:
        library.set_level(before)
    want = found[library.usable_levels()[0]]
    for level, got in found.items():
        difference = (got - want).norm() / want.norm()
        assert difference < 3e-3, (level, difference)  # orders of sums differ; keys are f16
