"""Passes of prompts as graphs, on the fake CUDA runtime: the bits of launched passes wherever they are in
a text, within the budget; what is not right is not used."""

import dataclasses

import numpy as np
import pytest
import torch
from fake_cuda import library
from fake_cuda.hollow import hollow_cuda, hollow_model
from models import make_model, make_sizes, shape_only
from plan_memory import CARD_BYTES, SHAPES, peak_and_limit, sizes_of, take_texts
from test_fake_step import checked_cuda
from test_runtime import make_split

from hotsplit import Engine
from hotsplit.runtime import gpu_setup
from hotsplit.runtime.step import captured_passes
from hotsplit.runtime.step.captured_passes import CapturedPasses

pytestmark = [
    pytest.mark.skipif(not library.can_be_built(), reason="needs a C++ compiler, and Linux")
]
MIB = 1 << 20
CONTEXT = 64
LENGTHS = (4, 8, 16)  # the reference's kernels are slow


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(gpu_setup, "LENGTHS", LENGTHS)


def planned(kind="q8_0", num_sequences=1, num_hot=96):
    """A model and a plan with room for graphs."""
    sizes = make_sizes(num_layers=1, width=64, num_neurons=96, context_length=CONTEXT)
    model = make_model(sizes=sizes, kind=kind, activation="silu")
    split = make_split(model, [range(num_hot)], context_length=CONTEXT, num_sequences=num_sequences)
    budget = split.vram_budget_bytes + 160 * MIB
    return model, dataclasses.replace(split, vram_budget_bytes=budget)


def prompts(engine):
    """Logits after prompts of several lengths, in texts of several lengths; the last one again, after
    others."""
    texts = [engine.sequence() for _ in range(engine._live.weights.cache.num_sequences)]
    found = []
    for length in (3, 8, 1, 9, 20, 4):
        for text in texts:
            found.append(text.extend(list((np.arange(length) * 7 + len(found)) % 50)))
    texts[0].rollback(6)
    found.append(texts[0].extend([3, 1, 4, 1, 5]))
    for text in texts:
        text.close()
    return torch.stack([logits.flatten() for logits in found])


@pytest.mark.parametrize("num_sequences", [1, 2])
def test_prompts_have_the_bits_of_launched_passes(num_sequences):
    model, split = planned(num_sequences=num_sequences)
    found, read = [], []
    for captures in (False, True):
        with (
            checked_cuda(seed=num_sequences, captures=captures) as cuda,
            Engine.of(model, split, mode="dense", device="cuda") as engine,
        ):
            before, already = cuda.num_graphs, engine.traffic.total
            found.append(prompts(engine))
            read.append(engine.traffic.total - already)
            assert cuda.num_graphs - before == (len(LENGTHS) if captures else 0)
    assert torch.equal(*found) and read[0] == read[1] > 0


@pytest.mark.parametrize("fault", ["a wrong value", "no graph"])
def test_graphs_that_fail_are_found_at_load(monkeypatch, caplog, fault):
    capture = CapturedPasses._capture

    def wrong(self, length, run, read):
        if fault == "no graph":
            raise RuntimeError("cannot be captured")
        capture(self, length, lambda: self.memory.out_TD.fill_(1.0), read)

    monkeypatch.setattr(CapturedPasses, "_capture", wrong)
    monkeypatch.setattr(gpu_setup, "LENGTHS", captured_passes.LENGTHS)  # the check's is among these
    model, split = planned()
    with (
        checked_cuda(captures=True, is_checked=True),
        Engine.of(model, split, mode="dense", device="cuda") as engine,
    ):
        assert engine.device.type == "cpu" and engine._live.captured is None
    (line,) = [each for each in caplog.messages if "everything runs on the CPU" in each]
    said = "a prompt again are off by" if fault == "a wrong value" else "cannot be captured"
    assert said in line


@pytest.mark.parametrize("kind, num_hot", [("f16", 96), ("q8_0", 32)])
def test_products_by_torch_and_neurons_on_the_cpu_are_launched(kind, num_hot):
    model, split = planned(kind, num_hot=num_hot)
    with (
        checked_cuda(captures=True),
        Engine.of(model, split, device="cuda", mode="dense") as engine,
    ):
        assert engine._live.captured is None


def test_graphs_take_what_a_plan_leaves(monkeypatch):
    """The longest launched pass comes first, and the budget is kept."""
    monkeypatch.setattr(gpu_setup, "LENGTHS", captured_passes.LENGTHS)
    shape = next(each for each in SHAPES if each[:2] == (2048, 5632))
    model = hollow_model(shape_only(sizes_of(shape, 4, 1024), kind="q8_0"))
    neurons, found = [range(5632)] * 4, []
    for spare in (80, 300):
        plan = make_split(model, neurons, context_length=1024, num_sequences=2)
        budget = plan.vram_budget_bytes + spare * MIB
        plan = dataclasses.replace(plan, vram_budget_bytes=budget, mode="dense")
        with (
            hollow_cuda(CARD_BYTES),
            Engine.of(model, plan, device="cuda", is_resident=False) as engine,
        ):
            captured = engine._live.captured
            found.append((engine._live.most_tokens, captured.lengths if captured else ()))
            take_texts(engine, plan)
            peak, limit = peak_and_limit(engine, plan)
            assert peak <= limit, (spare, peak, limit)
            assert captured is None or captured._graphs.keys() == {128}
    assert found == [(256, ()), (512, (32, 128, 256))]
