"""Passes that observers see in native operations, against the same tensors in torch; the passes
that must go through torch."""

import dataclasses

import pytest
import torch
from models import make_model, make_shape
from reference import logits_ref, rel_error
from test_native_step import BOUNDS, PAIRS
from test_runtime import PATTERNS, make_split, saved

from sparkinfer import Engine
from sparkinfer.runtime.kernels.cpu import library
from sparkinfer.runtime.step.native_layers import SHOWN, NativeLayers

pytestmark = pytest.mark.skipif(not library.is_available(), reason="the C++ kernels are not built")
IDS = [(7 * i + i * i) % 50 for i in range(30)]


@pytest.fixture
def calls(monkeypatch):
    """The layers that ran natively."""
    seen, run = [], NativeLayers.run
    monkeypatch.setattr(
        NativeLayers, "run", lambda self, index, *a, **k: (seen.append(index), run(self, index, *a, **k))[1]
    )  # fmt: skip
    return seen


def observed(engine, names, ids=IDS):
    """{(name, layer): tensor} of a pass over `ids`."""
    seen = {}
    with engine.observe(
        lambda name, layer, tensor: seen.update({(name, layer): tensor}),
        lambda name, layer: name in names,
    ):
        engine.hidden(ids)
    return seen


@pytest.mark.parametrize("mode", ["dense", "exact"])
@pytest.mark.parametrize("activation, kind", PAIRS)
def test_observers_see_what_torch_computes(tmp_path, calls, mode, kind, activation):
    shape = make_shape(width=256 if kind.endswith("_k") else 64)
    model = make_model(shape=shape, kind=kind, activation=activation)
    model = dataclasses.replace(model, threshold_L=(0.05,) * 2, path=tmp_path / "m.gguf")
    model.save(model.path)
    with Engine.load(model.path, mode=mode) as engine:
        got = observed(engine, SHOWN)
        assert calls == [0, 1]
        want = observed(engine, SHOWN | {"ffn_out"})
        assert calls == [0, 1]
    for key, tensor in got.items():
        assert tensor.shape == want[key].shape
        assert rel_error(tensor, want[key]) < BOUNDS[kind], key
    assert {name for name, _ in got} == SHOWN
    fired = got["ffn_hidden", 0] != 0
    assert fired.any() and (
        mode == "dense" and activation not in ("relu", "drelu", "fatrelu") or not fired.all()
    )


@pytest.mark.parametrize("num_neurons", [33, 96, 1056])
@pytest.mark.parametrize("count", [2, 5, 30])
def test_any_number_of_tokens_and_neurons(tmp_path, calls, num_neurons, count):
    """Few tokens take other operations than many; threads share large layers."""
    model = saved(tmp_path, shape=make_shape(num_neurons=num_neurons), kind="f32")
    for mode in ("dense", "exact"):
        with Engine.load(model.path, mode=mode) as engine:
            got = observed(engine, SHOWN, IDS[:count])
            want = observed(engine, SHOWN | {"attn_norm"}, IDS[:count])
        for key, tensor in got.items():
            assert rel_error(tensor, want[key]) < BOUNDS["f32"], key
    assert calls == [0, 1] * 2


def test_tensors_are_copies_and_bits_do_not_depend_on_threads(tmp_path):
    model = saved(tmp_path, shape=make_shape(num_neurons=1056), kind="q8_0")
    found = []
    with Engine.load(model.path, mode="exact") as engine:
        for threads in (1, 2, 3):
            library.set_threads(threads)
            found.append(observed(engine, SHOWN))
        observed(engine, SHOWN, IDS[::-1])
    for other in found[1:]:
        assert all(torch.equal(tensor, other[key]) for key, tensor in found[0].items())


def test_a_pass_that_is_seen_leaves_the_same_keys_and_values(tmp_path, calls):
    model = saved(tmp_path, kind="f32")
    with Engine.load(model.path) as engine:
        observed(engine, {"layer_out"}, IDS[:20])
        logits = engine._step(IDS[20], 20)
    assert calls == [0, 1]
    assert rel_error(logits, logits_ref(model, IDS[:21])[-1]) < BOUNDS["f32"]


@pytest.mark.parametrize("names", [set(), {"attn_heads"}, {"ffn_norm", "attn_norm"}])
def test_other_tensors_are_shown_by_torch(tmp_path, calls, names):
    model = saved(tmp_path)
    with Engine.load(model.path) as engine:
        assert {name for name, _ in observed(engine, names)} == names
    assert not calls


def test_single_tokens_predicted_neurons_and_plans_go_through_torch(tmp_path, calls):
    model = saved(tmp_path, predictor_rank=8)
    with Engine.load(model.path, mode="exact") as engine:
        assert len(observed(engine, SHOWN, IDS[:1])["ffn_gate", 1]) == 1
    with Engine.load(model.path, mode="predicted") as engine:
        assert observed(engine, {"ffn_gate"})["ffn_gate", 1].isnan().any()
    make_split(model, PATTERNS["half"]).save(tmp_path / "s.gguf")
    with Engine.load(model.path, split=tmp_path / "s.gguf", mode="exact") as engine:
        assert observed(engine, {"ffn_gate"})["ffn_gate", 1].shape == (len(IDS), 96)
    assert not calls


def test_new_thresholds_apply(tmp_path):
    model = saved(tmp_path, activation="silu")
    with Engine.load(model.path, mode="exact") as engine:
        shares = []
        for threshold in (0.0, 0.3):
            engine.set_thresholds((threshold,) * 2)
            shares.append((observed(engine, SHOWN)["ffn_hidden", 1] != 0).float().mean())
    assert shares[0] > 0.99 and 0 < shares[1] < 0.9


def test_bytes_are_counted(tmp_path):
    model = saved(tmp_path, kind="q8_0")
    with Engine.load(model.path, mode="dense") as engine:
        before = dataclasses.replace(engine.traffic)
        observed(engine, SHOWN)
        after = engine.traffic
        shape = model.shape
        matrix = shape.num_layers * shape.num_neurons * shape.width // 32 * 34
        assert (
            after.gate - before.gate == after.up - before.up == after.down - before.down == matrix
        )


def test_positions_without_a_block_are_refused(tmp_path):
    model = saved(tmp_path)
    with Engine.load(model.path) as engine:
        live = engine._live
        layers = NativeLayers.build(dict(enumerate(live.weights.layers)), None)
        x_TD = torch.zeros(2, model.shape.width)
        with pytest.raises(IndexError, match="positions 31 to 32 have no block"):
            layers.run(0, x_TD, sequence=0, start=31, observers=live.observers)
        layers.block_SN[0, -1] = -1
        with pytest.raises(IndexError, match="positions 30 to 31 have no block"):
            layers.run(0, x_TD, sequence=0, start=30, observers=live.observers)
