"""Norms after attention and feed-forward, before the residual sums, and a scaled embedding, as in
Gemma 2 and 3, and in OLMo 2, which has no other norms but one of all heads. test_native_layers
compares both with the reference; here they are divided by plans."""

import dataclasses

import numpy as np
import pytest
from hybrid_plans import SOME, F, L, split_of
from models import family_model, make_sizes
from reference import logits_ref, rel_error
from test_hybrid_step import hybrid, loaded, steps
from test_native_step import BOUNDS
from test_runtime import IDS, make_split

from hotsplit.costs.kernel_counts import dense_kernels
from hotsplit.model.spec import Add, LayerSpec, Norm
from hotsplit.runtime.kernels.gpu.kernels import triton_kernels
from hotsplit.runtime.step.backend import plain_backend
from hotsplit.runtime.step.batch import rows_of

FAMILY = ("olmo2", "sandwich with biases")


def made(family, *, offset=0, num_layers=L, is_tied=False):
    sizes = make_sizes(num_layers=num_layers, num_neurons=F)
    model = family_model(
        family, sizes=sizes, predictor_rank=8, input_layer_offset=offset, threshold=0.0
    )
    tensors = {n: e for n, e in model.tensors.items() if not is_tied or n != "output.weight"}
    return dataclasses.replace(model, tensors=tensors)


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
def test_the_comparison_rejects_other_models(mutant):
    model = made("sandwich with biases")
    other = dataclasses.replace(model, bare_spec=mutant(model.bare_spec))
    with loaded(other, mode="dense") as engine:
        assert rel_error(engine.logits(IDS), logits_ref(model, IDS)) > 0.05


@pytest.mark.parametrize("plan", ["mixed", "every kind of layer", "attention on the CPU"])
@pytest.mark.parametrize("family", FAMILY)
def test_steps_of_several_rows(plan, family):
    model = made(family)
    with loaded(model, split := split_of(model, plan), "exact") as engine:
        got = hybrid(engine, split, max_rows=4).run_rows(rows_of(IDS, 0, "all"))
    assert rel_error(got, logits_ref(model, IDS)) < BOUNDS["f32"]


def test_a_hybrid_step_of_tritons_kernels(several_rows):
    """In the interpreter: an undivided layer and a divided one."""
    model = made("olmo2", num_layers=2, is_tied=True)
    split = make_split(model, [np.arange(F), SOME], dense_on_gpu=[1, 1], head_on_gpu=True)
    with loaded(model, split, "exact") as engine:
        got = steps(hybrid(engine, split, plain_backend(triton_kernels())), IDS[:2])
    assert rel_error(got, logits_ref(model, IDS[:2])) < BOUNDS["f32"]


@pytest.mark.parametrize("family", FAMILY)
def test_each_norm_is_one_kernel_with_the_sum_before_it(family):
    model = made(family)
    of_norms = 2 + 2 + 2 if family == "olmo2" else 4  # with those of heads, and sums before none
    assert dense_kernels(model, 0, has_predictor=False) == of_norms + 4 + 3
