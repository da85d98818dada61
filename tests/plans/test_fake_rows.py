"""Several sequences and drafts with a plan on fake CUDA devices (fake_cuda): the cache has the
planned size, steps of several rows are captured at their first use, and each of their rows is
bit-identical to a step of one row."""

import json
import random

import pytest
import torch
from fake_cuda import library
from hybrid_plans import split_of
from test_fake_step import checked_cuda
from test_hybrid_rows import CONTEXT, ROOM, StepsAlone, saved, schedule
from test_plan_sequences import small_plan

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.cli import main
from hotsplit.runtime.step.sequences import Part
from hotsplit.runtime.step.workspace import decode_bytes

pytestmark = [
    pytest.mark.skipif(not library.can_be_built(), reason="needs a C++ compiler, and Linux")
]
MIB = 1 << 20


def planned(tmp_path, model, plan, num_sequences):
    split = split_of(model, plan, context_length=CONTEXT, num_sequences=num_sequences)
    path = tmp_path / f"{num_sequences}.gguf"
    split.save(path)
    return path


def loaded(tmp_path, model, plan, num_sequences, **options):
    split = planned(tmp_path, model, plan, num_sequences)
    return Engine.load(model.path, split=split, mode="predicted", device="cuda", **options)


@pytest.mark.parametrize(
    ("plan", "count", "lengths"),
    [("random", 1, (1, 2, 16)), ("random", 3, (1, 8)), ("mixed", 8, (1, 8, 16))],
)
def test_the_cache_takes_what_the_plan_says(tmp_path, plan, count, lengths):
    """One text, or two at a time, in steps of 1 to 32 rows."""
    model = saved(tmp_path)
    with checked_cuda(), loaded(tmp_path, model, plan, count) as engine:
        taken = sum(memory.taken["kv_cache"] for memory in engine.memories.values())
        assert taken == engine.bytes_by_role["gpu"]["kv_cache"] > 0
        assert engine._live.native.max_rows > 8
        (model_file, texts) = ModelFile.load(model.path), [engine.sequence() for _ in range(count)]
        before = {device: memory.used_bytes for device, memory in engine.memories.items()}
        for num_tokens in lengths:
            parts = [Part(sequence=t, tokens=[1] * num_tokens, wanted="all") for t in texts[:2]]
            engine.run(parts)
        assert engine._live.native.segments.keys() >= {("step", rows) for rows in (1, 2, 16)}
        for device, memory in engine.memories.items():
            assert memory.used_bytes == before[device] <= len(memory.slab)
            step_bytes = memory.used_bytes - memory.step_start
            rows = engine._live.native.max_rows
            assert step_bytes <= decode_bytes(model_file, CONTEXT, rows, count)
            assert len(memory.slab) <= memory.budget_bytes


def test_random_schedules(tmp_path):
    """Sequences are extended, forked and rolled back at random, by captured graphs; each row equals
    that of its text computed alone."""
    model, plan = saved(tmp_path), "every kind of layer"
    with (
        checked_cuda(num_devices=2, seed=3) as cuda,
        loaded(tmp_path, model, plan, 1) as single,
        loaded(tmp_path, model, plan, ROOM) as engine,
    ):
        alone, before = StepsAlone(single), cuda.num_graphs
        with torch.inference_mode():
            assert schedule(engine, alone, random.Random(1), 5) > 15
        assert cuda.num_graphs > before and len(engine._live.native.segments) > 2
        del alone  # and with it the step's memory


def test_prompts_and_steps_of_several_texts(tmp_path):
    """Prompts are prefill passes; their keys and values are gathered from blocks and scattered to
    them."""
    model = saved(tmp_path)
    prompts = [[5, 3, 7], [2] * 70, [1, 4, 4, 2, 1]]
    with checked_cuda(seed=5), loaded(tmp_path, model, "random", 3) as engine:
        texts = [engine.sequence() for _ in prompts]
        parts = [Part(sequence=s, tokens=p) for s, p in zip(texts, prompts, strict=True)]
        first = engine.run(parts)
        next_parts = [Part(sequence=s, tokens=[9], wanted="all") for s in texts]
        second = engine.run(next_parts)
    with Engine.load(model.path, mode="predicted", device="cpu", context_length=CONTEXT) as engine:
        for prompt, a, b in zip(prompts, first, second, strict=True):
            want = engine.logits([*prompt, 9])
            assert (a[0] - want[-2]).norm() < 1e-3 * want[-2].norm()
            assert (b[0] - want[-1]).norm() < 1e-3 * want[-1].norm()


@pytest.mark.parametrize("num_sequences", [1, 2])
def test_generate_with_drafts_writes_the_same_text(tmp_path, capsys, num_sequences):
    """The command, with a plan on a device. How many guesses it makes depends on measured times."""
    path, plan = small_plan(tmp_path, num_sequences)
    words = f"generate {path} --split {plan} --device cuda --prompt abcabcabcabc -n 24 --temp 0"
    found = []
    for more in ((), ("--speculate", "ngram")):
        with checked_cuda(seed=num_sequences):
            assert main([*words.split(), "--json", *more]) == 0
        found.append(json.loads(capsys.readouterr().out))
    plain, drafted = found
    assert drafted["text"] == plain["text"] and plain["text"]
