"""Norms after attention and feed-forward, before the residual sums, and a scaled embedding, as in
Gemma 2 and 3, and in OLMo 2, which has no other norms but one of all heads."""

import dataclasses
from functools import cache

import numpy as np
import pytest
import torch
from hybrid_plans import PLANS, SOME, F, L, planned, stepped
from models import family_model, make_sizes
from reference import logits_ref, rel_error
from test_hybrid_step import assert_same_in_any_order, hybrid, logged, steps
from test_native_step import BOUNDS
from test_runtime import IDS, make_split

from hotsplit import Engine
from hotsplit.costs.kernel_counts import HEAD_KERNELS, HOT_KERNELS, dense_kernels
from hotsplit.model.spec import Add, LayerSpec, Norm
from hotsplit.runtime.kernels.gpu.kernels import reference_kernels, triton_kernels
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.step import hybrid_builder
from hotsplit.runtime.step.backend import plain_backend
from hotsplit.runtime.step.batch import rows_of

FAMILY = ("olmo2", "sandwich with biases")
MODES = ("dense", "exact", "predicted")


def made(family, *, offset=0, num_layers=L, is_tied=False):
    sizes = make_sizes(num_layers=num_layers, num_neurons=F)
    model = family_model(
        family, sizes=sizes, predictor_rank=8, input_layer_offset=offset, threshold=0.0
    )
    tensors = {n: e for n, e in model.tensors.items() if not is_tied or n != "output.weight"}
    return dataclasses.replace(model, tensors=tensors)


def saved(tmp_path, family, **options):
    model = dataclasses.replace(made(family, **options), path=tmp_path / "m.gguf")
    model.save(model.path)
    return model


@cache
def right_logits(family, mode="dense", **options):
    """The logits of `saved`, in float64."""
    return logits_ref(made(family, **options), IDS, mode=mode)


def after_the_sum(layer):
    """The layer with its second norms after the residual sums: a norm of x instead of an output."""
    blocks = list(layer.blocks)
    for index, block in enumerate(blocks[:-1]):
        if isinstance(block, Norm) and isinstance(blocks[index + 1], Add):
            norm = dataclasses.replace(block, reads="x", writes="x")
            blocks[index : index + 2] = [blocks[index + 1], norm]
    return LayerSpec(blocks=tuple(blocks))


def unscaled(spec):
    return dataclasses.replace(spec, embedding_scale=1.0)


@pytest.mark.parametrize(
    "mutant", [unscaled, lambda s: s.with_layers([after_the_sum(x) for x in s.layers])]
)
def test_the_comparison_rejects_other_models(tmp_path, monkeypatch, mutant):
    model = saved(tmp_path, "sandwich with biases")
    want = right_logits("sandwich with biases")
    of = type(model).of

    def changed(path, keys, tensors):
        found = of(path, keys, tensors)
        return dataclasses.replace(found, bare_spec=mutant(found.bare_spec))

    monkeypatch.setattr(type(model), "of", changed)
    with Engine.load(model.path, mode="dense") as engine:
        assert rel_error(engine.logits(IDS), want) > 0.05


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILY)
def test_the_native_step_agrees_with_the_reference(tmp_path, level, family, mode):
    model, want = saved(tmp_path, family, offset=1), right_logits(family, mode, offset=1)
    with Engine.load(model.path, mode=mode) as engine:
        assert rel_error(stepped(engine), want) < BOUNDS["f32"]
    make_split(model, [SOME] * L).save(tmp_path / "s.gguf")
    with Engine.load(model.path, split=tmp_path / "s.gguf", mode=mode) as engine:  # two blocks
        assert rel_error(stepped(engine), want) < BOUNDS["f32"]


@pytest.mark.parametrize(
    ("family", "mode"), [*((FAMILY[1], mode) for mode in MODES), (FAMILY[0], "predicted")]
)
@pytest.mark.parametrize("plan", PLANS)
def test_hybrid_steps_agree_with_the_reference(tmp_path, family, plan, mode):
    model, want = saved(tmp_path, family, offset=1), right_logits(family, mode, offset=1)
    split = planned(tmp_path, model, plan)
    with Engine.load(model.path, split=tmp_path / "s.gguf", mode=mode) as engine:
        step = hybrid(engine, split, plain_backend(reference_kernels()))
        assert rel_error(steps(step), want) < BOUNDS["f32"]


@pytest.mark.parametrize("plan", ["mixed", "every kind of layer", "attention on the CPU"])
@pytest.mark.parametrize("family", FAMILY)
def test_steps_of_several_rows(tmp_path, plan, family):
    model = saved(tmp_path, family)
    split = planned(tmp_path, model, plan)
    with Engine.load(model.path, split=tmp_path / "s.gguf", mode="exact") as engine:
        placement = Placement.of_split(split, (torch.device("cpu"),) * len(split.budgets))
        step = hybrid_builder.build(
            engine._live.weights,
            placement,
            engine.traffic,
            plain_backend(reference_kernels()),
            max_rows=4,
        )
        got = step.run_rows(rows_of(IDS, 0, "all"))
        assert rel_error(got, right_logits(family)) < BOUNDS["f32"]


def test_the_tied_embedding_is_scaled_on_the_gpu(tmp_path):
    model = saved(tmp_path, "sandwich with biases", is_tied=True)
    split = planned(tmp_path, model, "all on the GPU")
    with Engine.load(model.path, split=tmp_path / "s.gguf", mode="exact") as engine:
        step = hybrid(engine, split, plain_backend(reference_kernels()))
        want = right_logits("sandwich with biases", is_tied=True)
        assert rel_error(steps(step), want) < BOUNDS["f32"]


def test_a_hybrid_step_of_tritons_kernels(tmp_path, several_rows):
    """In the interpreter: an undivided layer and a divided one."""
    model = saved(tmp_path, "olmo2", num_layers=2, is_tied=True)
    split = make_split(model, [np.arange(F), SOME], dense_on_gpu=[1, 1], head_on_gpu=True)
    split.save(tmp_path / "s.gguf")
    with Engine.load(model.path, split=tmp_path / "s.gguf", mode="exact") as engine:
        want = logits_ref(model, IDS[:2])
        got = steps(hybrid(engine, split, plain_backend(triton_kernels())), IDS[:2])
        assert rel_error(got, want) < BOUNDS["f32"]


@pytest.mark.parametrize("plan", ["mixed", "every kind of layer", "two GPUs, layers on the CPU"])
@pytest.mark.parametrize("family", FAMILY)
def test_any_order_that_the_events_allow_gives_the_same_bits(tmp_path, family, plan):
    model = saved(tmp_path, family)
    split = planned(tmp_path, model, plan)
    with Engine.load(model.path, split=tmp_path / "s.gguf", mode="predicted") as engine:
        assert_same_in_any_order(engine, split)


@pytest.mark.parametrize("family", FAMILY)
def test_each_norm_is_one_kernel_with_the_sum_before_it(tmp_path, family):
    model = saved(tmp_path, family)
    of_norms = 2 + 2 + 2 if family == "olmo2" else 4  # with those of heads, and sums before none
    assert dense_kernels(model, 0, has_predictor=False) == of_norms + 4 + 3
    split = planned(tmp_path, model, "mixed")  # divided, all on the CPU, all on the GPU, divided
    with Engine.load(model.path, split=tmp_path / "s.gguf", mode="predicted") as engine:
        log = logged(engine, split)
        main = [operation.name for operation in log if operation.stream == 0]
        counted = sum(dense_kernels(model, index, has_predictor=True) for index in range(L))
        # Attention's kernels do the append as well.
        assert main.count("kernel") == counted - L + 3 * (HOT_KERNELS - 1) + HEAD_KERNELS
