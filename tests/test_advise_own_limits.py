"""`hotsplit advise` on files that have limits already, such as those of `sparsify`."""

import dataclasses
import json
import shlex
from types import SimpleNamespace

import numpy as np
import pytest
from advice_models import chain, every_neuron_works, most_neurons_idle
from click.testing import CliRunner
from test_advise import run

from hotsplit.artifacts.limits_file import LayerLimits, Limits
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.commands import advise as command
from hotsplit.commands.all_commands import cli
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.measure.advise.timings import Rounds, Timings
from hotsplit.measure.advise.turns import Turns
from hotsplit.measure.evaluate.config import EvalConfig
from hotsplit.measure.evaluate.quality import evaluate
from hotsplit.options.engine_config import EngineConfig
from hotsplit.runtime.kernels.cpu import library

pytestmark = pytest.mark.skipif(not library.is_available(), reason="no C++ kernels")


@pytest.fixture
def made(tmp_path):
    """`m.gguf`, in which seven neurons in ten are idle; `own.gguf` with limits that silence those
    and a few that work; and a text."""
    model = most_neurons_idle(tmp_path / "m.gguf")
    count = model.spec.most_neurons
    limit_F = np.where(np.arange(count) % 70 == 0, 10.0, 0.1).astype(np.float32)
    limits = Limits(model_id=None, layers=(LayerLimits(gate_F=limit_F),), is_trained=True)
    own = model.with_limits(limits, "here")
    dataclasses.replace(own, path=tmp_path / "own.gguf").save(tmp_path / "own.gguf")
    (tmp_path / "t.txt").write_text(chain(8192))
    return tmp_path


def timed(monkeypatch, exact_over_dense: float) -> None:
    """Dense steps take times in proportion to their bytes; exact ones take `exact_over_dense` times
    as long."""

    def rounds(turns, group, count):
        dense = {p.type: p.bytes_per_token for p in group if p.rule == "dense"}
        row = [dense[p.type] * (1.0 if p.rule == "dense" else exact_over_dense) for p in group]
        found = Rounds(trials=tuple(p.trial for p in group), seconds=(tuple(row),) * count)
        turns.timings = Timings((*turns.timings.groups, found))

    monkeypatch.setattr(Turns, "rounds", rounds)


def advice_of(made, *words):
    done = run(made / "own.gguf", "--corpus", made / "t.txt", "--tokens", 6144, "--json", *words)
    assert done.exit_code == 0, (done.output, done.exception)
    return json.loads(done.stdout)


def test_limits_that_pay_are_advised_and_what_is_said_is_found_again(made, monkeypatch):
    timed(monkeypatch, 0.5)
    advice = advice_of(made, "--max-loss", 0.5)
    best = advice["best"]
    assert (best["type"], best["rule"], best["is_whole"]) == ("f16", "limits", True), advice["why"]
    found = evaluate(EvalConfig(model=made / "own.gguf", corpora=(made / "t.txt",),
                                engine=EngineConfig(mode="exact"), max_tokens=6144))  # fmt: skip
    assert found.kl_mean > 1e-4
    assert best["close"]["kl"] == pytest.approx(found.kl_mean, rel=0.2)
    assert best["bytes_per_token"] == pytest.approx(found.bytes_per_token, rel=0.01)
    assert best["bytes_per_token"] < 0.7 * found.dense_bytes_per_token
    rules = {(p["type"], p["rule"]) for p in advice["points"]}
    assert rules == {(t, r) for t in ("f16", "q8_0", "q4_0") for r in ("dense", "limits")}


def test_the_picture_shows_the_points_with_limits(made, monkeypatch):
    from matplotlib.axes import Axes

    labels = []
    plot = Axes.plot
    monkeypatch.setattr(Axes, "plot", lambda self, *args, **options: (
        labels.append(options.get("label")), plot(self, *args, **options))[1])  # fmt: skip
    timed(monkeypatch, 0.5)
    advice_of(made, "--max-loss", 0.5, "--type", "q8_0", "--plot", made / "p.png")
    assert {"f16 dense", "f16 limits", "q8_0 dense", "q8_0 limits"} <= set(labels)


def test_limits_that_gain_less_than_their_bytes_say_are_not_advised(made, monkeypatch):
    timed(monkeypatch, 0.9)
    advice = advice_of(made, "--max-loss", 0.5, "--type", "q8_0")
    assert advice["best"]["rule"] == "dense" and "where its bytes say" in advice["why"]


def test_the_model_before_training_is_what_counts_if_it_is_named(made, monkeypatch):
    """It has other weights here: the file's dense mode is close to its mode exact, the model before
    training is not."""
    timed(monkeypatch, 0.5)
    other = most_neurons_idle(made / "before.gguf")
    down = other.tensors["blk.0.ffn_down_t.weight"]
    half = dataclasses.replace(down, read_rows=lambda a, b: down.read_rows(a, b) / 2)
    tensors = other.tensors | {"blk.0.ffn_down_t.weight": half}
    dataclasses.replace(other, tensors=tensors, path=made / "half.gguf").save(made / "half.gguf")
    near = advice_of(made, "--max-loss", 0.5, "--type", "q8_0")
    far = advice_of(made, "--max-loss", 0.5, "--type", "q8_0", "--dense", made / "half.gguf")
    kl = [next(p["close"]["kl"] for p in each["points"] if (p["type"], p["rule"]) == ("f16", "limits"))
          for each in (near, far)]  # fmt: skip
    assert kl[1] > 5 * kl[0]
    plain = run(made / "own.gguf", "--corpus", made / "t.txt", "--tokens", 6144, "--type", "q8_0")
    assert "not the model that it was trained from; give that with --dense" in plain.stderr


@pytest.fixture
def files(made):
    """The files of `made`; `q8.gguf` and `own8.gguf`, which are `m.gguf` and `own.gguf` in q8_0;
    and `l`, the limits of `own.gguf`."""
    for source, name in (("m", "q8"), ("own", "own8")):
        convert(ConvertConfig(source=made / f"{source}.gguf", output=made / f"{name}.gguf",
                              outtype="q8_0"))  # fmt: skip
    ModelFile.load(made / "own.gguf").limits.save(made / "l")
    return made


@pytest.mark.parametrize(
    "model, dense, rule, kind, verb",
    [
        ("m", None, "dense", "f16", "generate"),  # nothing to convert
        ("m", None, "dense", "q8_0", "convert"),
        ("q8", None, "dense", "q8_0", "generate"),
        ("q8", None, "dense", "q4_0", "convert"),
        ("q8", None, "gates", "q8_0", "convert"),  # with limits
        ("m", None, "gates", "q8_0", "convert"),
        ("own", None, "limits", "f16", "generate"),
        ("own8", None, "limits", "q4_0", "convert"),
        ("own8", "m", "dense", "f16", "generate"),
        ("own8", "q8", "dense", "q8_0", "generate"),
        ("own", "m", "dense", "q8_0", "convert"),
    ],
)
def test_the_next_command_works_as_it_is_printed(
    files, monkeypatch, model, dense, rule, kind, verb
):
    folder = files / "a folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "out.gguf").write_text("mine")
    advice = SimpleNamespace(best=SimpleNamespace(rule=rule, type=kind))
    path = files / f"{model}.gguf"
    if model.startswith("own"):
        reference = None if dense is None else files / f"{dense}.gguf"
        line = command._next_of_trained(path, reference, advice)
    else:
        line = command._next(path, advice, files / "l")
    words = shlex.split(line.removeprefix("next: "))
    assert words[:2] == ["hotsplit", verb]
    done = CliRunner().invoke(cli, words[1:])
    assert done.exit_code == 0, (line, done.output, done.exception)
    assert (folder / "out.gguf").read_text() == "mine"
    if verb == "convert":
        made = ModelFile.load(folder / "out1.gguf")
        assert made.tensors["blk.0.attn_output.weight"].kind == kind
        assert made.has_limits == (rule != "dense")


def test_a_reference_less_precise_than_the_file_is_refused(files, monkeypatch):
    """It would be unfair to the file: what the reference has lost would count as the file's
    loss."""
    words = ("--corpus", files / "t.txt", "--tokens", 6144, "--dense", files / "q8.gguf")
    done = run(files / "own.gguf", *words)
    assert done.exit_code != 0 and "\n" not in str(done.exception)
    for part in ("q8.gguf: is in q8_0", "less precise than the f16 of", "give the model"):
        assert part in str(done.exception)
    timed(monkeypatch, 0.5)
    assert run(files / "own8.gguf", *words, "--type", "q4_0").exit_code == 0


def test_what_makes_no_sense_is_refused_in_one_line(made):
    every_neuron_works(made / "other.gguf")
    text = ("--corpus", made / "t.txt")
    for words, line in (
        ((made / "own.gguf", *text, "--limits", made / "l"), "has limits already"),
        ((made / "m.gguf", *text, "--dense", made / "other.gguf"), "leave --dense out"),
        ((made / "own.gguf", *text, "--dense", made / "own2.gguf"), "own2.gguf"),
        ((made / "own.gguf", *text, "--tokens", 100), "wanted 2048 or more"),
    ):
        done = run(*words)
        assert done.exit_code != 0 and line in (done.output + str(done.exception)), done.output
