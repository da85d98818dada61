"""Passes that observers see in native operations, against the float64 decoder and the bits of the
steps."""

import dataclasses
from functools import partial

import pytest
import torch
from models import FAMILIES, family_model, gemma3n_spec, make_model, make_sizes, sparse_model
from reference import logits_ref, rel_error
from test_by_output import stock_of
from test_experts import ROUTES, mixture
from test_native_step import BOUNDS, CASES
from test_runtime import PATTERNS, make_split, saved

from hotsplit import Engine
from hotsplit.profile.count.counting import Counter, experts_of, gates_of
from hotsplit.runtime.ops.observers import NAMES
from hotsplit.runtime.step.decoder import NativeLayers

IDS = [(7 * i + i * i) % 50 for i in range(30)]
OUTSIDE = {"embedding", "output_norm", "logits"}  # of layers
WITHIN = NAMES.keys() - OUTSIDE
OF_SOME = {"ffn_predicted", "ffn_experts", "ffn_shared_hidden", "ffn_latent"}


def gemma3n():
    sizes = make_sizes(width=128, context_length=64)
    spec = gemma3n_spec(sizes)
    return make_model(spec=spec, kind="q8_0")


# Models by what differs in their embedding, layers or head.
SEEN = {
    **{
        kind: partial(make_model, kind=kind, sizes=make_sizes(width=256))
        for kind in ("f32", "bf16", "q8_0", "q4_k")
    },
    **{family: partial(family_model, family, kind="q8_0") for family in FAMILIES},
    "mixture": mixture,
    "gemma3n": gemma3n,
}


@pytest.fixture
def calls(monkeypatch):
    """The layers that ran natively."""
    seen, run = [], NativeLayers._layer
    monkeypatch.setattr(
        NativeLayers,
        "_layer",
        lambda self, index, *a: (seen.append(index), run(self, index, *a))[1],
    )
    return seen


def observed(engine, names, ids=IDS):
    """{(name, layer): tensor} of a pass over `ids`."""
    seen = {}
    with engine.observe(
        lambda name, layer, tensor: seen.update({(name, layer): tensor.clone()}),
        lambda name, layer: name in names,
    ):
        engine.hidden(ids)
    return seen


def wanted(model, mode="dense", ids=IDS):
    """What the float64 decoder has of it."""
    seen = {}
    logits_ref(model, ids, mode=mode, seen=seen)
    return {key: torch.as_tensor(value) for key, value in seen.items()}


def compare(got, want, bound, names=WITHIN - OF_SOME):
    """Scores and gates near a threshold may name or silence a neuron in one path only."""
    assert {name for name, _ in got} == names
    for key, tensor in got.items():
        other = want[key]
        is_alike = (tensor.isnan() == other.isnan()) & ((tensor == 0) == (other == 0))
        assert is_alike.float().mean() > 0.99, key
        mine, other = tensor[is_alike].nan_to_num(), other[is_alike].nan_to_num()
        assert rel_error(mine, other) < bound, key


@pytest.mark.parametrize("activation, kind, mode", CASES)
def test_observers_see_what_the_reference_computes(tmp_path, calls, mode, kind, activation):
    shape = make_sizes(width=256 if kind.endswith("_k") else 64)
    model = sparse_model(sizes=shape, kind=kind, activation=activation)
    model = dataclasses.replace(model, path=tmp_path / "m.gguf")
    model.save(model.path)
    with Engine.load(model.path, mode=mode) as engine:
        got = observed(engine, WITHIN)
    assert calls == [0, 1]
    names = WITHIN - OF_SOME | ({"ffn_predicted"} if mode == "predicted" else set())
    # A neuron that is named in one path only changes what later layers see.
    compare(got, wanted(model, mode), BOUNDS[kind] * (3 if mode == "predicted" else 2), names)
    assert (got["ffn_hidden", 0] != 0).any()
    assert got["ffn_gate", 1].isnan().any() == (mode == "predicted")


@pytest.mark.parametrize("kind", ["linear", "relu"])
@pytest.mark.parametrize("offset", [0, 1])
def test_scores_of_predictors(tmp_path, kind, offset):
    model = make_model(sizes=make_sizes(num_layers=3), predictor_rank=8, predictor_kind=kind)
    info = dataclasses.replace(model.predictor, input_layer_offset=offset)
    model = dataclasses.replace(model, predictor=info)
    model.save(tmp_path / "m.gguf")
    with Engine.load(tmp_path / "m.gguf", mode="predicted") as engine:
        got = observed(engine, {"ffn_predicted"})
    assert ("ffn_predicted", 2) in got
    compare(got, wanted(model, "predicted"), BOUNDS["f32"], {"ffn_predicted"})


@pytest.mark.parametrize("mode", ["dense", "exact", "predicted"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_divided_neurons_are_seen_in_the_layers_order(tmp_path, mode, pattern):
    model = saved(tmp_path, kind="q8_0", predictor_rank=8)
    make_split(model, PATTERNS[pattern]).save(tmp_path / "s.gguf")
    names = {"ffn_gate", "ffn_hidden", "ffn_out", "layer_out"}
    with Engine.load(model.path, split=tmp_path / "s.gguf", mode=mode) as engine:
        compare(observed(engine, names), wanted(model, mode), BOUNDS["q8_0"], names)


@pytest.mark.parametrize("activation", ["relu", "silu"])
@pytest.mark.parametrize("num_neurons", [33, 96, 1056])
@pytest.mark.parametrize("count", [2, 5, 30])
def test_any_number_of_tokens_and_neurons(tmp_path, num_neurons, count, activation):
    """Few tokens take other operations than many; threads share large layers."""
    shape = make_sizes(num_neurons=num_neurons)
    model = saved(tmp_path, sizes=shape, kind="f32", activation=activation)
    want = wanted(model, ids=IDS[:count])
    for mode in ("dense", "exact"):
        with Engine.load(model.path, mode=mode) as engine:
            compare(observed(engine, WITHIN, IDS[:count]), want, BOUNDS["f32"])


@pytest.mark.parametrize(
    "layout, mode, kind",
    [
        ("sparse", "dense", "q8_0"),
        ("sparse", "exact", "f32"),
        ("stock", "dense", "f32"),
        ("stock", "dense", "q4_k"),
    ],
)
def test_mixtures(layout, mode, kind):
    """Experts, of which some have one token, shared ones, and a layer without a router."""
    activation, width = ("relu" if mode == "exact" else "silu"), 256 if kind == "q4_k" else 64
    model = mixture(
        route=ROUTES["sigmoid"],
        kind=kind,
        layout=layout,
        width=width,
        num_neurons=max(96, width),
        activation=activation,
        num_dense=1,
        num_shared=width,
        has_shared_gate=True,
    )
    counter = Counter(gates_of(model), model.spec.most_neurons, experts_L=experts_of(model))
    with Engine.of(model, mode=mode) as engine, engine.observe(counter.observe, counter.wants):
        got = observed(engine, WITHIN, IDS[:6])
    want = wanted(model, ids=IDS[:6])
    assert {name for name, layer in got if layer == 1} == WITHIN - {"ffn_predicted", "ffn_latent"}
    assert torch.equal(got["ffn_experts", 1], want["ffn_experts", 1])
    assert mode == "dense" or 1 in got["ffn_experts", 1].flatten().bincount()
    compare(got, want, BOUNDS[kind], WITHIN - {"ffn_predicted", "ffn_latent"})
    assert ("ffn_experts", 0) not in got and (got["ffn_hidden", 1] == 0).any() == (mode == "exact")


@pytest.mark.parametrize("kind", ["f32", "q8_0", "q4_k"])
@pytest.mark.parametrize("count", [1, 2, 30])
def test_stock_files(tmp_path, kind, count):
    """Their `down` has a row for each output."""
    model = stock_of(tmp_path, kind)
    with Engine.load(model.path, mode="dense", device="cpu") as engine:
        got = observed(engine, WITHIN, IDS[:count])
    compare(got, wanted(model, ids=IDS[:count]), BOUNDS[kind])


def test_several_sequences(tmp_path):
    """Each attends to its own tokens."""
    model = saved(tmp_path, kind="f32")
    texts = (IDS[:14], IDS[14:28])
    seen = []
    with (
        Engine.load(model.path, num_sequences=2) as engine,
        engine.observe(
            lambda name, layer, x: seen.append(x.clone()), lambda *key: key == ("layer_out", 1)
        ),
        engine.sequence() as first,
        engine.sequence() as second,
    ):
        for ids in (slice(0, 6), slice(6, 14)):
            for sequence, text in zip((first, second), texts, strict=True):
                sequence.extend(text[ids])
    for number, text in enumerate(texts):
        want = wanted(model, ids=text)["layer_out", 1]
        assert rel_error(torch.cat(seen[number::2]), want) < BOUNDS["f32"]


def test_observers_see_what_they_want_alone(tmp_path, calls):
    model = saved(tmp_path)
    for name in WITHIN - OF_SOME:
        seen = []
        with (
            Engine.load(model.path) as engine,
            engine.observe(
                lambda name, layer, x, seen=seen: seen.append((name, layer)),
                lambda *key, name=name: key == (name, 1),
            ),
        ):
            engine.hidden(IDS)
        assert seen == [(name, 1)]
    assert calls == [0, 1] * len(WITHIN - OF_SOME)


@pytest.mark.parametrize(
    "names", [set(), {"logits", "output_norm"}, {"layer_out"}, {*WITHIN, "embedding"}]
)
@pytest.mark.parametrize("case", SEEN)
def test_a_pass_that_is_seen_has_the_bits_of_the_steps(calls, case, names):
    """Whatever of it is seen, for a text and for a single token."""
    seen = {}
    with Engine.of(SEEN[case]()) as engine:
        ids = [token % engine.model.spec.vocab_size for token in IDS]
        want = torch.stack([engine._step(token, at).clone() for at, token in enumerate(ids)])
        assert torch.equal(engine.logits(ids), want)
        with engine.observe(
            lambda name, layer, tensor: seen.setdefault(name, []).append(tensor.clone()),
            lambda name, layer: name in names,
        ):
            got, alone = engine.logits(ids), engine.logits(ids[:1])
    assert torch.equal(got, want)
    assert calls
    assert torch.equal(alone, want[:1])
    if "logits" in names:
        assert torch.equal(seen["logits"][0], want) and len(seen["output_norm"][0]) == len(ids)


def test_the_comparison_of_bits_notices_another_head():
    """The head of the native step alone is changed."""
    with Engine.of(SEEN["q8_0"]()) as engine:
        want = engine.logits(IDS)
        assert engine._live._native_layers is not None
        engine._live.native.step.logit_cap = 0.5
        assert not torch.equal(engine.logits(IDS), want)
        with engine.observe(lambda *a: None, lambda *a: False):
            assert torch.equal(engine.logits(IDS), want)
