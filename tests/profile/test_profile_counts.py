"""Counts compared with transformers' own pre-activations on 4,096 tokens: they are equal except for
gates within rounding of zero, which may have either sign.

Two f32 products w.x differ by at most |w| |x - x'|, because the inputs differ (measured), plus
2 D eps sum|w_j x_j|, for the rounding of two sums of D terms in any order (Higham, Accuracy and
Stability, 3.1; eps = 2^-24, one more term for a bias). The gate of every neuron that fires on one
side only must be within that bound of zero."""

import numpy as np
import pytest
import torch
from checkpoints import random_model, save_tokenizer
from paths import ROOT
from test_families import CASES
from transformers import AutoModelForCausalLM

from hotsplit import Engine
from hotsplit.artifacts.profile_file import EDGES
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.profile.count.counting import Counter
from hotsplit.runtime.kernels.gate import Gate

BUNDLED = ROOT / "examples" / "tiny-relu"
LINEAR = {"llama": "mlp.gate_proj", "opt": "fc1", "falcon": "mlp.dense_h_to_4h"}
NUM_TOKENS = 4096


def observed_by_transformers(folder, family, windows):
    """(gates [T, F], inputs [T, D], weight, bias) of each layer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    modules = [m for n, m in model.named_modules() if n.endswith(LINEAR[family])]
    inputs, gates = [[] for _ in modules], [[] for _ in modules]
    for index, module in enumerate(modules):

        def hook(module, args, out, index=index):
            inputs[index].append(args[0].reshape(-1, args[0].shape[-1]))
            gates[index].append(out.reshape(-1, out.shape[-1]))

        module.register_forward_hook(hook)
    with torch.no_grad():
        for ids in windows:
            model(ids[None])
    return [
        (torch.cat(g), torch.cat(x), m.weight.detach(), m.bias)
        for g, x, m in zip(gates, inputs, modules, strict=True)
    ]


def observed_here(path, windows):
    """(gates of each layer, inputs of each layer, the counter's counts)."""
    with Engine.load(path, mode="dense", device="cpu") as engine:
        num_layers = engine.model.spec.num_layers
        counter = Counter(
            (Gate(activation="relu", threshold=0.0),) * num_layers, engine.model.spec.most_neurons
        )
        kept = {name: [[] for _ in range(num_layers)] for name in ("ffn_gate", "ffn_norm")}
        with (
            engine.observe(counter.observe, counter.wants),
            engine.observe(lambda n, i, t: kept[n][i].append(t.clone()), lambda n, i: n in kept),
        ):
            for ids in windows:
                engine.hidden(ids)
    gates, inputs = ([torch.cat(layer) for layer in kept[name]] for name in kept)
    return gates, inputs, counter.arrays()["active_count_LF"]


def rounding_bound(x_TD, other_TD, weight_FD, bias_F):
    x_TD, other_TD, weight_FD = x_TD.double(), other_TD.double(), weight_FD.double()
    eps, terms = 2.0**-24, x_TD.shape[1] + 1
    size_TF = torch.maximum(x_TD.abs(), other_TD.abs()) @ weight_FD.abs().T
    if bias_F is not None:
        size_TF = size_TF + bias_F.double().abs()
    shift_T1 = (x_TD - other_TD).norm(dim=1, keepdim=True)
    return shift_T1 * weight_FD.norm(dim=1) + 2 * terms * eps / (1 - terms * eps) * size_TF


@pytest.mark.parametrize("case", ["bundled", "opt", "falcon-7b"])
def test_counts_equal_those_of_transformers_except_for_gates_within_rounding(
    tmp_path, case, capsys
):
    if case == "bundled":
        folder, length, vocab_size, family = BUNDLED, 512, 4096, "llama"
    else:
        folder, length, vocab_size = random_model(tmp_path / "hf", CASES[case]), 64, 320
        save_tokenizer(folder, 320)
        family = case.split("-")[0]
    path = tmp_path / "m.gguf"
    convert(ConvertConfig(source=folder, output=path, outtype="f32"))
    generator = torch.Generator().manual_seed(0)
    windows = torch.randint(vocab_size, (NUM_TOKENS // length, length), generator=generator)
    gates, inputs, count_LF = observed_here(path, windows)
    num_differing = 0
    for index, (want_TF, x_TD, weight, bias) in enumerate(
        observed_by_transformers(folder, family, windows)
    ):
        fires_TF, wanted_TF = gates[index] > 0, want_TF > 0
        assert (fires_TF.sum(0) == count_LF[index]).all()
        differs_TF = fires_TF != wanted_TF
        num_differing += int(differs_TF.sum())
        bound_TF = rounding_bound(x_TD, inputs[index], weight, bias)
        assert (want_TF.abs() <= bound_TF)[differs_TF].all()
        # The bound does not hide errors: few gates are that close to zero.
        assert (want_TF.abs() <= bound_TF).float().mean() < 2e-3
        wrong = torch.roll(fires_TF, 1, dims=1) != wanted_TF
        assert not (want_TF.abs() <= bound_TF)[wrong].all()
    print(f"{case}: {num_differing} of {NUM_TOKENS * count_LF.numel():,} gates differ")
    assert num_differing <= 1e-5 * NUM_TOKENS * count_LF.numel()


@pytest.mark.parametrize("activation, threshold", [("relu", 0.0), ("fatrelu", 0.5), ("silu", 0.0)])
def test_a_gate_at_its_threshold_does_not_fire_and_silu_keeps_its_magnitudes(activation, threshold):
    gate = Gate(activation=activation, threshold=threshold)
    exact = {"relu": 0.0, "fatrelu": 0.5}.get(activation)
    gate_TF = torch.linspace(-4, 4, 120).reshape(3, 40)
    if exact is not None:
        gate_TF[1, 7] = exact
    counter = Counter((gate,), 40)
    counter.observe("ffn_gate", 0, gate_TF)
    counted = counter.arrays()
    values = gate_TF.double().numpy()
    if activation == "silu":
        size = np.abs(values / (1 + np.exp(-values)))
        fires = size > threshold
    else:
        fires = values > threshold
        size = np.where(fires, values, 0)
    assert (counted["active_count_LF"][0].numpy() == fires.sum(axis=0)).all()
    want = np.histogram(size, bins=[*EDGES, np.inf])[0]
    # A value at an edge may fall on either side.
    assert np.abs(counted["gate_histogram_LB"][0].numpy() - want).max() <= 1


def test_a_neuron_that_does_not_fire_gives_zero_for_every_gate_but_nan():
    gate = torch.tensor([-torch.inf, -1.0, 0.0, 1.0, torch.inf, torch.nan])
    value, fires = Gate(activation="relu", threshold=0.0).act(gate)
    assert fires.tolist() == [False, False, False, True, True, True]
    assert value.tolist()[:5] == torch.relu(gate).tolist()[:5] and value[5].isnan()
