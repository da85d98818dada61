"""A gated delta net in C++ against its definition in float64: at every level, in rows and prompts,
with several sequences in a pass and states in slots. A row's bits depend neither on the other rows
of its pass nor on threads.

Letters: T tokens, D model width, G key heads, V value heads, N and M values of a key and of a value
head, J taps, C channels of the convolution, S slots."""

from ctypes import addressof, c_int64, pointer
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from delta_models import RECURRENT, conv_model
from models import make_sizes
from reference import logits_ref, rel_error

from hotsplit import Engine
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.ops.attention.native import TableStruct
from hotsplit.runtime.ops.delta import DeltaStruct
from hotsplit.runtime.ops.norm import NormStruct
from hotsplit.runtime.ops.structs import MatrixStruct, Structs
from hotsplit.runtime.step.native_parts import PartStruct
from hotsplit.runtime.step.native_step import (
    VALUES,
    LayerStruct,
    OpStruct,
    RowStruct,
    StepStruct,
    native_ops,
)
from hotsplit.runtime.step.program import Op

LEVELS = library.usable_levels()
D, SLOTS, EPSILON = 40, 12, 1e-6
MOST = 96  # rows of a pass
INPUTS = ("qkv", "z", "beta", "alpha")


@dataclass(frozen=True)
class Sizes:
    G: int
    V: int
    N: int
    M: int
    J: int = 4
    is_grouped: bool = False

    @property
    def keys(self):
        """The key head of each value head."""
        head_V = np.arange(self.V)
        return head_V // (self.V // self.G) if self.is_grouped else head_V % self.G

    @property
    def C(self):
        return 2 * self.G * self.N + self.V * self.M


# The last one has whole vectors at all levels, the others remainders of columns or of rows.
SIZES = (
    Sizes(1, 1, 5, 3),
    Sizes(2, 6, 20, 37, J=2),
    Sizes(3, 3, 33, 24),
    Sizes(2, 4, 48, 64, is_grouped=True),
)


def softplus(x):
    return np.logaddexp(0.0, x)


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


@dataclass
class Net:
    """Random weights of a layer, the definition, and the C++."""

    sizes: Sizes
    seed: int = 0
    f32: dict[str, np.ndarray] = field(default_factory=dict)
    kept: list[object] = field(default_factory=list)

    def __post_init__(self):
        s, random = self.sizes, np.random.default_rng(self.seed)
        shapes = {
            "qkv": (s.C, D),
            "z": (s.V * s.M, D),
            "beta": (s.V, D),
            "alpha": (s.V, D),
            "out": (D, s.V * s.M),
            "conv": (s.J, s.C),
            "step_bias": (s.V,),
            "norm": (s.M,),
        }
        self.f32 = {n: random.standard_normal(d).astype(np.float32) for n, d in shapes.items()}
        for name in (*INPUTS, "out"):
            self.f32[name] /= np.float32(np.sqrt(shapes[name][1]))
        self.f32["decay"] = -np.exp(random.standard_normal(s.V)).astype(np.float32)
        self.state_SVNM = torch.full((SLOTS, s.V, s.N, s.M), torch.nan)
        self.inputs_SJC = torch.full((SLOTS, s.J - 1, s.C), torch.nan)
        self._build()

    def reference(self, x_TD):
        """Outputs [T, D] and states [T, V, N, M] of a text from its beginning, in float64."""
        s, w = self.sizes, {name: values.astype(np.float64) for name, values in self.f32.items()}
        x_TD, T = x_TD.astype(np.float64), len(x_TD)
        qkv_TC, z_TY, b_TV, a_TV = (x_TD @ w[name].T for name in INPUTS)
        before_TC = np.concatenate([np.zeros((s.J - 1, s.C)), qkv_TC])
        u_TC = sum(w["conv"][j] * before_TC[j : j + T] for j in range(s.J))
        u_TC *= sigmoid(u_TC)
        q, k, v = np.split(u_TC, [s.G * s.N, 2 * s.G * s.N], axis=1)
        q, k = (part.reshape(T, s.G, s.N) for part in (q, k))
        q, k = (part / np.sqrt((part**2).sum(-1, keepdims=True) + 1e-6) for part in (q, k))
        q, v = q / np.sqrt(s.N), v.reshape(T, s.V, s.M)
        beta_TV, decay_TV = sigmoid(b_TV), np.exp(w["decay"] * softplus(a_TV + w["step_bias"]))
        S, states, y = np.zeros((s.V, s.N, s.M)), [], []
        for t in range(T):
            for h in range(s.V):
                own_N = k[t, s.keys[h]]
                S[h] *= decay_TV[t, h]
                S[h] += np.outer(own_N, beta_TV[t, h] * (v[t, h] - own_N @ S[h]))
            o = np.stack([q[t, s.keys[h]] @ S[h] for h in range(s.V)])
            o = o / np.sqrt((o**2).mean(-1, keepdims=True) + EPSILON) * w["norm"]
            z = z_TY[t].reshape(s.V, s.M)
            y.append(w["out"] @ (o * z * sigmoid(z)).reshape(-1))
            states.append(S.copy())
        return np.stack(y), np.stack(states)

    def _build(self):
        s, structs = self.sizes, Structs()
        tensors = {name: torch.from_numpy(values) for name, values in self.f32.items()}

        def matrix(name):
            rows, columns = tensors[name].shape
            return MatrixStruct(
                data=tensors[name].data_ptr(),
                num_rows=rows,
                num_columns=columns,
                stride=4 * columns,
                kind=library.kind_code("f32"),
            )

        delta = DeltaStruct(
            input=(MatrixStruct * 4)(*map(matrix, INPUTS)),
            output=matrix("out"),
            norm=NormStruct(weight=structs.vector(tensors["norm"], s.M), epsilon=EPSILON),
            conv=structs.vector(tensors["conv"], *tensors["conv"].shape),
            decay=structs.vector(tensors["decay"], s.V),
            step_bias=structs.vector(tensors["step_bias"], s.V),
            state=self.state_SVNM.data_ptr(),
            inputs=self.inputs_SJC.data_ptr(),
            num_key_heads=s.G,
            num_value_heads=s.V,
            key_width=s.N,
            value_width=s.M,
            num_taps=s.J,
            num_slots=SLOTS,
            is_grouped=s.is_grouped,
        )
        op = Op(
            kind="delta",
            layer=0,
            device="host",
            reads=("attn_in", "state.0"),
            writes=("attn_out", "state.0"),
        )
        self.delta = delta
        (ops,) = native_ops([op], {0: None}, weights=lambda op: structs.address(delta))
        self.x_TD, self.y_TD = torch.zeros(MOST, D), torch.zeros(MOST, D)
        table = TableStruct(
            block=structs.indices(torch.zeros(8)),
            num_sequences=8,
            blocks_per_sequence=1,
            block_length=1000,
            num_blocks=1,
        )
        self.step = StepStruct(
            layer=structs.array(LayerStruct, [LayerStruct()]),
            num_layers=1,
            op=structs.array(OpStruct, ops),
            num_ops=1,
            width=D,
            num_neurons=1,
            context_length=1000,
            max_rows=MOST,
            table=structs.array(TableStruct, [table]),
            num_tables=1,
        )
        self.step.vector[VALUES.index("attn_in")] = self.x_TD.data_ptr()
        self.step.vector[VALUES.index("attn_out")] = self.y_TD.data_ptr()
        self.step.workspace = structs.workspace(library.step_bytes(self.step))
        self.kept = [structs, tensors]

    def run(self, runs):
        """Outputs of a pass, one array for each run (x [T, D], slot to begin with, {row: slot in
        which the state after it is stored})."""
        rows = [
            RowStruct(sequence=number, position=t, source=-1, reads=reads, writes=writes.get(t, -1))
            for number, (x_TD, reads, writes) in enumerate(runs)
            for t in range(len(x_TD))
        ]
        T = len(rows)
        self.x_TD[:T] = torch.from_numpy(np.concatenate([x_TD for x_TD, _, _ in runs]))
        array, count = (RowStruct * T)(*rows), c_int64(T)
        library.run_part(
            PartStruct(
                step=pointer(self.step),
                row=addressof(array),
                num_rows=addressof(count),
                begin=0,
                end=1,
            )
        )
        ends = np.cumsum([len(x_TD) for x_TD, _, _ in runs])[:-1]
        return np.split(self.y_TD[:T].numpy().copy(), ends)

    def alone(self, x_TD):
        """Outputs of a text whose tokens are computed one by one, with the state in two slots."""
        y = []
        for t in range(len(x_TD)):
            reads = -1 if t == 0 else (t - 1) % 2
            y += self.run([(x_TD[t : t + 1], reads, {0: t % 2})])
        return np.concatenate(y)


def text(seed, length):
    return np.random.default_rng(seed).standard_normal((length, D)).astype(np.float32)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_it_equals_its_definition(restore_library, level, sizes):
    library.set_level(level)
    net, x_TD = Net(sizes), text(1, 37)
    want_TD, states_TVNM = net.reference(x_TD)
    (got_TD,) = net.run([(x_TD, -1, {36: 3, 20: 5})])
    assert rel_error(torch.from_numpy(got_TD), torch.from_numpy(want_TD)) < 3e-6
    for slot, t in ((3, 36), (5, 20)):
        assert rel_error(net.state_SVNM[slot], torch.from_numpy(states_TVNM[t])) < 3e-6


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_rows_bits_depend_on_nothing_else(restore_library, level, sizes):
    """Tokens alone, a text in one pass, in several passes from slot to slot and beside other
    texts."""
    library.set_level(level)
    net, x_TD, y_TD = Net(sizes), text(1, 50), text(2, 23)
    want, other = net.alone(x_TD), net.alone(y_TD)
    net.run([(y_TD[:9], -1, {8: 9})])
    for threads in (1, 2, 3):
        library.set_threads(threads)
        (whole,) = net.run([(x_TD, -1, {49: 2, 15: 3, 16: 4})])
        assert whole.tobytes() == want.tobytes()
        state, inputs = net.state_SVNM[2].clone(), net.inputs_SJC[2].clone()
        for slot, begin in ((3, 16), (4, 17)):  # the states that the pass has stored on its way
            (rest,) = net.run([(x_TD[begin:], slot, {49 - begin: 6})])
            assert rest.tobytes() == want[begin:].tobytes()
            assert torch.equal(net.state_SVNM[6], state) and torch.equal(net.inputs_SJC[6], inputs)
        first, one, half = net.run(
            [(x_TD[:2], -1, {0: 7, 1: 0}), (y_TD[9:10], 9, {0: 1}), (y_TD, -1, {22: 8})]
        )
        again, last = net.run([(y_TD[10:], 1, {12: 10}), (x_TD[2:], 0, {47: 11})])
        assert np.concatenate([first, last]).tobytes() == want.tobytes()
        assert one.tobytes() == other[9:10].tobytes() and half.tobytes() == other.tobytes()
        assert again.tobytes() == other[10:].tobytes()
        assert torch.equal(net.state_SVNM[11], state) and torch.equal(
            net.state_SVNM[8], net.state_SVNM[10]
        )


def test_a_slot_that_is_read_is_not_changed(restore_library):
    net, x_TD = Net(SIZES[-1]), text(1, 5)
    net.run([(x_TD, -1, {4: 1})])
    before = net.state_SVNM.clone(), net.inputs_SJC.clone()
    net.run([(x_TD[:1], 1, {}), (x_TD, 1, {4: 2})])  # of the first, no state is kept
    for tensor, old in zip((net.state_SVNM, net.inputs_SJC), before, strict=True):
        assert torch.equal(tensor[1], old[1])
        assert not tensor[2].isnan().any() and tensor[3:].isnan().all()


@pytest.mark.parametrize("wrong", ["decay", "norm", "conv", "step_bias", "alpha"])
def test_the_definition_rejects_a_net_with_other_weights(wrong):
    net, x_TD = Net(SIZES[2]), text(1, 9)
    (got_TD,) = net.run([(x_TD, -1, {})])
    net.f32[wrong] = net.f32[wrong] * 1.01
    want_TD, _ = net.reference(x_TD)
    assert rel_error(torch.from_numpy(got_TD), torch.from_numpy(want_TD)) > 3e-5


@pytest.mark.parametrize(
    "name, value",
    [
        ("num_taps", 0),
        ("num_taps", 17),
        ("value_width", 513),
        ("num_slots", 0),
        ("num_key_heads", 3),
        ("state", None),
        ("conv", None),
        ("inputs", None),
    ],
)
def test_impossible_sizes_are_refused(name, value):
    net = Net(SIZES[-1])
    setattr(net.delta, name, value)
    assert library.step_bytes(net.step) == -1


def test_gates_stay_finite_where_their_functions_do_not(restore_library):
    """Decays and betas far from 0 are those of float64."""
    for level in LEVELS:
        library.set_level(level)
        for bias in (-200.0, -20.0, 20.0, 200.0):
            net, x_TD = Net(SIZES[2]), text(1, 6)
            net.f32["step_bias"][:] = bias
            want_TD, _ = net.reference(x_TD)
            (got_TD,) = net.run([(x_TD, -1, {})])
            assert rel_error(torch.from_numpy(got_TD), torch.from_numpy(want_TD)) < 3e-6


@pytest.fixture(params=RECURRENT)
def model_path(tmp_path, request):
    """The path of a model of five layers, one of which attends."""
    sizes = make_sizes(num_layers=5, context_length=400, num_heads=4, num_kv_heads=2)
    model = replace(RECURRENT[request.param](sizes, period=3), path=tmp_path / "m.gguf")
    model.save(model.path)
    return model.path


IDS = [(7 * i + i * i) % 50 for i in range(70)]


@pytest.mark.parametrize("num_taps", [1, 2, 5])
def test_passes_of_short_convolutions_have_equal_bits(num_taps, level):
    """A prompt at once, in parts and token by token, in a hidden size of no whole vectors."""
    sizes = make_sizes(num_layers=2, width=36, num_heads=2, num_kv_heads=1, context_length=300)
    ids = [*IDS, *IDS, *IDS, *IDS][:257]
    with Engine.of(conv_model(sizes, period=2, num_taps=num_taps), mode="dense") as engine:
        want = engine.logits(ids)
        assert rel_error(want, logits_ref(engine.model, ids)) < 1e-5
        for ends in ((1, 3, 10, 74, 257), range(1, 12)):
            with engine.sequence() as text:
                for begin, end in pairwise((0, *ends)):
                    assert torch.equal(text.extend(ids[begin:end], "all"), want[begin:end])


def test_a_model_agrees_with_the_reference(model_path, level):
    with Engine.load(model_path, mode="dense") as engine:
        got = engine._prefill(torch.tensor(IDS))
        for position, token in enumerate(IDS):
            one_by_one = engine._step(token, position)
        assert torch.equal(got, one_by_one)
        assert rel_error(got, logits_ref(engine.model, IDS)[-1]) < 1e-5


def test_observers_see_layers_with_states(model_path):
    names, seen, want = ("layer_out", "ffn_hidden", "attn_norm", "attn_heads"), {}, {}
    with (
        Engine.load(model_path, mode="dense") as engine,
        engine.observe(
            lambda name, layer, x: seen.update({(name, layer): x.clone()}),
            lambda name, layer: name in names,
        ),
    ):
        engine._prefill(torch.tensor(IDS))
        logits_ref(engine.model, IDS, seen=want)
    assert len(seen) == 4 * engine.model.spec.num_layers
    for key, values in seen.items():
        assert rel_error(values, want[key]) < 1e-5
