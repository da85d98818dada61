"""Prompts of mixtures on a GPU: cold experts streamed to it, or computed by the CPU at the same
time. The CPU stands for the GPU, with the reference of its kernels.

Letters: A experts."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from checkpoints import random_model, save_tokenizer
from hybrid_plans import random_plan
from passes import logits, streaming
from reference import logits_ref, rel_error
from test_experts import ROUTES, mixture
from test_families import CASES, converted
from test_hybrid_experts import loaded, made_plan
from test_native_step import BOUNDS

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.errors import HotsplitError
from hotsplit.options.prompt_rates import PromptRates
from hotsplit.runtime.kernels.gpu.expert_pairs import Choices, most_tiles
from hotsplit.runtime.prefill.expert_stream import ColdExperts, streamed
from hotsplit.runtime.weights.neuron_block import by_role

CPU = torch.device("cpu")
IDS = np.random.default_rng(3).integers(0, 50, 21).tolist()
# Seconds per byte with which the CPU takes experts of up to about three tokens.
RATES = PromptRates(cpu_s=1e-10, token_s=1e-10, link_s=4e-10, staged_s=4e-10)
HOT = [[1, 4, 7], []]


def with_streams(engine, split, **options):
    """(a step that streams experts alone, their stream or None)."""
    step, streams = streaming(engine, split, least_tokens=4, only=ColdExperts, **options)
    return step, next(iter(streams.values()), None)


def noted(stream):
    """Lists of what is streamed and of what the CPU computes, which grow with each pass."""
    parts, chosen, was_run, was_chosen = [], [], stream.run, stream.chosen

    def run(layer, pieces, *given):
        parts.append([piece.tolist() for piece in pieces])
        was_run(layer, pieces, *given)

    def choose(expert_A, count_A):
        found_A = was_chosen(expert_A, count_A)
        chosen.append((expert_A.tolist(), found_A.tolist()))
        return found_A

    stream.run, stream.chosen = run, choose
    return parts, chosen


@pytest.mark.parametrize("is_resident", [False, True])
@pytest.mark.parametrize(
    ("layout", "kind"),
    [("stock", "f32"), ("sparse", "q8_0"), ("stock", "q4_0"), ("sparse", "f16"), ("stock", "q2_0")],
)
def test_streamed_experts_give_the_logits_of_the_cpu(layout, kind, is_resident):
    """In the file, in tiles and groups, with shared experts; one layer has no hot expert."""
    model = mixture(
        route=ROUTES["groups"],
        layout=layout,
        kind=kind,
        width=64,
        num_neurons=64,
        num_shared=64,
        has_shared_gate=True,
    )
    split = made_plan(model, HOT, [1, 1])
    with loaded(model, split, is_resident=is_resident) as engine:
        want = engine.logits(IDS)
        step, stream = with_streams(engine, split)
        logits(step, IDS)  # the first pass of a length runs twice
        parts, _ = noted(stream)
        assert rel_error(logits(step, IDS), want) < max(2 * BOUNDS[kind], 1e-5)
        assert len(parts) == 2 and all(len(part) <= 3 for layer in parts for part in layer)
        assert sorted({*range(12)} - {*itertools.chain(*parts[0])} - unused(parts[0])) == [1, 4, 7]
        assert not stream._slots  # the buffers are given back
        parts.clear()
        logits(step, IDS[:3])  # too few tokens
        assert not parts


def unused(parts) -> set[int]:
    """Cold experts that no token has chosen."""
    return {*range(12)} - {1, 4, 7} - {*itertools.chain(*parts)}


@pytest.mark.parametrize("mode", ["dense", "exact"])
def test_experts_with_biases_and_interleaved_rows(tmp_path, mode):
    folder = random_model(tmp_path / "hf", CASES["gpt-oss"])
    save_tokenizer(folder, 320)
    layout = "stock" if mode == "dense" else "sparse"
    path = converted(folder, tmp_path / "m.gguf", outtype="f32", layout=layout)
    split = made_plan(model := ModelFile.load(path), [[0, 3], [], 6], [0, 0, 0])
    with loaded(model, split, mode=mode) as engine:
        want = engine.logits(IDS)
        step, _ = with_streams(engine, split)
        assert rel_error(logits(step, IDS), want) < 1e-5


@pytest.mark.parametrize("layout", ["stock", "sparse"])
def test_random_plans_give_the_logits_of_the_definition(layout):
    """20 plans, with and without rates, experts in memory and in the file, and pieces of any
    size."""
    model = mixture(
        route=ROUTES["groups"],
        layout=layout,
        kind="f32",
        num_neurons=24,
        num_shared=16,
        num_dense=1,
    )
    want = logits_ref(model, IDS)
    num_streamed = 0
    for seed in range(20):
        split = random_plan(model, seed)
        with loaded(model, split, is_resident=seed % 3 > 0) as engine:
            if not any(by_role(layer.ffn.blocks)[1] for layer in engine.layers):
                continue
            step, stream = with_streams(
                engine,
                split,
                pieces=1 + seed % 4,
                rates=RATES if seed % 2 else None,
                is_staged=seed % 5 > 0,
            )
            if stream is None:
                continue
            parts, _ = noted(stream)
            assert rel_error(logits(step, IDS), want) < 1e-5, seed
            num_streamed += sum(map(len, parts))
    assert num_streamed > 20


@pytest.mark.parametrize("is_staged", [False, True])
def test_the_cpu_takes_experts_with_few_tokens(is_staged):
    model = mixture(route=ROUTES["groups"], kind="f32", num_neurons=32)
    split = made_plan(model, HOT, [1, 1])
    with loaded(model, split) as engine:
        want = engine.logits(IDS)
        step, stream = with_streams(engine, split, rates=RATES, is_staged=is_staged)
        _, chosen = noted(stream)
        assert rel_error(logits(step, IDS), want) < 1e-5
        assert all(0 < len(own) < len(every) for every, own in chosen)
        stream.rates = None  # leaves it none, and nothing of what it has computed
        assert rel_error(logits(step, IDS), want) < 1e-5


@pytest.mark.parametrize(
    "count_E", [[1, 1, 1, 1], [33, 1, 33, 1], [64, 0, 31, 33], [0, 0, 0, 128], [0, 0, 3, 1]]
)
def test_pairs_of_streamed_experts_fit_into_their_memory(count_E):
    id_T1 = np.repeat(np.arange(4), count_E)[:, None]
    choices = Choices.of(id_T1, 4)
    parts = choices.in_parts(np.flatnonzero(count_E), 40)
    found = sum(len(choices.tables(part, len(id_T1), 1)[0]) for part in parts)
    assert found <= 3 * (len(id_T1) + most_tiles(len(id_T1), 4))


def test_what_is_streamed_does_not_depend_on_earlier_passes():
    """The rows with which a pass is filled up to its length may have anything."""
    model = mixture(route=ROUTES["groups"], kind="q8_0", width=64, num_neurons=64)
    split = made_plan(model, HOT, [1, 1])
    found = []
    with loaded(model, split) as engine:
        step, stream = with_streams(engine, split, rates=RATES)
        _, chosen = noted(stream)
        for token in (5, 9, 11):
            logits(step, [token] * 32)
            chosen.clear()
            found.append((logits(step, IDS).tolist(), chosen.copy()))
    assert found[0] == found[1] == found[2]


def test_rates_divide_experts_as_brute_force_does():
    random = np.random.default_rng(0)
    for _ in range(60):
        count_A = random.integers(1, 9, random.integers(1, 8))
        rates = PromptRates(**{name: float(random.random()) for name in vars(RATES)})
        cpu_A, link = rates.cpu_s + rates.token_s * count_A, rates.link_s

        def longer(on_gpu_A, cpu_A=cpu_A, link=link):
            return max(cpu_A[~on_gpu_A].sum(), link * on_gpu_A.sum())

        every = [np.array(s) for s in itertools.product([False, True], repeat=len(count_A))]
        got_A = streamed(rates, count_A, is_in_turn=False)
        assert np.isclose(longer(got_A), min(map(longer, every)))
        assert got_A.tolist() == sorted(got_A, key=bool) or count_A[got_A].min() >= max(
            count_A[~got_A], default=0
        )
        in_turn_A = streamed(rates, count_A, is_in_turn=True)
        assert (in_turn_A == (cpu_A > rates.staged_s)).all()


@pytest.mark.parametrize("wrong", [{"cpu_s": -1.0}, {"token_s": float("nan")}, {"link_s": 2.0}])
def test_rates_that_cannot_be_are_refused(wrong):
    with pytest.raises(HotsplitError, match="wanted 0 to 1"):
        dataclasses.replace(RATES, **wrong)


@pytest.mark.parametrize("fault", ["expert", "order", "one piece"])
def test_wrong_pieces_are_found(fault):
    model = mixture(route=ROUTES["groups"], kind="f32", num_neurons=16, width=32)
    split = made_plan(model, HOT, [1, 1])
    with loaded(model, split) as engine:
        want = engine.logits(IDS)
        step, stream = with_streams(engine, split)
        was = stream._send

        def send(slot, cold, place_A):
            if fault == "expert":
                place_A = np.where(place_A == place_A.max(), place_A.min(), place_A)
            elif fault == "order":
                place_A = place_A[::-1].copy()
            was(slot, cold, np.zeros_like(place_A) if fault == "one piece" else place_A)

        stream._send = send
        assert rel_error(logits(step, IDS), want) > 1e-3
