"""The firings that profiles count, compared with those of transformers; predictors; all
commands in turn."""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import random_llama
from forked import run_command
from models import make_model
from transformers import AutoModelForCausalLM

from hotsplit import Engine
from hotsplit.artifacts.data_sheets import load_machine
from hotsplit.artifacts.machine_file import Figure
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.predictor_file import Predictors
from hotsplit.artifacts.profile_file import Profile
from hotsplit.cli import main
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.costs.part_bytes import plan_bytes
from hotsplit.errors import HotsplitError
from hotsplit.measure.calibrate import calibrate as calibrating
from hotsplit.measure.calibrate import cpu_bandwidth
from hotsplit.measure.evaluate.evaluate_config import EvalConfig
from hotsplit.measure.evaluate.quality import evaluate
from hotsplit.measure.timing.interleave import MIN_ROUNDS
from hotsplit.options.engine_config import EngineConfig
from hotsplit.profile.collect import profile
from hotsplit.profile.predictors.predictor_options import PredictorChoices, Target
from hotsplit.profile.profile_config import ProfileConfig
from hotsplit.runtime.step.workspace import workspace_bytes

RTX = Path("rtx-4060-8gb")  # by its data sheet
WORDS = "the quick brown fox def add(a, b): return jumps over lazy dog"


# ---- profile ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def random_model(tmp_path_factory):
    """A folder with a random relu checkpoint `hf`, its f32 model file `m.gguf` and a text
    `text.txt`."""
    folder = tmp_path_factory.mktemp("random")
    random_llama(folder / "hf")
    convert(ConvertConfig(source=folder / "hf", output=folder / "m.gguf", outtype="f32"))
    order = np.random.default_rng(0).integers(0, 12, 6000)
    text = " ".join(WORDS.split()[i] + ("\n" if n % 9 == 8 else "") for n, i in enumerate(order))
    (folder / "text.txt").write_text(text)
    return folder


def test_counts_equal_those_of_transformers_activations(tmp_path, random_model):
    """Hooks in transformers count again, over every window that the profile used."""
    report = profile(
        ProfileConfig(
            model=random_model / "m.gguf",
            corpora=(random_model / "text.txt",),
            output=tmp_path / "p",
            max_tokens=600,
        )
    )
    from hotsplit.profile.corpus.corpus import read_windows

    with Engine.load(random_model / "m.gguf") as engine:
        windows = read_windows(
            [random_model / "text.txt"], engine.codec, context_length=128, max_tokens=600, seed=0
        )
    model = AutoModelForCausalLM.from_pretrained(random_model / "hf", dtype=torch.float32).eval()
    count_LF = torch.zeros(3, 160, dtype=torch.int64)

    def count(index, fired_TF):
        count_LF[index] += fired_TF.sum(0)

    for index, layer in enumerate(model.model.layers):
        layer.mlp.act_fn.register_forward_hook(
            lambda module, args, out, index=index: count(index, out[0] > 0)
        )
    with torch.no_grad():
        for ids in windows.ids:
            model(ids[None])
    found = Profile.load(tmp_path / "p")
    # A gate within rounding of zero may fall on its other side: about one in a hundred thousand.
    assert np.abs(found.active_count_LF - count_LF.numpy()).sum() <= 3
    assert found.num_tokens == 600 == sum(len(ids) for ids in windows.ids) == report.num_tokens
    silent = 3 * 160 * 600 - found.active_count_LF.sum()
    assert silent <= found.gate_histogram_LB[:, 0].sum() <= silent + 30  # and a few below 2^-16


def test_training_beats_chance_and_keeps_the_contribution_it_promises(
    tmp_path, random_model, monkeypatch
):
    target = Target(contribution=0.95, lost_norm=0.9, precision=0.01)
    tried = PredictorChoices(ranks=(32,), has_whole=False, target=target)
    monkeypatch.setattr(PredictorChoices, "of", lambda rank, model: tried)
    report = profile(
        ProfileConfig(
            model=random_model / "m.gguf",
            corpora=(random_model / "text.txt",),
            output=tmp_path / "p",
            max_tokens=8000,
            train_predictors=tmp_path,
        )
    )
    trained = Predictors.load(tmp_path / "predictors.safetensors")
    assert trained.model_id == report.model_id
    for quality in (layer.chosen for layer in report.quality_L):
        assert quality.contribution >= 0.94  # 0.95 on the text that chose the threshold
        # Random predictors name as large a share as they recall.
        assert quality.predicted_density < 0.9 * quality.recall
        assert quality.precision > 1.1 * quality.density
    convert(
        ConvertConfig(
            source=random_model / "m.gguf", output=tmp_path / "m.gguf", predictors=tmp_path
        )
    )
    result = evaluate(
        EvalConfig(
            model=tmp_path / "m.gguf",
            corpora=(random_model / "text.txt",),
            engine=EngineConfig(mode="predicted"),
            max_tokens=500,
        )
    )
    named = [q.chosen.predicted_density for q in report.quality_L]
    assert np.allclose(result.named_share_L, named, atol=0.12)  # 500 tokens are few
    assert 0 < result.kl_mean < 0.1


def test_too_little_text_to_train_on_is_refused(tmp_path, random_model):
    config = ProfileConfig(
        model=random_model / "m.gguf",
        corpora=(random_model / "text.txt",),
        output=tmp_path / "p",
        max_tokens=256,
        train_predictors=tmp_path,
    )
    with pytest.raises(HotsplitError, match="cannot train predictors"):
        profile(config)
    assert not list(tmp_path.iterdir())


def test_a_silu_model_has_nothing_to_predict(tmp_path):
    folder = random_llama(tmp_path / "hf", hidden_act="silu")
    convert(ConvertConfig(source=folder, output=tmp_path / "m"))
    (tmp_path / "t").write_text("fox " * 4000)
    with pytest.raises(HotsplitError, match="every neuron of this silu model fires"):
        profile(
            ProfileConfig(
                model=tmp_path / "m",
                corpora=(tmp_path / "t",),
                output=tmp_path / "p",
                train_predictors=tmp_path,
            )
        )


# ---- the commands ----------------------------------------------------------------------------


def test_every_command_of_the_pipeline(tmp_path, random_model, monkeypatch, capsys):
    """Every stage as a user types it; --json gives one object on stdout. Calibration runs in this
    process, where it may take less time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cpu_bandwidth, "CPU_LIMIT_S", 0.0)
    monkeypatch.setattr(cpu_bandwidth, "MAX_BUFFER_BYTES", 32 << 20)
    monkeypatch.setattr(calibrating, "COSTS_LIMIT_S", 0.0)
    text = random_model / "text.txt"
    # A model this small gains only on a GPU whose launches cost next to nothing.
    card, soon = load_machine(RTX), Figure(best=1e-7)
    times = ("launch_s", "kernel_s", "token_s", "copy_latency_s", "hand_over_s", "cpu_run_s")
    gpu = replace(card.gpus[0], **dict.fromkeys(times, soon))
    replace(card, gpus=(gpu,)).save(tmp_path / "card.json")
    commands = [
        f"convert {random_model}/hf -o base.gguf --outtype q8_0",
        f"profile base.gguf --corpus {text} -o p.safetensors --tokens 4000 --train-predictors pred"
        " --predictor-rank 16",
        "convert base.gguf -o m.gguf --predictors pred",
        "calibrate -o machine.json --gpu-from card.json",
        "solve m.gguf --profile p.safetensors --machine machine.json -vb HALF --mode predicted"
        " -o m.split.gguf",
        "generate m.gguf -spif-ms m.split.gguf -p 'the quick' -n 5 --temp 0",
        f"eval m.gguf --split m.split.gguf --corpus {text} --tokens 300",
    ]
    steps = [shlex.split(command) for command in commands]
    reports = {}
    for step in steps:
        if step[0] == "solve":
            model = ModelFile.load(tmp_path / "m.gguf")
            (whole,), _ = plan_bytes(
                model,
                context_length=128,
                num_hot=[160] * 3,
                dense_on_gpu=[True] * 3,
                head_on_gpu=True,
            )
            whole |= {"workspace": workspace_bytes(model, 128, "predicted")}
            half = f"{sum(whole.values()) - whole['neurons'] // 2}B"
            step = [half if word == "HALF" else word for word in step]
        if step[0] == "calibrate":
            assert main([*step, "--json"]) == 0
            out, lines = capsys.readouterr()
            assert "CPU, 1 thread: " in lines
        else:
            done = run_command(*step, "--json", cwd=tmp_path)
            assert done.returncode == 0, done.stderr
            out = done.stdout
        reports[step[0]] = json.loads(out)
    assert reports["generate"]["mode"] == reports["eval"]["mode"] == "predicted"
    assert len(reports["generate"]["token_ids"]) <= 5
    assert reports["calibrate"]["cpu_bandwidth_gb_per_s"]["1"]["rounds"] >= MIN_ROUNDS
    gpu_bytes = reports["solve"]["gpu_bytes"]
    assert 0 < sum(gpu_bytes.values()) <= int(half.removesuffix("B"))
    assert gpu_bytes["neurons"] < whole["neurons"]
    made = "base.gguf p.safetensors p.report.json pred m.gguf card.json machine.json m.split.gguf"
    assert {p.name for p in tmp_path.iterdir()} == set(made.split())
    again = run_command(*steps[5], cwd=tmp_path)
    assert again.stdout.startswith("the quick")
    assert "tokens" in again.stderr
    assert "GPU role" in again.stderr
    refused = run_command(*steps[0], cwd=tmp_path)
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    assert "--force" in refused.stderr


def test_bad_input_gives_one_line_and_exit_1_and_leaves_nothing(tmp_path, random_model):
    model, text = random_model / "m.gguf", random_model / "text.txt"
    (tmp_path / "cut.gguf").write_bytes(model.read_bytes()[:5000])
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "no-config").mkdir()
    before = sorted(tmp_path.iterdir())
    bad = [
        (("convert", "nowhere", "-o", "x.gguf"), "nowhere"),
        (("convert", "no-config", "-o", "x.gguf"), "config.json"),
        (("profile", "cut.gguf", "--corpus", text, "-o", "x"), "not a whole GGUF file"),
        (("profile", model, "--corpus", "empty.txt", "-o", "x"), "empty corpus"),
        (("generate", model, "-p", "fox", "-c", 4000), "the model has up to 128"),
        (("generate", model, "--split", text, "-p", "fox"), "not a GGUF file"),
        (("generate", model, "--mode", "predicted", "-p", "fox"), "has no predictors"),
        (("generate", model, "-p", "fox", "-n", 0), "wanted 1 or more"),
        (("generate", model, "-p", os.fsdecode(b"\xff")), "not UTF-8"),
        (("profile", model, "--corpus", text, "-o", text, "--force"), "give the output another"),
        (("calibrate", "-o", "/proc/none/x.json"), "cannot be written"),
    ]
    for args, message in bad:
        done = run_command(*args, cwd=tmp_path)
        assert done.returncode == 1, (args, done.stderr)
        assert done.stderr.count("\n") == 1, done.stderr
        assert message in done.stderr
        assert done.stdout == ""
    assert sorted(tmp_path.iterdir()) == before


def test_usage_errors_are_2_and_help_and_inspect_need_no_torch(tmp_path):
    assert run_command("solve").returncode == 2
    assert run_command("solve", "m", "--vram-budget", "8 apples").returncode == 2
    make_model(kind="f16").save(tmp_path / "m.gguf")
    for words in (["--help"], ["inspect", str(tmp_path / "m.gguf")]):
        probe = (
            "import sys; sys.modules['torch'] = sys.modules['transformers'] = None;"
            f"from hotsplit.cli import main; sys.exit(main({words}))"
        )
        subprocess.run([sys.executable, "-c", probe], check=True, capture_output=True)
