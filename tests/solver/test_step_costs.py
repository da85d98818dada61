"""What calibrate fits to whole decode steps, and the plans that follow from an old machine file's
figures of an H100."""

import numpy as np
import pytest
import torch
from models import make_inputs, make_machine, make_profile, make_sizes, shape_only
from paths import TESTS

from hotsplit.artifacts.machine_file import CpuCosts, Machine
from hotsplit.costs import part_bytes
from hotsplit.costs.kernel_counts import HEAD_KERNELS, HOT_KERNELS
from hotsplit.measure.calibrate.step_costs import (
    COLD,
    CONTEXT,
    Card,
    Shape,
    StepTimes,
    engine_of,
    fit,
    plan_of,
    steps_of,
)
from hotsplit.solver.mode_choice import find
from hotsplit.solver.problem import num_cpu_runs, of_counts, placement_seconds

NARROW = Shape(num_layers=8, hidden_size=256, num_neurons=256, vocab_size=500)
WIDE = Shape(num_layers=4, hidden_size=1024, num_neurons=2048, vocab_size=300)
CARD = Card(bandwidth=2e12, link=2e10, launch_s=1.5e-6)
CPU: CpuCosts = make_machine(cpu_gb_per_s=100, token_s=3e-5, logit_s=2e-10).costs
KERNELS = 4 + 2 + 3 + HOT_KERNELS


def planted(
    shape: Shape,
    *,
    kernel_s: float,
    token_s: float,
    hand_over_s: float,
    cpu_run_s: float,
    card: Card = CARD,
    rounds: int = 5,
) -> StepTimes:
    """The times of a shape's steps on a machine with these figures, by the solver's formulas."""
    model = shape.model(1)
    sizes, count = part_bytes.layer_bytes(model, 0), shape.num_neurons
    read = sizes.attention + part_bytes.kv_read(model, 0, CONTEXT)
    hot = count * sizes.neuron

    def kernels(number: int, num_bytes: float) -> float:
        return max(number * kernel_s, number * card.launch_s + num_bytes / card.bandwidth)

    layer_s = kernels(KERNELS, read + hot)
    cold_s = COLD * sizes.neuron / 100e9 + hand_over_s
    hot_s = HOT_KERNELS * kernel_s + hot / card.bandwidth
    token = token_s + 3e-5 + 2e-10 * shape.vocab_size + 4 * shape.vocab_size / card.link
    token += kernels(HEAD_KERNELS, part_bytes.head_bytes(model))
    seconds = []
    for step in steps_of(shape):
        _, on_gpu, on_cpu, divided, runs = step.terms_T
        more = divided * (cold_s - hot_s) + runs * cpu_run_s
        seconds.append(token + on_gpu * layer_s + on_cpu * 7e-4 + more)
    return StepTimes(shape=shape, seconds_RS=np.tile(seconds, (rounds, 1)))


@pytest.mark.parametrize("kernel_s", [3e-6, 1.5e-6])
def test_planted_figures_are_found(kernel_s):
    """Also those of kernels that take no longer than their start and their bytes, of a layer whose
    bytes take longer than the least time of its kernels."""
    figures = {"kernel_s": kernel_s, "token_s": 2e-4, "hand_over_s": 9e-5, "cpu_run_s": 1.2e-4}
    found = fit(planted(NARROW, **figures), planted(WIDE, **figures), CARD, CPU)
    for name, value in figures.items():
        assert getattr(found, name).median == pytest.approx(value, rel=1e-6), name
    # The check has teeth: other figures give other times.
    for name in figures:
        times = planted(NARROW, **figures | {name: 2 * figures[name]})
        assert not np.allclose(times.seconds_RS, planted(NARROW, **figures).seconds_RS, rtol=1e-3)


def test_a_noisy_round_moves_the_quartiles_and_not_the_median():
    figures = {"kernel_s": 3e-6, "token_s": 2e-4, "hand_over_s": 9e-5, "cpu_run_s": 1.2e-4}
    narrow, wide = planted(NARROW, **figures), planted(WIDE, **figures)
    narrow.seconds_RS[0, 2:4] += 3e-3
    found = fit(narrow, wide, CARD, CPU)
    assert found.hand_over_s.median == pytest.approx(9e-5, rel=1e-6)
    assert max(narrow.fitted_RT()[:, 3]) > 2e-4


def test_steps_run_as_planned_and_give_the_undivided_logits():
    shape = Shape(num_layers=4, hidden_size=64, num_neurons=128, vocab_size=50, head_dim=32)
    logits = []
    for step in steps_of(shape):
        model = shape.model(step.num_layers)
        plan = plan_of(model, step)
        assert [not on for on in plan.dense_on_gpu].count(True) == len(step.on_cpu)
        with engine_of(model, plan, torch.device("cpu")) as engine:
            if step.num_layers == 4:
                logits.append(engine._step(3, 0).clone())
            divided = [layer for layer in engine.layers if len(layer.ffn.blocks) == 2]
            assert len(divided) == step.num_divided
    for other in logits[1:]:
        assert torch.allclose(other, logits[0], rtol=1e-4, atol=1e-5)


# ---- an H100, some of whose figures were not measured --------------------------------------------

H100 = TESTS / "machines" / "h100.json"
SMOLLM2 = shape_only(
    make_sizes(
        num_layers=30,
        width=576,
        num_neurons=1536,
        num_heads=9,
        num_kv_heads=3,
        head_width=64,
        vocab_size=49152,
        context_length=1024,
    ),
    kind="q8_0",
)
# Measured on that machine: seconds of a token on the CPU alone, and all on the card.
CPU_ALONE_S, ON_CARD_S = 3.18e-3, 1.09e-3


def smollm2_inputs(vram_bytes: int):
    profile = make_profile(SMOLLM2, np.ones((30, 1536)))
    machine = Machine.load(H100)
    return make_inputs(
        SMOLLM2, profile, machine, vram_bytes, mode="dense", workspace=1 << 20, context_length=1024
    )


def test_the_cpu_alone_and_the_card_alone_are_priced_as_measured():
    problem = smollm2_inputs(1 << 30).pipeline().model
    on = [np.full(30, 1536), np.ones(30, bool), True]
    off = [np.zeros(30, int), np.zeros(30, bool), False]
    cpu_s, card_s = (placement_seconds(problem, of_counts(problem, *each)) for each in (off, on))
    assert cpu_s == pytest.approx(CPU_ALONE_S, rel=0.15)  # 1.65 ms by the file's own figures
    assert card_s == pytest.approx(ON_CARD_S, rel=0.3)


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_plans_that_lost_on_an_h100_are_no_longer_made(share):
    """At these shares of its bytes, plans that gave the card the head first, and 0, 10 and 19 of 30
    layers, were predicted at 1.5, 1.2 and 0.9 ms, and the machine could not keep that: a layer
    takes the CPU 0.1 ms. Now whole layers go to the card, next to each other, and a token is not
    promised sooner than the layers that are left take the CPU."""
    whole = sum(
        part_bytes.layer_bytes(SMOLLM2, n).attention
        + 1536 * part_bytes.layer_bytes(SMOLLM2, n).neuron
        for n in range(30)
    ) + part_bytes.head_bytes(SMOLLM2)
    inputs = smollm2_inputs(int(share * whole))
    found = find(inputs, time_limit_s=5)
    placement, seconds = found.answer.placement, found.answer.objective_s
    num_hot_L, dense_L = placement.num_hot_L, placement.dense_L
    assert ((num_hot_L == 0) | (num_hot_L == 1536)).all() and ((num_hot_L > 0) == dense_L).all()
    assert num_cpu_runs(dense_L) == 1 and dense_L.any()
    left_s = (30 - dense_L.sum()) * (CPU_ALONE_S - 0.3e-3) / 30  # 0.3 ms: the head
    assert left_s + 2.5e-4 < seconds < CPU_ALONE_S
    # The plan that was made at 30 %: the head, which saves less than the card costs.
    problem = inputs.pipeline().model
    head = of_counts(problem, np.zeros(30, int), np.zeros(30, bool), True)
    alone = of_counts(problem, np.zeros(30, int), np.zeros(30, bool), False)
    assert placement_seconds(problem, head) > 0.95 * placement_seconds(problem, alone)
