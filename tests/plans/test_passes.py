"""Passes of hybrid steps, with both roles on the CPU."""

from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from checkpoints import random_model, save_tokenizer
from hybrid_plans import PLANS_AND_MODES, F, L, make, planned, random_plan
from models import family_model, make_model, make_sizes
from passes import passing
from reference import logits_ref, rel_error
from test_families import CASES, converted
from test_hybrid_step import assert_as_undivided
from test_runtime import make_split
from test_smallthinker import checkpoint

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.files.gguf_file import array_entry
from hotsplit.model.tensors import in_layout, is_neuron_major
from hotsplit.runtime.device.cuda_runtime import DeviceLost
from hotsplit.runtime.kernels.gpu.kernels import reference_kernels, triton_kernels
from hotsplit.runtime.step import pass_device
from hotsplit.runtime.step.backend import plain_backend
from hotsplit.runtime.step.batch import rows_of

CONTEXT = 256


def ids_of(count):
    return [int(x) for x in np.random.default_rng(3).integers(0, 50, count)]


@pytest.mark.parametrize("plan, mode", PLANS_AND_MODES)
def test_a_pass_gives_the_logits_of_the_undivided_model(tmp_path, plan, mode):
    sizes = make_sizes(num_layers=L, num_neurons=F, context_length=CONTEXT)
    model = make(tmp_path, sizes=sizes)
    model.save(model.path)
    split = planned(tmp_path, model, plan, context_length=CONTEXT)
    ids = ids_of(200)
    with Engine.load(model.path, mode=mode) as whole, whole.sequence() as text:
        want = torch.cat(
            [
                text.extend(ids[:140], wanted="all"),
                text.extend(ids[140:], wanted="last").view(1, -1),
            ]
        )
    with Engine.load(model.path, split=tmp_path / "s.gguf", mode=mode) as engine:
        step = passing(engine, split)
        got = torch.cat(
            [
                step.run_pass(rows_of(ids[:140], 0, "all")),
                step.run_pass(rows_of(ids[140:], 140, "last")),
            ]
        )
        assert rel_error(got, want) < 2e-3


@pytest.mark.parametrize("plan", ["all on the GPU", "last layers on the CPU"])
def test_any_rows_of_a_pass_may_have_logits(tmp_path, plan):
    """The work after the last layer is made for them while none of their hidden states is there."""
    sizes = make_sizes(num_layers=L, num_neurons=F, context_length=CONTEXT)
    model = make(tmp_path, sizes=sizes)
    split, ids = planned(tmp_path, model, plan, context_length=CONTEXT), ids_of(40)
    want = logits_ref(model, ids)
    with Engine.of(model, split, mode="dense", device="cpu") as engine:
        for wanted in ([1, 2], [3, 5, 6, 7, 39], [*range(1, 10)]):
            step, rows = passing(engine, split), rows_of(ids, 0)
            rows = [replace(row, has_logits=n in wanted) for n, row in enumerate(rows)]
            assert rel_error(step.run_pass(rows), want[wanted]) < 2e-3


def compared(model, splits, context, mode="dense"):
    """The largest relative error, by any of the plans, of a pass's logits and then of a step's."""
    count = min(90, context - 2)
    chance = np.random.default_rng(3)
    ids = [int(x) for x in chance.integers(0, min(50, model.spec.vocab_size), count)]
    with (
        Engine.of(model, mode=mode, device="cpu", context_length=context) as whole,
        whole.sequence() as text,
    ):
        want = torch.cat([text.extend(ids, wanted="all"), text.extend([7], wanted="all")])
    errors = []
    for split in splits:
        with Engine.of(model, split, mode=mode, device="cpu") as engine:
            step = passing(engine, split)
            got = [
                step.run_pass(rows_of(ids[: count // 2], 0, "all")),
                step.run_pass(rows_of(ids[count // 2 :], count // 2, "all")),
            ]
            got.append(step.run_rows(rows_of([7], count, "all")))
            errors.append(rel_error(torch.cat(got), want))
    return max(errors)


def as_stock(model: ModelFile) -> ModelFile:
    """The model in f32 with its down projections by outputs; llama.cpp would not run all of
    these."""
    tensors = {
        in_layout(name, "stock"): array_entry(np.array(entry.read()).swapaxes(-1, -2), "f32")
        if is_neuron_major(name)
        else entry
        for name, entry in model.tensors.items()
    }
    return replace(model, layout="stock", tensors=tensors)


ON_GPUS = [case for case in CASES if not case.startswith("flashnext")]


@pytest.mark.parametrize("case", [*ON_GPUS, "smallthinker"])
def test_every_graph_of_layers(tmp_path, case):
    """In passes and steps together, and in steps alone, whose bound is that of sums in f32. Other
    tests compare the undivided models with transformers."""
    folder = tmp_path / "hf"
    if case == "smallthinker":
        checkpoint(folder, {})
    else:
        random_model(folder, CASES[case])
    save_tokenizer(folder, 320)
    model = ModelFile.load(converted(folder, tmp_path / "m.gguf", outtype="f32"))
    context = min(CONTEXT, model.spec.context_length)
    splits = [random_plan(model, seed, context=context) for seed in range(2)]
    assert compared(model, splits, context) < 3e-3
    assert_as_undivided(model, splits[1], mode="exact", context_length=context)
    if any(layer.route for layer in model.spec.layers):
        stock = as_stock(model)
        splits = [random_plan(stock, seed, context=context) for seed in range(2, 5)]
        assert_as_undivided(stock, *splits, mode="dense", context_length=context)


@pytest.mark.parametrize("mode", ["exact", "predicted"])
@pytest.mark.parametrize("plan", ["all on the GPU", "random"])
def test_neurons_in_parts(tmp_path, monkeypatch, plan, mode):
    """A part has as many neurons as keep its values small, with their own names."""
    model = make(tmp_path, sizes=make_sizes(num_layers=L, num_neurons=F, context_length=CONTEXT))
    split, rows = planned(tmp_path, model, plan, context_length=CONTEXT), rows_of(ids_of(40), 0)
    found = []
    for size in (F, 16):
        monkeypatch.setattr(pass_device, "gpu_part_neurons", lambda num_rows, size=size: size)
        with Engine.of(model, split, mode=mode, device="cpu") as engine:
            step = passing(engine, split)
            found.append(step.run_pass(rows).clone())
    assert rel_error(*found) < 1e-3 and not torch.equal(*found)


def test_a_gpu_that_is_lost_before_a_first_pass_is_not_used_again(tmp_path):
    """The work of a length is made at its first use, which runs it. An interrupt ends all of it."""
    model = make(tmp_path, sizes=make_sizes(num_layers=L, num_neurons=F, context_length=CONTEXT))
    split, finished = planned(tmp_path, model, "random", context_length=CONTEXT), []
    with Engine.of(model, split, mode="dense", device="cpu") as engine:
        step = passing(engine, split)
        rows = rows_of(ids_of(40), 0)
        step._finish = finished.append
        for error in (KeyboardInterrupt(), DeviceLost("gone")):
            step.prepare = Mock(side_effect=error)
            with pytest.raises(type(error)):
                step.run_pass(rows)
        assert step.segments["step", 1] in finished
        for run in (lambda: step.run_pass(rows), lambda: step.run(3, 0)):
            with pytest.raises(DeviceLost, match="gone; start again"):
                run()
        assert step.prepare.call_count == 1


def test_a_gpu_that_is_lost_when_its_work_is_waited_for_is_not_used_again(tmp_path):
    model = make(tmp_path, sizes=make_sizes(num_layers=L, num_neurons=F, context_length=CONTEXT))
    split = planned(tmp_path, model, "random", context_length=CONTEXT)
    for error in (None, KeyboardInterrupt()):
        with Engine.of(model, split, mode="dense", device="cpu") as engine:
            step = passing(engine, split)
            step._finish = Mock(side_effect=DeviceLost("gone"))
            with pytest.raises(DeviceLost, match="gone; start again"), step._watched(()):
                if error is not None:
                    raise error
            assert step.lost
            with pytest.raises(DeviceLost, match="gone; start again"):
                step.run(3, 0)
            assert step._finish.call_count == 1


@pytest.mark.parametrize("kind, bound", [("f16", 2e-3), ("bf16", 1.5e-2), ("q8_0", 2e-3)])
@pytest.mark.parametrize(
    "family", ["llama", "olmo2", "sandwich with biases", "opt", "opt, norms after", "falcon"]
)
def test_norms_are_rounded_as_products_take_them(family, kind, bound):
    """All is on the GPU, so that products alone read most norms."""
    sizes = make_sizes(num_layers=L, width=256, num_neurons=F)
    model = family_model(family, sizes=sizes, kind=kind)
    split = make_split(model, [range(F)] * L)
    ids = ids_of(32)
    with Engine.of(model, split, mode="dense", device="cpu") as engine:
        got = passing(engine, split).run_pass(rows_of(ids, 0, "all"))
    assert rel_error(got, logits_ref(model, ids)) < bound


def test_triton_kernels_give_the_references_logits():
    """In Triton's interpreter, with the weights in main memory: launches take what passes give."""
    pytest.importorskip("triton")

    shape = make_sizes(num_layers=1, width=32, num_neurons=24, vocab_size=20, context_length=64)
    model, rows = make_model(sizes=shape, kind="q4_0", predictor_rank=8), rows_of([3, 17, 4], 0)
    split = make_split(model, [range(0, 24, 3)], context_length=64)
    with Engine.of(model, split, mode="predicted", device="cpu", is_resident=False) as engine:
        backends = map(plain_backend, (triton_kernels(), reference_kernels()))
        steps = [passing(engine, split, backend=backend) for backend in backends]
        got, want = (step.run_pass(rows) for step in steps)
    assert rel_error(got, want) < 2e-3
