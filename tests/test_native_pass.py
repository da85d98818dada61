"""Several tokens through the neurons that fire for them, in one native call: against float64.

Letters: T tokens, D model width, N neurons."""

import dataclasses
from itertools import cycle, product

import pytest
import torch
from k_quants import BLOCK_BYTES
from models import make_model, make_shape
from reference import rel_error
from test_cpu_kernels import FLOAT_DTYPES, KINDS, SMALL_BLOCKS
from test_cpu_kernels import matrix as random_matrix

from sparkinfer import Engine
from sparkinfer.runtime import native_pass, tiles
from sparkinfer.runtime.kernels.cpu import library
from sparkinfer.runtime.matrix import Linear, Matrix
from sparkinfer.runtime.native_pass import NativePass
from sparkinfer.runtime.native_structs import NotNative
from sparkinfer.runtime.neuron_block import Gate, NeuronBlock

pytestmark = pytest.mark.skipif(not library.is_available(), reason="the C++ kernels are not built")
ACTIVATIONS = ("relu", "fatrelu", "drelu", "silu", "gelu", "gelu_tanh")
SIZES = [(kind, D) for kind in FLOAT_DTYPES for D in (1, 33, 256, 320)]
SIZES += [(kind, D) for kind in SMALL_BLOCKS for D in (32, 64, 256, 288, 544)]
SIZES += [(kind, D) for kind in BLOCK_BYTES for D in (256, 768)]
# Round the edges of tiles of tokens (32) and of blocks of neurons (128, 256).
COUNTS = [(2, 1), (3, 127), (5, 128), (37, 129), (32, 255), (65, 257), (2, 513)]
WRONG = [torch.zeros_like, lambda y: 0.5 * y, lambda y: y.flip(0)]
BOUND = 1e-5


@pytest.fixture(autouse=True)
def however_many(monkeypatch):
    monkeypatch.setattr(native_pass, "MOST_PAIRS", dict.fromkeys(library.LEVELS, 1.0))


@dataclasses.dataclass(frozen=True)
class Case:
    """Neurons as the kernels take them, their numbers in float64, and tokens."""

    block: NeuronBlock
    gate: Gate
    weight: dict[str, torch.Tensor]  # [N, D] of gate, up, down; [N] of the biases
    x_TD: torch.Tensor

    def gates(self) -> torch.Tensor:
        return self.x_TD.double() @ self.weight["gate"].T + self.weight["gate_bias"]

    def raw(self) -> torch.Tensor:
        return self.gates().float()

    def named(self, share: float) -> torch.Tensor:
        """bool [T, N]; none whose gate is so near to its threshold that rounding could decide."""
        value_TN = self.gate.before_threshold(self.gates())
        edge = self.gate.threshold if self.gate.activation != "relu" else 0.0
        distance_TN = (value_TN.abs() - abs(edge)).abs()
        chance_TN = torch.rand(value_TN.shape, generator=torch.Generator().manual_seed(3))
        return (chance_TN < share) & (distance_TN > 1e-3)

    def want(self, gates_TN: torch.Tensor, is_named_TN=True) -> torch.Tensor:
        """float64 [T, D]."""
        activated_TN, fires_TN = self.gate.act(gates_TN, is_dense=False)
        up_TN = None
        if self.block.up is not None:
            up_TN = self.x_TD.double() @ self.weight["up"].T + self.weight["up_bias"]
        hidden_TN = self.gate.hidden(activated_TN, up_TN)
        # What does not fire is not touched, not even by what is no number.
        hidden_TN = torch.where(fires_TN & is_named_TN, hidden_TN, 0.0)
        return hidden_TN @ self.weight["down"]


def case(kind, T, N, D, activation="relu", is_gated=True, has_bias=False, has_rows=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    num_rows = N + 5 if has_rows else N
    row_N = torch.randperm(num_rows, generator=generator)[:N] if has_rows else None
    rows = slice(None) if row_N is None else row_N
    names = ["gate", "up", "down"] if is_gated else ["gate", "down"]
    made = {name: random_matrix(kind, num_rows, D, seed + i) for i, name in enumerate(names)}
    # A neuron's rows side by side, as a resident layer has them.
    whole = torch.cat([m.weight for m in made.values()], dim=1)
    width = whole.shape[1] // len(made)
    part = {name: Matrix(data=whole[:, i * width : (i + 1) * width], kind=kind, width=D)
            for i, name in enumerate(made)}  # fmt: skip
    weight = {name: m.exact_FD[rows] for name, m in made.items()}
    linear = {}
    for name in names[:-1]:
        bias = torch.randn(num_rows, generator=generator) if has_bias else None
        linear[name] = Linear(weight=part[name], bias_N=bias)
        weight[f"{name}_bias"] = torch.zeros(N) if bias is None else bias[rows].double()
    ids = torch.arange(N)
    block = NeuronBlock(gate=linear["gate"], up=linear.get("up"), down=part["down"], id_N=ids,
                        row_N=row_N)  # fmt: skip
    scale = D**-0.5 / float(weight["gate"].std(correction=0).clamp(min=1e-3))
    x_TD = scale * torch.randn(T, D, generator=generator)
    return Case(block, Gate(activation=activation, threshold=0.3), weight, x_TD)


def from_raw(made: Case, raw_TN=None) -> torch.Tensor:
    raw_TN = made.raw() if raw_TN is None else raw_TN
    tokens, y_TD = NativePass(made.x_TD), torch.zeros_like(made.x_TD)
    assert tokens.add_open(made.block, made.gate, made.gate.before_threshold(raw_TN).clone())
    tokens.add_to(y_TD)
    return y_TD


def from_named(made: Case, named_TN) -> torch.Tensor:
    tokens, y_TD = NativePass(made.x_TD), torch.zeros_like(made.x_TD)
    assert tokens.add_named(made.block, made.gate, named_TN)
    tokens.add_to(y_TD)
    return y_TD


def is_right(got_TD, want_TD) -> bool:
    if not want_TD.any():
        return not got_TD.any()
    return rel_error(got_TD, want_TD) < BOUND


@pytest.mark.parametrize("kind, D", SIZES)
def test_neurons_that_fire_add_what_they_should(level, kind, D):
    kinds_of_block = cycle(product([True, False], [False, True], [True, False]))
    for (T, N), (gated, bias, rows), activation in zip(
        COUNTS, kinds_of_block, cycle(ACTIVATIONS), strict=False
    ):
        made = case(kind, T, N, D, activation, gated, bias, rows)
        assert is_right(from_raw(made), made.want(made.raw().double()))
        for share in (0.1, 1.0):
            named_TN = made.named(share)
            assert is_right(from_named(made, named_TN), made.want(made.gates(), named_TN))


@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation, is_gated):
    made = case("q8_0", 37, 300, 96, activation, is_gated, has_bias=True, has_rows=True)
    assert is_right(from_raw(made), made.want(made.raw().double()))
    named_TN = made.named(0.4)
    assert is_right(from_named(made, named_TN), made.want(made.gates(), named_TN))


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("kind", KINDS)
def test_the_measure_rejects_wrong_results(kind, wrong):
    made = case(kind, 37, 129, 256)
    want_TD = made.want(made.raw().double())
    got_TD = from_raw(made)
    assert is_right(got_TD, want_TD) and not is_right(wrong(got_TD), want_TD)


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("kind", ["f16", "q4_0_planar", "q8_0_planar", "q6_k"])
def test_the_number_of_threads_does_not_show(level, kind, is_named):
    before, found = library.num_threads(), []
    made = case(kind, 101, 400, 768)
    try:
        for threads in (1, 2, 3, 7):
            library.set_threads(threads)
            found.append(from_named(made, made.named(0.3)) if is_named else from_raw(made))
    finally:
        library.set_threads(before)
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_a_token_gets_the_same_bits_whatever_is_beside_it(level):
    made = case("q4_0", 37, 300, 544)
    all_TD = from_raw(made)
    for t in range(0, 37, 5):
        alone = dataclasses.replace(made, x_TD=made.x_TD[t : t + 1])
        assert torch.equal(from_raw(alone, made.raw()[t : t + 1])[0], all_TD[t])


def test_parts_add_up():
    made = case("f16", 37, 300, 96)
    tokens, y_TD = NativePass(made.x_TD), torch.ones_like(made.x_TD)
    for start, stop in ((0, 100), (100, 300)):
        part = made.block.part(start, stop)
        assert tokens.add_open(part, made.gate, made.raw()[:, start:stop].contiguous())
    tokens.add_to(y_TD)
    assert is_right(y_TD, 1 + made.want(made.raw().double()))


def test_nothing_fires(level):
    made = case("f16", 37, 300, 96)
    assert not from_raw(made, -made.raw().abs()).any()
    assert not from_named(made, torch.zeros(37, 300, dtype=torch.bool)).any()


@pytest.mark.parametrize("threshold", [-torch.inf, torch.inf])
def test_a_threshold_may_be_infinite(threshold):
    made = case("f16", 37, 300, 96, "fatrelu")
    made = dataclasses.replace(made, gate=Gate(activation="fatrelu", threshold=threshold))
    every_TN = torch.ones(37, 300, dtype=torch.bool)
    want_TD = made.want(made.raw().double())
    assert bool(want_TD.any()) == (threshold < 0)
    assert is_right(from_raw(made), want_TD) and is_right(from_named(made, every_TN), want_TD)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_is_no_number_is_seen_in_its_token_only(level, activation):
    made = case("f16", 37, 300, 96, activation)
    x_TD = made.x_TD.clone()
    x_TD[33, 7] = torch.nan
    made = dataclasses.replace(made, x_TD=x_TD)
    raw_TN = torch.where(made.raw().isnan(), torch.nan, made.raw())
    for y_TD in (from_raw(made, raw_TN), from_named(made, made.named(0.1) | raw_TN.isnan())):
        lost_T = y_TD.isnan().all(dim=1)
        assert lost_T.nonzero().flatten().tolist() == [33] and y_TD.isnan().sum() == 96


@pytest.mark.parametrize("is_named", [True, False])
def test_neurons_that_any_token_needs_are_counted(is_named):
    made = case("f16", 37, 300, 96)
    tokens, named_TN = NativePass(made.x_TD), made.named(0.02)
    open_TN = made.gates() > 0
    if is_named:
        found = tokens.add_named(made.block, made.gate, named_TN)
        assert found == (int(named_TN.any(0).sum()), int((named_TN & open_TN).any(0).sum()))
        assert 0 < found.open < found.named < 300
    else:
        found = tokens.add_open(made.block, made.gate, torch.where(named_TN, 1.0, -1.0))
        assert found is not None and found.open == int(named_TN.any(0).sum())


@pytest.mark.parametrize("is_named", [True, False])
def test_of_too_many_pairs_nothing_is_done(is_named, monkeypatch):
    made = case("f16", 37, 300, 96)
    value_TN = torch.where(made.named(0.3), 1.0, -1.0)
    pairs = int((value_TN > 0).sum())
    for most, is_done in ((pairs, True), (pairs - 1, False)):
        share = (most + 0.5) / (37 * 300)
        monkeypatch.setattr(native_pass, "MOST_PAIRS", {library.level(): share})
        tokens, y_TD = NativePass(made.x_TD), torch.zeros_like(made.x_TD)
        given_TN = value_TN.clone()
        if is_named:
            found = tokens.add_named(made.block, made.gate, value_TN > 0)
        else:
            found = tokens.add_open(made.block, made.gate, given_TN)
        tokens.add_to(y_TD)
        assert (found is not None) == is_done == bool(y_TD.any())
        assert is_done or torch.equal(given_TN, value_TN)


def test_sizes_that_do_not_fit_together_are_refused():
    made = case("f16", 3, 10, 96)
    narrow = Matrix(data=made.block.down.data[:, :64], kind="f16", width=64)
    block = dataclasses.replace(made.block, down=narrow)
    with pytest.raises(NotNative, match="do not fit"):
        NativePass(made.x_TD).add_named(block, made.gate, torch.ones(3, 10, dtype=torch.bool))
    outside = dataclasses.replace(made.block, row_N=torch.arange(1, 11))
    with pytest.raises(NotNative, match="do not fit"):
        NativePass(made.x_TD).add_named(outside, made.gate, torch.ones(3, 10, dtype=torch.bool))


@pytest.mark.parametrize("tile", ["f32", "bf16"])
@pytest.mark.parametrize("mode", ["dense", "exact", "predicted"])
def test_an_engine_takes_it_where_it_is_worth_it(tmp_path, mode, tile, monkeypatch):
    """Not densely, nor where the processor multiplies bf16 faster."""
    monkeypatch.setenv(tiles.TILES_VARIABLE, tile)
    tiles._processors_choice.cache_clear()
    runs, run_pass = [], library.run_pass
    monkeypatch.setattr(library, "run_pass", lambda s: runs.append(run_pass(s)))
    model = make_model(shape=make_shape(num_neurons=300), kind="f16", predictor_rank=8)
    model.save(tmp_path / "m.gguf")
    with Engine.load(tmp_path / "m.gguf", mode=mode, device="cpu") as engine:
        got = engine.logits(range(20))
        taken = bool(runs)
        with engine.observe(lambda name, layer, tensor: None):
            want = engine.logits(range(20))
    tiles._processors_choice.cache_clear()
    assert taken == (mode != "dense" and tile == "f32")
    assert (got - want).norm() < (3e-2 if tile == "bf16" else 1e-4) * want.norm()
    assert (got.flip(0) - want).norm() > 0.1 * want.norm()
