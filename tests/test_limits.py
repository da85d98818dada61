"""Limits: gates that count as zero, against a decoder in float64 with the same masks.

Each limit of the reference is in the middle of the widest gap among the lower 60 % of the
magnitudes compared with it, so that rounding does not change which values pass. Letters: L layers,
D model width, F neurons, T tokens."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from models import make_model, make_sizes
from reference import Bounds, logits_ref, rel_error, weights
from test_runtime import make_split

from hotsplit import Engine
from hotsplit.artifacts.limits_file import LayerLimits, Limits
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import array_entry
from hotsplit.runtime.kernels.cpu import library
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


def model_of(kind="f32", *, activation="silu", predictor_rank=0, seed=0) -> ModelFile:
    """A model whose predictors, if any, name about half of the neurons whatever x is."""
    model = make_model(
        sizes=SHAPE, kind=kind, activation=activation, predictor_rank=predictor_rank, seed=seed
    )
    biases = {}
    if predictor_rank:
        random = np.random.default_rng(seed + 1)
        biases = {
            f"blk.{layer}.ffn_pred_up.bias": array_entry(100.0 * random.choice([-1, 1], F), "f32")
            for layer in range(L)
        }
    return dataclasses.replace(model, tensors=model.tensors | biases)


@dataclass
class Reference:
    """A decoder in float64 with the given limits or, without any, limits that it chooses if
    `is_limited`. It records which gates pass."""

    model: ModelFile
    limits: Limits | None = None
    named_LF: np.ndarray | None = None
    is_limited: bool = True
    passes: dict = field(default_factory=dict)  # [T, F] by layer
    chosen: dict = field(default_factory=dict)  # [F] by layer

    def logits(self, ids: list[int]) -> np.ndarray:
        named_LTF = None if self.named_LF is None else self.named_LF[:, None, :]
        silent = partial(self.silent, iter(range(L)))
        return logits_ref(self.model, ids, named_LTF=named_LTF, silent=silent)

    def silent(self, layers: Iterator[int], value_TF: np.ndarray) -> np.ndarray:
        layer, limit_F = next(layers), None
        if self.limits is not None:
            limit_F = self.limits.layers[layer].gate_F
        elif self.is_limited:
            limit_F = self.chosen[layer] = in_widest_gap(np.abs(value_TF))
        passes = np.ones(value_TF.shape, bool) if limit_F is None else np.abs(value_TF) > limit_F
        self.passes[layer] = passes if self.named_LF is None else passes & self.named_LF[layer]
        return ~passes

    def made(self) -> Limits:
        layers = tuple(LayerLimits(gate_F=self.chosen[layer]) for layer in range(L))
        return Limits(model_id=None, layers=layers)


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


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_those_of_float64_with_masks(tmp_path, restore_library, kind):
    """Bits are the same for every number of rows and threads, with weights in memory or mapped."""
    model = model_of(kind)
    reference = Reference(model)
    want = reference.logits(IDS)
    path = saved(model.with_limits(reference.made(), "here"), tmp_path)
    unlimited = Reference(model, is_limited=False).logits(IDS)
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


def test_limits_can_be_set_and_removed(tmp_path):
    model = model_of("q8_0")
    reference = Reference(model)
    want = reference.logits(IDS)
    with Engine.load(saved(model, tmp_path), mode="exact") as engine:
        engine.set_limits(reference.made())
        got = engine.logits(IDS)
        assert rel_error(got, want) < BOUNDS["q8_0"]
        assert torch.equal(one_by_one(engine, IDS[:9]), got[:9])
        engine.set_limits(None)
        unlimited = Reference(model, is_limited=False).logits(IDS)
        assert rel_error(engine.logits(IDS), unlimited) < BOUNDS["q8_0"] < rel_error(got, unlimited)


def test_layers_may_differ(tmp_path):
    model = model_of()
    made = chosen_of(model).made()
    limits = dataclasses.replace(made, layers=(made.layers[0], LayerLimits()))
    want = Reference(model, limits=limits).logits(IDS[:5])
    with Engine.load(saved(model.with_limits(limits, "here"), tmp_path), mode="exact") as engine:
        assert rel_error(engine.logits(IDS[:5]), want) < BOUNDS["f32"]


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_predicted_mode_applies_limits_to_the_named_neurons(tmp_path, kind):
    model = model_of(kind, predictor_rank=8)
    named_LF = np.stack([weights(model, f"blk.{i}.ffn_pred_up.bias") > 0 for i in range(L)])
    reference = Reference(model, named_LF=named_LF)
    want = reference.logits(IDS)
    path = saved(model.with_limits(reference.made(), "here"), tmp_path)
    with Engine.load(path, mode="predicted") as engine:
        got = engine.logits(IDS)
        assert rel_error(got, want) < BOUNDS[kind]
        assert torch.equal(one_by_one(engine, IDS[:9]), got[:9])


def test_dense_mode_ignores_limits(tmp_path):
    model = model_of("q8_0")
    huge = Limits(model_id=None, layers=(LayerLimits(gate_F=np.full(F, 1e30, np.float32)),) * L)
    with (
        Engine.load(saved(model, tmp_path), mode="dense") as engine,
        Engine.load(saved(model.with_limits(huge, "x"), tmp_path, "l"), mode="dense") as limited,
    ):
        want = engine.logits(IDS)
        assert torch.equal(limited.logits(IDS), want)
        assert torch.equal(one_by_one(limited, IDS[:5]), want[:5])
        engine.set_limits(huge)
        assert torch.equal(engine.logits(IDS), want)


@pytest.mark.parametrize("kind", KINDS)
def test_limits_of_zero_change_nothing(tmp_path, kind):
    model = model_of(kind)
    zero = (LayerLimits(gate_F=np.zeros(F, np.float32)),) * L
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


def test_traffic_counts_only_the_rows_that_are_read(tmp_path):
    """One token reads its own rows; several in a pass, those that any of them needs."""
    model = model_of("q8_0")
    reference = Reference(model)
    reference.logits(IDS)
    path = saved(model.with_limits(reference.made(), "here"), tmp_path)
    with Engine.load(path, mode="exact") as engine:
        engine.hidden(IDS)
        for first, count in ((20, 1), (21, 1), (22, 7), (0, 40)):
            rows = rows_of(IDS[first : first + count], first, "all")
            got = read_by(engine, lambda rows=rows: engine._live.native.run_rows(rows))
            assert got == bytes_wanted(model, reference, slice(first, first + count))
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


def test_observed_passes_apply_the_same_limits(tmp_path):
    """An observer selects the ordinary path, here one token at a time and all at once."""
    model = model_of()
    reference = Reference(model)
    want = reference.logits(IDS)
    path = saved(model.with_limits(reference.made(), "here"), tmp_path)
    with (
        Engine.load(path, mode="exact") as engine,
        engine.observe(lambda name, layer, tensor: None, lambda name, layer: False),
    ):
        assert rel_error(engine.logits(IDS), want) < BOUNDS["f32"]
        assert rel_error(one_by_one(engine, IDS[:9]), want[:9]) < BOUNDS["f32"]


def test_limits_are_the_same_without_the_kernels(tmp_path, monkeypatch):
    model = model_of("q8_0")
    reference = Reference(model)
    want = reference.logits(IDS)
    path = saved(model.with_limits(reference.made(), "here"), tmp_path)
    monkeypatch.setattr(library, "is_available", lambda: False)
    with Engine.load(path, mode="exact") as engine:
        assert isinstance(engine._live.native, str)
        assert rel_error(engine.logits(IDS), want) < BOUNDS["f16"]
        assert rel_error(one_by_one(engine, IDS[:5]), want[:5]) < BOUNDS["f16"]


def test_divided_layers_apply_the_limits_of_their_neurons(tmp_path):
    for kind, is_resident in product(("f32", "q8_0"), (True, False)):
        model = model_of(kind)
        reference = Reference(model)
        want = reference.logits(IDS)
        path = saved(model.with_limits(reference.made(), "here"), tmp_path)
        hot = [np.random.default_rng(1).permutation(F)[:70], [5]]
        make_split(ModelFile.load(path), hot, context_length=64).save(tmp_path / "s.gguf")
        with Engine.load(
            path, split=tmp_path / "s.gguf", mode="exact", is_resident=is_resident
        ) as engine:
            assert rel_error(engine.logits(IDS), want) < BOUNDS[kind]


@pytest.mark.parametrize("name", ["attn_norm.weight", "ffn_norm.weight", "ffn_gate.weight"])
def test_nan_passes_every_limit(tmp_path, name):
    """NaN in an input or a gate, under limits that are larger than all other values."""
    huge = LayerLimits(gate_F=np.full(F, 1e30, np.float32))
    model, full = model_of(), f"blk.1.{name}"
    values = model.tensors[full].read().copy()
    values[7] = np.nan
    model = dataclasses.replace(model, tensors=model.tensors | {full: array_entry(values, "f32")})
    with Engine.load(saved(model, tmp_path), mode="exact") as engine:
        engine.set_limits(Limits(model_id=None, layers=(LayerLimits(), huge)))
        for count in (1, 6):
            assert engine.logits(IDS[:count]).isnan().all(), count


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "f16"])
def test_at_every_level_a_row_does_not_depend_on_the_others(tmp_path, level, kind):
    model = model_of(kind)
    with Engine.load(saved(model, tmp_path), mode="exact") as engine:
        reference = Reference(model)
        want = reference.logits(IDS[:11])
        engine.set_limits(reference.made())
        alone = one_by_one(engine, IDS[:11])
        assert torch.equal(engine.logits(IDS[:11]), alone)
        assert rel_error(alone, want) < BOUNDS[kind]


def test_thresholds_take_the_place_of_limits(tmp_path):
    model = model_of()
    with Engine.load(saved(model, tmp_path), mode="exact") as engine:
        engine.set_limits(chosen_of(model).made())
        assert engine.model.has_limits
        engine.set_thresholds((0.2,) * L)
        assert not engine.model.has_limits
        got = engine.logits(IDS)
        engine.set_thresholds((0.0,) * L)
        constant = LayerLimits(gate_F=np.full(F, 0.2, np.float32))
        engine.set_limits(Limits(model_id=None, layers=(constant,) * L))
        assert torch.equal(engine.logits(IDS), got)
        assert engine.model.threshold_L == (0.0,) * L


def test_limits_that_cannot_be_used_are_refused(tmp_path):
    model = model_of()
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
    with pytest.raises(HotsplitError, match="mode dense uses no limits"):
        limits.save(tmp_path / "l.safetensors")
        Engine.load(path, mode="dense", limits=tmp_path / "l.safetensors")


@pytest.mark.parametrize("wrong", [np.zeros_like, lambda y: 0.5 * y, lambda y: y[::-1]])
def test_the_measure_rejects_wrong_results(wrong):
    want = Reference(model_of()).logits(IDS[:7])
    assert rel_error(wrong(want).copy(), want) > 0.1


def bytes_wanted(model: ModelFile, reference: Reference, rows: slice) -> dict[str, int]:
    """The bytes that steps read, by kind of matrix, computed from the masks of the reference."""
    total = dict.fromkeys(("gate", "up", "down", "predictor", "attention"), 0)
    for layer in range(L):
        entry = {n: model.tensors[f"blk.{layer}.{n}.weight"] for n in (
            "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down_t")}  # fmt: skip
        total["attention"] += sum(e.num_bytes for n, e in entry.items() if n.startswith("attn"))
        num_fired = int(reference.passes[layer][rows].any(axis=0).sum())
        total["gate"] += entry["ffn_gate"].num_bytes
        total["up"] += num_fired * entry["ffn_up"].row_bytes
        total["down"] += num_fired * entry["ffn_down_t"].row_bytes
    return total
