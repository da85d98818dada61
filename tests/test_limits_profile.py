"""Profiles, predictors and plans of model files with limits.

Firings are counted again from transformers' activations in float64, in which every gate at or below
its limit is silenced. Letters: L layers, T tokens, D model width, F neurons."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import random_llama
from forked import run_command
from models import make_machine, make_model, make_profile, make_sizes
from sparsify_runs import make_inputs, tiny_config
from test_profile_run import stopped_at
from transformers import AutoModelForCausalLM

from hotsplit import Engine
from hotsplit.artifacts.limits_file import LayerLimits, Limits
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.predictor_file import Predictors
from hotsplit.artifacts.profile_file import Profile
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.costs.part_bytes import plan_bytes
from hotsplit.errors import HotsplitError, Interrupted
from hotsplit.measure.evaluate.config import EvalConfig
from hotsplit.measure.evaluate.eval_file import eval_content
from hotsplit.measure.evaluate.quality import evaluate
from hotsplit.options.engine_config import EngineConfig
from hotsplit.profile import memory
from hotsplit.profile.collect import profile
from hotsplit.profile.config import ProfileConfig
from hotsplit.profile.corpus.corpus import read_windows
from hotsplit.profile.count.merge import MergeConfig, merge
from hotsplit.profile.predictors.check import check_predictors
from hotsplit.profile.predictors.layer_trainer import LayerTrainer, phases
from hotsplit.profile.predictors.low_rank import Level
from hotsplit.profile.predictors.options import PredictorOptions
from hotsplit.profile.stream import streaming
from hotsplit.report.config import ReportConfig
from hotsplit.report.report import report
from hotsplit.runtime.kernels.gate import Gate
from hotsplit.runtime.step.workspace import workspace_bytes
from hotsplit.solver.solve import SolveConfig, solve
from hotsplit.sparsify.run import sparsify

L, D, F = 3, 96, 160
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A random SiLU checkpoint `hf`, as a model file `m.gguf`, and a text `t.txt`."""
    folder = tmp_path_factory.mktemp("limits")
    sizes = {"hidden_size": D, "intermediate_size": F, "num_hidden_layers": L}
    random_llama(folder / "hf", hidden_act="silu", **sizes)
    convert(ConvertConfig(source=folder / "hf", output=folder / "m.gguf", outtype="f32"))
    words = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "def", "return")
    order = np.random.default_rng(0).choice(words, 9000)
    (folder / "t.txt").write_text("\n".join(" ".join(line) for line in order.reshape(-1, 9)))
    return folder


@torch.no_grad()
def scales(folder: Path) -> list[float]:
    """The median magnitude of each layer's activated gates."""
    seen: dict[int, float] = {}
    model = hooked(folder, lambda layer, gate: seen.setdefault(layer, float(gate.abs().median())))
    model(torch.arange(3, 120)[None])
    return [seen[layer] for layer in range(L)]


def limits_of(folder: Path, *, seed: int = 0, layers: tuple[int, ...] = (0, 1, 2)) -> Limits:
    """Limits that silence about half of the neurons, different for each neuron."""
    random = np.random.default_rng(seed)
    found = []
    for layer, scale in enumerate(scales(folder)):
        own = LayerLimits(gate_F=(scale * random.uniform(0.5, 1.6, F)).astype("f4"))
        found.append(own if layer in layers else LayerLimits())
    return Limits(model_id=None, layers=tuple(found), is_trained=True)


def with_limits(folder: Path, limits: Limits, to: Path) -> Path:
    """The checkpoint as a model file with these limits."""
    limits.save(to.with_suffix(".limits"))
    convert(ConvertConfig(source=folder / "hf", output=to, outtype="f32",
                          limits=to.with_suffix(".limits")))  # fmt: skip
    return to


def hooked(folder: Path, change) -> torch.nn.Module:
    """transformers' model in float64. If `change(layer, gate)` returns a tensor, it replaces the
    activated gates."""
    model = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float64).eval()

    def told(layer: int, gate: torch.Tensor) -> torch.Tensor | None:
        found = change(layer, gate)
        return found if isinstance(found, torch.Tensor) else None

    for index, layer in enumerate(model.model.layers):
        layer.mlp.act_fn.register_forward_hook(
            lambda module, args, out, index=index: told(index, out)
        )
    return model


@torch.no_grad()
def counted_again(folder: Path, limits: Limits, windows) -> np.ndarray:
    """Firings i64 [L, F]."""
    count_LF = np.zeros((L, F), np.int64)

    def change(layer: int, gate: torch.Tensor) -> torch.Tensor:
        limit_F = limits.layers[layer].gate_F
        fires = gate.abs() > (-1.0 if limit_F is None else torch.from_numpy(limit_F).double())
        count_LF[layer] += fires[0].sum(0).numpy()
        return gate * fires

    model = hooked(folder, change)
    for ids_T in windows:
        model(ids_T[None])
    return count_LF


def config_of(folder: Path, model: Path, output: Path, **options) -> ProfileConfig:
    options = {"max_tokens": 1500} | options
    return ProfileConfig(model=model, corpora=(folder / "t.txt",), output=output, **options)


def windows_of(folder: Path, model: Path, max_tokens: int = 1500):
    with Engine.load(model) as engine:
        return read_windows([folder / "t.txt"], engine.codec, context_length=128,
                            max_tokens=max_tokens, seed=0).ids  # fmt: skip


@pytest.mark.parametrize("layers", [(0, 1, 2), (0, 2)])
def test_counts_equal_those_of_transformers_with_the_same_limits(tmp_path, made, layers):
    limits = limits_of(made, layers=layers)
    model = with_limits(made, limits, tmp_path / "m.gguf")
    report = profile(config_of(made, model, tmp_path / "p"))
    found, windows = Profile.load(tmp_path / "p"), windows_of(made, model)
    want_LF = counted_again(made, limits, windows)
    # A value within rounding of its limit may fall on its other side, and then so may a few values
    # of later layers: in all, at most one in 10,000.
    assert np.abs(found.active_count_LF - want_LF).sum() <= 1e-4 * 1500 * L * F
    assert found.limits == report.limits == limits.sha256 and found.limits is not None
    for layer, own in enumerate(limits.layers):
        share = found.density_L[layer]
        assert share == 1.0 if own.gate_F is None else 0.15 < share < 0.7, (layer, share)
    # the check notices limits that are ignored, and those of another layer
    none = Limits(model_id=None, layers=(LayerLimits(),) * L)
    turned = dataclasses.replace(limits, layers=limits.layers[1:] + limits.layers[:1])
    for wrong in (none, turned) if len(layers) < L else (none,):
        error_LF = found.active_count_LF - counted_again(made, wrong, windows)
        assert np.abs(error_LF).sum() > 0.05 * want_LF.sum()
    quality = report.record["exact"]
    assert quality.kl_mean > 1e-4
    assert quality.bytes_per_token < quality.dense_bytes_per_token


def test_a_streamed_profile_counts_the_same(tmp_path, made, monkeypatch):
    model = with_limits(made, limits_of(made), tmp_path / "m.gguf")
    options = {"train_predictors": tmp_path / "whole", "predictors": PredictorOptions(rank=32)}
    whole = profile(config_of(made, model, tmp_path / "p", max_tokens=2500, **options))
    needs = memory.needs_of
    monkeypatch.setattr(
        streaming, "needs_of", lambda *a, **k: dataclasses.replace(needs(*a, **k), whole_bytes=1 << 60)
    )  # fmt: skip
    options["train_predictors"] = tmp_path / "parts"
    parts = profile(config_of(made, model, tmp_path / "q", max_tokens=2500, **options))
    one, other = Profile.load(tmp_path / "p"), Profile.load(tmp_path / "q")
    assert (one.active_count_LF == other.active_count_LF).all() and one.limits == other.limits
    assert whole.record["exact"].kl_mean == pytest.approx(parts.record["exact"].kl_mean, rel=1e-6)
    densities = [[q.chosen.density for q in each.quality_L] for each in (whole, parts)]
    assert densities[0] == densities[1] and max(densities[0]) < 0.6


def test_a_profile_or_predictors_of_other_limits_do_not_fit(tmp_path, made, monkeypatch):
    """The model files come from one checkpoint, so they have the same model_id and size."""
    for name, seed in (("a.gguf", 0), ("b.gguf", 1)):
        with_limits(made, limits_of(made, seed=seed), tmp_path / name)
    a, b, plain = tmp_path / "a.gguf", tmp_path / "b.gguf", made / "m.gguf"
    make_machine().save(tmp_path / "machine.json")
    options = {"train_predictors": tmp_path / "pred", "predictors": PredictorOptions(rank=32)}
    profile(config_of(made, a, tmp_path / "p", max_tokens=2500, **options))
    compared = evaluate(
        EvalConfig(
            model=a, corpora=(made / "t.txt",), engine=EngineConfig(mode="exact"), max_tokens=200
        )
    )
    assert compared.limits == ModelFile.load(a).limits.sha256 != ModelFile.load(b).limits.sha256
    (tmp_path / "e.json").write_text(json.dumps(eval_content(compared)))
    page = {"output": tmp_path / "page.html", "evals": (tmp_path / "e.json",)}
    assert "quality" not in report(ReportConfig(model=a, **page)).missing
    for model, words in ((b, "made with limits .*b.gguf has limits"), (plain, "has no limits")):
        with pytest.raises(HotsplitError, match=words):
            report(ReportConfig(model=model, force=True, **page))
    profile(config_of(made, plain, tmp_path / "plain"))
    profile(config_of(made, b, tmp_path / "q", seed=1))

    def solved(model: Path, counted: str) -> SolveConfig:
        return SolveConfig(
            model=model, profile=tmp_path / counted, machine=tmp_path / "machine.json",
            output=tmp_path / "plan", vram_budget_bytes=(0,), force=True,
        )  # fmt: skip

    def workspace(*about) -> int:
        return 1 << 20

    assert solve(solved(a, "p"), workspace).mode == "exact"
    for model, counted, words in (
        (b, "p", "made with limits .*, but .*b.gguf has limits .*profile on this model"),
        (a, "plain", "made without limits, but .*a.gguf has limits"),
        (plain, "p", "made with limits .*, but .*m.gguf has no limits"),
    ):
        with pytest.raises(HotsplitError, match=words):
            solve(solved(model, counted), workspace)
    with pytest.raises(HotsplitError, match="counted by different limits"):
        merge(MergeConfig(profiles=(tmp_path / "p", tmp_path / "q"), output=tmp_path / "sum"))

    def added(model: Path) -> ConvertConfig:
        return ConvertConfig(source=model, output=tmp_path / "full", predictors=tmp_path / "pred",
                             force=True)  # fmt: skip

    for model in (b, plain):
        with pytest.raises(HotsplitError, match="train predictors for this model file"):
            convert(added(model))
    convert(added(a))
    assert ModelFile.load(tmp_path / "full").quality.keys() == {"exact", "predicted"}
    other = {"source": tmp_path / "full", "output": tmp_path / "x", "limits": tmp_path / "b.limits"}
    with pytest.raises(HotsplitError, match="predictors were not trained with the limits"):
        convert(ConvertConfig(**other))
    with pytest.raises(HotsplitError, match="no thresholds"):
        convert(ConvertConfig(source=plain, output=tmp_path / "x", thresholds=tmp_path / "p"))
    stopped_at(monkeypatch, 5)
    with pytest.raises(Interrupted):
        profile(config_of(made, a, tmp_path / "cut"))
    assert a.stat().st_size == b.stat().st_size
    b.rename(a)
    with pytest.raises(HotsplitError, match="begun with limits of the model"):
        profile(config_of(made, a, tmp_path / "cut"))


def test_the_bytes_that_a_profile_records_are_those_that_steps_read(tmp_path, made):
    """The bytes saved against mode dense agree with the runtime's counters, one token at a time."""
    model = with_limits(made, limits_of(made), tmp_path / "m.gguf")
    options = {"model": model, "corpora": (made / "t.txt",), "max_tokens": 400}
    found = evaluate(EvalConfig(**options, engine=EngineConfig(mode="exact")))
    read = {}
    for mode in ("dense", "exact"):
        with Engine.load(model, mode=mode) as engine:
            before, count = engine.traffic.total, 0
            for ids_T in windows_of(made, model, 400):
                for position, token in enumerate(ids_T.tolist()):
                    engine._step(token, position)
                    count += 1
            read[mode] = (engine.traffic.total - before) / count
    saved = found.dense_bytes_per_token - found.bytes_per_token
    assert saved == pytest.approx(read["dense"] - read["exact"], rel=2e-3)
    assert 0.1 * read["dense"] < saved < 0.6 * read["dense"]


def test_what_limits_rule_out_is_refused(tmp_path, made):
    gates = with_limits(made, limits_of(made), tmp_path / "gates.gguf")
    for options in ({"target_sparsity": 0.5}, {"perplexity_budget": 0.01}):
        with pytest.raises(HotsplitError, match="has limits, by which its firings are counted"):
            profile(config_of(made, gates, tmp_path / "p", **options))
    profile(config_of(made, made / "m.gguf", tmp_path / "t", target_sparsity=0.5))
    with pytest.raises(HotsplitError, match="without limits of gates"):
        convert(ConvertConfig(source=gates, output=tmp_path / "x", thresholds=tmp_path / "t"))


def test_predictors_learn_the_firings_by_limits(tmp_path, made, monkeypatch):
    """The labels equal the firings in transformers. Predictors that name all neurons give the bits
    of mode exact."""
    limits = limits_of(made)
    model = with_limits(made, limits, tmp_path / "m.gguf")
    labels = [np.zeros(F, np.int64) for _ in range(L)]
    trainers: list[LayerTrainer] = []
    plain = LayerTrainer._examine

    def examine(self, x_TD, gate_TF, hidden_TF):
        trainers.append(self) if self not in trainers else None
        labels[trainers.index(self)] += self.fires(gate_TF).sum(0).numpy()
        plain(self, x_TD, gate_TF, hidden_TF)

    monkeypatch.setattr(LayerTrainer, "_examine", examine)
    report = profile(config_of(made, model, tmp_path / "p", max_tokens=4000,
                               train_predictors=tmp_path))  # fmt: skip
    windows = windows_of(made, model, 4000)
    windows = windows[phases(len(windows))["examine"]]
    want_LF = counted_again(made, limits, windows)
    assert np.abs(np.stack(labels) - want_LF).sum() <= 1e-3 * want_LF.sum()
    for quality in (each.chosen for each in report.quality_L):
        assert quality.contribution > 0.985 and quality.precision > quality.density + 0.05
        assert quality.predicted_density < 0.9
    full = tmp_path / "full.gguf"
    convert(ConvertConfig(source=model, output=full, predictors=tmp_path))
    check = check_predictors(full)
    assert check is not None and not check.is_near_chance and check.recall > 0.9
    file = ModelFile.load(full)
    every = dataclasses.replace(file.predictor, threshold_L=(-np.inf,) * L)
    dataclasses.replace(file, predictor=every, path=tmp_path / "all.gguf").save(
        tmp_path / "all.gguf"
    )
    ids_T = torch.arange(3, 100)
    logits = {}
    for path, mode in ((model, "exact"), (tmp_path / "all.gguf", "predicted"), (full, "predicted")):
        with Engine.load(path, mode=mode) as engine:
            logits[path.name] = engine.logits(ids_T)
    assert torch.equal(logits["m.gguf"], logits["all.gguf"])
    assert not torch.equal(logits["m.gguf"], logits["full.gguf"])
    assert Predictors.load(tmp_path / "predictors.safetensors").limits == limits.sha256


def test_a_profile_keeps_the_digest_of_its_limits(tmp_path, made):
    """The digest changes with a limit's layer or value."""
    limits = limits_of(made)
    limits.save(tmp_path / "l")
    assert Limits.load(tmp_path / "l").sha256 == limits.sha256
    first, *others = limits.layers
    other_F = first.gate_F.copy()
    other_F[7] = np.nextafter(other_F[7], np.float32(1))
    for layers in (
        (dataclasses.replace(first, gate_F=other_F), *others),
        (*others, first),
        (LayerLimits(), *others),
    ):
        assert Limits(model_id=None, layers=layers).sha256 != limits.sha256
    model = make_model(sizes=make_sizes())
    profile_ = dataclasses.replace(make_profile(model), limits=limits.sha256)
    profile_.save(tmp_path / "p")
    assert Profile.load(tmp_path / "p").limits == limits.sha256
    make_profile(model).save(tmp_path / "q")
    assert Profile.load(tmp_path / "q").limits is None
    for wrong in (5, ["a"], {}):
        dataclasses.replace(make_profile(model), limits=wrong).save(tmp_path / "w")
        with pytest.raises(HotsplitError, match="limits"):
            Profile.load(tmp_path / "w")


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_a_stretched_gate_reaches_the_common_score_where_its_neuron_starts_to_fire(activation):
    gate = Gate(activation=activation, threshold=0.0)
    limit_F = torch.tensor([0.05, 0.1, 0.3, 0.5, 1.0, 2.0, 0.0])
    level = Level.of(gate, limit_F, limit_F)
    assert level.score == pytest.approx(0.3)
    x_NF = torch.linspace(0.01, 3, 500, dtype=torch.float64)[:, None]
    fires_NF = gate.smooth(x_NF) > limit_F
    found_NF = gate.smooth(x_NF * level.stretch_F) > level.score
    differs_F = (fires_NF != found_NF)[:, :6].sum(0)
    assert differs_F.max() <= 1 and level.stretch_F[6] == 8.0
    same = Level.of(gate, torch.full((3,), 0.2), limit_F[:3])
    assert torch.equal(same.stretch_F, torch.ones(3)) and same.score == pytest.approx(0.2)


def half_of_the_neurons(path: Path) -> str:
    """A VRAM budget for all of a model but half of its neurons."""
    model = ModelFile.load(path)
    count, context = model.spec.num_layers, model.spec.context_length
    (whole,), _ = plan_bytes(model, context_length=context, num_hot=[model.spec.most_neurons] * count,
                          dense_on_gpu=[True] * count, head_on_gpu=True)  # fmt: skip
    whole |= {"workspace": workspace_bytes(model, context, "exact")}
    return f"{sum(whole.values()) - whole['neurons'] // 2}B"


def test_a_trained_model_goes_through_the_commands(tmp_path):
    """The stages run from sparsify to generation with a plan, bench and report. Mode dense has the
    logits of transformers, and mode exact the same logits with a plan as without, both to 1e-5."""
    inputs = make_inputs(tmp_path)
    made = sparsify(tiny_config(inputs, tmp_path)).record.made[0]
    text = inputs[1]
    make_machine(launch_s=1e-8, hand_over_s=1e-8, copy_latency_s=1e-8, cpu_gb_per_s=1.0).save(
        tmp_path / "machine.json"
    )
    steps = [
        ("convert", made.checkpoint, "-o", "base.gguf", "--outtype", "f32"),
        ("profile", "base.gguf", "--corpus", text, "-o", "p.safetensors", "--tokens", 4000,
         "--train-predictors", "pred", "--predictor-rank", 32),
        ("convert", "base.gguf", "-o", "m.gguf", "--predictors", "pred"),
        ("solve", "m.gguf", "--profile", "p.safetensors", "--machine", "machine.json", "-vb",
         "HALF", "-o", "m.split.gguf", "--mode", "exact"),
        ("generate", "m.gguf", "--split", "m.split.gguf", "-p", "the quick", "-n", 5, "--temp", 0),
        ("eval", "m.gguf", "--mode", "exact", "--corpus", text, "--tokens", 300),
        ("eval", "m.gguf", "--mode", "predicted", "--corpus", text, "--tokens", 300),
        ("run", "m.gguf", "-p", "the quick", "-n", 5, "--temp", 0),
        ("bench", "m.gguf", "-p", 16, "-n", 8, "-r", 2),
    ]  # fmt: skip
    reports = []
    for step in steps:
        if step[0] == "solve":
            half = half_of_the_neurons(tmp_path / "m.gguf")
            step = tuple(half if word == "HALF" else word for word in step)
        done = run_command(*step, "--json", cwd=tmp_path)
        assert done.returncode == 0, (step, done.stderr)
        reports.append(json.loads(done.stdout))
    profiled, solved, exact, predicted = reports[1], reports[3], reports[5], reports[6]
    assert 0.3 < np.mean(profiled["density_L"]) < 0.5
    assert profiled["limits"] == ModelFile.load(tmp_path / "m.gguf").limits.sha256
    assert "The file has limits (sha256" in (tmp_path / "p.report.md").read_text()
    assert any("run only on the CPU" in note for note in solved["notes"])
    assert 0 < solved["num_hot"] < solved["num_neurons"]
    assert reports[4]["mode"] == "exact" and reports[7]["mode"] != "dense"
    assert 0.3 < np.mean(exact["hidden_share_L"]) < 0.5
    assert predicted["mode"] == "predicted" and predicted["kl_mean"] > 0
    done = run_command("eval", "m.gguf", "--corpus", text, "--tokens", 300, cwd=tmp_path)
    assert "dense is this file without its limits" in done.stdout + done.stderr
    done = run_command("report", "m.gguf", "--profile", "p.safetensors", "--split", "m.split.gguf",
                       "--predictors", "pred", "-o", "page.html", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    ids_T = torch.randint(1, 257, (40,), generator=torch.Generator().manual_seed(0))
    logits = {}
    for mode, split in (("dense", None), ("exact", None), ("exact", tmp_path / "m.split.gguf")):
        with Engine.load(tmp_path / "m.gguf", split=split, mode=mode) as engine:
            logits[mode, split is not None] = engine.logits(ids_T).double()
    model = AutoModelForCausalLM.from_pretrained(made.checkpoint, dtype=torch.float32).eval()
    with torch.no_grad():
        want_TV = model(ids_T[None]).logits[0].double()
    assert (logits["dense", False] - want_TV).norm() < 1e-5 * want_TV.norm()
    assert (logits["exact", False] - want_TV).norm() > 1e-2 * want_TV.norm()
    exact_TV = logits["exact", False]
    assert (logits["exact", True] - exact_TV).norm() < 1e-5 * exact_TV.norm()
