"""Limits: gates, hidden values and inputs that count as zero, in every form of storage, against a
decoder in float64 with the same masks.

Each limit of the reference is in the middle of the widest gap among the lower 60 % of the
magnitudes compared with it, so that rounding does not change which values pass. Letters: L layers,
D model width, F neurons, H outputs of all heads, N any of D, F and H, T tokens."""

import dataclasses
from dataclasses import dataclass, field
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from gguf import quants
from models import make_model, make_sizes
from reference import Bounds, norm, rel_error, rotate, weights
from test_runtime import make_split

from hotsplit import Engine
from hotsplit.artifacts.limits_file import LayerLimits, Limits, transposed_by, transposed_name
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.errors import HotsplitError
from hotsplit.families.sizes import sizes_of
from hotsplit.files.gguf_file import TensorEntry, array_entry, type_of
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.step import native_step
from hotsplit.runtime.step.batch import rows_of

pytestmark = pytest.mark.skipif(not library.is_available(), reason="the C++ kernels are not built")

KINDS = ("f32", "f16", "bf16", "q8_0", "q4_0")
# Unless weights are f32, keys and values are cached in f16; with blocks, x and the coefficients of
# sums have 16 bits too.
BOUNDS = Bounds(f32=1e-5, f16=1e-3, bf16=1e-3, q8_0=1e-3, q4_0=1e-3)
L, D, F, HEADS, KV = 2, 96, 224, 6, 2
SHAPE = make_sizes(
    width=D, num_neurons=F, num_heads=HEADS, num_kv_heads=KV, vocab_size=90, context_length=64
)
IDS = np.random.default_rng(0).integers(0, 90, 40).tolist()
NEURONS, ATTENTION, INPUTS = ("gate_F", "hidden_F"), ("qkv_D", "output_H"), ("ffn_D",)
ALL = (*NEURONS, *ATTENTION, *INPUTS)
STORED = {"rows": (), "attention": ATTENTION, "all": (*ATTENTION, *INPUTS)}


def model_of(kind="f32", *, activation="silu", predictor_rank=0, seed=0) -> ModelFile:
    """A model with biases. Its predictors, if any, name about half of the neurons whatever x is."""
    model = make_model(
        sizes=SHAPE, kind=kind, activation=activation, predictor_rank=predictor_rank, seed=seed
    )
    random = np.random.default_rng(seed + 1)
    sizes = {"attn_q": D, "attn_k": D * KV // HEADS, "attn_v": D * KV // HEADS, "attn_output": D,
             "ffn_gate": F, "ffn_up": F, "ffn_down": D}  # fmt: skip
    more = {
        f"blk.{layer}.{name}.bias": array_entry(0.3 * random.standard_normal(size), "f32")
        for layer in range(L)
        for name, size in sizes.items()
    }
    if predictor_rank:
        for layer in range(L):
            bias_F = 100.0 * random.choice([-1, 1], F)
            more[f"blk.{layer}.ffn_pred_up.bias"] = array_entry(bias_F, "f32")
    return dataclasses.replace(model, tensors=model.tensors | more)


def stored(model: ModelFile, fields: tuple[str, ...]) -> ModelFile:
    """The model with those matrices transposed, and rounded again, whose inputs these limits
    silence."""
    every = Limits(
        model_id=None,
        layers=(LayerLimits(**dict.fromkeys(fields, np.zeros(1, np.float32))),) * L,
    )
    tensors = dict(model.tensors)
    for name in sorted(transposed_by(every, model.graph)):
        entry = tensors.pop(name)
        tensors[transposed_name(name)] = entry_of(weights(model, name).T, entry.kind)
    return dataclasses.replace(model, tensors=tensors)


def entry_of(values: np.ndarray, kind: str) -> TensorEntry:
    values = np.ascontiguousarray(values, np.float32)
    if kind in ("f32", "f16"):
        return array_entry(values, kind)
    data = quants.quantize(values, type_of(kind))
    return TensorEntry(shape=values.shape, kind=kind, read_rows=lambda a, b: data[a:b])


@dataclass
class Reference:
    """A decoder in float64 with the given limits or, without any, limits that it chooses for
    `fields`. It records which values pass."""

    model: ModelFile
    fields: tuple[str, ...] = ALL
    limits: Limits | None = None
    named_LF: np.ndarray | None = None
    chosen: list[dict] = field(default_factory=lambda: [{} for _ in range(L)])
    passes: dict = field(default_factory=dict)  # [T, N] by layer and field

    def silence(self, layer: int, name: str, value_TN: np.ndarray, of_TN=None) -> np.ndarray:
        """`value_TN` where it passes, else 0; `of_TN` is False where it is not computed."""
        limit_N = None
        if self.limits is not None:
            limit_N = self.limits.layers[layer].present.get(name)
        elif name in self.fields:
            limit_N = self.chosen[layer][name] = in_widest_gap(np.abs(value_TN))
        passes = np.ones(value_TN.shape, bool) if limit_N is None else np.abs(value_TN) > limit_N
        if name not in NEURONS:
            passes[0] = True  # the first token's inputs always pass
        self.passes[layer, name] = passes if of_TN is None else passes & of_TN
        return np.where(self.passes[layer, name], value_TN, 0)

    def logits(self, ids: list[int]) -> np.ndarray:
        s = sizes_of(self.model.bare_spec)
        x = weights(self.model, "token_embd.weight")[ids]
        for layer in range(s.num_layers):
            x = x + self.attention(layer, norm(x, self.w(layer, "attn_norm"), s.norm_epsilon))
            x = x + self.ffn(layer, norm(x, self.w(layer, "ffn_norm"), s.norm_epsilon))
        x = norm(x, weights(self.model, "output_norm.weight"), s.norm_epsilon)
        return x @ weights(self.model, self.model.head_name).T

    def w(self, layer: int, name: str) -> np.ndarray:
        full = f"blk.{layer}.{name}.weight"
        if full in self.model.tensors:
            return weights(self.model, full)
        return weights(self.model, transposed_name(full)).T

    def product(self, layer: int, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.w(layer, name).T + weights(self.model, f"blk.{layer}.{name}.bias")

    def attention(self, layer: int, x: np.ndarray) -> np.ndarray:
        s, count = sizes_of(self.model.bare_spec), len(x)
        x = self.silence(layer, "qkv_D", x)
        q = rotate(self.product(layer, "attn_q", x).reshape(count, s.num_heads, -1), s)
        k = rotate(self.product(layer, "attn_k", x).reshape(count, s.num_kv_heads, -1), s)
        v = self.product(layer, "attn_v", x).reshape(count, s.num_kv_heads, -1)
        out = np.zeros_like(q)
        for head, t in product(range(s.num_heads), range(count)):
            group = head * s.num_kv_heads // s.num_heads
            scores = k[: t + 1, group] @ q[t, head] / np.sqrt(s.head_width)
            share = np.exp(scores - scores.max())
            out[t, head] = share / share.sum() @ v[: t + 1, group]
        heads = self.silence(layer, "output_H", out.reshape(count, -1))
        return self.product(layer, "attn_output", heads)

    def ffn(self, layer: int, x: np.ndarray) -> np.ndarray:
        x = self.silence(layer, "ffn_D", x)
        gate = self.product(layer, "ffn_gate", x)
        value = gate / (1 + np.exp(-gate))
        named = None if self.named_LF is None else np.broadcast_to(self.named_LF[layer], gate.shape)
        value = self.silence(layer, "gate_F", value, named)
        hidden = value * self.product(layer, "ffn_up", x)
        hidden = self.silence(layer, "hidden_F", hidden, self.passes[layer, "gate_F"])
        down = weights(self.model, f"blk.{layer}.ffn_down_t.weight")
        return hidden @ down + weights(self.model, f"blk.{layer}.ffn_down.bias")

    def made(self) -> Limits:
        return Limits(model_id=None, layers=tuple(LayerLimits(**own) for own in self.chosen))


def in_widest_gap(magnitude_TN: np.ndarray) -> np.ndarray:
    """f32 [N]: for each column, the middle of the widest gap below its 60th percentile."""
    ordered = np.sort(magnitude_TN, axis=0)[: max(2, int(0.6 * len(magnitude_TN)))]
    gap = np.diff(ordered, axis=0)
    place = gap.argmax(axis=0)
    middle = (ordered[:-1] + ordered[1:]) / 2
    return middle[place, np.arange(ordered.shape[1])].astype(np.float32)


def saved(model: ModelFile, tmp_path, name="m.gguf"):
    model = dataclasses.replace(model, path=tmp_path / name)
    model.save(model.path)
    return model.path


def one_by_one(engine: Engine, ids) -> torch.Tensor:
    return torch.stack([engine._step(token, position) for position, token in enumerate(ids)])


def read_by(engine: Engine, run) -> dict[str, int]:
    before = dataclasses.asdict(engine.traffic)
    run()
    return {k: v - before[k] for k, v in dataclasses.asdict(engine.traffic).items()}


@pytest.mark.parametrize("storage", STORED)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_those_of_float64_with_masks(tmp_path, restore_library, kind, storage):
    """Bits are the same for every number of rows and threads, with weights in memory or mapped."""
    model = stored(model_of(kind), STORED[storage])
    reference = Reference(model)
    want = reference.logits(IDS)
    path = saved(model.with_limits(reference.made(), "here"), tmp_path)
    unlimited = Reference(model, fields=()).logits(IDS)
    assert rel_error(unlimited, want) > 0.05
    bits = None
    for is_resident in (True, False):
        with Engine.load(path, mode="exact", is_resident=is_resident) as engine:
            assert engine.mode == "exact" and not isinstance(engine._live.native, str)
            for threads in (1, 2):
                library.set_threads(threads)
                singles = one_by_one(engine, IDS)
                bits = singles if bits is None else bits
                assert torch.equal(singles, bits)
                for count in (1, 2, 7, 40):
                    assert torch.equal(engine.logits(IDS[:count]), bits[:count]), count
    assert rel_error(bits, want) < BOUNDS[kind]


@pytest.mark.parametrize("fields", [(name,) for name in ALL] + [NEURONS, (*ATTENTION, "hidden_F")])
@pytest.mark.parametrize("storage", STORED)
def test_each_rule_works_alone(tmp_path, fields, storage):
    model = stored(model_of("q8_0"), STORED[storage])
    reference = Reference(model, fields=fields)
    want = reference.logits(IDS)
    with Engine.load(saved(model, tmp_path), mode="exact") as engine:
        engine.set_limits(reference.made())
        got = engine.logits(IDS)
        assert rel_error(got, want) < BOUNDS["q8_0"]
        assert torch.equal(one_by_one(engine, IDS[:9]), got[:9])
        engine.set_limits(None)
        unlimited = Reference(model, fields=()).logits(IDS)
        assert rel_error(engine.logits(IDS), unlimited) < BOUNDS["q8_0"] < rel_error(got, unlimited)


@pytest.mark.parametrize("storage", STORED)
def test_layers_may_differ(tmp_path, storage):
    model = stored(model_of(), STORED[storage])
    made = chosen_of(model).made()
    limits = dataclasses.replace(made, layers=(made.layers[0], LayerLimits()))
    want = Reference(model, limits=limits).logits(IDS[:5])
    with Engine.load(saved(model.with_limits(limits, "here"), tmp_path), mode="exact") as engine:
        assert rel_error(engine.logits(IDS[:5]), want) < BOUNDS["f32"]


@pytest.mark.parametrize("storage", STORED)
@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_predicted_mode_applies_limits_to_the_named_neurons(tmp_path, kind, storage):
    model = stored(model_of(kind, predictor_rank=8), STORED[storage])
    named_LF = np.stack([weights(model, f"blk.{i}.ffn_pred_up.bias") > 0 for i in range(L)])
    reference = Reference(model, named_LF=named_LF)
    want = reference.logits(IDS)
    path = saved(model.with_limits(reference.made(), "here"), tmp_path)
    with Engine.load(path, mode="predicted") as engine:
        got = engine.logits(IDS)
        assert rel_error(got, want) < BOUNDS[kind]
        assert torch.equal(one_by_one(engine, IDS[:9]), got[:9])


@pytest.mark.parametrize("storage", STORED)
def test_dense_mode_ignores_limits(tmp_path, storage):
    model = stored(model_of("q8_0"), STORED[storage])
    huge = Limits(model_id=None, layers=tuple(
        LayerLimits(**{n: np.full_like(v, 1e30) for n, v in own.items()})
        for own in chosen_of(model).chosen
    ))  # fmt: skip
    with (
        Engine.load(saved(model, tmp_path), mode="dense") as engine,
        Engine.load(saved(model.with_limits(huge, "x"), tmp_path, "l"), mode="dense") as limited,
    ):
        want = engine.logits(IDS)
        assert torch.equal(limited.logits(IDS), want)
        assert torch.equal(one_by_one(limited, IDS[:5]), want[:5])
        engine.set_limits(huge)
        assert torch.equal(engine.logits(IDS), want)


@pytest.mark.parametrize("storage", STORED)
@pytest.mark.parametrize("kind", KINDS)
def test_limits_of_zero_change_nothing(tmp_path, kind, storage):
    model = stored(model_of(kind), STORED[storage])
    zero = tuple(
        LayerLimits(**{name: np.zeros_like(limit) for name, limit in own.items()})
        for own in chosen_of(model).chosen
    )
    with Engine.load(saved(model, tmp_path), mode="exact") as engine:
        want, alone = engine.logits(IDS), one_by_one(engine, IDS[:5])
        engine.set_limits(Limits(model_id=None, layers=zero))
        assert torch.equal(engine.logits(IDS), want)
        assert torch.equal(one_by_one(engine, IDS[:5]), alone)


def chosen_of(model: ModelFile) -> Reference:
    reference = Reference(model)
    reference.logits(IDS[:5])
    return reference


def test_a_constant_limit_equals_a_threshold(tmp_path):
    """The logits are equal bit for bit, and so are the bytes read."""
    for kind in ("f32", "q4_0"):
        model = model_of(kind)
        constant = LayerLimits(gate_F=np.full(F, 0.11, np.float32))
        threshold = dataclasses.replace(model, threshold_L=(0.11,) * L)
        with (
            Engine.load(saved(threshold, tmp_path), mode="exact") as scalar,
            Engine.load(saved(model, tmp_path, "v.gguf"), mode="exact") as vector,
        ):
            vector.set_limits(Limits(model_id=None, layers=(constant,) * L))
            for count in (1, 12):
                logits, read = [], []
                for engine in (scalar, vector):
                    run = partial(engine.logits, IDS[:count])
                    read.append(read_by(engine, lambda run=run, to=logits: to.append(run())))
                assert torch.equal(*logits) and read[0] == read[1]
                assert 0 < read[0]["up"] < read[0]["gate"] or count > 1


@pytest.mark.parametrize("storage", STORED)
def test_traffic_counts_only_the_rows_that_are_read(tmp_path, storage):
    """One token reads its own rows; several in a pass, those that any of them needs."""
    fields = STORED[storage]
    model = stored(model_of("q8_0"), fields)
    reference = Reference(model)
    reference.logits(IDS)
    path = saved(model.with_limits(reference.made(), "here"), tmp_path)
    with Engine.load(path, mode="exact") as engine:
        engine.hidden(IDS)
        for first, count in ((20, 1), (21, 1), (22, 7), (0, 40)):
            rows = rows_of(IDS[first : first + count], first, "all")
            got = read_by(engine, lambda rows=rows: engine._live.native.run_rows(rows))
            assert got == bytes_wanted(model, fields, reference, slice(first, first + count))
    with Engine.load(path, mode="dense") as engine:
        got = read_by(engine, lambda: engine.logits(IDS[:3]))
    whole = {n: e.num_bytes for n, e in model.tensors.items() if len(e.shape) == 2}
    for name, starts in {
        "gate": "ffn_gate",
        "up": "ffn_up",
        "down": "ffn_down",
        "attention": "attn_",
    }.items():
        assert got[name] == sum(b for n, b in whole.items() if f".{starts}" in n), name


@pytest.mark.parametrize("storage", STORED)
def test_observed_passes_apply_the_same_limits(tmp_path, storage):
    """An observer selects the ordinary path, here one token at a time and all at once. The observed
    outputs of attention's heads pass their limits where the reference's do."""
    model = stored(model_of(), STORED[storage])
    reference = Reference(model)
    want = reference.logits(IDS)
    seen = []
    with Engine.load(
        saved(model.with_limits(reference.made(), "here"), tmp_path), mode="exact"
    ) as engine:
        with engine.observe(
            lambda name, layer, tensor: seen.append(tensor.clone()),
            lambda name, layer: name == "attn_heads" and layer == 0,
        ):
            assert rel_error(engine.logits(IDS), want) < BOUNDS["f32"]
            limit_H = reference.chosen[0]["output_H"]
            passes = np.abs(seen[0].numpy()) > limit_H
            passes[0] = True
            assert (passes == reference.passes[0, "output_H"]).all()
            assert rel_error(one_by_one(engine, IDS[:9]), want[:9]) < BOUNDS["f32"]


def test_limits_are_the_same_without_the_kernels(tmp_path, monkeypatch):
    for storage, fields in STORED.items():
        model = stored(model_of("q8_0"), fields)
        reference = Reference(model)
        want = reference.logits(IDS)
        path = saved(model.with_limits(reference.made(), "here"), tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(library, "is_available", lambda: False)
            with Engine.load(path, mode="exact") as engine:
                assert isinstance(engine._live.native, str), storage
                assert rel_error(engine.logits(IDS), want) < BOUNDS["f16"]
                assert rel_error(one_by_one(engine, IDS[:5]), want[:5]) < BOUNDS["f16"]


def test_divided_layers_apply_the_limits_of_their_neurons(tmp_path):
    for kind, is_resident in product(("f32", "q8_0"), (True, False)):
        model = model_of(kind)
        reference = Reference(model, fields=(*NEURONS, *ATTENTION))
        want = reference.logits(IDS)
        path = saved(model.with_limits(reference.made(), "here"), tmp_path)
        hot = [np.random.default_rng(1).permutation(F)[:70], [5]]
        make_split(ModelFile.load(path), hot, context_length=64).save(tmp_path / "s.gguf")
        with Engine.load(
            path, split=tmp_path / "s.gguf", mode="exact", is_resident=is_resident
        ) as engine:
            assert rel_error(engine.logits(IDS), want) < BOUNDS[kind]


@pytest.mark.parametrize("storage", STORED)
def test_nan_passes_every_limit(tmp_path, storage):
    """NaN in an input, a gate or an up, under limits that are larger than all other values."""
    places = {"attn_norm": ("qkv_D", "output_H"), "ffn_norm": ("ffn_D",), "ffn_gate": NEURONS,
              "ffn_up": ("hidden_F",)}  # fmt: skip
    for (name, fields), count in product(places.items(), (1, 6)):
        model = stored(model_of(), STORED[storage])
        full = f"blk.1.{name}.{'weight' if name.endswith('norm') else 'bias'}"
        values = model.tensors[full].read().copy()
        values[7] = np.nan
        model = dataclasses.replace(
            model, tensors=model.tensors | {full: array_entry(values, "f32")}
        )
        sizes = {"gate_F": F, "hidden_F": F, "qkv_D": D, "output_H": D, "ffn_D": D}
        limits = {field: np.full(sizes[field], 1e30, np.float32) for field in fields}
        with Engine.load(saved(model, tmp_path), mode="exact") as engine:
            engine.set_limits(Limits(model_id=None, layers=(LayerLimits(), LayerLimits(**limits))))
            assert engine.logits(IDS[:count]).isnan().all(), (name, count)


def test_transposed_floats_give_the_product_by_rows(tmp_path):
    model = model_of("f32")
    limits = chosen_of(model).made()
    with (
        Engine.load(saved(model.with_limits(limits, "x"), tmp_path), mode="exact") as by_rows,
        Engine.load(
            saved(stored(model, STORED["all"]).with_limits(limits, "x"), tmp_path, "t"),
            mode="exact",
        ) as by_inputs,
    ):
        assert rel_error(by_inputs.logits(IDS), by_rows.logits(IDS)) < BOUNDS["f32"]


@pytest.mark.parametrize("mode", ["exact", "dense"])
def test_transposed_neurons_of_drelu_rectify_their_ups(tmp_path, mode):
    """No file has such neurons, since limits are for SiLU and GELU, but the kernels take them."""
    by_rows, by_inputs = model_of(activation="drelu"), stored(model_of(), STORED["all"])
    with (
        Engine.load(saved(by_rows, tmp_path), mode=mode) as plain,
        Engine.load(saved(by_inputs, tmp_path, "t"), mode=mode) as transposed,
    ):
        live = transposed._live
        layers = tuple(
            dataclasses.replace(
                layer,
                ffn=dataclasses.replace(
                    layer.ffn, gate=dataclasses.replace(layer.ffn.gate, activation="drelu")
                ),
            )
            for layer in live.weights.layers
        )
        weights = dataclasses.replace(live.weights, layers=layers)
        native = native_step.build(weights, transposed.traffic)
        transposed._sequences.decoder = dataclasses.replace(live, weights=weights, native=native)
        assert rel_error(transposed.logits(IDS), plain.logits(IDS)) < BOUNDS["f32"]
        assert rel_error(one_by_one(transposed, IDS[:5]), plain.logits(IDS[:5])) < BOUNDS["f32"]


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "f16"])
def test_at_every_level_a_row_does_not_depend_on_the_others(tmp_path, level, kind):
    model = stored(model_of(kind), STORED["all"])
    with Engine.load(saved(model, tmp_path), mode="exact") as engine:
        reference = Reference(model)
        want = reference.logits(IDS[:11])
        engine.set_limits(reference.made())
        alone = one_by_one(engine, IDS[:11])
        assert torch.equal(engine.logits(IDS[:11]), alone)
        assert rel_error(alone, want) < BOUNDS[kind]


def test_thresholds_take_the_place_of_gate_limits(tmp_path):
    model = model_of()
    with Engine.load(saved(model, tmp_path), mode="exact") as engine:
        limits = chosen_of(model).made()
        engine.set_limits(limits)
        assert engine.model.has_limits
        engine.set_thresholds((0.2,) * L)
        assert engine.model.limits.layers[0].gate_F is None
        other = tuple(dataclasses.replace(layer, gate_F=None) for layer in limits.layers)
        got = engine.logits(IDS)
        engine.set_thresholds((0.0,) * L)
        constant = LayerLimits(gate_F=np.full(F, 0.2, np.float32)).gate_F
        engine.set_limits(Limits(model_id=None, layers=tuple(
            dataclasses.replace(layer, gate_F=constant) for layer in other
        )))  # fmt: skip
        assert torch.equal(engine.logits(IDS), got)
        assert engine.model.threshold_L == (0.0,) * L


def test_limits_that_cannot_be_used_are_refused(tmp_path):
    model = stored(model_of(), STORED["all"])
    limits = chosen_of(model).made()
    path = saved(model.with_limits(limits, "here"), tmp_path)
    with Engine.load(path, mode="exact") as engine:
        for wrong, message in (
            (dataclasses.replace(limits, layers=limits.layers[:1]), "limits of 1 layers"),
            (dataclasses.replace(limits, model_id="other"), "limits of model other"),
            (Limits(model_id=None, layers=(LayerLimits(gate_F=np.zeros(3, np.float32)),) * L),
             r"is \[3\], wanted \[224\]"),
            (Limits(model_id=None, layers=(LayerLimits(gate_F=-np.ones(F, np.float32)),) * L),
             "not all finite and at least 0"),
        ):  # fmt: skip
            with pytest.raises(HotsplitError, match=message):
                engine.set_limits(wrong)
    make_split(ModelFile.load(path), [[3], [4]], context_length=64).save(tmp_path / "s.gguf")
    with pytest.raises(HotsplitError, match="leave the plan out"):
        Engine.load(path, split=tmp_path / "s.gguf")
    with pytest.raises(HotsplitError, match="mode dense uses no limits"):
        limits.save(tmp_path / "l.safetensors")
        Engine.load(path, mode="dense", limits=tmp_path / "l.safetensors")


@pytest.mark.parametrize("wrong", [np.zeros_like, lambda y: 0.5 * y, lambda y: y[::-1]])
def test_the_measure_rejects_wrong_results(wrong):
    want = Reference(model_of()).logits(IDS[:7])
    assert rel_error(wrong(want).copy(), want) > 0.1


def bytes_wanted(model, fields, reference: Reference, rows: slice) -> dict[str, int]:
    """The bytes that steps read, by kind of matrix, computed from the masks of the reference."""

    def row(layer: int, name: str) -> int:
        full = f"blk.{layer}.{name}.weight"
        return model.tensors.get(full, model.tensors.get(transposed_name(full))).row_bytes

    def any_of(layer: int, name: str) -> int:
        return int(reference.passes[layer, name][rows].any(axis=0).sum())

    total = dict.fromkeys(("gate", "up", "down", "predictor", "attention"), 0)
    for layer in range(L):
        for place, names in (
            ("qkv_D", ("attn_q", "attn_k", "attn_v")),
            ("output_H", ("attn_output",)),
        ):
            for name in names:
                full = f"blk.{layer}.{name}.weight"
                count = any_of(layer, place) if place in fields else model.tensors[full].shape[0]
                total["attention"] += count * row(layer, name)
        gates, ups = (F, any_of(layer, "gate_F"))
        if "ffn_D" in fields:
            gates = ups = any_of(layer, "ffn_D")
        total["gate"] += gates * row(layer, "ffn_gate")
        total["up"] += ups * row(layer, "ffn_up")
        total["down"] += any_of(layer, "hidden_F") * row(layer, "ffn_down")
    return total
