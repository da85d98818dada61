"""A block of neurons in one native call, compared with float64, with bits that name neurons and
without."""

import dataclasses
from itertools import product

import pytest
import torch
from models import make_sizes, sparse_model
from reference import rel_error
from test_runtime import make_split, saved

from hotsplit import Engine
from hotsplit.runtime.device.bits import pack_bits
from hotsplit.runtime.ops.neurons.feed_forward import FeedForward
from hotsplit.runtime.ops.neurons.native import NativeNeurons

ACTIVATIONS = ("relu", "relu2", "fatrelu", "drelu", "silu", "gelu", "gelu_tanh")
BOUNDS = {"f32": 1e-5, "q8_0": 1e-3, "q4_0": 1e-3}
F, D = 77, 64  # F bits do not fill whole words


def layer_of(
    tmp_path, kind="f32", activation="relu", is_resident=True, mode="predicted", width=D, num=F
):
    shape = make_sizes(width=width, num_neurons=num)
    model = sparse_model(sizes=shape, kind=kind, activation=activation)
    model = dataclasses.replace(model, path=tmp_path / "m.gguf")
    model.save(model.path)
    mode = "exact" if model.predictor is None and mode == "predicted" else mode
    with Engine.load(model.path, mode=mode, is_resident=is_resident) as engine:
        return engine.layers[0].ffn


def bytes_read(neurons: NativeNeurons) -> int:
    """Weight bytes of the rows needed in all calls so far."""
    struct = neurons.struct
    return struct.gate_bytes + struct.up_bytes + struct.down_bytes


def reference(ffn: FeedForward, x_D, named_F):
    """The sum in float64, from the unpacked rows."""
    (block,) = ffn.blocks
    rows = torch.arange(len(block.id_N))
    gate, up, down = (
        m.rows(rows).double() for m in (block.gate.weight, block.up.weight, block.down)
    )
    activated, fires = ffn.gate.act(gate @ x_D.double())
    hidden = ffn.gate.hidden(activated, up @ x_D.double())
    return (hidden * fires * named_F) @ down


@pytest.mark.parametrize("is_resident", [True, False])
@pytest.mark.parametrize(
    "kind, activation", [*product(BOUNDS, ["relu"]), *product(["f32"], ACTIVATIONS)]
)
def test_the_sum_of_named_neurons_equals_float64(tmp_path, kind, activation, is_resident):
    ffn = layer_of(tmp_path, kind, activation, is_resident)
    neurons = NativeNeurons.of(ffn.blocks[0], ffn.gate, F, is_named=True)
    generator = torch.Generator().manual_seed(0)
    for share in (0.0, 0.03, 0.4, 1.0):
        x_D = torch.randn(D, generator=generator)
        named_F = torch.rand(F, generator=generator) < share
        neurons.x_D.copy_(x_D)
        neurons.named_W.copy_(pack_bits(named_F))
        before = bytes_read(neurons)
        neurons.node.run()
        want = reference(ffn, x_D, named_F)
        if not want.any():
            assert not neurons.y_D.any()
        else:
            assert rel_error(neurons.y_D, want) < BOUNDS[kind]
        row = ffn.blocks[0].down.row_bytes
        assert (
            int(named_F.sum()) * row <= bytes_read(neurons) - before <= 3 * int(named_F.sum()) * row
        )


@pytest.mark.parametrize("mode", ["exact", "predicted"])
@pytest.mark.parametrize("kind", BOUNDS)
def test_a_part_of_a_layer_has_the_biases_of_its_rows(tmp_path, level, kind, mode):
    num = 601
    ffn = layer_of(tmp_path, kind, mode=mode, num=num)
    generator = torch.Generator().manual_seed(2)
    rows = torch.arange(1, num, 3)
    gate_F, up_F = (torch.randn(num, generator=generator) for _ in range(2))
    (whole,) = ffn.blocks
    part = dataclasses.replace(
        whole,
        gate=dataclasses.replace(whole.gate, bias_N=gate_F),
        up=dataclasses.replace(whole.up, bias_N=up_F),
        id_N=rows,
        row_N=rows,
        is_whole=False,
    )
    x_D = torch.randn(D, generator=generator)
    named_F = torch.rand(num, generator=generator) < (0.4 if mode == "predicted" else 2)
    neurons = NativeNeurons.of(part, ffn.gate, num, is_named=mode == "predicted")
    neurons.x_D.copy_(x_D)
    if neurons.named_W is not None:
        neurons.named_W.copy_(pack_bits(named_F))
    neurons.node.run()
    gates_N = whole.gate.weight.rows(rows).double() @ x_D.double() + gate_F[rows]
    ups_N = whole.up.weight.rows(rows).double() @ x_D.double() + up_F[rows]
    fires_N = (gates_N > 0) & named_F[rows]
    assert 0.1 < fires_N.double().mean() < 0.8
    want = (gates_N * ups_N * fires_N) @ whole.down.rows(rows).double()
    assert rel_error(neurons.y_D, want) < BOUNDS[kind]


def test_a_nan_gate_reaches_the_sum(tmp_path):
    for activation in ACTIVATIONS:
        ffn = layer_of(tmp_path, activation=activation)
        ffn.blocks[0].gate.weight.data[5, 3] = torch.nan
        neurons = NativeNeurons.of(ffn.blocks[0], ffn.gate, F, is_named=True)
        neurons.x_D.fill_(0.5)
        for named, is_lost in ((torch.arange(F) == 5, True), (torch.arange(F) != 5, False)):
            neurons.named_W.copy_(pack_bits(named))
            neurons.node.run()
            assert neurons.y_D.isnan().all() == is_lost


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_tokens_together_equal_each_alone(tmp_path, level, activation):
    """With a NaN gate, which some tokens name, and bits after the last neuron; in a whole block and
    in one that holds every third neuron."""
    num, num_tokens, lost = 601, 5, 45
    ffn = layer_of(tmp_path, activation=activation, num=num)
    (whole,) = ffn.blocks
    whole.gate.weight.data[lost, 3] = torch.nan
    ids = torch.arange(0, num, 3)
    part = dataclasses.replace(whole, id_N=ids, row_N=ids, is_whole=False)
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(num_tokens, D, generator=generator)
    named_TF = torch.rand(num_tokens, num, generator=generator) < 0.4
    named_TF[:, lost] = torch.arange(num_tokens) % 2 == 1
    named_TW = torch.stack([pack_bits(named_F) for named_F in named_TF])
    named_TW[:, -1] |= -1 << num % 32
    for block in (whole, part):
        y_TD = torch.zeros(num_tokens, D)
        together = NativeNeurons.of(block, ffn.gate, num, x_D=x_TD, named_W=named_TW, y_D=y_TD)
        together.struct.num_tokens = num_tokens
        together.node.run()
        named = int(named_TF[:, block.id_N].any(0).sum())
        assert together.struct.gate_bytes == named * whole.gate.weight.row_bytes
        alone = NativeNeurons.of(block, ffn.gate, num, is_named=True)
        for t in range(num_tokens):
            alone.x_D.copy_(x_TD[t])
            alone.named_W.copy_(named_TW[t])
            alone.node.run()
            assert alone.y_D.isnan().all() == named_TF[t, lost]
            torch.testing.assert_close(y_TD[t], alone.y_D, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("wrong", [torch.zeros_like, lambda y: 0.5 * y, lambda y: y.flip(0)])
def test_the_measure_rejects_wrong_results(tmp_path, wrong):
    ffn = layer_of(tmp_path)
    x_D = torch.linspace(-1, 1, D)
    want = reference(ffn, x_D, torch.ones(F))
    assert rel_error(wrong(want.float()), want) > 0.1


def test_bits_are_packed_by_number():
    for length in (1, 31, 32, 33, 64, 77):
        named_F = torch.rand(length, generator=torch.Generator().manual_seed(length)) < 0.5
        words = pack_bits(named_F)
        assert words.dtype == torch.int32 and len(words) == -(-length // 32)
        got = [(int(words[j // 32]) >> (j % 32)) & 1 for j in range(length)]
        assert got == named_F.int().tolist()


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_bits_of_the_neurons_that_fire(tmp_path, num_tokens):
    """A call for a block alone sets the bits of its own neurons, by their ids in the layer."""
    model = saved(tmp_path, sizes=make_sizes(num_neurons=F))
    make_split(model, [range(0, F, 2), range(30)]).save(tmp_path / "s.gguf")
    x_TD = torch.randn(num_tokens, 64, generator=torch.Generator().manual_seed(0))
    with Engine.load(model.path, split=tmp_path / "s.gguf", mode="exact") as engine:
        ffn = engine.layers[0].ffn
        for block in ffn.blocks:
            fired_W = torch.full((-(-F // 32),), -1, dtype=torch.int32)
            neurons = NativeNeurons.of(block, ffn.gate, F, fired_W=fired_W)
            for x_D in x_TD:
                neurons.x_D.copy_(x_D)
                neurons.node.run()
                want = torch.zeros(F, dtype=torch.bool)
                want[block.id_N] = block.gate.weight.product(x_D[None])[0] > 0
                assert torch.equal(fired_W, pack_bits(want)) and want.any()
                assert not torch.equal(fired_W, pack_bits(want.flip(0)))
