"""The bits of a native step, one per neuron, row and layer, compared with what observers see in the
ordinary path: in every mode, for one row and several, for whole and divided layers."""

import dataclasses

import numpy as np
import pytest
import torch
from models import make_model, make_sizes
from test_runtime import make_split

from hotsplit import Engine
from hotsplit.runtime.device.bits import pack_bits, unpack_bits
from hotsplit.runtime.ops.neurons.native import NativeNeurons
from hotsplit.runtime.step.batch import Row, rows_of

F, L = 77, 2  # not a whole number of words
IDS = [3, 17, 9, 40, 2, 33, 21]
SOME = np.random.default_rng(5).permutation(F)[:30]
MODES = ("dense", "exact", "predicted")


def saved(tmp_path, activation="relu", **options):
    shape = make_sizes(num_layers=L, num_neurons=F)
    model = make_model(sizes=shape, predictor_rank=8, activation=activation, **options)
    model = dataclasses.replace(model, threshold_L=(0.05,) * L, path=tmp_path / "m.gguf")
    model.save(model.path)
    return model


def seen_bits(engine):
    """bool [T, L, F] from the ordinary path: predicted neurons, or those whose `down` is read."""
    seen = {}

    def observe(name, layer, tensor):
        ffn = engine.layers[layer].ffn
        if name == "ffn_predicted":
            seen[layer] = tensor > ffn.predictor.threshold
        else:
            value = ffn.gate.act(tensor)[1]
            seen[layer] = torch.ones_like(value) if engine.mode == "dense" else value

    name = "ffn_predicted" if engine.mode == "predicted" else "ffn_gate"
    with engine.observe(observe, lambda n, layer: n == name), engine.sequence() as text:
        text.extend(IDS)
    return torch.stack([seen[layer] for layer in range(L)], dim=1)


def native_bits(engine, pieces):
    """The same from the native step, with the rows divided into steps of these lengths."""
    native = engine._live.native
    fired = torch.full((native.max_rows, L, -(-F // 32)), -1, dtype=torch.int32)
    native.step.fired = fired.data_ptr()
    found, start = [], 0
    engine._live.weights.cache.reserve(0, 0, len(IDS))
    for count in pieces:
        native.run_rows(rows_of(IDS[start : start + count], start))
        found.append(fired[:count].clone())
        assert (fired[count:] == -1).all()  # nothing is written beyond the rows
        fired.fill_(-1)
        start += count
    native.step.fired = None
    native.run(IDS[0], 0)
    assert (fired == -1).all()
    words = torch.cat(found)
    bits = unpack_bits(words.view(-1, words.shape[-1]).flatten()).view(len(IDS), L, -1)
    assert not bits[..., F:].any()
    return bits[..., :F]


PIECES = ([1] * 7, [7], [2, 5], [3, 1, 3])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("activation", ["relu", "fatrelu", "drelu"])
def test_bits_equal_what_observers_see(tmp_path, activation, mode):
    model = saved(tmp_path, activation)
    with Engine.load(model.path, mode=mode) as engine:
        want = seen_bits(engine)
        assert mode == "dense" or 0.05 < want.float().mean() < 0.95
        for pieces in PIECES:
            assert torch.equal(native_bits(engine, pieces), want)


@pytest.mark.parametrize("mode", ["exact", "predicted"])
@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "f16"])
def test_bits_of_divided_layers_and_other_types(tmp_path, kind, mode):
    model = saved(tmp_path, kind=kind)
    make_split(model, [SOME, np.arange(F)[::2]]).save(tmp_path / "s.gguf")
    with Engine.load(model.path, split=tmp_path / "s.gguf", mode=mode) as engine:
        one, many = native_bits(engine, PIECES[0]), native_bits(engine, PIECES[1])
        assert torch.equal(one, many)
        # A neuron whose gate is nearly 0 may fire in only one order of summation.
        assert (one != seen_bits(engine)).float().mean() < 0.01


def test_copied_rows_have_no_bits(tmp_path):
    """Only computed rows have bits, in their order."""
    model = saved(tmp_path)
    with Engine.load(model.path, mode="exact", num_sequences=2) as engine:
        want = seen_bits(engine)
        native = engine._live.native
        fired = torch.zeros(4, L, -(-F // 32), dtype=torch.int32)
        native.step.fired = fired.data_ptr()
        for number in (0, 1):
            engine._live.weights.cache.reserve(number, 0, 2)
        first = Row(token=IDS[0], position=0)
        native.run_rows(
            [
                first,
                Row(token=IDS[0], position=0, sequence=1, source=0),
                Row(token=IDS[1], position=1, sequence=1),
            ]
        )
        assert torch.equal(fired[:2], pack_bits(want[:2])) and not fired[2:].any()


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_bits_of_one_block(tmp_path, num_tokens):
    """A call for a block alone sets the bits of its own neurons, by their ids in the layer."""
    model = saved(tmp_path)
    make_split(model, [SOME, SOME]).save(tmp_path / "s.gguf")
    x_TD = torch.randn(num_tokens, 64, generator=torch.Generator().manual_seed(0))
    with Engine.load(model.path, split=tmp_path / "s.gguf", mode="exact") as engine:
        ffn = engine.layers[0].ffn
        for block in ffn.blocks:
            neurons = NativeNeurons.of(block, ffn.gate, F)
            fired_W = torch.full((-(-F // 32),), -1, dtype=torch.int32)
            neurons.struct.fired = fired_W.data_ptr()
            for x_D in x_TD:
                neurons.x_D.copy_(x_D)
                neurons.run()
                want = torch.zeros(F, dtype=torch.bool)
                want[block.id_N] = block.gate.weight.product(x_D[None])[0] > 0
                assert torch.equal(fired_W, pack_bits(want)) and want.any()


@pytest.mark.parametrize("wrong", [torch.zeros_like, torch.ones_like, lambda t: t.flip(-1)])
def test_the_comparison_finds_wrong_bits(tmp_path, wrong):
    model = saved(tmp_path)
    with Engine.load(model.path, mode="exact") as engine:
        want = seen_bits(engine)
        assert not torch.equal(wrong(want), want)
