"""`hotsplit run` and `hotsplit cache`: files are made once, kept, shared, resumed and removed.

The GPU is simulated: its memory is what --vram says, its other figures are made up, and plans run
on the CPU."""

import dataclasses
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from checkpoints import random_llama
from models import byte_level_keys, make_model, make_sizes
from run_fixtures import budget_below, told

from hotsplit.artifacts.machine_file import Machine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.split_file import Split
from hotsplit.artifacts.trial_file import Trial
from hotsplit.cli import main
from hotsplit.errors import Interrupted
from hotsplit.run import estimate, housekeeping, prepare, stages
from hotsplit.run.default_budgets import Room
from hotsplit.run.trial import PlanTimes
from hotsplit.runtime import drafting

pytest_plugins = ("run_fixtures",)
pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def gpu(monkeypatch, card):
    """A GPU with as much memory as --vram says."""

    def room_here(vram, device):
        return Room(main=1 << 34, gpus=vram or ())

    monkeypatch.setattr(prepare, "room_here", room_here)

    # Both sides are on the CPU, and these models take microseconds: by the clock, chance decides.
    def measured_by(model, split, config):
        return PlanTimes(token_s=Split.load(split).objective_s if split else 1.0, prompt_s=0.5)

    monkeypatch.setattr(stages, "measured_by", measured_by)


def run(capsys, *words: object) -> dict:
    return told(capsys, *words)[0]


def refused(capsys, *words: object) -> str:
    """The error line of a run that is refused."""
    capsys.readouterr()
    assert main(["run", *map(str, words)]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    return shown.err.splitlines()[-1]


def made(report: dict) -> list[str]:
    return report["run"]["made"]


def stock_of(source: Path, path: Path) -> None:
    words = ["convert", str(source), "-o", str(path)]
    assert main([*words, "--layout", "stock", "--outtype", "q8_0", "--no-verify"]) == 0


def partials(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.endswith(".partial")]


# ---- made once ----------------------------------------------------------------------------------


def test_a_second_run_makes_nothing_and_gives_the_same_text(capsys, silu, cache):
    first = run(capsys, silu, "--no-verify")
    second = run(capsys, silu)
    assert made(first) == ["model"] and made(second) == []
    assert first["text"] == second["text"] and first["mode"] == "dense"
    assert not partials(cache)


def test_a_converted_model_is_compared_with_its_source(capsys, silu):
    assert main(["run", str(silu), "-p", "the", "-n", "1", "--verify"]) == 0
    assert "verified: logits equal transformers'" in capsys.readouterr().err


def test_a_hotsplit_model_file_is_run_in_place(capsys, cache, tmp_path):
    keys_, vocab_size = byte_level_keys()
    model = make_model(sizes=make_sizes(vocab_size=vocab_size), activation="silu", extra_keys=keys_)
    model.save(tmp_path / "m.gguf")
    assert made(run(capsys, tmp_path / "m.gguf")) == []
    assert housekeeping.list_cache(cache) == ()


def test_a_stock_file_is_run_in_place_unless_something_else_is_asked_for(
    capsys, cache, silu, tmp_path
):
    """A SiLU model reads every neuron, so nothing has to be transposed."""
    stock_of(silu, tmp_path / "s.gguf")
    report = run(capsys, tmp_path / "s.gguf", "--no-verify")
    assert made(report) == [] and report["run"]["outtype"] == "q8_0"
    assert report["mode"] == "dense" and housekeeping.list_cache(cache) == ()
    for asked in (("--outtype", "q4_0"), ("--activation", "gelu"), ("--mode", "exact")):
        other = run(capsys, tmp_path / "s.gguf", "--no-verify", *asked)
        assert "model" in made(other), asked


def test_what_was_chosen_is_said_once_and_again_if_it_changes(capsys, cache, silu, card, tmp_path):
    stock_of(silu, tmp_path / "s.gguf")

    def said(*words: object) -> list[str]:
        capsys.readouterr()
        assert main([*map(str, words), "-c", "16"]) == 0
        lines = capsys.readouterr().err.splitlines()
        return [line for line in lines if line.startswith(("type ", "mode ", "on the CPU"))]

    text = ("-p", "the", "-n", "1", "--device", "cpu")
    run_it = ("run", tmp_path / "s.gguf", *text)
    assert len(said(*run_it)) == 3 and said(*run_it) == []
    assert len(said("plan", tmp_path / "s.gguf")) == 3
    assert len(said(*run_it, "--mode", "dense")) == 3  # by another reason
    (tmp_path / "copy.gguf").write_bytes((tmp_path / "s.gguf").read_bytes() + b"0")
    assert said("run", tmp_path / "copy.gguf", *text) != []  # another source
    for content in ("[1]", "[" * 100_000):
        (cache / "said.json").write_text(content)
        assert len(said(*run_it)) == 3
    assert said(*run_it) == []
    assert main(["cache", "clear"]) == 0 and not (cache / "said.json").exists()


def test_a_checkpoint_of_which_every_neuron_is_read_is_kept_in_llamacpps_layout(
    capsys, cache, silu
):
    assert made(run(capsys, silu, "--no-verify")) == ["model"]
    (kept,) = housekeeping.list_cache(cache)
    assert ModelFile.load(cache / kept.name / kept.file).layout == "stock"


def test_by_default_a_short_look_at_the_model_decides(capsys, relu):
    """On the package's own text, half of a random model's neurons fire, so no predictors are
    trained."""
    report = run(capsys, relu, "--no-verify")
    assert made(report) == ["model", "look"] and report["mode"] == "exact"
    assert made(run(capsys, relu)) == []


def test_a_changed_source_is_converted_again(capsys, silu, tmp_path):
    own = Path(shutil.copytree(silu, tmp_path / "own"))
    first = run(capsys, own, "--no-verify")
    weights = own / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1  # one bit of the last weight
    weights.write_bytes(data)
    assert made(run(capsys, own, "--no-verify")) == ["model"]
    shutil.copyfile(silu / "model.safetensors", weights)
    os.utime(weights, ns=(0, (silu / "model.safetensors").stat().st_mtime_ns))
    again = run(capsys, own, "--no-verify")
    assert made(again) == [] and again["text"] == first["text"]


def test_other_text_repeats_the_profile_and_the_stages_after_it(capsys, relu, text, tmp_path):
    asked = (relu, "--no-verify", "--mode", "predicted", "--tokens", 1408, "--corpus")
    first = run(capsys, *asked, text)
    assert made(first) == ["model", "profile", "full"] and first["mode"] == "predicted"
    other = tmp_path / "other.txt"
    other.write_text(text.read_text() + "more\n")
    assert made(run(capsys, *asked, other)) == ["profile", "full"]


def test_a_dense_model_that_does_not_fit_gets_a_plan_without_a_look(
    capsys, silu, text, gpu, monkeypatch
):
    """On a busy machine it says so, once, and how to make again what depends on it."""
    monkeypatch.setattr(stages, "load_now", lambda: 1e4)
    words = (
        silu,
        "--corpus",
        text,
        "--no-verify",
        "--vram",
        budget_below(silu, 100 << 10, 32),
        "-c",
        32,
    )
    report, lines = told(capsys, *words)
    assert made(report) == ["model", "machine", "plan", "trial"]
    assert report["mode"] == "dense"
    (line,) = [line for line in lines if "this machine was busy when it was measured" in line]
    assert line.endswith("hotsplit cache clear machine plan trial")


@pytest.mark.parametrize("vram", ["0", "1400KiB"])
def test_longer_texts_by_another_scaling_of_positions(capsys, silu, text, gpu, vram):
    """The plan, too, is for the longer context."""
    more = (silu, "--outtype", "f16", "--corpus", text, "--no-verify", "--vram", vram, "-c", 512)
    line = refused(capsys, *more, "-p", "the", "-n", 3)
    assert "--rope-scaling yarn stretches it" in line
    report = run(capsys, *more, "--rope-scaling", "yarn")
    assert report["run"]["context_length"] == 512
    assert ("plan" in made(report)) == (vram != "0")
    again = run(capsys, *more, "--rope-scaling", "yarn")
    assert made(again) == [] and again["text"] == report["text"]
    other = run(capsys, *more, "--rope-scaling", "linear")
    assert made(other) == (["plan", "trial"] if vram != "0" else [])
    words = ["run", *map(str, more), "-p", "the", "-n", "3", "--rope-scale", "8"]
    assert main(words) == 0
    assert "rotary embeddings: YaRN, 8 times the" in capsys.readouterr().err


def test_other_commands_prepare_a_checkpoint_as_run_does(capsys, silu, gpu, tmp_path, cache):
    """With a plan that has room for all the texts, whose files the next command finds."""
    vram = budget_below(silu, 100 << 10, 32, texts=2)
    asked = ("--vram", vram, "-c", "32", "-n", "3", "--temp", "0", "-t", "1", "--json")
    prompts = tmp_path / "p.txt"
    prompts.write_text("the\nfox\n")
    assert main(["generate", str(silu), "--prompts", str(prompts), *asked]) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert "stage 4 of 4" in shown.err and "gpu" in found["bytes"]
    kept = housekeeping.list_cache(cache)
    (plan,) = [cache / each.name / each.file for each in kept if each.kind == "plan"]
    assert Split.load(plan).num_sequences == 2
    assert main(["generate", str(silu), "-p", "the", *asked]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == found["texts"][0]["text"]
    more = ("--split", str(plan))
    assert main(["chat", str(silu), "--vram", "1MiB", *more]) == 2
    assert "--vram makes a plan: leave --split out" in capsys.readouterr().err


def test_a_draft_model_is_prepared_as_the_model_is(capsys, silu, cache, monkeypatch):
    """The draft model is prepared before the model."""
    model = str(cache.parent / "m.gguf")
    assert main(["convert", str(silu), "-o", model]) == 0
    asked = (model, "-p", "the", "-n", "6", "--temp", "0", "-t", "1")
    assert main(["generate", *asked]) == 0
    alone = capsys.readouterr().out
    opened, drafts = drafting._model_drafters, []
    monkeypatch.setattr(
        drafting, "_model_drafters", lambda *given: drafts.append(given[1]) or opened(*given)
    )
    for command in ("generate", "run"):
        assert main([command, *asked, "-md", str(silu)]) == 0
        shown = capsys.readouterr()
        assert shown.out == alone and drafts.pop().path.parent.parent == cache
        assert ("stage 1 of 1: convert" in shown.err) == (command == "generate")
    assert main(["generate", *asked, "-md", str(cache.parent / "no" / "such")]) == 1
    assert "no such folder" in capsys.readouterr().err


# ---- a trial ------------------------------------------------------------------------------------


def timed(monkeypatch, **seconds: float):
    """Plans by name of their file, and the CPU alone ("cpu"), take these shares of the first plan's
    prediction; returns the list of what was tried."""
    tried, first = [], []

    def measured_by(model, split, config):
        name = "cpu" if split is None else split.name.partition(".")[0]
        first[:] = first or [Split.load(split).objective_s]
        tried.append(name)
        assert config.device == ("cpu" if split is None else None)
        return PlanTimes(token_s=seconds[name] * first[0], prompt_s=0.5)

    monkeypatch.setattr(stages, "measured_by", measured_by)
    return tried


@pytest.mark.parametrize(
    ("seconds", "runs", "words"),
    [
        # As predicted, and slower than the CPU alone by less than 5 %, or by more.
        ((1.2, 1.15), "the plan", None),
        ((1.2, 1.1), "the CPU alone", "everything runs on the CPU"),
        # A prediction that was missed brings other plans, of which the fastest runs.
        ((3.0, 9.0, 2.0, 4.0), "the second plan", "one by what was measured runs instead"),
        ((3.0, 9.0, 2.0, 1.5), "whole layers", "whole layers runs instead"),
        ((10.0, 1.0, 5.0, 4.0), "the CPU alone", "everything runs on the CPU"),
    ],
)
def test_a_slow_plan_is_replaced_once_and_for_all(
    capsys, monkeypatch, silu, text, gpu, cache, seconds, runs, words
):
    names = ("model", "cpu", "second", "layers")
    tried = timed(monkeypatch, **dict(zip(names, seconds, strict=False)))
    vram = budget_below(silu, 100 << 10, 32)
    asked = (silu, "--corpus", text, "--no-verify", "--vram", vram, "-c", 32)
    texts = []
    for number in range(2):
        report, lines = told(capsys, *asked)
        texts.append(report["text"])
        assert ("trial" in made(report)) == (number == 0)
        (line,) = [each for each in lines if "the plan takes" in each]
        assert "predicted" in line and "the CPU alone" in line
        assert words is None or words in line
        assert ("gpu" in report["bytes"]) == (runs != "the CPU alone")
    assert texts[0] == texts[1]
    is_missed = seconds[0] > 1.3
    assert tried == ["model", "cpu"] + ["second", "layers"] * is_missed  # once
    (kept,) = [each for each in housekeeping.list_cache(cache) if each.kind == "trial"]
    assert Trial.load(cache / kept.name / kept.file).runs == runs


def test_the_second_plan_is_solved_with_what_was_measured(
    capsys, monkeypatch, silu, text, gpu, cache
):
    """The CPU alone is slower than predicted, and its figures in the second plan's machine file are
    as much slower; what they do not explain of the plan's seconds is laid to its hand-overs."""
    timed(monkeypatch, model=3.0, cpu=9.0, second=2.0, layers=4.0)
    run(
        capsys,
        silu,
        "--corpus",
        text,
        "--no-verify",
        "--vram",
        budget_below(silu, 100 << 10, 32),
        "-c",
        32,
    )
    found = {each.kind: cache / each.name for each in housekeeping.list_cache(cache)}
    own = Machine.load(found["machine"] / "machine.json")
    scaled = Machine.load(found["trial"] / "machine.json")
    factor = scaled.costs.layer_s["exact"].median / own.costs.layer_s["exact"].median
    assert factor > 3
    assert own.cpu_rate("q8_0") / scaled.cpu_rate("q8_0") == pytest.approx(factor)
    second = Split.load(found["trial"] / "second.split.gguf")
    first = Split.load(found["plan"] / "model.split.gguf")
    assert second.machine_sha256 != first.machine_sha256
    assert second.objective_s > 3 * first.objective_s


# ---- interrupted --------------------------------------------------------------------------------


def interrupting(monkeypatch, place: str, after: int):
    """Simulates Ctrl-C in a stage after this many calls of its progress callback; `solve`, which
    has none, is interrupted before it begins."""
    count, function = 0, getattr(stages, place)

    def tick(*_):
        nonlocal count
        count += 1
        if count > after:
            raise Interrupted("by hand", signal.SIGINT)

    def call(config, *args, **more):
        if place == "profile":
            args = (tick, *args[1:])
        elif place == "solve":
            tick()
        else:
            more |= {{"convert": "on_bytes", "calibrate": "on_probe"}[place]: tick}
        return function(config, *args, **more)

    monkeypatch.setattr(stages, place, call)


FIVE = (  # a stage, progress calls before Ctrl-C, stages that the same run completed before it
    ("convert", 3, []),
    ("profile", 2, ["model"]),
    ("profile", 9, []),
    ("calibrate", 0, ["profile", "full"]),
    ("solve", 0, ["machine"]),
)


def test_a_run_continues_after_interrupts_in_five_places_and_with_other_budgets(
    tmp_path, monkeypatch, capsys, text, gpu, cache
):
    """Each time the same command continues; in the end, another budget or context only repeats the
    plan. The weights take more memory than the temporaries, so that budgets between exist."""
    sizes = {"num_hidden_layers": 3, "hidden_size": 128, "intermediate_size": 512}
    model = random_llama(tmp_path / "relu", **sizes)
    more = ["--outtype", "f16", "--no-verify", "--mode", "predicted", "--tokens", "1408"]
    asked = (model, "--corpus", text, *more)
    short = ("--vram", "1800000B", "-c", 32)
    there: list[str] = []
    for place, after, before in FIVE:
        with monkeypatch.context() as patched:
            interrupting(patched, place, after)
            words = [*map(str, (*asked, *short)), "-p", "the", "-n", "1", "-t", "1"]
            assert main(["run", *words]) == 130, place
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith("hotsplit: interrupted in stage "), place
        assert last.endswith("the same command continues from there")
        there += before
        ready = [s.kind for s in housekeeping.list_cache(cache) if s.state == "ready"]
        assert sorted(ready) == sorted(there), place
        assert not partials(cache)
    report = run(capsys, *asked, *short)
    assert made(report) == ["plan", "trial"] and report["bytes"]["gpu"]["workspace"] > 0
    assert report["mode"] == "predicted"
    assert made(run(capsys, *asked, *short)) == []
    assert made(run(capsys, *asked, "--vram", "1804096B", "-c", 32)) == ["plan", "trial"]
    assert made(run(capsys, *asked, "--vram", "1800000B", "-c", 31)) == ["plan", "trial"]
    # Files from which others were made may be removed: they are not read again.
    assert main(["cache", "clear", "model", "profile", "machine"]) == 0
    assert made(run(capsys, *asked, *short)) == []
    assert housekeeping.clear(cache).kept == ()


def test_a_profile_continues_where_it_stopped(monkeypatch, capsys, relu, text, cache):
    monkeypatch.setattr("hotsplit.profile.count.run.SAVE_SHARE", 1e9)  # saved after every window
    asked = (relu, "--corpus", text, "--no-verify", "--mode", "predicted", "--tokens", 1408)
    profile = stages.profile
    saved = lambda config: dataclasses.replace(config, save_every_s=0.0)  # noqa: E731
    monkeypatch.setattr(stages, "profile", lambda config, *args: profile(saved(config), *args))
    with monkeypatch.context() as patched:
        interrupting(patched, "profile", 12)
        assert main(["run", *map(str, asked), "-p", "the", "-t", "1"]) == 130
    (resume,) = cache.rglob("*.resume")
    (folder,) = {s.name for s in housekeeping.list_cache(cache) if s.state == "unfinished"}
    assert resume.parent.name == folder
    seen = []

    def watched(config, tick, *args):
        return profile(saved(config), lambda count: (seen.append(count), tick(count)), *args)

    monkeypatch.setattr(stages, "profile", watched)
    run(capsys, *asked)
    assert max(seen) > 3 * 128  # what the first run had done, reported at once
    assert not list(cache.rglob("*.resume"))


@pytest.mark.parametrize(
    "heard",
    [
        [(5.0, 0.0), (6.0, 100.0), (7.0, 100.0)],
        [(6.0, 50.0), (6.5, 50.0), (7.0, 50.0), (7.5, 50.0)],  # streamed: two layers, two windows
        [(6.0, 200.0)],
    ],
)
def test_the_rate_of_counting_leaves_out_what_was_not_timed(heard):
    assert stages.counted_per_s(heard, seconds=2.0) == pytest.approx(100.0)


# ---- refusals -----------------------------------------------------------------------------------


def test_a_full_disk_is_reported_before_the_work(monkeypatch, capsys, silu, cache):
    usage = shutil.disk_usage(silu)._replace(free=estimate.SPARE_BYTES + 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    line = refused(capsys, silu, "-p", "the")
    assert "would be written, but" in line and "set HOTSPLIT_CACHE to a folder" in line
    assert housekeeping.list_cache(cache) == ()


def test_a_cache_that_cannot_be_written_is_refused_in_one_line(monkeypatch, capsys, silu, tmp_path):
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("HOTSPLIT_CACHE", str(tmp_path / "file"))
    line = refused(capsys, silu, "-p", "the")
    assert "the cache folder cannot be written" in line and "HOTSPLIT_CACHE" in line
    assert (tmp_path / "file").read_text() == "mine"


def test_a_plan_for_this_machine_measures_it_and_makes_nothing_else(capsys, relu, cache, gpu):
    """It says what `run` would do, and how long that takes."""
    assert main(["plan", str(relu), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [work["kind"] for work in plan["stages"]] == ["model", "look", "profile", "full"]
    assert plan["num_bytes"] > 0 < plan["seconds"] and plan["token_s"] > 0
    assert [each.kind for each in housekeeping.list_cache(cache)] == ["machine"]
    assert "busy" not in capsys.readouterr().err
    assert main(["plan", str(relu), "--vram", "8GiB"]) == 1
    assert "torch sees no GPU on this machine; --machine plans for" in capsys.readouterr().err


def test_figures_of_a_busy_machine_are_said_to_be_until_it_is_measured_again(
    capsys, relu, cache, gpu, monkeypatch
):
    """In one line, also in later plans, which take the figures from the cache."""
    for load, is_busy in ((1e4, True), (0.0, True), (0.0, False)):
        monkeypatch.setattr(stages, "load_now", lambda load=load: load)
        if not is_busy:
            assert main(["cache", "clear", "machine"]) == 0
        capsys.readouterr()
        assert main(["plan", str(relu)]) == 0
        lines = [line for line in capsys.readouterr().err.splitlines() if "busy" in line]
        assert len(lines) == is_busy
        for line in lines:
            assert line.startswith(
                "note: this machine was busy when it was measured (10000.0 processes"
            )
            assert line.endswith(" when it is idle: hotsplit cache clear machine")


def test_where_nothing_is_left_to_prepare_a_plan_says_so(capsys, silu, tmp_path, gpu):
    assert main(["convert", str(silu), "-o", str(tmp_path / "m.gguf"), "--no-verify"]) == 0
    capsys.readouterr()
    assert main(["plan", str(tmp_path / "m.gguf")]) == 0
    assert (
        "\nnothing to prepare before the first token\nnext: hotsplit run" in capsys.readouterr().err
    )
