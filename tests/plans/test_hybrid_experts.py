"""Hybrid steps of mixtures of experts, with both roles on the CPU: some experts of each layer are
hot, others cold. Logits agree with those of the undivided model up to rounding, whatever the plan;
each row has the bits of a row alone."""

import dataclasses
import random

import numpy as np
import pytest
import torch
from checkpoints import random_model, save_tokenizer
from hybrid_plans import random_plan, stepped
from passes import passing
from reference import logits_ref, rel_error
from test_experts import IDS, ROUTES, mixture
from test_families import CASES, converted
from test_hybrid_rows import StepsAlone, schedule
from test_hybrid_step import hybrid, steps
from test_native_step import BOUNDS
from test_runtime import make_split
from test_sequences import ROOM

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.costs.part_bytes import bytes_on_one_side
from hotsplit.errors import HotsplitError
from hotsplit.runtime.kernels.gpu.kernels import reference_kernels
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.step.backend import plain_backend
from hotsplit.runtime.step.batch import Row
from hotsplit.runtime.step.forms import placed_form
from hotsplit.runtime.step.program import HOST, step_program
from hotsplit.runtime.step.program_summary import file_form

CPU = torch.device("cpu")


def made_plan(model: ModelFile, hot, dense, **options):
    """A plan with these hot experts in each layer; all of them if a number."""
    split = make_split(
        model,
        [np.arange(ids) if isinstance(ids, int) else np.array(ids) for ids in hot],
        dense_on_gpu=dense,
        head_on_gpu=True,
        **options,
    )
    return dataclasses.replace(split, mode="dense")


# Two layers: hot experts of each, and whether attention is on the GPU.
PLANS = {
    "some": ([[1, 4, 7, 11], [0, 2]], [1, 1]),
    "none and all": ([[], 12], [1, 1]),
    "beside the CPU's attention": ([[3, 5], 12], [0, 0]),
    "one layer on the CPU": ([[1, 2, 3], []], [1, 0]),
}


def stock(route: str = "groups", **options) -> ModelFile:
    return mixture(route=ROUTES[route], layout="stock", **options)


def loaded(model: ModelFile, split, **options) -> Engine:
    return Engine.of(model, split, **{"mode": "dense", "device": "cpu"} | options)


@pytest.mark.parametrize("mode", ["dense", "exact"])
def test_random_plans_of_experts_by_neurons(mode):
    model = mixture(
        route=ROUTES["groups"],
        kind="q8_0",
        activation="relu",
        num_neurons=64,
        num_shared=96,
        has_shared_gate=mode == "exact",
    )
    assert_plans_agree(model, (1, 2, 5), BOUNDS["q8_0"], mode)


@pytest.mark.usefixtures("devices_types")
@pytest.mark.parametrize("kind", ["q8_0", "q4_k", "iq3_xxs", "nvfp4"])
def test_random_plans_of_types_in_blocks(kind):
    is_super = kind != "q8_0"
    model = stock(
        "softmax",
        kind=kind,
        num_neurons=256 if is_super else 64,
        width=256 if is_super else 64,
        num_shared=256 if is_super else 32,
        has_shared_gate=True,
        num_dense=1 - is_super,
    )
    assert_plans_agree(model, (4,) if is_super else (3, 4, 6), BOUNDS[kind])


def assert_plans_agree(
    model: ModelFile, seeds, bound: float = BOUNDS["f32"], mode: str = "dense"
) -> None:
    """The definition is in float64, without a plan."""
    want = logits_ref(model, IDS)
    for seed in seeds:
        split = random_plan(model, seed)
        with loaded(model, split, mode=mode) as engine:
            undivided = stepped(engine, IDS)
            got = steps(hybrid(engine, split), IDS)
        assert rel_error(undivided, want) < bound, seed
        assert rel_error(got, want) < bound, seed


def test_the_comparison_notices_a_missing_side():
    """Hot experts, or cold ones, that add nothing."""
    model = stock()
    with loaded(model, split := made_plan(model, *PLANS["some"])) as engine:
        right, want = reference_kernels(), stepped(engine, IDS)
        nothing = right.replaced(expert_down=lambda *given, **_: given[-1].zero_())
        assert rel_error(steps(hybrid(engine, split), IDS), want) < 1e-5
        assert rel_error(steps(hybrid(engine, split, plain_backend(nothing)), IDS), want) > 1e-2
        step, elsewhere = hybrid(engine, split), torch.zeros(64)
        for struct in step.meter.structs[:-1]:
            struct.y = elsewhere.data_ptr()
        assert rel_error(steps(step, IDS), want) > 1e-2


# ---- several rows ----------------------------------------------------------------------------


def with_hybrid(model: ModelFile, split) -> Engine:
    """An engine whose decode step is a hybrid one of up to 32 rows."""
    engine = loaded(model, split)
    step = passing(engine, split, max_rows=32)
    engine._sequences.decoder = dataclasses.replace(engine._live, native=step)
    return engine


@pytest.mark.parametrize("plan", ["some", "beside the CPU's attention"])
def test_rows_of_several_texts_have_the_bits_of_rows_alone(plan):
    """Each expert on the CPU is read once for all rows that chose it."""
    model = stock(num_shared=32, num_neurons=32)
    one, many = (
        made_plan(model, *PLANS[plan], num_sequences=number, context_length=80)
        for number in (1, ROOM)
    )
    with with_hybrid(model, one) as single, with_hybrid(model, many) as engine:
        alone = StepsAlone(single)
        compared = [schedule(engine, alone, random.Random(seed), 8) for seed in range(4)]
    assert sum(compared) > 60


def test_experts_of_the_cpu_are_read_once_for_all_rows():
    """Rows with the same token choose the same experts, so two read the bytes of one; and only
    those that are not hot."""
    model, read = stock(kind="q8_0", num_neurons=32), []
    for number in (1, 2):
        split = made_plan(model, *PLANS["some"], num_sequences=number, context_length=64)
        with with_hybrid(model, split) as engine:
            for sequence in range(number):
                engine._live.weights.cache.reserve(sequence, 0, 1)
            rows = [Row(token=3, position=0, sequence=s, has_logits=True) for s in range(number)]
            engine._live.native.run_rows(rows)  # prepares this number of rows
            before = engine.traffic.total
            engine._live.native.run_rows(rows)
            read.append(engine.traffic.total - before)
    of_expert = 2 * 32 * 68 + 64 * 34
    assert read[0] == read[1] and read[0] % of_expert == 0
    assert 0 < read[0] < 2 * 4 * of_expert  # four experts in each of two layers


# ---- plans -----------------------------------------------------------------------------------


def test_bytes_are_those_of_the_hot_experts(tmp_path):
    """With their biases, to the byte; also in a layer with neurons, and from a file."""
    folder = random_model(tmp_path / "hf", CASES["gpt-oss"])
    save_tokenizer(folder, 320)
    path = converted(folder, tmp_path / "m.gguf", outtype="q8_0", layout="stock")
    model = ModelFile.load(path)
    split = made_plan(model, [[0, 3], [], 6], [0, 0, 0])
    split.save(tmp_path / "s.gguf")
    with Engine.load(path, split=tmp_path / "s.gguf", device="cpu") as engine:
        hot = cold = 0
        for layer in engine.layers:
            for block in layer.ffn.blocks:
                biases = [m.bias_PN for m in block.matrices]
                size = sum(m.data.nbytes for m in block.matrices) + sum(b.nbytes for b in biases)
                hot, cold = hot + size * (block.role == "hot"), cold + size * (block.role == "cold")
        assert (hot, cold) == (split.gpu_bytes["neurons"], split.cpu_bytes["neurons"])
    whole = bytes_on_one_side(model, 32, 0)
    stored = sum(e.num_bytes for n, e in model.tensors.items() if "_exps" in n)
    assert hot + cold == whole["neurons"] == stored


def test_plans_that_name_no_experts_of_the_model_are_refused(tmp_path):
    model = stock(path=tmp_path / "m.gguf", num_dense=1)
    model.save(model.path)
    right = made_plan(model, [[30, 2], [1, 5]], [1, 1])
    right.check_against(model, tmp_path / "s.gguf")
    wrong = dataclasses.replace(right, hot=(right.hot[0], np.array([1, 12], np.int32)))
    with pytest.raises(HotsplitError, match="names layers, neurons or experts missing in"):
        wrong.check_against(model, tmp_path / "s.gguf")


@pytest.mark.parametrize("plan", PLANS)
def test_the_program_of_a_file_is_that_of_loaded_weights(plan):
    """With bytes that add up to the plan's."""
    model = stock(num_shared=32, has_shared_gate=True)
    with loaded(model, split := made_plan(model, *PLANS[plan])) as engine:
        placement = Placement.of_split(split, (CPU,))
        want = step_program(placed_form(engine._live.weights, placement))
    got = step_program(file_form(model, split))
    assert [dataclasses.replace(op, weight_bytes=0) for op in got] == list(want)
    found = {
        side: sum(op.weight_bytes for op in got if op.device == side) for side in ("gpu0", HOST)
    }
    own = ("attention", "neurons", "head")
    assert found["gpu0"] == sum(split.gpu_bytes[item] for item in own)
