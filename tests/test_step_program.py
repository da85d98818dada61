"""The step program: any order of its operations that their declared reads and writes allow gives the same
bits, on the host alone and with plans; a read or write that is not declared is found. The forms made
from files and from weights agree."""

import dataclasses
from collections import Counter

import pytest
import torch
from hybrid_plans import ALL, NONE, SOME
from models import FAMILIES, family_model, make_shape
from replay import Replay
from test_runtime import IDS, make_split

from sparkinfer import Engine
from sparkinfer.runtime.kernels.cpu import library
from sparkinfer.runtime.model.placement import Placement
from sparkinfer.runtime.step.program import (
    HOST,
    LayerForm,
    StepForm,
    edges,
    last_reads,
    layer_ops,
    step_program,
)

needs_kernels = pytest.mark.skipif(
    not library.is_available(), reason="the C++ kernels are not built"
)
CPU = torch.device("cpu")
POSITION = 3
# Hot neurons of each layer, attention on the GPU, the head there, homes: every kind of layer and copy.
PLANS = {
    "host": None,
    "divided": ([SOME, SOME, SOME], [1, 1, 1], True, None),
    "every kind of layer": ([SOME, SOME, NONE], [1, 0, 0], False, None),
    "two GPUs": ([SOME, NONE, ALL], [1, 0, 1], True, [0, 0, 1, 1]),
}
ORDERS = {
    "llama": "pre-norm",
    "llama with biases": "pre-norm",
    "qwen3": "pre-norm",
    "opt": "pre-norm",
    "opt, norms after": "post-norm",
    "falcon": "parallel",
    "falcon, two norms": "parallel",
    "falcon, one after the other": "pre-norm",
}
QUICK = ("llama with biases", "opt, norms after", "falcon, two norms")


def replayed(tmp_path, family, plan, offset=1):
    """A replay of one token behind three others, and its logits in the order of the program."""
    shape = make_shape(num_layers=3, num_neurons=len(ALL))
    model = family_model(family, shape=shape, predictor_rank=8, input_layer_offset=offset)
    model = dataclasses.replace(model, path=tmp_path / "m.gguf")
    model.save(model.path)
    options = {}
    if PLANS[plan] is not None:
        hot, dense, head, home = PLANS[plan]
        split = make_split(model, hot, dense_on_gpu=dense, head_on_gpu=head, home=home)
        split.save(tmp_path / "s.gguf")
        options = {"split": tmp_path / "s.gguf"}
    with Engine.load(model.path, mode="predicted", **options) as engine:
        weights = engine._live.weights
        want = torch.stack([engine._step(token, i).clone() for i, token in enumerate(IDS[:4])])
        if PLANS[plan] is None:
            replay = Replay.of_host(weights, offset)
        else:
            placement = Placement.of_split(split, (CPU,) * len(split.budgets))
            replay = Replay.of_plan(weights, placement, offset)
        for position in range(POSITION + 1):
            replay.host.token_1[0], replay.host.position_1[0] = IDS[position], position
            got = replay.logits(range(len(replay.operations)))
        bound = 0.0 if PLANS[plan] is None else 1e-5 * want[POSITION].abs().max()
        assert (got - want[POSITION]).abs().max() <= bound
        yield replay, got


@pytest.fixture
def loaded(tmp_path, request):
    yield from replayed(tmp_path, *request.param)


CASES = [(family, plan) for family in FAMILIES for plan in PLANS]
marked = [
    case if case[0] in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES
]


@needs_kernels
@pytest.mark.parametrize("loaded", marked, indirect=True)
def test_any_order_that_the_declared_edges_allow_gives_the_same_bits(loaded):
    replay, want = loaded
    orders = {tuple(replay.order(seed, replay.edges)) for seed in range(50)}
    for order in orders:
        assert torch.equal(replay.logits(order), want)
    assert len(orders) > 30 or "copy" not in {op.name for op in replay.operations}


@needs_kernels
@pytest.mark.parametrize("loaded", marked, indirect=True)
def test_a_read_or_write_that_is_not_declared_is_found(loaded):
    """All of them in turn. Those whose order others keep anyway cannot be found."""
    replay, want = loaded
    found, missed = Counter(), []
    for number, operation in enumerate(replay.operations):
        for is_read, values in ((True, operation.reads), (False, operation.writes)):
            for value in values:
                changes = replay.changes(number, value, want, is_read=is_read)
                found[changes] += 1
                if changes is False:
                    missed.append((number, operation.name, "read" if is_read else "write", value))
    print(found, missed)
    assert found[True] >= 20 and not missed


@needs_kernels
@pytest.mark.parametrize("loaded", [("llama", "divided")], indirect=True)
def test_the_replay_sees_a_value_that_nothing_writes(loaded):
    replay, want = loaded
    order = list(range(len(replay.operations)))
    for left_out in order[2:-2]:
        assert not torch.equal(replay.logits([n for n in order if n != left_out]), want)
    assert torch.equal(replay.logits(order), want)
