"""Passes that observers see in native operations, against the same tensors in torch; the passes
that must go through torch."""

import dataclasses
from functools import partial

import pytest
import torch
from models import FAMILIES, family_model, make_model, make_sizes, sparse_model
from reference import logits_ref, rel_error
from test_by_output import stock_of
from test_experts import ROUTES, mixture
from test_native_step import BOUNDS, CASES
from test_own_operations import NUMBERS
from test_runtime import PATTERNS, make_split, saved

from hotsplit import Engine
from hotsplit.families.gemma3n import gemma3n_spec
from hotsplit.families.sizes import sizes_of
from hotsplit.measure.evaluate.quality import compare_all
from hotsplit.profile.count.counting import Counter, experts_of, gates_of
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.step.native_layers import SHOWN, NativeLayers

IDS = [(7 * i + i * i) % 50 for i in range(30)]
OF_ALL = SHOWN - {"ffn_predicted", "ffn_experts", "ffn_shared_hidden"}  # what every layer has


def gemma3n():
    sizes = make_sizes(width=128, context_length=64)
    spec = gemma3n_spec([sizes] * 2, [False] * 2, [None] * 2, [None] * 2, NUMBERS)
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


@pytest.mark.parametrize("activation, kind, mode", CASES)
def test_observers_see_what_torch_computes(tmp_path, calls, mode, kind, activation):
    shape = make_sizes(width=256 if kind.endswith("_k") else 64)
    model = sparse_model(sizes=shape, kind=kind, activation=activation)
    model = dataclasses.replace(model, path=tmp_path / "m.gguf")
    model.save(model.path)
    with Engine.load(model.path, mode=mode) as engine:
        got = observed(engine, SHOWN)
        assert calls == [0, 1]
        want = observed(engine, SHOWN | {"ffn_out"})
        assert calls == [0, 1]
    # A neuron that is named in one path only changes what later layers see.
    compare(got, want, BOUNDS[kind] * (2 if mode == "predicted" else 1))
    assert {name for name, _ in got} == OF_ALL | (
        {"ffn_predicted"} if mode == "predicted" else set()
    )
    assert (got["ffn_hidden", 0] != 0).any()
    assert got["ffn_gate", 1].isnan().any() == (mode == "predicted")


def compare(got, want, bound):
    """Scores and gates near a threshold may name or silence a neuron in one path only."""
    for key, tensor in got.items():
        other = want[key]
        is_alike = (tensor.isnan() == other.isnan()) & ((tensor == 0) == (other == 0))
        assert is_alike.float().mean() > 0.99, key
        mine, other = tensor[is_alike].nan_to_num(), other[is_alike].nan_to_num()
        assert rel_error(mine, other) < bound, key


@pytest.mark.parametrize("kind", ["linear", "relu"])
@pytest.mark.parametrize("offset", [0, 1])
def test_scores_of_predictors(tmp_path, calls, kind, offset):
    model = make_model(sizes=make_sizes(num_layers=3), predictor_rank=8, predictor_kind=kind)
    info = dataclasses.replace(model.predictor, input_layer_offset=offset)
    dataclasses.replace(model, predictor=info).save(tmp_path / "m.gguf")
    with Engine.load(tmp_path / "m.gguf", mode="predicted") as engine:
        got = observed(engine, SHOWN)
        assert calls == [0, 1, 2]
        compare(got, observed(engine, SHOWN | {"ffn_out"}), BOUNDS["f32"])
    assert ("ffn_predicted", 2) in got


@pytest.mark.parametrize("mode", ["dense", "exact", "predicted"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_divided_neurons_are_seen_in_the_layers_order(tmp_path, calls, mode, pattern):
    model = saved(tmp_path, kind="q8_0", predictor_rank=8)
    make_split(model, PATTERNS[pattern]).save(tmp_path / "s.gguf")
    with Engine.load(model.path, split=tmp_path / "s.gguf", mode=mode) as engine:
        got = observed(engine, SHOWN)
        assert calls == [0, 1]
        compare(got, observed(engine, SHOWN | {"ffn_out"}), BOUNDS["q8_0"])


@pytest.mark.parametrize("activation", ["relu", "silu"])
@pytest.mark.parametrize("num_neurons", [33, 96, 1056])
@pytest.mark.parametrize("count", [2, 5, 30])
def test_any_number_of_tokens_and_neurons(tmp_path, calls, num_neurons, count, activation):
    """Few tokens take other operations than many; threads share large layers."""
    shape = make_sizes(num_neurons=num_neurons)
    model = saved(tmp_path, sizes=shape, kind="f32", activation=activation)
    for mode in ("dense", "exact"):
        with Engine.load(model.path, mode=mode) as engine:
            got = observed(engine, SHOWN, IDS[:count])
            want = observed(engine, SHOWN | {"attn_out"}, IDS[:count])
        compare(got, want, BOUNDS["f32"])
    assert calls == [0, 1] * 2


def test_bits_do_not_depend_on_threads(tmp_path):
    model = saved(tmp_path, sizes=make_sizes(num_neurons=1056), kind="q8_0")
    found = []
    with Engine.load(model.path, mode="exact") as engine:
        for threads in (1, 2, 3):
            library.set_threads(threads)
            found.append(observed(engine, SHOWN))
    for other in found[1:]:
        assert all(torch.equal(tensor, other[key]) for key, tensor in found[0].items())


@pytest.mark.parametrize(
    "layout, mode, kind",
    [
        ("sparse", "dense", "q8_0"),
        ("sparse", "exact", "f32"),
        ("stock", "dense", "f32"),
        ("stock", "dense", "q4_k"),
    ],
)
def test_mixtures(calls, layout, mode, kind):
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
    counters = []
    with Engine.of(model, mode=mode) as engine:
        found = []
        for names in (SHOWN, SHOWN | {"ffn_out"}):
            counter = Counter(gates_of(model), model.spec.most_neurons, experts_L=experts_of(model))
            with engine.observe(counter.observe, counter.wants):
                found.append(observed(engine, names, IDS[:6]))
            counters.append(counter.arrays())
    assert calls == [0, 1]
    got, want = found
    assert {name for name, layer in got if layer == 1} == SHOWN - {"ffn_predicted"}
    assert torch.equal(got["ffn_experts", 1], want["ffn_experts", 1])
    assert mode == "dense" or 1 in got["ffn_experts", 1].flatten().bincount()
    compare(got, want, BOUNDS[kind])
    assert ("ffn_experts", 0) not in got and (got["ffn_hidden", 1] == 0).any() == (mode == "exact")
    for name, array in counters[0].items():
        other, is_rounded = counters[1][name], name == "gate_histogram_LB"  # into bins
        assert torch.equal(array, other) or (
            is_rounded and (array - other).abs().sum() < 0.01 * array[:, 1:].sum()
        ), name


@pytest.mark.parametrize("kind", ["f32", "q8_0", "q4_k"])
@pytest.mark.parametrize("count", [2, 30])
def test_stock_files(tmp_path, calls, kind, count):
    """Their `down` has a row for each output."""
    model = stock_of(tmp_path, kind)
    with Engine.load(model.path, mode="dense", device="cpu") as engine:
        got = observed(engine, SHOWN, IDS[:count])
        assert calls == [0, 1]
        compare(got, observed(engine, SHOWN | {"ffn_out"}, IDS[:count]), BOUNDS[kind])


def test_several_sequences(tmp_path, calls):
    """Each attends to its own tokens."""
    model = saved(tmp_path, kind="f32")
    texts = (IDS[:14], IDS[14:28])
    found = []
    for names in ({"layer_out"}, {"layer_out", "attn_out"}):
        seen = []
        with (
            Engine.load(model.path, num_sequences=2) as engine,
            engine.observe(
                lambda name, layer, tensor, seen=seen: seen.append(tensor.clone()),
                lambda name, layer, names=names: name in names and (name, layer) != ("attn_out", 0),
            ),
            engine.sequence() as first,
            engine.sequence() as second,
        ):
            for ids in (slice(0, 6), slice(6, 14)):
                for sequence, text in zip((first, second), texts, strict=True):
                    sequence.extend(text[ids])
        found.append([t for t in seen if t.shape[-1] == model.spec.hidden_size])
    native, in_torch = found[0], found[1]
    assert calls == [0, 1] * 4
    outs = list(in_torch)
    assert len(native) == 8 and len(outs) == 12
    outs = [outs[i] for i in range(12) if i % 3 != 1]
    for mine, other in zip(native, outs, strict=True):
        assert rel_error(mine, other) < BOUNDS["f32"]


def test_what_one_layer_wants_decides_for_all(tmp_path, calls):
    model = saved(tmp_path)
    for name, expected in (("ffn_gate", [0, 1]), ("attn_out", [])):
        seen = []
        with (
            Engine.load(model.path) as engine,
            engine.observe(
                lambda name, layer, tensor, seen=seen: seen.append((name, layer)),
                lambda found, layer, name=name: (found, layer) == (name, 1),
            ),
        ):
            engine.hidden(IDS)
        assert seen == [(name, 1)] and calls == expected
        calls.clear()


@pytest.mark.parametrize("is_native", [True, False])
def test_modes_are_compared_on_one_path(tmp_path, calls, is_native, monkeypatch):
    model = saved(tmp_path, activation="silu")
    with (
        Engine.load(model.path, mode="dense") as dense,
        Engine.load(model.path, mode="exact") as exact,
    ):
        if not is_native:
            monkeypatch.setitem(exact._live.__dict__, "_native_layers", None)
        compare_all(dense, [exact], [torch.tensor(IDS)])
    assert calls == ([0, 1] * 2 if is_native else [])


def test_a_pass_that_is_seen_leaves_the_same_keys_and_values(tmp_path, calls):
    model = saved(tmp_path, kind="f32")
    with Engine.load(model.path) as engine:
        observed(engine, {"layer_out"}, IDS[:20])
        logits = engine._step(IDS[20], 20)
    assert calls == [0, 1]
    assert rel_error(logits, logits_ref(model, IDS[:21])[-1]) < BOUNDS["f32"]


@pytest.mark.parametrize("names", [{"attn_out"}, {"ffn_norm", "ffn_out"}])
def test_other_tensors_are_shown_by_torch(tmp_path, calls, names):
    model = saved(tmp_path)
    with Engine.load(model.path) as engine:
        assert {name for name, _ in observed(engine, names)} == names
    assert not calls


@pytest.mark.parametrize(
    "names", [set(), {"logits", "output_norm"}, {"layer_out"}, {*SHOWN, "embedding"}]
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
    assert calls, "the pass went through torch"
    assert torch.equal(alone, want[:1])
    if "logits" in names:
        assert torch.equal(seen["logits"][0], want) and len(seen["output_norm"][0]) == len(ids)


def test_the_comparison_of_bits_notices_another_head():
    """The head of the native step alone is changed."""
    with Engine.of(SEEN["q8_0"]()) as engine:
        want = engine.logits(IDS)
        engine._live.native.step.logit_cap = 0.5
        assert not torch.equal(engine.logits(IDS), want)
        with engine.observe(lambda *a: None, lambda *a: False):
            assert torch.equal(engine.logits(IDS), want)


def test_single_tokens_are_seen(tmp_path, calls):
    model = saved(tmp_path)
    with Engine.load(model.path, mode="exact") as engine:
        got = observed(engine, SHOWN, IDS[:1])
        want = observed(engine, SHOWN, IDS[:2])
    assert calls == [0, 1] * 2
    for key, tensor in got.items():
        assert torch.equal(tensor[0].nan_to_num(), want[key][0].nan_to_num()), key


def test_torch_can_be_asked_for(tmp_path, calls):
    model, seen = saved(tmp_path), []
    with Engine.load(model.path, mode="exact") as engine:
        assert engine.has_native_layers
        with engine.observe(lambda *a: seen.append(a[0]), lambda n, i: n in SHOWN, in_torch=True):
            engine.hidden(IDS)
    assert set(seen) == OF_ALL and not calls


def test_bytes_are_counted(tmp_path):
    model = saved(tmp_path, kind="q8_0")
    with Engine.load(model.path, mode="dense") as engine:
        before = dataclasses.replace(engine.traffic)
        observed(engine, SHOWN)
        after = engine.traffic
        shape = sizes_of(model.bare_spec)
        matrix = shape.num_layers * shape.num_neurons * shape.hidden_size // 32 * 34
        assert (
            after.gate - before.gate == after.up - before.up == after.down - before.down == matrix
        )


def test_positions_without_a_block_are_refused(tmp_path):
    model = saved(tmp_path)
    with Engine.load(model.path) as engine:
        live = engine._live
        layers = NativeLayers.build(dict(enumerate(live.weights.layers)), {})
        rest = {"slots": None, "predictor_input_TD": None, "beside": {}}
        rest["observers"] = live.observers
        x_TD = torch.zeros(2, model.spec.hidden_size)
        with pytest.raises(IndexError, match="positions 31 to 32 have no block"):
            layers.run(0, x_TD, start=31, **rest)
        layers.tables[0].block_SN[0, -1] = -1
        with pytest.raises(IndexError, match="positions 30 to 31 have no block"):
            layers.run(0, x_TD, start=30, **rest)
