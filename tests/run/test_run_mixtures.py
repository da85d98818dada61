"""`hotsplit run` of mixtures of experts: the look that records routings, the plan, and the trial of
all that is obvious; on fake CUDA devices, too."""

from dataclasses import replace
from pathlib import Path

import pytest
from delta_models import FEW, delta_model
from fake_cuda import library as fake_library
from fake_cuda.torch_cuda import fake_cuda
from models import byte_level_keys, latent_spec, make_model, make_sizes, mixture_spec
from run_fixtures import MIB, budget_below, told
from test_latent import OF_BLOCKS
from test_run import made, timed

from hotsplit.artifacts.profile_file import Profile
from hotsplit.artifacts.split_file import Split
from hotsplit.run import choice, housekeeping, prepare, stages, trial
from hotsplit.run.choice import Wishes, choose
from hotsplit.run.default_budgets import Room
from hotsplit.run.source import look_at
from hotsplit.run.trial import PlanTimes, measured_by

pytest_plugins = ("run_fixtures",)
pytestmark = pytest.mark.usefixtures("cache")
LESS = 80 << 10  # by which the budget is too small for all


def saved(path: Path, mixer: str = "attention") -> Path:
    keys, vocab_size = byte_level_keys()
    sizes = make_sizes(
        num_layers=3, width=64, num_neurons=64, vocab_size=vocab_size, context_length=64
    )
    if mixer == "delta nets":
        model = delta_model(sizes, experts=FEW, period=2, kind="q8_0", extra_keys=keys)
    elif mixer == "latents":
        spec = latent_spec(sizes, OF_BLOCKS, experts=replace(FEW, has_shared_gate=False))
        model = make_model(spec=spec, kind="q8_0", extra_keys=keys)
    else:
        spec = mixture_spec(sizes, num_neurons=64)
        model = make_model(spec=spec, kind="q8_0", extra_keys=keys)
    model.save(path)
    return path


def run(capsys, *words: object) -> tuple[dict, list[str]]:
    return told(capsys, *words, "-c", "64")


@pytest.mark.parametrize("fastest", ["model", "experts", "layers", "cpu"])
def test_whatever_is_fastest_runs(capsys, monkeypatch, card, tmp_path, text, cache, fastest):
    """Nothing is converted; the look records the experts of as many tokens as there are, at
    most."""
    monkeypatch.setattr(prepare, "room_here", lambda vram, _: Room(main=1 << 34, gpus=vram or ()))
    monkeypatch.setattr(stages, "EXPERT_TOKENS", 700)
    names = ("model", "experts", "layers", "cpu")
    tried = timed(monkeypatch, **{name: 1.0 if name == fastest else 1.2 for name in names})
    path = saved(tmp_path / "m.gguf")
    vram = budget_below(path, LESS, 64)
    report, lines = run(capsys, path, "--corpus", text, "--vram", vram)
    assert made(report) == ["look", "machine", "plan", "trial"] and report["mode"] == "dense"
    assert sorted(tried) == sorted(names)
    assert ("gpu" in report["bytes"]) == (fastest != "cpu")
    (line,) = [line for line in lines if "the plan takes" in line]
    assert (
        "all experts on the CPU" in line and "whole layers" in line and line.count("predicted") == 4
    )
    found = {each.kind: cache / each.name / each.file for each in housekeeping.list_cache(cache)}
    routing_LTK = Profile.load(found["look"]).routing_LTK
    assert routing_LTK is not None and routing_LTK.shape[1] == 700
    plan, obvious = Split.load(found["plan"]), found["trial"].parent
    assert plan.objective_s <= Split.load(obvious / "experts.split.gguf").objective_s
    assert plan.objective_s <= Split.load(obvious / "layers.split.gguf").objective_s
    assert 0 < sum(len(ids) for ids in plan.hot) < 18
    again, _ = run(capsys, path, "--corpus", text, "--vram", budget_below(path, LESS, 64))
    assert made(again) == [] and again["text"] == report["text"]


@pytest.mark.skipif(not fake_library.can_be_built(), reason="needs a C++ compiler, and Linux")
@pytest.mark.parametrize(
    ("mixer", "less", "ways"),
    [
        ("delta nets", 100, ["cpu", "experts", "layers", "model"]),
        ("latents", 168, ["cpu", "layers", "model"]),  # too little for attention of all
    ],
)
def test_plans_are_tried_and_run_on_a_device(
    capsys, monkeypatch, card, tmp_path, text, mixer, less, ways
):
    """Each way is loaded and run; the text is that of the CPU. Fewer steps are timed, as their
    seconds are not those of a device."""
    monkeypatch.setattr(stages, "EXPERT_TOKENS", 64)
    monkeypatch.setattr(trial, "STEPS", 4)
    tried = []

    def timed_as_predicted(model, split, config):
        tried.append("cpu" if split is None else split.name.partition(".")[0])
        measured = measured_by(model, split, config)
        assert 0 < measured.token_s < 60
        return PlanTimes(
            token_s=1.0 if split is None else Split.load(split).objective_s,
            prompt_s=measured.prompt_s,
        )

    monkeypatch.setattr(stages, "measured_by", timed_as_predicted)
    path = saved(tmp_path / "m.gguf", mixer)
    want, lines = run(capsys, path, "--vram", "0")
    assert "on the CPU, without a plan: torch sees no GPU here" in lines or made(want) == []
    with fake_cuda():
        vram = budget_below(path, less << 10, 64)
        report, lines = run(capsys, path, "--corpus", text, "--vram", vram)
    assert sorted(tried) == ways
    assert any("by a plan for" in line for line in lines)
    assert report["bytes"]["gpu"]["neurons"] > 0 and report["text"] == want["text"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "exact"}, "plans of mixtures of experts are for mode dense so far"),
        ({"kv_offload": "on"}, "plans of mixtures of experts have no --kv-offload so far"),
    ],
)
def test_what_plans_lack_runs_on_the_cpu(tmp_path, options, words):
    given = look_at(saved(tmp_path / "m.gguf"), None, tmp_path / "none.gguf")
    wishes = Wishes(engine=choice.EngineConfig(**options))
    small = choice.run_bytes(given.draft("q4_0"), 64, 4 * MIB)  # another type would fit the GPU
    found = choose(given, wishes, Room(main=1 << 40, gpus=(small,)))
    assert (found.budgets, found.device, found.is_converted) == ((), "cpu", False)
    assert found.lines[-1] == f"on the CPU: {words}"


def test_a_mixture_that_fits_has_a_plan_too(tmp_path):
    given = look_at(saved(tmp_path / "m.gguf"), None, tmp_path / "none.gguf")
    found = choose(given, Wishes(), Room(main=1 << 40, gpus=(1 << 40,)))
    assert found.budgets == (1 << 40,) and found.device is None
    assert found.lines[1].startswith("mode dense: a token computes all neurons of the experts")
