"""A plan that loads takes every text: on a hollow CUDA device, random plans of models of 0.1 to 70
B take prompts of the whole context and generations within their budgets."""

import os
import random
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_cuda import library
from fake_cuda.devices import ACTIVE
from fake_cuda.hollow import hollow_cuda, hollow_model
from models import (
    Sizes,
    make_inputs,
    make_machine,
    make_profile,
    make_sizes,
    mixture_spec,
    shape_only,
)
from test_runtime import make_split

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.split_file import Split
from hotsplit.errors import HotsplitError
from hotsplit.model.modes import Mode
from hotsplit.model.spec import Route
from hotsplit.options.key_selection import KeySelection
from hotsplit.runtime import loading
from hotsplit.runtime.device.device_memory import kept_budget
from hotsplit.runtime.kernels.gpu.expert_pairs import Choices
from hotsplit.runtime.prefill.expert_stream import ExpertStream
from hotsplit.runtime.step.hybrid_step import HybridStep
from hotsplit.runtime.step.workspace import workspace_bytes
from hotsplit.runtime.step.workspace import workspace_bytes as workspace_of_plans
from hotsplit.runtime.weights.expert_block import ExpertBlock
from hotsplit.solver.inputs import Inputs
from hotsplit.solver.mode_choice import Found, obvious_plans
from hotsplit.solver.optimise import find_plan
from hotsplit.solver.solve import split_of

CARD_BYTES = 80 << 30
# Width, neurons, heads, key-value heads, head width and vocabulary of models from 0.1 to 70 B.
SHAPES = [
    (576, 1536, 9, 3, 64, 49152),
    (896, 4864, 14, 2, 64, 151936),
    (2048, 5632, 32, 4, 64, 32000),
    (2048, 8192, 32, 8, 64, 128256),
    (2304, 9216, 8, 4, 256, 256000),
    (3072, 8192, 24, 8, 128, 128256),
    (4096, 11008, 32, 32, 128, 32000),
    (4096, 14336, 32, 8, 128, 128256),
    (5120, 13824, 40, 40, 128, 32000),
    (8192, 22016, 64, 8, 128, 32000),
    (8192, 28672, 64, 8, 128, 128256),
]
LAYERS = (1, 2, 3, 4, 8, 16, 32, 80)
MOST_COST = 60  # about the launches of a case


@dataclass(frozen=True, kw_only=True)
class Case:
    model: ModelFile
    plan: Split
    seed: int = 0


def sizes_of(shape: tuple[int, ...], num_layers: int, context_length: int) -> Sizes:
    width, neurons, heads, kv_heads, head_width, vocab_size = shape
    return make_sizes(
        num_layers=num_layers,
        width=width,
        num_neurons=neurons,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_width=head_width,
        vocab_size=vocab_size,
        context_length=context_length,
    )


def solved(
    model: ModelFile,
    mode: Mode,
    share: float,
    *,
    num_sequences: int = 1,
    kv_offload: KeySelection | None = None,
    budget_bytes: int | None = None,
) -> Split:
    """The solver's plan for a budget: `budget_bytes`, or a share of the way from the smallest that
    puts anything on the GPU to all."""
    machine = make_machine(memory_bytes=CARD_BYTES, layer_s=1e-5)
    options = {
        "mode": mode,
        "workspace": 0,
        "num_sequences": num_sequences,
        "kv_offload": kv_offload,
    }
    profile = make_profile(model)

    def inputs_for(budget: int) -> Inputs:
        found = make_inputs(model, profile, machine, budget, **options)
        found = replace(found, paths=(Path(__file__),) * 3)  # whose hashes the plan has
        return found.with_workspace(workspace_bytes)

    if budget_bytes is None:
        problem = inputs_for(CARD_BYTES).pipeline().model
        least, most = problem.minimum_bytes, problem.placeable_bytes + problem.workspace_bytes
        budget_bytes = least + int(share * (most - least))
    inputs = inputs_for(budget_bytes)
    pipeline = inputs.pipeline()
    answer = find_plan(
        pipeline, time_limit_s=1.0, known=[*obvious_plans(inputs).values()], beat_s=0.0
    )
    assert answer is not None
    return split_of(Found(inputs=inputs, pipeline=pipeline, answer=answer, others=()), solve_s=0.0)


def random_case(seed: int) -> Case:
    choose = random.Random(seed)
    shape, context = choose.choice(SHAPES), choose.choice([64, 64, 200, 512, 1024, 2048])
    passes = 3 + context / 128
    tiles = 10 + shape[0] * shape[1] / (1 << 20)
    most = max(1, MOST_COST * 10 / passes / tiles)
    num_layers = choose.choice([n for n in LAYERS if n <= most])
    sizes, rank = sizes_of(shape, num_layers, context), choose.choice([0, 64, 512])
    kind = choose.choice(["f16", "bf16", "q8_0", "q4_0"])
    model = hollow_model(shape_only(sizes, kind=kind, predictor_rank=rank))
    mode = choose.choice(["dense", "exact", *["predicted"] * 2 * (rank > 0)])
    share = choose.choice([0.0, 1.0, choose.random(), choose.random(), choose.random() ** 3])
    is_offloaded = choose.random() < 0.15
    plan = solved(
        model,
        mode,
        share,
        num_sequences=1 if is_offloaded else choose.choice([1, 1, 2, 4]),
        kv_offload=KeySelection.parse("on") if is_offloaded else None,
    )
    return Case(model=model, plan=plan, seed=seed)


@contextmanager
def loaded(case: Case):
    """The engine of a case on a hollow device."""
    with (
        hollow_cuda(CARD_BYTES),
        Engine.of(case.model, case.plan, device="cuda", is_resident=False) as engine,
    ):
        yield engine


def take_texts(engine: Engine, plan: Split) -> None:
    """A prompt that leaves a few positions of the context, a generation, and a second prompt, for
    each sequence of the plan. Raises HotsplitError where memory is short."""
    context = plan.context_length
    texts = [engine.sequence() for _ in range(plan.num_sequences)]
    for text in texts:
        text.extend(np.arange(context - 4) % 50)
        for token in range(4):
            text.extend([token])
        text.rollback(context // 3)
        text.extend(np.arange(min(45, context // 2)))


def peak_and_limit(engine: Engine, plan: Split) -> tuple[int, int]:
    """(most bytes that torch reserved, bytes that it may)."""
    (report,) = engine.memory_report()
    return report.peak_reserved, kept_budget(plan.vram_budget_bytes)


pytestmark = [
    pytest.mark.skipif(not library.can_be_built(), reason="needs a C++ compiler, and Linux")
]
MIB = 1 << 20
# `HOTSPLIT_PLANS=300 pytest tests/solver/test_plan_memory.py` tries so many.
NUM_PLANS = int(os.environ.get("HOTSPLIT_PLANS", "12"))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTSPLIT_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def passes(monkeypatch):
    """The rows of each pass on a GPU. None takes memory of it, not even for a moment."""
    lengths, run_pass = [], HybridStep.run_pass

    def run(step, rows):
        (allocator,) = ACTIVE[-1].allocators
        before = allocator.peak_allocated = allocator.allocated
        found = run_pass(step, rows)
        assert (allocator.allocated, allocator.peak_allocated) == (before, before)
        lengths.append(len(rows))
        return found

    monkeypatch.setattr(HybridStep, "run_pass", run)
    return lengths


def check(case: Case) -> None:
    with loaded(case) as engine:
        take_texts(engine, case.plan)
        if engine.memories:
            peak, limit = peak_and_limit(engine, case.plan)
            assert peak <= limit, (peak, limit)


@pytest.mark.parametrize("seed", range(NUM_PLANS))
def test_a_random_plan_takes_all_texts_within_its_budget(seed):
    check(random_case(seed))


@pytest.mark.parametrize("share", [0.45, 0.8])
def test_plans_of_a_model_of_few_wide_layers_take_prompts(share):
    """2 % of its bytes hold no pass of 128 tokens, and one of 64 has tensors of exactly 1 MiB."""
    shape = next(each for each in SHAPES if each[:2] == (4096, 11008))
    model = hollow_model(shape_only(sizes_of(shape, 8, 1024), kind="f16"))
    whole = sum(entry.num_bytes for entry in model.tensors.values())
    plan = solved(model, "dense", 0.0, budget_bytes=int(share * whole))
    check(Case(model=model, plan=plan))


# Width, experts, their neurons, those of a token, and the type; experts that are hot of each layer.
MIXTURES = {
    "qwen3-30b-a3b": (2048, 128, 768, 8, "q4_0", [40, 0, 128]),
    "mixtral-8x7b": (4096, 8, 14336, 2, "q4_0", [3]),
    "gpt-oss-20b": (2880, 32, 2880, 4, "q8_0", [10, 9]),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_plans_of_mixtures_take_prompts_with_streamed_experts(name, monkeypatch):
    """Random choices, since nothing is computed; a plan reserves memory for pieces of whole
    experts."""
    width, num_experts, neurons, num_used, kind, hot = MIXTURES[name]
    sizes = sizes_of((width, neurons, 32, 8, 64, 32000), len(hot), 1024)
    route = Route(num_experts=num_experts, num_used=num_used)
    spec = mixture_spec(sizes, route=route, num_neurons=neurons)
    model = hollow_model(shape_only(sizes, kind=kind, spec=spec))
    plan = make_split(model, [np.arange(count) for count in hot], context_length=1024)
    workspace = workspace_of_plans(model, 1024, "dense", 1, 8 << 30)
    gpu, cpu = ({**x, "workspace": workspace} for x in (plan.gpu_bytes, plan.cpu_bytes))
    plan = replace(
        plan, mode="dense", gpu_bytes=gpu, cpu_bytes=cpu, vram_budget_bytes=sum(gpu.values())
    )
    random = np.random.default_rng(0)

    def choices(id_TK, count):
        chosen_TE = np.stack([random.permutation(count) for _ in range(len(id_TK))])
        return of(chosen_TE[:, : id_TK.shape[1]], count)

    def places(block):
        if block.place_E is not None and block.role == "cold":
            return block.place_E.numpy()
        every = np.arange(num_experts)  # hot ones are the first
        return np.where(every < block.gate.data.shape[0], every, -1)

    def run(stream, layer, parts, *given):
        streamed.append(layer)
        was(stream, layer, parts, *given)

    of, was, streamed = Choices.of, ExpertStream.run, []
    monkeypatch.setattr(Choices, "of", choices)
    monkeypatch.setattr(loading, "check_routers", lambda *given: None)
    monkeypatch.setattr(ExpertBlock, "places", property(places))
    monkeypatch.setattr(ExpertStream, "run", run)
    check(Case(model=model, plan=plan))
    assert {*streamed} == {layer for layer, count in enumerate(hot) if count < num_experts}


def smollm2():
    """A model of SmolLM2's shape, and its plan in 90 MiB."""
    model = hollow_model(shape_only(sizes_of(SHAPES[0], 30, 512), kind="q8_0"))
    return model, solved(model, "dense", 0.0, budget_bytes=90 * MIB)


def test_what_earlier_engines_of_the_process_took_is_free_again():
    """What `run` does: an engine on the card, then a plan in 90 MiB."""
    model, plan = smollm2()
    with hollow_cuda(CARD_BYTES) as cuda:
        with Engine.of(model, device="cuda", is_resident=False) as engine:
            engine.sequence().extend(list(range(50)))
        assert torch.cuda.memory_reserved() == 0
        cuda.allocators[0].peak_reserved = 0
        with Engine.of(model, plan, device="cuda", is_resident=False) as engine:
            take_texts(engine, plan)
            peak, limit = peak_and_limit(engine, plan)
            assert peak <= limit == 128 * MIB


def test_an_error_says_what_the_process_held_before():
    model, plan = smollm2()
    with hollow_cuda(CARD_BYTES):
        held = torch.empty(54 * MIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(
            HotsplitError, match="54.00 MiB are held by this process's earlier work"
        ):
            Engine.of(model, plan, device="cuda", is_resident=False)
        del held


def test_a_pass_that_takes_memory_is_noticed():
    """Checks the fixture `passes`."""
    with loaded(wide()) as engine:
        step = engine._live.native
        prepare = step.prepare

        def prepare_with_memory(*given):
            torch.empty(1, device="cuda")  # is free at once
            return prepare(*given)

        step.prepare = prepare_with_memory
        with pytest.raises(AssertionError, match="=="):
            engine.sequence().extend(list(range(40)))


def wide():
    """A case of one wide layer, all on the card."""
    shape = next(each for each in SHAPES if each[:2] == (4096, 11008))
    model = hollow_model(shape_only(sizes_of(shape, 1, 512), kind="f16"))
    return Case(model=model, plan=solved(model, "dense", 1.0))
