"""Hybrid steps of mixtures most of whose layers are gated delta nets or short convolutions, with
both roles on the CPU: logits agree with those of the undivided model up to rounding, each row has
the bits of a row alone, and what fails or is tried changes no state."""

import dataclasses
import random
from functools import partial

import numpy as np
import pytest
import torch
from delta_models import FEW, KIMI, RECURRENT, SMALL, TINY, both_model, single_model, with_recurrent
from hybrid_plans import random_plan, stepped
from models import changed, make_model, make_sizes, mixture_spec
from passes import logits, passing, streaming
from reference import logits_ref, rel_error
from test_experts import IDS
from test_hybrid_experts import made_plan, with_hybrid
from test_hybrid_rows import StepsAlone, schedule
from test_hybrid_step import hybrid, steps
from test_runtime import make_split
from test_sequences import ROOM

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.files.gguf_file import array_entry
from hotsplit.model.short_conv import ShortConv
from hotsplit.model.spec import Rotary, Route
from hotsplit.model.tensors import is_router
from hotsplit.runtime.kernels.gpu.kernels import reference_kernels
from hotsplit.runtime.step.backend import plain_backend

# Hot experts of four layers, the last of which attends, and whether attention or delta nets are on
# the GPU.
PLANS = {
    "some": ([[1, 4, 7], [0, 2], 8, [3]], [1, 1, 1, 1]),
    "layers of both sides": ([[1, 2], [], [], [5]], [1, 0, 0, 1]),
    "beside the CPU's delta nets": ([[3, 5], 8, [1], [2, 6]], [0, 0, 0, 1]),
}


MIXERS = {
    "delta nets": lambda width: TINY,
    "Kimi delta attention": lambda width: KIMI,
    "short convolutions": lambda width: ShortConv(size=width, num_taps=3),
    "Mamba-2": lambda width: SMALL,
}


def delta_mixture(
    kind: str = "f32", *, num_layers: int = 4, width: int = 64, mixer: str = "delta nets", **options
) -> ModelFile:
    """Three layers with states and one attention with gates and rotation of half a head, with a
    gated shared expert; routers choose clearly."""
    sizes = make_sizes(num_layers=num_layers, width=width, num_neurons=32, context_length=96)
    spec = mixture_spec(
        sizes,
        route=Route(num_experts=8, num_used=3),
        num_neurons=32,
        num_shared=32,
        has_shared_gate=True,
    )
    spec = with_recurrent(changed(spec, Rotary, num_values=8), MIXERS[mixer](width), **options)
    model, chance = make_model(spec=spec, kind=kind), np.random.default_rng(1)
    own = {}
    for name, entry in model.tensors.items():
        if name.endswith("ssm_a"):
            own[name] = array_entry(-np.abs(entry.read()), "f32")
        elif is_router(name):
            own[name] = array_entry(chance.standard_normal(entry.shape) / 2, "f32")
    return dataclasses.replace(model, tensors=model.tensors | own)


def loaded(model: ModelFile, split, **options) -> Engine:
    return Engine.of(model, split, mode="dense", device="cpu", **options)


@pytest.mark.parametrize("mixer", MIXERS)
def test_random_plans_give_the_logits_of_the_undivided_model(mixer):
    """In q8_0; test_passes has them in f32. The CPU rounds inputs of products to 8 bits, and the
    norms of queries, keys and outputs make errors of small values larger."""
    model = delta_mixture("q8_0", mixer=mixer)
    with Engine.of(model, mode="dense", device="cpu", context_length=32) as whole:
        want = stepped(whole, IDS)
    for seed in range(4):
        split = random_plan(model, seed)
        with loaded(model, split) as engine:
            got = steps(hybrid(engine, split), IDS)
        assert rel_error(got, want) < 2e-2, seed


@pytest.mark.parametrize("wrong", ["convolve", "delta_rule", "gate_norm", "convolve_gated"])
def test_the_comparison_notices_a_kernel_that_does_nothing(wrong):
    mixer = "short convolutions" if wrong == "convolve_gated" else "delta nets"
    model, right = delta_mixture(mixer=mixer), reference_kernels()
    spoilt = right.replaced(**{wrong: lambda *given, **options: None})
    with loaded(model, split := made_plan(model, *PLANS["some"])) as engine:
        want = stepped(engine, IDS)
        assert rel_error(steps(hybrid(engine, split), IDS), want) < 1e-5
        assert rel_error(steps(hybrid(engine, split, plain_backend(spoilt)), IDS), want) > 1e-2


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("plan", ["some", "layers of both sides"])
def test_rows_of_several_texts_have_the_bits_of_rows_alone(plan, mixer):
    """With forks and rollbacks."""
    model = delta_mixture(mixer=mixer)
    one, many = (
        made_plan(model, *PLANS[plan], num_sequences=number, context_length=80)
        for number in (1, ROOM)
    )
    with with_hybrid(model, one) as single, with_hybrid(model, many) as engine:
        alone = StepsAlone(single)
        compared = schedule(engine, alone, random.Random(1), 6)
    assert compared > 10


@pytest.mark.parametrize("mixer", RECURRENT)
@pytest.mark.parametrize("dense", [[1, 1, 1, 1], [1, 0, 0, 1]])
def test_a_long_prompt_has_one_state(dense, mixer):
    """Passes have as many rows as a call of the CPU takes, if states are there."""
    model = RECURRENT[mixer](make_sizes(num_layers=4, num_neurons=64, context_length=192))
    split = make_split(
        model,
        [range(0, 60 * on_gpu, 2) for on_gpu in dense],
        dense_on_gpu=dense,
        context_length=192,
    )
    ids = np.random.default_rng(1).integers(0, 50, 150).tolist()
    with loaded(model, split) as engine:
        want, step = engine.logits(ids), passing(engine, split)
        assert step.most_tokens == (256 if all(dense) else 128)
        assert rel_error(logits(step, ids), want) < 1e-4


OTHER_BLOCKS = {
    "one block a layer": single_model,
    "one block a layer, experts": partial(single_model, experts=FEW),
    "one block a layer, experts of latents": partial(single_model, experts=FEW, latent_size=32),
    "two mixers side by side": both_model,
}


@pytest.mark.parametrize("blocks", OTHER_BLOCKS)
def test_layers_without_a_mixer_or_neurons_or_with_two_mixers(blocks):
    """On the CPU and in plans, as steps and as passes, with cold weights streamed or not."""
    sizes = make_sizes(num_layers=10, num_neurons=64, context_length=96)
    model, ids = OTHER_BLOCKS[blocks](sizes), IDS[:12]
    want = logits_ref(model, ids)
    for seed in range(3):
        split = random_plan(model, seed, context=96)
        with loaded(model, split) as engine:
            assert rel_error(engine.logits(ids), want) < 1e-5
            assert rel_error(steps(hybrid(engine, split), ids), want) < 1e-5
            assert rel_error(logits(passing(engine, split), ids), want) < 1e-5
            assert rel_error(logits(streaming(engine, split)[0], ids), want) < 1e-5


def test_a_step_that_fails_changes_no_state():
    """A kernel raises after states have been written; the same tokens then give the same logits."""
    model, right, broken = delta_mixture(), reference_kernels(), []

    def gate_norm(*given, **flags):
        right.gate_norm(*given, **flags)
        if broken:
            raise RuntimeError("the device fails")

    kernels = right.replaced(gate_norm=gate_norm)
    with loaded(model, split := made_plan(model, *PLANS["some"])) as engine:
        step = hybrid(engine, split, plain_backend(kernels))
        want = steps(step, IDS[:4])
        steps(step, IDS[:3])
        broken.append(True)
        with pytest.raises(RuntimeError, match="the device fails"):
            step.run(IDS[7], 3)
        broken.clear()
        assert torch.equal(step.run(IDS[3], 3), want[3])
