"""Logits of an engine on a device against those of the CPU alone: for every plan of one GPU with
every type of weights and mode, and for several architectures; and the tokens of captured steps
against those of steps that are not captured.

The CPU's logits are compared elsewhere: with a decoder in float64 (test_runtime) and with
transformers (test_families)."""

import dataclasses

import numpy as np
import pytest
import torch
from checkpoints import random_model, save_tokenizer
from hybrid_plans import PLANS
from models import make_model, make_sizes
from reference import Bounds, rel_error
from test_families import CASES, converted
from test_runtime import IDS, make_split

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.files.gguf_file import array_entry

pytestmark = pytest.mark.gpu
L, F = 4, 96  # as in PLANS
MODES = ("dense", "exact", "predicted")
KINDS = ("f32", "f16", "bf16", "q8_0", "q4_0", "mxfp4", "q4_k", "q5_k", "q6_k")
# A step's sums are f32; its keys and values are f16, which a sum in another order may change by one
# unit. Except for f32 matrices, a prompt's products take both factors in 16 bits, each rounded by
# at most half of eps.
STEP_BOUND = 2 * torch.finfo(torch.float16).eps
STEP_BOUNDS = Bounds(dict.fromkeys(KINDS, STEP_BOUND))
PROMPT_BOUNDS = {kind: 4 * torch.finfo(torch.float16).eps for kind in KINDS}
PROMPT_BOUNDS["bf16"] = 4 * torch.finfo(torch.bfloat16).eps
ONE_GPU = [name for name in PLANS if "two GPUs" not in name]


def random_file(tmp_path, kind, *, is_tied=False, rank=8):
    """A model whose predictors' scores are seldom near zero, so that rounding selects no other
    neurons."""
    width = 256 if kind.endswith("_k") else 64
    shape = make_sizes(num_layers=L, num_neurons=F, width=width)
    model = make_model(sizes=shape, kind=kind, is_tied=is_tied, predictor_rank=rank)
    random = np.random.default_rng(3)
    biases = {
        f"blk.{layer}.ffn_pred_up.bias": array_entry(3.0 * random.choice([-1, 1], F), "f32")
        for layer in range(L)
    }
    tensors = model.tensors | biases
    model = dataclasses.replace(model, tensors=tensors, path=tmp_path / "m.gguf")
    model.save(model.path)
    return model


def planned(tmp_path, model, name):
    hot, dense, head, _ = PLANS[name]
    make_split(model, hot, dense_on_gpu=dense, head_on_gpu=head).save(tmp_path / "s.gguf")
    return tmp_path / "s.gguf"


def stepped(engine, ids=IDS):
    """Logits after each token, one at a time."""
    return torch.stack([engine._step(token, i).clone() for i, token in enumerate(ids)])


def prompted(engine, ids=IDS):
    """Logits f32 [1, V] after a prompt, which is computed in one pass."""
    with engine.sequence() as text:
        return text.extend(ids, "last")


def both(path, mode, device, split=None, **options):
    """(logits of a prompt, of steps) on the CPU alone, and with the split on the device."""
    length = {} if split else {"context_length": 32}
    with Engine.load(path, mode=mode, device="cpu", context_length=32) as engine:
        want = prompted(engine), stepped(engine)
    with Engine.load(path, split=split, mode=mode, device=device, **length, **options) as engine:
        return want, (prompted(engine), stepped(engine))


def check(found, kind):
    (prompt, steps), (got_prompt, got_steps) = found
    assert rel_error(got_steps, steps) < STEP_BOUNDS[kind]
    assert rel_error(got_prompt, prompt) < PROMPT_BOUNDS[kind]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("plan", ONE_GPU)
@pytest.mark.parametrize("kind", KINDS)
def test_every_division_gives_what_the_cpu_gives(tmp_path, device, kind, plan, mode):
    model = random_file(tmp_path, kind)
    check(both(model.path, mode, device, planned(tmp_path, model, plan)), kind)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["f16", "q4_0", "q6_k"])
@pytest.mark.parametrize("plan", [None, "random", "head on the CPU"])
def test_tied_weights(tmp_path, device, kind, plan, mode):
    model = random_file(tmp_path, kind, is_tied=True)
    split = planned(tmp_path, model, plan) if plan else None
    check(both(model.path, mode, device, split), kind)


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_without_a_plan_all_is_on_the_device(tmp_path, device, kind, graph):
    check(both(random_file(tmp_path, kind).path, "predicted", device, graph=graph), kind)


@pytest.mark.parametrize("outtype", ["f16", "bf16", "q8_0", "q4_0"])
@pytest.mark.parametrize(
    "case",
    [
        "llama-biases",
        "qwen3-biases-tied",
        "opt",
        "opt-norm-after",
        "falcon-7b",
        "falcon-11b",
        "phi4-mini",
    ],
)
def test_every_graph_of_layers(tmp_path, device, case, outtype):
    """Gated and ungated, with and without biases, tied and untied."""
    folder = random_model(tmp_path / "hf", CASES[case])
    save_tokenizer(folder, 320)
    path = converted(folder, tmp_path / "m.gguf", outtype=outtype)
    model = ModelFile.load(path)
    neurons = np.arange(model.spec.most_neurons)
    hot = [neurons[::3], neurons, neurons[:0]]
    make_split(model, hot, dense_on_gpu=[1, 1, 1]).save(tmp_path / "s.gguf")
    check(both(path, "exact", device, tmp_path / "s.gguf"), outtype)


def test_the_bounds_reject_neurons_left_out(tmp_path, device):
    """Predicted logits differ from dense ones by the neurons that the predictors leave out."""
    model = random_file(tmp_path, "f16")
    split = planned(tmp_path, model, "random")
    (prompt, steps), _ = both(model.path, "dense", device, split)
    _, (other_prompt, other_steps) = both(model.path, "predicted", device, split)
    assert rel_error(other_steps, steps) > 5 * STEP_BOUND
    assert rel_error(other_prompt, prompt) > 5 * PROMPT_BOUNDS["f16"]


@pytest.mark.parametrize("plan", ["random", "every kind of layer"])
def test_a_thousand_tokens_equal_those_of_the_plain_path(tmp_path, device, long_model, plan):
    hot, dense, head, _ = PLANS[plan]
    split = make_split(long_model, hot, dense_on_gpu=dense, head_on_gpu=head, context_length=1100)
    split.save(tmp_path / "s.gguf")
    found, logits = [], []
    for graph in (True, False):
        with Engine.load(
            long_model.path, split=tmp_path / "s.gguf", device=device, graph=graph
        ) as engine:
            run = engine.generate("def main():", max_tokens=1000, temperature=0.0)
            found.append([token.id for token in run])
            logits.append(stepped(engine))
    assert len(found[0]) == 1000
    assert found[0] == found[1]
    assert torch.equal(logits[0], logits[1])


@pytest.mark.parametrize("plan", ["mixed", "every kind of layer"])
def test_steps_repeat_to_the_bit(tmp_path, device, plan):
    model = random_file(tmp_path, "q4_0")
    split = planned(tmp_path, model, plan)
    with Engine.load(model.path, split=split, mode="predicted", device=device) as engine:
        first = stepped(engine)
        for _ in range(20):
            assert torch.equal(stepped(engine), first)
