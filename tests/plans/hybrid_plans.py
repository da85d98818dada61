"""Divisions of a small random model over GPUs and the CPU, which tests of hybrid steps share."""

import dataclasses

import numpy as np
import torch
from models import make_sizes, sparse_model
from test_runtime import IDS, make_split

from hotsplit.artifacts.model_file import ModelFile

F, L = 96, 4
ALL, NONE = np.arange(F), np.arange(0)
random = np.random.default_rng(5)
SOME = random.permutation(F)[:37]
# Hot neurons of each layer, which layers have attention on the GPU, whether the head is on one, and
# the number of the GPU of each layer and of the head (None: there is one GPU).
PLANS = {
    "all on the GPU": ([ALL] * L, [1] * L, True, None),
    "no neuron on the GPU": ([NONE] * L, [1] * L, True, None),
    "one neuron": ([ALL[5:6]] * L, [1] * L, True, None),
    "random": ([SOME] * L, [1] * L, True, None),
    "all but one": ([ALL[1:]] * L, [1] * L, True, None),
    "mixed": ([SOME, NONE, ALL, ALL[::3]], [1] * L, True, None),
    "head on the CPU": ([SOME] * L, [1] * L, False, None),
    "last layers on the CPU": ([SOME, ALL, NONE, NONE], [1, 1, 0, 0], False, None),
    "first layers on the CPU": ([NONE, NONE, SOME, ALL], [0, 0, 1, 1], True, None),
    "layers on the CPU between": ([SOME, NONE, NONE, ALL], [1, 0, 0, 1], True, None),
    "attention on the CPU": ([SOME, ALL, ALL[:1], NONE], [0] * L, True, None),
    "every kind of layer": ([SOME, SOME, NONE, NONE], [1, 0, 0, 1], False, None),
    "two GPUs": ([SOME, NONE, SOME, ALL], [1, 1, 1, 1], True, [0, 0, 1, 1, 1]),
    "two GPUs, layers on the CPU": ([SOME, NONE, NONE, SOME], [1, 0, 0, 1], True, [0, 0, 1, 1, 1]),
}

MODES = ("dense", "exact", "predicted")
IN_ALL_MODES = ("random", "every kind of layer")  # other plans in one
PLANS_AND_MODES = [
    (plan, mode)
    for number, plan in enumerate(PLANS)
    for mode in (MODES if plan in IN_ALL_MODES else MODES[number % 3 :][:1])
]


def model_of(**options) -> ModelFile:
    return sparse_model(**{"sizes": make_sizes(num_layers=L, num_neurons=F)} | options)


def split_of(model: ModelFile, plan: str, **options):
    hot, dense, head, home = PLANS[plan]
    return make_split(model, hot, dense_on_gpu=dense, head_on_gpu=head, home=home, **options)


def make(tmp_path, **options) -> ModelFile:
    return dataclasses.replace(model_of(**options), path=tmp_path / "m.gguf")


def planned(tmp_path, model, plan, **options):
    split = split_of(model, plan, **options)
    split.save(tmp_path / "s.gguf")
    return split


def made(tmp_path, plan, **options):
    """A saved model and its plan."""
    model = make(tmp_path, **options)
    model.save(model.path)
    return model, planned(tmp_path, model, plan)


def stepped(engine, ids=IDS):
    return torch.stack([engine._step(token, i).clone() for i, token in enumerate(ids)])


def random_plan(
    model: ModelFile,
    seed: int,
    *,
    num_sequences: int = 1,
    context: int = 32,
    draft_on_gpu: bool = False,
):
    """Hot neurons or experts of each layer (none, some or all), sides of the dense blocks and the
    head, and one or two GPUs. `draft_on_gpu`: with the draft block, beside the last attention."""
    chance, layers = np.random.default_rng(seed), model.spec.layers
    hot = []
    for layer in layers:
        number = layer.neurons.num_units
        others = () if layer.neurons.needs_all_gates else chance.integers(0, number + 1, 3)
        count = chance.choice([0, number, *others])
        hot.append(np.sort(chance.permutation(number)[:count]))
    dense = [chance.random() < 0.7 for _ in layers]
    if draft_on_gpu:
        dense[model.spec.last_attending] = True
    home = None
    if chance.random() < 0.3:
        first = int(chance.integers(1, len(layers) + 1))
        home = [0] * first + [1] * (len(layers) + 1 - first)
    split = make_split(
        model,
        hot,
        dense_on_gpu=dense,
        head_on_gpu=bool(chance.random() < 0.5),
        home=home,
        num_sequences=num_sequences,
        context_length=context,
        draft_on_gpu=draft_on_gpu,
    )
    return dataclasses.replace(split, mode="dense")
