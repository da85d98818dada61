"""Mixtures of experts: the router against its definition in float64, each row's bits whatever the
other rows are, weights that are not read unless their expert is chosen, and files that are
refused."""

import dataclasses
import random
from functools import partial
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from models import make_model, make_sizes, mixture_spec
from reference import Bounds, logits_ref, rel_error, route_ref
from spec_keys import spec_keys
from test_sequences import CONTEXT, ROOM, Alone, schedule

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.model_gguf import read_model_gguf
from hotsplit.artifacts.profile_file import Corpus, Profile
from hotsplit.costs.part_bytes import head_bytes, layer_bytes
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import TensorEntry, array_entry, in_memory, write_gguf
from hotsplit.files.gguf_types import block_sizes
from hotsplit.measure.evaluate.quality import ShareCounter, mean_bytes
from hotsplit.model.route import CHOICE_BIAS, Route
from hotsplit.model.tensors import in_layout, is_down
from hotsplit.model.weight_types import TABLE_NAMES
from hotsplit.profile.count import counting
from hotsplit.profile.count.counting import Counter, experts_of, gates_of, routing_of
from hotsplit.runtime import resolved_options
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.kernels.gate import Gate
from hotsplit.runtime.kernels.gpu.routing import choose_experts
from hotsplit.runtime.ops.route import Router
from hotsplit.runtime.weights.matrix import Linear, Matrix

LEVELS = library.usable_levels()
BOUNDS = Bounds(
    f32=1e-5,
    f16=1e-3,
    bf16=1e-3,
    q8_0=1e-3,
    q4_0=1e-3,
    q4_k=1e-3,
    q5_k=1e-3,
    q6_k=1e-3,
    q2_0=1e-3,
    q1_0=1e-3,
    tq2_0=1e-3,
    nvfp4=1e-3,
    iq1_m=1e-3,
    iq2_xs=1e-3,
    iq3_xxs=1e-3,
    iq3_s=1e-3,
)
IDS = [3, 41, 7, 7, 19, 0, 33, 28, 12, 49, 5]
GROUPS = {"num_groups": 3, "num_used_groups": 2}
ROUTES = {
    "softmax": Route(num_experts=7, num_used=3, renormalises=False),
    "renormalised": Route(num_experts=5, num_used=5, scale=1.5),
    "one": Route(num_experts=9, num_used=1),
    "sigmoid": Route(num_experts=8, num_used=3, gating="sigmoid", has_choice_bias=True, scale=2.5),
    "groups": Route(num_experts=12, num_used=4, gating="sigmoid", has_choice_bias=True, **GROUPS),
    "softmax groups": Route(num_experts=6, num_used=3, has_bias=True, **GROUPS),
    "of chosen": Route(
        num_experts=8, num_used=4, gating="softmax_of_chosen", has_bias=True, renormalises=False
    ),
}


def mixture(
    *,
    route: Route = ROUTES["softmax"],
    kind: str = "f32",
    layout: str = "sparse",
    width: int = 64,
    num_neurons: int = 37,
    path: Path = Path("memory.gguf"),
    **numbers,
) -> ModelFile:
    """A random mixture whose routers choose clearly; K-quants need whole blocks."""
    activation = numbers.pop("activation", "silu")
    sizes = make_sizes(width=width, num_neurons=num_neurons, context_length=CONTEXT)
    spec = mixture_spec(
        sizes, route=route, num_neurons=num_neurons, activation=activation, **numbers
    )
    model = make_model(spec=spec, kind=kind, path=path)
    tensors = {in_layout(n, layout): e for n, e in model.tensors.items()}
    if layout == "stock":
        tensors |= {n: transposed(e, kind) for n, e in tensors.items() if is_down(n)}
    return dataclasses.replace(model, layout=layout, tensors=tensors | clear_routers(model))


def clear_routers(model: ModelFile) -> dict[str, TensorEntry]:
    """Routers that choose clearly."""
    chance, found = np.random.default_rng(1), {}
    for name, entry in model.tensors.items():
        if "ffn_gate_inp.w" in name:
            found[name] = array_entry(4 * chance.standard_normal(entry.shape) / 8, "f32")
        elif name.endswith(("exp_probs_b.bias", "ffn_gate_inp.bias")):
            found[name] = array_entry(0.2 * chance.standard_normal(entry.shape), "f32")
    return found


def transposed(entry: TensorEntry, kind: str) -> TensorEntry:
    """Random values in the shape of the transpose."""
    shape = *entry.shape[:-2], entry.shape[-1], entry.shape[-2]
    flat = make_model(
        sizes=make_sizes(width=shape[-1], num_neurons=int(np.prod(shape[:-1]))), kind=kind
    )
    made = flat.tensors["blk.0.ffn_up.weight"]
    made = made.in_file if made.kind in TABLE_NAMES else made
    data = made.read().reshape(*shape[:-1], -1)
    return in_memory(TensorEntry(shape=shape, kind=made.kind, read_rows=lambda a, b: data[a:b]))


def with_expert_in(model: ModelFile, expert: int, value: float) -> ModelFile:
    """The model with all weights of one expert, of every layer, of this value."""

    def filled(entry: TensorEntry) -> TensorEntry:
        data = entry.read().copy()
        if entry.kind == "q8_0":  # the scale of each block
            data[expert].reshape(-1, 34)[:, :2] = np.array([value], np.float16).view(np.uint8)
        else:
            data[expert] = value
        return dataclasses.replace(entry, read_rows=lambda a, b: data[a:b])

    changed = {n: filled(e) for n, e in model.tensors.items() if "_exps" in n}
    return dataclasses.replace(model, tensors=model.tensors | changed)


# ---- the router ----------------------------------------------------------------------------------


def router_of(spec: Route, seed: int, width: int = 24) -> tuple[Router, dict[str, np.ndarray]]:
    chance = np.random.default_rng(seed)
    weight_ED = chance.standard_normal((spec.num_experts, width)).astype(np.float32) / 4
    bias_E, choice_E = chance.standard_normal((2, spec.num_experts)).astype(np.float32) / 4
    own = {"bias_E": bias_E} if spec.has_bias else {}
    own |= {"choice_bias_E": choice_E} if spec.has_choice_bias else {}
    parts = {name: torch.from_numpy(values) for name, values in own.items()}
    matrix = Matrix(data=torch.from_numpy(weight_ED), kind="f32", width=width)
    linear = Linear(weight=matrix, bias_N=parts.get("bias_E"))
    vectors = {CHOICE_BIAS: parts["choice_bias_E"]} if spec.has_choice_bias else {}
    router = Router(spec=spec, linear=linear, vectors=vectors)
    return router, {"weight_ED": weight_ED, **own}


def routed_by(router: Router, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers of the chosen experts, and their weights."""
    routed_T2K = torch.zeros(len(x_TD), 2 * router.spec.num_used)
    logit_TE = router.linear.apply(x_TD)
    choose_experts.reference(logit_TE, router.choice_bias_E, router.spec, routed_T2K)
    id_TK, weight_TK = routed_T2K.chunk(2, dim=1)
    return id_TK.long(), weight_TK


@pytest.mark.parametrize("name", ROUTES)
def test_the_router_equals_its_definition(name):
    spec = ROUTES[name]
    for seed in range(20):
        router, arrays = router_of(spec, seed)
        x_TD = np.random.default_rng(100 + seed).standard_normal((5, 24)).astype(np.float32)
        id_TK, weight_TK = routed_by(router, torch.from_numpy(x_TD))
        for x_D, id_K, weight_K in zip(x_TD, id_TK, weight_TK, strict=True):
            want_ids, want_K = route_ref(spec, x_D=x_D, **arrays)
            assert id_K.tolist() == want_ids
            assert np.abs(weight_K.numpy() - want_K).max() < 2e-6 * spec.scale


def test_the_definition_by_hand():
    """Logits 0, ln 2 and ln 4: softmax gives 1/7, 2/7 and 4/7."""
    spec = Route(num_experts=3, num_used=2, renormalises=False)
    weight_ED = np.log(np.array([[1.0], [2.0], [4.0]]))
    ids, weight_K = route_ref(spec, weight_ED, np.ones(1))
    assert ids == [2, 1] and np.allclose(weight_K, [4 / 7, 2 / 7])
    ids, weight_K = route_ref(
        dataclasses.replace(spec, renormalises=True, scale=3.0), weight_ED, np.ones(1)
    )
    assert ids == [2, 1] and np.allclose(weight_K, [2.0, 1.0])
    ids, weight_K = route_ref(spec, weight_ED, np.ones(1), choice_bias_E=np.array([9.0, 0, 0]))
    assert ids == [0, 2] and np.allclose(weight_K, [1 / 7, 4 / 7])  # the bias only chooses


@pytest.mark.parametrize("routes_in_torch", [False, True])
def test_of_equal_scores_the_lower_index_is_chosen(tmp_path, routes_in_torch):
    """All scores are equal, so the first three experts are chosen, and the others have NaN."""
    model = mixture(path=tmp_path / "m.gguf")
    zeros = {
        n: array_entry(np.zeros(e.shape), "f32") for n, e in model.tensors.items() if "inp.w" in n
    }
    model = dataclasses.replace(model, tensors=model.tensors | zeros)
    for expert in (0, 2, 3, 6):
        with (
            Engine.of(with_expert_in(model, expert, np.nan)) as engine,
            engine.observe(lambda *_: None, lambda *_: False, routes_in_torch=routes_in_torch),
        ):
            assert bool(engine.logits(IDS).isfinite().all()) == (expert >= 3)


# ---- results -------------------------------------------------------------------------------------

LAYOUTS = [("sparse", "dense"), ("sparse", "exact"), ("stock", "dense")]


@pytest.mark.parametrize("layout, mode", LAYOUTS)
@pytest.mark.parametrize("name", ROUTES)
def test_experts_equal_the_reference(name, layout, mode):
    """Also with shared experts, a gate of theirs, and a first layer without experts."""
    for activation, numbers in (
        ("relu", {"num_shared": 29, "has_shared_gate": True, "num_dense": 1}),
        ("silu", {"num_shared": 64}),
    ):
        model = mixture(route=ROUTES[name], layout=layout, activation=activation, **numbers)
        with Engine.of(model, mode=mode) as engine:
            assert rel_error(engine.logits(IDS), logits_ref(model, IDS)) < 1e-5


@pytest.mark.parametrize("layout, mode", LAYOUTS)
@pytest.mark.parametrize("kind", BOUNDS)
def test_all_types(kind, layout, mode):
    """A step of one row, steps of several, and any number of threads give the same bits."""
    block = max(64, block_sizes(kind)[0])
    num_neurons = 96 if layout == "sparse" or block_sizes(kind)[0] <= 32 else block
    model = mixture(
        kind=kind,
        layout=layout,
        num_neurons=num_neurons,
        width=block,
        activation="relu",
        num_shared=num_neurons,
    )
    with Engine.of(model, mode=mode) as engine:
        want = engine.logits(IDS)
        assert rel_error(want, logits_ref(model, IDS)) < BOUNDS[kind]
        for threads in (1, 2, 3):
            library.set_threads(threads)
            assert torch.equal(engine.logits(IDS), want)
            for position, token in enumerate(IDS):
                assert torch.equal(engine._step(token, position), want[position])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("layout, mode", LAYOUTS)
def test_all_levels(level, layout, mode):
    library.set_level(level)
    for kind in ("f32", "q8_0", "bf16"):
        model = mixture(kind=kind, layout=layout, num_neurons=160, activation="relu")
        with Engine.of(model, mode=mode) as engine:
            want = engine.logits(IDS)
            assert rel_error(want, logits_ref(model, IDS)) < BOUNDS[kind]
            library.set_threads(2)
            for position, token in enumerate(IDS):
                assert torch.equal(engine._step(token, position), want[position])


@pytest.mark.parametrize("layout, mode", LAYOUTS)
def test_random_schedules(layout, mode):
    for kind in ("f32", "q8_0"):
        model = mixture(kind=kind, layout=layout, num_neurons=64, activation="relu", num_shared=32)
        with (
            Engine.of(model, mode=mode, context_length=CONTEXT) as single,
            Engine.of(model, mode=mode, context_length=CONTEXT, num_sequences=ROOM) as engine,
        ):
            alone = Alone(single)
            chances = (random.Random(f"{kind} {mode} {seed}") for seed in range(8))
            assert sum(schedule(engine, alone, chance, 12) for chance in chances) > 200


@pytest.mark.parametrize("layout, mode", LAYOUTS)
@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_an_expert_that_no_row_chooses_is_not_read(kind, layout, mode):
    """Expert 2 is never chosen, by its bias, and has NaN; if it may be chosen, the results are
    NaN."""
    model = mixture(route=ROUTES["sigmoid"], kind=kind, layout=layout, num_neurons=64)
    for bias, is_finite in ((-100.0, True), (100.0, False)):
        values = np.zeros(8, np.float32)
        values[2] = bias
        biases = {n: array_entry(values, "f32") for n in model.tensors if "exp_probs_b" in n}
        own = dataclasses.replace(model, tensors=model.tensors | biases)
        broken = with_expert_in(own, 2, np.nan)
        with Engine.of(own, mode=mode) as whole, Engine.of(broken, mode=mode) as engine:
            got, one = engine.logits(IDS), engine._step(IDS[0], 0)
            assert bool(got.isfinite().all()) == bool(one.isfinite().all()) == is_finite
            if is_finite:
                assert torch.equal(got, whole.logits(IDS))


# ---- bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["sparse", "stock"])
def test_bytes_are_those_of_the_chosen_experts(layout):
    """Three of seven for one row; of several rows, each expert that any row chooses once."""
    model = mixture(kind="q8_0", layout=layout, num_neurons=96)
    with Engine.of(model, mode="dense") as engine:
        seen = {}
        with engine.observe(
            lambda n, i, t: seen.setdefault(i, t.unique()), lambda n, i: n == "ffn_experts"
        ):
            engine.logits(IDS)
        used = sum(map(len, seen.values()))
        row, of_expert = 68, 3 * 96 * 68 if layout == "sparse" else 2 * 96 * 68 + 64 * 102
        for run, experts in (
            (partial(engine._step, IDS[0], 0), 2 * 3),
            (partial(engine.logits, IDS), used),
        ):
            before = dataclasses.replace(engine.traffic)
            run()
            read = [getattr(engine.traffic, n) - getattr(before, n) for n in ("gate", "up", "down")]
            assert read[0] == read[1] == experts * 96 * row and sum(read) == experts * of_expert


def test_exact_mode_skips_silent_neurons_of_the_chosen_experts():
    model = mixture(kind="q8_0", num_neurons=96, activation="relu")
    with Engine.of(model, mode="exact") as engine:
        fired = []
        with engine.observe(
            lambda n, i, t: fired.append(int((t > 0).sum())), lambda n, i: n == "ffn_gate"
        ):
            engine._step(IDS[0], 0)
        before = dataclasses.replace(engine.traffic)
        engine._step(IDS[0], 0)
        read = engine.traffic.down - before.down
        assert 0 < read == sum(fired) * 68 < 2 * 3 * 96 * 68


@pytest.mark.parametrize("mode", ["dense", "exact"])
def test_bytes_by_shares_are_those_that_the_runtime_reads(mode):
    """Also with a first layer that has no experts, and another number of neurons."""
    model = mixture(kind="q8_0", num_neurons=96, activation="relu", num_dense=1)
    shares = ShareCounter(model)
    with Engine.of(model, mode=mode) as engine:
        with engine.observe(shares.observe, shares.wants):
            engine.logits(IDS)
        before = dataclasses.replace(engine.traffic)
        for position, token in enumerate(IDS):
            engine._step(token, position)
        names = ("gate", "up", "down")
        read = sum(getattr(engine.traffic, n) - getattr(before, n) for n in names) / len(IDS)
    others = head_bytes(model) + sum(layer_bytes(model, layer).attention for layer in range(2))
    assert mean_bytes(model, mode, shares) - others == pytest.approx(read, rel=1e-3)


@pytest.mark.parametrize("layout, mode", LAYOUTS)
def test_experts_are_copied_once_or_stay_in_the_file(tmp_path, caplog, monkeypatch, layout, mode):
    """In memory, in the layouts of dense layers, they take the file's bytes. If they do not fit,
    they stay in the mapped file, and the other weights do not."""
    path = tmp_path / "m.gguf"
    mixture(kind="q8_0", layout=layout, num_neurons=64).save(path)
    opened, found = ModelFile.load(path), {}
    names = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps" + "_t" * (layout == "sparse"))
    free = 1 << 30
    for is_tight in (False, True):
        monkeypatch.setattr(resolved_options, "free_memory_bytes", lambda free=free: free)
        with Engine.of(opened, mode=mode, context_length=16) as engine:
            found[is_tight] = engine.logits(IDS)
            items = engine.bytes_by_role["cpu"]
            free = int((sum(items.values()) - items["neurons"] / 2) / resolved_options.FREE_SHARE)
            for index, layer in enumerate(engine.layers):
                (block,) = layer.ffn.blocks
                for name, own in zip(names, (block.gate, block.up, block.down), strict=True):
                    raw = opened.entry(index, f"{name}.weight").read()
                    assert own.data.nbytes == raw.nbytes
                    assert np.shares_memory(own.data.numpy(), raw) == is_tight
                    assert (own.kind == "q8_0") == is_tight
                assert layer.attention.output.weight.kind != "q8_0"
    assert "the experts stay in the file" in caplog.text
    assert rel_error(*found.values()) < 1e-3


MEASURES_A_LOAD = """
import sys
from pathlib import Path
from hotsplit import Engine

def kib(name):
    status = Path("/proc/self/status").read_text()
    return int(status.split(name + ":")[1].split()[0])

Engine.load(sys.argv[1], context_length=16).close()  # imports, threads, the kernels' tables
for path in sys.argv[2:]:
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
    before = kib("VmRSS"), kib("RssAnon")
    with Engine.load(path, context_length=16) as engine:
        engine.logits([1, 2, 3])
        print(kib("VmHWM") - before[0], kib("RssAnon") - before[1])
"""


def many_experts(kind: str, path: Path, num_experts: int) -> Path:
    """Saves a mixture with these many experts, which are copies of four. llama.cpp's layout."""
    model = mixture(
        kind=kind,
        layout="stock",
        width=256,
        num_neurons=256,
        route=Route(num_experts=4, num_used=4),
    )
    route = Route(num_experts=num_experts, num_used=4)
    sizes = make_sizes(width=256, num_neurons=256, context_length=CONTEXT)
    tensors = {}
    for name, entry in model.tensors.items():
        if "_exps" in name or "ffn_gate_inp" in name:
            rows = np.repeat(entry.read(), num_experts // 4, axis=0)
            entry = TensorEntry(
                shape=(num_experts, *entry.shape[1:]),
                kind=entry.kind,
                read_rows=lambda a, b, rows=rows: rows[a:b],
            )
        tensors[name] = entry
    spec = mixture_spec(sizes, route=route, num_neurons=256, activation="silu")
    keys = spec_keys(spec)
    dataclasses.replace(model, bare_spec=spec, keys=keys, tensors=tensors, path=path).save(path)
    return path


def test_a_load_takes_the_bytes_of_the_file_and_no_copy_more(tmp_path):
    """Files of 57 and 107 MB: a tensor of all experts is a sixth of one."""
    files = [many_experts(kind, tmp_path / f"{kind}.gguf", 256) for kind in ("q4_k", "q8_0")]
    small = many_experts("q8_0", tmp_path / "s.gguf", 8)
    done = forked.run_python(MEASURES_A_LOAD, small, *files)
    assert done.returncode == 0, done.stderr
    for path, line in zip(files, done.stdout.splitlines(), strict=True):
        size = path.stat().st_size >> 10
        peak, anonymous = map(int, line.split())
        assert 0.9 * size < anonymous < 1.1 * size, (path, peak, anonymous)
        assert peak < 1.3 * size, (path, peak, anonymous)


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_experts_and_their_neurons_are_counted(activation):
    model = mixture(route=ROUTES["groups"], activation=activation, num_dense=1)
    spec, chosen = model.spec, {}
    with Engine.of(model, mode="dense") as engine:
        counter = Counter(gates_of(model), spec.most_neurons, experts_L=experts_of(model))
        seen = {}
        with (
            engine.observe(counter.observe, counter.wants),
            engine.observe(
                lambda n, i, t: seen.update({(n, i): t}), lambda n, i: n.startswith("ffn")
            ),
        ):
            engine.logits(IDS)
        router = engine.layers[1].router
        chosen, _ = routed_by(router, seen["ffn_norm", 1])
        assert torch.equal(seen["ffn_experts", 1], chosen)
    arrays = counter.arrays()
    assert torch.equal(arrays["expert_count_LE"][1], chosen.flatten().bincount(minlength=12))
    assert arrays["expert_count_LE"][0].sum() == 0 and len(IDS) * 4 == len(chosen.flatten())
    fired_TA = seen["ffn_gate", 1] > 0 if activation == "relu" else seen["ffn_hidden", 1] != 0
    want_EN = torch.zeros(12, 37, dtype=torch.int64)
    for experts_K, fired_KN in zip(chosen, fired_TA.unflatten(1, (4, 37)), strict=True):
        want_EN[experts_K] += fired_KN
    assert torch.equal(arrays["active_count_LF"][1], want_EN.flatten())
    profile = Profile(
        model_id=model.model_id,
        num_tokens=len(IDS),
        threshold_L=model.threshold_L,
        corpora=(Corpus(name="ids", sha256="0" * 64, num_tokens=len(IDS)),),
        routing_LTK=routing_of(arrays),
        **{
            name: arrays[name].numpy()
            for name in ("active_count_LF", "gate_histogram_LB", "expert_count_LE")
        },
    )
    profile.validate()
    assert np.array_equal(profile.routing_LTK[1], chosen.sort(dim=1).values)
    assert (profile.routing_LTK[0] == -1).all()
    assert (profile.merge(profile).expert_count_LE == 2 * arrays["expert_count_LE"].numpy()).all()
    wrong = dataclasses.replace(profile, expert_count_LE=profile.expert_count_LE + len(IDS))
    with pytest.raises(HotsplitError, match="experts were chosen"):
        wrong.validate()
    for routing_LTK in (profile.routing_LTK[:, :, ::-1], profile.routing_LTK + 9, [[[1]]]):
        wrong = dataclasses.replace(profile, routing_LTK=np.array(routing_LTK, np.int16))
        with pytest.raises(HotsplitError, match="recorded experts are"):
            wrong.validate()


def test_each_process_records_its_share_of_experts(monkeypatch):
    """Added up, the shares of three processes are what each has seen, also after a resumption."""
    monkeypatch.setattr(counting, "MAX_RECORDED", 6)
    gates = (Gate(activation="relu", threshold=0.0),)
    counters = [Counter(gates, 8, experts_L=(4,), share=(number, 3)) for number in range(3)]
    for number, counter in enumerate(counters):
        for batch in ([number], [3, number], [1]):  # the experts besides expert 2 of each token
            id_TK = torch.tensor([[expert if expert != 2 else 0, 2] for expert in batch])
            counter.observe("ffn_experts", 0, id_TK)
            counter.observe("ffn_gate", 0, torch.ones(len(batch), 4))
    again = Counter(gates, 8, experts_L=(4,), share=(0, 3))
    again.load(counters[0].arrays())
    parts = [counter.arrays()["recorded_LRK"] for counter in (again, *counters[1:])]
    routing_LTK = routing_of({"recorded_LRK": sum(parts)})
    assert routing_LTK[0].tolist() == [[0, 2], [2, 3], [1, 2], [2, 3], [0, 2], [2, 3]]


# ---- files ---------------------------------------------------------------------------------------


def header_of(path: Path, model: ModelFile) -> tuple[dict, dict]:
    dataclasses.replace(model, path=path).save(path)
    return read_model_gguf(path)


@pytest.mark.parametrize("layout", ["sparse", "stock"])
def test_a_file_says_all_of_its_mixture(tmp_path, layout):
    for route in (ROUTES["groups"], ROUTES["renormalised"]):
        model = mixture(route=route, layout=layout, path=tmp_path / "m.gguf", num_dense=1)
        model.save(model.path)
        spec, own = ModelFile.load(model.path).bare_spec, model.bare_spec
        for layer, want in zip(spec.layers, own.layers, strict=True):
            assert (layer.route, layer.neurons, layer.shared) == (
                want.route,
                want.neurons,
                want.shared,
            )


WRONG_KEYS = {
    "0 experts, wanted 1 to": {"expert_count": 0},
    "65536 experts, wanted 1 to": {"expert_count": 65536},
    "13 experts a token of 12": {"expert_used_count": 13},
    "0 experts a token of 12": {"expert_used_count": 0},
    "12 experts do not divide into 5 groups": {"expert_group_count": 5},
    "4 groups a token of 3": {"expert_group_used_count": 4},
    "9 experts a token from 2 of 3 groups": {"expert_used_count": 9},
    "expert_gating_func' is 4, wanted one of 1, 2, 3": {"expert_gating_func": 4},
    "expert_weights_scale' is -1.0, wanted more than 0": {"expert_weights_scale": -1},
    "expert_weights_scale' is False, wanted a number": {"expert_weights_scale": False},
    "2 layers without experts of 2": {"leading_dense_block_count": 2},
    "blk.0.ffn_gate_exps.weight is f32 .12, 37, 64., wanted .12, 36, 64.": {
        "expert_feed_forward_length": 36
    },
}


@pytest.mark.parametrize("words", WRONG_KEYS)
def test_keys_that_do_not_fit_are_refused(tmp_path, words):
    keys, tensors = header_of(tmp_path / "m.gguf", mixture(route=ROUTES["groups"]))
    ModelFile.of(tmp_path / "m.gguf", keys, tensors)
    changed = {
        f"qwen3moe.{name}": value if isinstance(value, bool) else np.float32(value)
        for name, value in WRONG_KEYS[words].items()
    }
    with pytest.raises(HotsplitError, match=words):
        ModelFile.of(tmp_path / "m.gguf", keys | changed, tensors)


def test_a_router_of_the_wrong_shape_is_refused(tmp_path):
    keys, tensors = header_of(tmp_path / "m.gguf", mixture())
    name = "blk.1.ffn_gate_inp.weight"
    tensors[name] = array_entry(np.ones((6, 64)), "f32")
    with pytest.raises(HotsplitError, match=rf"{name} is f32 \[6, 64\], wanted \[7, 64\]"):
        ModelFile.of(tmp_path / "m.gguf", keys, tensors)


def test_a_router_with_nan_is_refused_with_its_layer():
    model = mixture(route=ROUTES["softmax groups"])
    for name in ("ffn_gate_inp.weight", "ffn_gate_inp.bias"):
        values = model.entry(1, name).read().copy()
        values.flat[3] = np.nan
        broken = model.tensors | {f"blk.1.{name}": array_entry(values, "f32")}
        with pytest.raises(HotsplitError, match=f"blk.1.{name} has NaN.* the router of layer 1"):
            Engine.of(dataclasses.replace(model, tensors=broken))


def test_gates_and_ups_in_one_tensor_are_two_views(tmp_path):
    model = mixture(kind="q8_0", num_neurons=64, layout="stock")
    keys, tensors = header_of(tmp_path / "m.gguf", model)
    with Engine.load(tmp_path / "m.gguf") as engine:
        want = engine.logits(IDS)
    joined = dict(tensors)
    for layer in range(2):
        gate, up = (joined.pop(f"blk.{layer}.ffn_{n}_exps.weight").read() for n in ("gate", "up"))
        both = np.concatenate([gate, up], axis=1)
        joined[f"blk.{layer}.ffn_gate_up_exps.weight"] = TensorEntry(
            shape=(7, 128, 64), kind="q8_0", read_rows=lambda a, b, both=both: both[a:b]
        )
    extra = {k: v for k, v in keys.items() if not k.startswith(("GGUF.", "general.arch"))}
    write_gguf(tmp_path / "j.gguf", "qwen3moe", extra, joined)
    with Engine.load(tmp_path / "j.gguf") as engine:
        assert torch.equal(engine.logits(IDS), want)
    twice = joined | {"blk.1.ffn_up_exps.weight": tensors["blk.1.ffn_up_exps.weight"]}
    write_gguf(tmp_path / "t.gguf", "qwen3moe", extra, twice)
    with pytest.raises(
        HotsplitError, match="has blk.1.ffn_gate_up_exps.weight and blk.1.ffn_up_exps"
    ):
        Engine.load(tmp_path / "t.gguf")


def test_what_mixtures_cannot_do_is_refused(tmp_path):
    model = mixture(path=tmp_path / "m.gguf")
    for words, refused in {
        "predictors are not supported for mixtures": lambda: model.refuse_predictors(
            "leave them out"
        ),
        "GPUs without a plan are not supported for mixtures|sees 0 CUDA": lambda: Engine.of(
            model, device="cuda"
        ),
        "which a mixture of experts in the stock layout does not have": lambda: Engine.of(
            mixture(layout="stock", activation="relu"), mode="exact"
        ),
    }.items():
        with pytest.raises(HotsplitError, match=words):
            refused()
