"""Gates that are cut off by their mean and deviation: torch agrees with transformers' feed-forward
of Gemma 3n in float64, the native step with torch, and mode exact reads ups and downs of the
neurons that are left."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from models import changed, family_spec, make_model, make_sizes
from reference import rel_error
from test_native_step import BOUNDS
from test_runtime import IDS, make_split
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP

from hotsplit import Engine, HotsplitError
from hotsplit.costs.default_mode import choose_mode
from hotsplit.files.gguf_file import array_entry
from hotsplit.model.spec import Neurons

SHARE, F = 0.8, 203  # of neurons cut off, and a number with no whole group
CUTOFF = torch.distributions.Normal(0, 1).icdf(torch.tensor(SHARE)).item()
BIASES = ("ffn_gate.bias",)


def cut_spec(sizes=None, options=(), activation="gelu_tanh"):
    """A Llama of three layers of which the last computes all neurons."""
    sizes = sizes or make_sizes(num_layers=3, num_neurons=F)
    spec = family_spec("llama", sizes, activation, options)
    cut = changed(spec, Neurons, cutoff=CUTOFF)
    return spec.with_layers([*cut.layers[:-1], spec.layers[-1]])


def as_stock(model):
    """The model with down projections by outputs."""
    entries = {}
    for name, entry in model.tensors.items():
        is_down = name.endswith("ffn_down_t.weight")
        values = entry.read().T.copy() if is_down else None
        entries[name.replace("_t.weight", ".weight") if is_down else name] = (
            array_entry(values, "f32") if is_down else entry
        )
    return replace(model, layout="stock", tensors=entries)


def seen(engine, ids=IDS, names=None):
    """Logits, and the tensors of all layers that an observer sees; in torch without `names`."""
    found = {}

    def keep(name, layer, tensor):
        found[name, layer] = tensor.clone()

    with engine.observe(keep, lambda name, layer: names is None or name in names):
        return engine.logits(ids), found


def transformers_ref(model, layer, x_TD):
    """transformers' feed-forward of a layer in float64; its gates have no biases."""
    own = model.spec.layers[layer].neurons
    share = 0.0 if own.cutoff is None else SHARE
    config = SimpleNamespace(
        hidden_size=64,
        intermediate_size=[own.number],
        hidden_activation="gelu_pytorch_tanh",
        activation_sparsity_pattern=[share],
    )
    block = Gemma3nTextMLP(config).double()
    for name, ours in (("gate", "ffn_gate"), ("up", "ffn_up"), ("down", "ffn_down_t")):
        values = torch.from_numpy(np.array(model.tensors[f"blk.{layer}.{ours}.weight"].read()))
        values = values.T if name == "down" else values
        getattr(block, f"{name}_proj").weight.data = values.double()
    with torch.no_grad():
        return block(x_TD.double())


@pytest.mark.parametrize("mode", ["dense", "exact"])
def test_torch_agrees_with_transformers_in_float64(mode):
    model = make_model(spec=cut_spec())
    with Engine.of(model, mode=mode, device="cpu") as engine:
        _, found = seen(engine)
    for layer in range(3):
        want = transformers_ref(model, layer, found["ffn_norm", layer])
        assert rel_error(found["ffn_out", layer], want) < 1e-6
        share = (found["ffn_hidden", layer] != 0).double().mean()
        assert share > 0.95 if layer == 2 else abs(share - (1 - SHARE)) < 0.1


@pytest.mark.parametrize("wrong", [{"cutoff": None}, {"cutoff": 0.99 * CUTOFF}])
def test_the_measure_rejects_another_cutoff(wrong):
    model = make_model(spec=cut_spec())
    other = replace(model, bare_spec=changed(model.bare_spec, Neurons, **wrong))
    with Engine.of(other, mode="dense", device="cpu") as engine:
        _, found = seen(engine)
    want = transformers_ref(model, 0, found["ffn_norm", 0])
    assert rel_error(found["ffn_out", 0], want) > 1e-4


@pytest.mark.parametrize("layout", ["sparse", "stock"])
@pytest.mark.parametrize("kind, options", [("f32", BIASES), ("f16", ()), ("q8_0", ())])
@pytest.mark.parametrize("mode", ["dense", "exact"])
def test_the_native_step_agrees_with_torch(mode, kind, options, layout):
    """For one row and several."""
    sizes = make_sizes(num_layers=3, num_neurons=224 if kind == "q8_0" else F)
    model = make_model(spec=cut_spec(sizes, options), kind=kind, last=options)
    if layout == "stock" and kind == "f32":
        model = as_stock(model)
    with Engine.of(model, mode=mode, device="cpu") as engine:
        want, values = seen(engine)
        _, of_native_layers = seen(engine, names=("ffn_hidden",))
        for layer in range(3):
            hidden = "ffn_hidden", layer
            assert rel_error(of_native_layers[hidden], values[hidden]) < BOUNDS[kind]
        assert rel_error(engine.logits(IDS), want) < BOUNDS[kind]
        with engine.sequence() as sequence:
            rows = torch.cat([sequence.extend([token]) for token in IDS])
        assert torch.equal(rows, engine.logits(IDS))


def test_exact_reads_ups_and_downs_of_what_is_left():
    model = make_model(spec=cut_spec())
    with Engine.of(model, mode="exact", device="cpu") as engine:
        _, found = seen(engine, IDS[:1])
        row = model.tensors["blk.0.ffn_up.weight"].row_bytes
        fired = [int((found["ffn_hidden", layer] != 0).sum()) for layer in range(2)]
        before = replace(engine.traffic)
        engine.logits(IDS[:1])
        assert engine.traffic.gate - before.gate == 3 * F * row
        assert engine.traffic.up - before.up == (sum(fired) + F) * row
        assert engine.traffic.down - before.down == (sum(fired) + F) * row


def test_exact_is_the_default_and_nothing_chooses_neurons_otherwise(tmp_path):
    model = make_model(spec=cut_spec())
    assert choose_mode(model).mode == "exact"
    with pytest.raises(
        HotsplitError, match="predictors are not supported for models that need all"
    ):
        model.refuse_predictors("leave them out")
    plan = make_split(model, [[0]] * 3)
    with pytest.raises(HotsplitError, match="divides layer 0, in which a neuron needs the gates"):
        plan.check_against(model, tmp_path / "p.gguf")
