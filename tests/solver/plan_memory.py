"""Random plans of models of 0.1 to 70 B, solved and loaded on a hollow CUDA device, and the texts
that each must take."""

import random
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from fake_cuda.hollow import hollow_cuda, hollow_model
from models import Sizes, make_inputs, make_machine, make_profile, make_sizes, shape_only

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.split_file import Split
from hotsplit.model.modes import Mode
from hotsplit.options.key_selection import KeySelection
from hotsplit.runtime.device.device_memory import kept_budget
from hotsplit.runtime.step.workspace import workspace_bytes
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
