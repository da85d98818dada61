"""The command `sparkinfer advise`, from a model and a text to a file that runs as advised."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner
from models import make_model, make_shape
from serving import TOKENIZER
from test_profile_corpus import text_of

from sparkinfer import Engine, progress
from sparkinfer.commands.all_commands import cli
from sparkinfer.errors import SparkinferError
from sparkinfer.limits import Limits
from sparkinfer.profile import advise as advise_module
from sparkinfer.runtime.kernels.cpu import library

pytestmark = pytest.mark.skipif(not library.is_available(), reason="no C++ kernels")


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setattr(advise_module, "ROUNDS", 2)
    monkeypatch.setattr(advise_module, "STEPS", 4)
    keys = {
        "tokenizer.huggingface.json": TOKENIZER.read_text(encoding="utf-8"),
        "tokenizer.ggml.eos_token_id": np.uint32(0),
    }
    shape = make_shape(vocab_size=4096, context_length=256)
    model = make_model(shape=shape, kind="f16", activation="silu", extra_keys=keys)
    dataclasses.replace(model, path=tmp_path / "m.gguf").save(tmp_path / "m.gguf")
    (tmp_path / "t.txt").write_text(text_of(0, 20_000))
    return tmp_path


def run(*words):
    return CliRunner().invoke(cli, ["advise", *map(str, words)], catch_exceptions=True)


@pytest.mark.slow
def test_advise_measures_rules_and_recommends_one(files):
    done = run(files / "m.gguf", "--corpus", files / "t.txt", "--tokens", 3072, "--json",
               "--type", "q8_0", "--plot", files / "p.png")  # fmt: skip
    assert done.exit_code == 0, (done.output, done.exception)
    advice = json.loads(done.stdout)
    dense = [p for p in advice["points"] if p["rule"] == "dense"]
    assert [p["type"] for p in dense] == ["f16", "q8_0"]
    assert dense[0]["close"]["kl"] == 0.0  # against itself
    rules = {p["rule"] for p in advice["points"]}  # a rule may be unable to save so much
    assert {"dense", "mixed"} <= rules <= {"dense", "gates", "hidden", "mixed"}
    assert all(p["seconds"] > 0 for p in advice["points"])
    mixed = [p for p in advice["points"] if (p["type"], p["rule"]) == ("f16", "mixed")]
    kl, read = ([p[key] for p in mixed] for key in ("share", "bytes_per_token"))
    assert kl == sorted(kl) and read == sorted(read, reverse=True)
    assert mixed[0]["close"]["kl"] < mixed[-1]["close"]["kl"]
    assert advice["best"]["close"]["perplexity_increase"] <= 0.01
    assert (files / "p.png").read_bytes().startswith(b"\x89PNG")


def test_limits_of_a_point_record_their_cost_in_a_model_file(files, monkeypatch, capsys):
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    config = advise_module.AdviseConfig(
        model=files / "m.gguf", corpora=(files / "t.txt",), max_tokens=2048, rules=("mixed",),
        shares=(0.16,),
    )  # fmt: skip
    said = []
    adviser = advise_module.Adviser(config, said.append)
    (line,) = said
    runs = [x for x in capsys.readouterr().err.splitlines() if x.startswith("probing: ")]
    assert line.endswith(f"{len(runs)} runs of {advise_module.PROBE_TOKENS} tokens")
    assert "(100%)" in runs[-1]
    _, point = adviser.points_of("f16", adviser.engine, config.rules)
    adviser.limits_of(point).save(files / "l.safetensors")
    quality = Limits.load(files / "l.safetensors").quality["exact"]
    assert quality.kl_mean == point.close.kl
    assert quality.bytes_per_token == point.bytes_per_token < quality.dense_bytes_per_token
    done = CliRunner().invoke(
        cli, ["convert", str(files / "m.gguf"), "-o", str(files / "s.gguf"), "--limits",
              str(files / "l.safetensors"), "--no-verify"],
    )  # fmt: skip
    assert done.exit_code == 0, (done.output, done.exception)
    allowed = 10.0 if point.close.perplexity_increase > 0.01 else 0.01
    with Engine.load(files / "s.gguf", max_loss=allowed) as engine:
        assert engine.mode == "exact"
        close = adviser.meter.measure(None, engine)
        assert close.kl == pytest.approx(point.close.kl, rel=0.2)
    costly = dataclasses.replace(point.close, perplexity_increase=0.5)
    monkeypatch.setattr(adviser.meter, "measure", lambda limits, engine: costly)
    with Engine.load(files / "m.gguf", mode="exact") as engine:  # as if in a smaller type
        (dense,) = adviser.points_of("q4_0", engine, config.rules)
    assert dense.rule == "dense" and "no rule is tried" in said[-1]


@pytest.mark.parametrize("tokens", [1000, 3072])
def test_impossible_requests_for_advice_are_refused(files, tokens):
    (files / "t.txt").write_text("too short")
    done = run(files / "m.gguf", "--corpus", files / "t.txt", "--tokens", tokens)
    assert isinstance(done.exception, SparkinferError), done.output


def test_a_model_that_is_sparse_by_itself_is_refused(files):
    model = make_model(activation="relu")
    dataclasses.replace(model, path=files / "r.gguf").save(files / "r.gguf")
    done = run(files / "r.gguf", "--corpus", files / "t.txt")
    assert "sparse by itself" in str(done.exception) or "rules cannot be tried" in str(
        done.exception
    )


def test_trial_files_are_removed_when_a_signal_ends_the_process(tmp_path):
    """In native code no exception is raised, so a `with` block alone would not remove them."""
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from sparkinfer.files import remove_unfinished, temporary_folder\n"
        "with temporary_folder('trial-', Path(sys.argv[1])) as folder:\n"
        "    (folder / 'model.gguf').write_bytes(b'x')\n"
        "    remove_unfinished()\n"
        "    os._exit(7)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, tmp_path], timeout=60, check=False)
    assert ended.returncode == 7 and not list(tmp_path.iterdir())
