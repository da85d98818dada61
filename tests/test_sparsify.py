"""Training to be sparse: whole runs, what they write, and what they refuse.

Models are tiny and random; benchmarks/sparsify.py measures a real one."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import edit_config, random_llama
from safetensors.torch import load_file, save_file
from sparsify_runs import make_inputs, tiny_config, trainer_of, windows_of
from transformers import AutoModelForCausalLM

from hotsplit import Engine
from hotsplit.artifacts.limits_file import FILE_NAME, LayerLimits
from hotsplit.artifacts.limits_file import Limits as LimitsFile
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.cli import main
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.errors import HotsplitError, Interrupted
from hotsplit.families.sizes import sizes_of
from hotsplit.sparsify import state
from hotsplit.sparsify.config import SparsifyConfig
from hotsplit.sparsify.run import sparsify
from hotsplit.sparsify.source import as_checkpoint
from hotsplit.sparsify.student import Update, load_student, matrix_names, whole_matrices
from hotsplit.sparsify.trained_checkpoint import read_trained


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> tuple[Path, Path]:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def config(inputs, tmp_path) -> SparsifyConfig:
    return tiny_config(inputs, tmp_path)


# ---- a run ----------------------------------------------------------------------------------


@pytest.mark.parametrize("allocation, share_left", [("sensitivity", 0.97), ("uniform", 0.85)])
def test_training_brings_the_model_closer_to_its_dense_self(config, allocation, share_left):
    report = sparsify(replace(config, tokens=128 * 48, allocation=allocation))
    untrained, made = report.record.untrained["0.6"], report.record.made[0]
    (found,) = made.quality.values()
    assert found.silent_share == pytest.approx(0.6, abs=0.03)
    assert found.kl < share_left * untrained.kl
    assert found.kl_95 < found.kl and 0 < found.same_top < 1
    assert report.num_tokens == 128 * 48 and len(report.record.curve) == 4
    trained = load_file(made.checkpoint / "model.safetensors")
    dense = load_file(config.model / "model.safetensors")
    changed = {name.split(".")[-2] for name in dense if not torch.equal(trained[name], dense[name])}
    assert changed == {"gate_proj", "up_proj", "down_proj"}
    limits = LimitsFile.load(made.checkpoint / FILE_NAME)
    assert [layer.gate_F.shape for layer in limits.layers] == [(160,)] * 3


def test_a_run_weighs_the_error_of_every_layers_output(config):
    """Layers are not compared on held-out windows, which are shorter than a training pass."""
    record = sparsify(replace(config, layer_weight=1.0)).record
    (found,) = record.made[0].quality.values()
    assert found.kl < record.untrained["0.6"].kl


def interrupted_after(num_steps: int):
    """A progress callback that interrupts the process after this many steps."""
    counts = []

    def on_tokens(count: float) -> None:
        counts.append(count)
        if len(counts) == num_steps + 1:  # the first call counts what was done before
            os.kill(os.getpid(), signal.SIGINT)

    return on_tokens


def test_a_stopped_and_resumed_run_gives_the_same_result_bit_for_bit(config, tmp_path):
    config = replace(config, tokens=128 * 8, shares=(0.5, 0.6), checks=1)
    other = replace(config, output=tmp_path / "b.gguf", save_checkpoint=tmp_path / "b")
    whole = sparsify(config)
    for num_steps in (3, 7):
        with pytest.raises(Interrupted, match="the same command continues from there"):
            sparsify(other, on_tokens=interrupted_after(num_steps))
    stopped = sparsify(other)
    assert [m.quality for m in stopped.record.made] == [m.quality for m in whole.record.made]
    assert [p.quality for p in stopped.record.curve] == [p.quality for p in whole.record.curve]
    losses = [[point.trained_kl for point in run.record.curve] for run in (whole, stopped)]
    assert losses[0] == losses[1] and len(losses[0]) < 8  # a run is stopped between two points
    for a, b in zip(whole.record.made, stopped.record.made, strict=True):
        for name in ("model.safetensors", FILE_NAME):
            want, found = (load_file(made.checkpoint / name) for made in (a, b))
            assert want.keys() == found.keys()
            assert all(torch.equal(want[key], found[key]) for key in want)


def test_a_signal_that_comes_twice_counts_once_and_a_later_one_ends_the_run(config, monkeypatch):
    counts = []

    def twice(count: float) -> None:
        counts.append(count)
        if len(counts) in (4, 5):  # the first call counts what was done before
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="the same command continues from there"):
        sparsify(config, on_tokens=twice)
    assert len(counts) == 4
    monkeypatch.setattr("hotsplit.sparsify.run.SAME_S", 0.0)
    counts.clear()
    with pytest.raises(Interrupted, match="nothing half-written was left"):
        sparsify(config, on_tokens=twice)


def test_the_state_of_another_run_is_refused(config):
    with pytest.raises(Interrupted):
        sparsify(config, on_tokens=interrupted_after(2))
    with pytest.raises(HotsplitError, match="learning_rate 0.001, this run has 0.002; delete it"):
        sparsify(replace(config, learning_rate=2e-3))


def test_a_run_continues_from_a_trained_checkpoint(config, tmp_path):
    made = sparsify(config).record.made[0]
    more = replace(config, shares=(0.7,), start_from=made.checkpoint, tokens=128 * 4,
                   output=tmp_path / "more.gguf", save_checkpoint=tmp_path / "more")  # fmt: skip
    record = sparsify(more).record
    (quality,) = made.quality.values()
    assert record.started == quality
    assert record.curve[0].wanted_share > 0.55
    with pytest.raises(HotsplitError, match="wanted a checkpoint that sparsify wrote"):
        sparsify(replace(more, start_from=config.model, force=True))


@pytest.mark.parametrize("rule", ["relu", "fatrelu", "drelu"])
def test_a_trained_checkpoint_has_the_replaced_activation(config, rule):
    shares = (0.6,) if rule == "fatrelu" else ()
    report = sparsify(replace(config, rule=rule, shares=shares, tokens=128 * 5))
    made = report.record.made[0]
    (found,) = made.quality.values()
    assert found.silent_share > {"relu": 0.4, "fatrelu": 0.55, "drelu": 0.65}[rule]
    file = config.output.with_name("m.gguf")
    convert(ConvertConfig(source=made.checkpoint, output=file, outtype="f32"))
    with Engine.load(file, mode="exact") as engine:
        assert engine.model.activation == rule
        assert (engine.model.threshold_L[0] > 0) == (rule == "fatrelu")


def test_low_rank_updates_start_at_the_dense_model_and_are_written_whole(config):
    trainer = trainer_of(replace(config, rank=4))
    dense = load_file(config.model / "model.safetensors")

    def matrices():
        return dict(whole_matrices(trainer.student.layers, dense.__getitem__))

    assert all(torch.equal(matrix, dense[name]) for name, matrix in matrices().items())
    trainer.measure(windows_of())
    for _ in range(2):  # the first step moves `up` alone
        trainer.train(windows_of())
    part, name = trainer.student.layers[0].gate_proj, "model.layers.0.mlp.gate_proj.weight"
    assert isinstance(part, Update)
    x_TD = torch.randn(5, 64)
    assert torch.allclose(part(x_TD), x_TD @ matrices()[name].T, atol=1e-4)
    assert not torch.equal(matrices()[name], dense[name])
    made = sparsify(replace(config, rank=4, tokens=128 * 2)).record.made[0]
    assert not torch.equal(load_file(made.checkpoint / "model.safetensors")[name], dense[name])


@pytest.mark.slow
def test_two_processes_train_the_same_model_as_one(config, tmp_path):
    """Each takes half of every batch, so their summed gradient differs only by rounding."""
    options = ["--tokens", "768", "--held-out-tokens", "256", "--check-tokens", "256", "--checks",
               "2", "--window", "32", "--micro-tokens", "64", "--precision", "f32", "--device",
               "cpu", "--outtype", "f32"]  # fmt: skip

    def run(name: str, launcher: list[str], batch: int) -> dict:
        command = [*launcher, "-m", "hotsplit", "sparsify", str(config.model), "--corpus",
                   str(config.corpora[0]), "-o", str(tmp_path / f"{name}.gguf"), "--save-checkpoint",
                   str(tmp_path / name), "--batch-tokens", str(batch), "--json", *options]  # fmt: skip
        done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path)
        return json.loads(done.stdout)

    torchrun = [
        str(Path(sys.executable).parent / "torchrun"),
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    one, two = run("one", [sys.executable], 128), run("two", torchrun, 64)
    assert (one["num_processes"], two["num_processes"]) == (1, 2)
    want, found = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    dense = load_file(config.model / "model.safetensors")
    for name in want:
        moved = (want[name] - dense[name]).norm()
        # Adam's steps are as large as usual where a gradient is mostly rounding error.
        assert (found[name] - want[name]).norm() <= 0.3 * moved
    assert (tmp_path / "two.gguf").exists() and not (tmp_path / "two.gguf.sparsify").exists()


# ---- what it writes -------------------------------------------------------------------------


def error_of(file: Path, mode: str, ids_T: torch.Tensor, want_TV: torch.Tensor) -> float:
    """The relative error of the engine's logits."""
    with Engine.load(file, mode=mode) as engine:
        found_TV = engine.logits(ids_T).double()
    return float((found_TV - want_TV).norm() / want_TV.norm())


def test_the_engine_computes_what_was_trained_without_its_limits_and_with_them(config, tmp_path):
    made = sparsify(replace(config, tokens=128 * 4)).record.made[0]
    file = tmp_path / "m.gguf"
    convert(ConvertConfig(source=made.checkpoint, output=file, outtype="f32"))
    ids_T = torch.randint(1, 257, (40,), generator=torch.Generator().manual_seed(0))
    trained, dense = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(ids_T[None])
        .logits[0]
        .detach()
        for path in (made.checkpoint, config.model)
    )
    assert error_of(file, "dense", ids_T, trained.double()) < 1e-5
    assert (dense - trained).norm() / trained.norm() > 1e-3
    student = load_student(made.checkpoint, "threshold", torch.float32, "cpu")
    _, limit_LF = read_trained(made.checkpoint, matrix_names(student.layers))
    for layer, limit_F in zip(student.layers, limit_LF, strict=True):
        layer.limit_F = limit_F
    want_TV = student.model(ids_T[None]).logits[0].detach().double()
    assert error_of(file, "exact", ids_T, want_TV) < 1e-4
    assert error_of(file, "dense", ids_T, want_TV) > 1e-2


@pytest.mark.parametrize(
    ("activation", "layout"),
    [("silu", "sparse"), ("silu", "stock"), ("gelu", "sparse"), ("gelu_pytorch_tanh", "sparse")],
)
def test_a_model_file_becomes_the_checkpoint_it_was_made_of(inputs, tmp_path, activation, layout):
    source, file = shutil.copytree(inputs[0], tmp_path / "source"), tmp_path / "m.gguf"
    edit_config(source, lambda config: config.update(hidden_act=activation))
    convert(ConvertConfig(source=source, output=file, outtype="f32", layout=layout))
    folder = as_checkpoint(file, tmp_path / "again")
    found, want = (load_file(path / "model.safetensors") for path in (folder, source))
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], want[name]) for name in want)
    ids_T = torch.arange(1, 30)
    logits = [
        AutoModelForCausalLM.from_pretrained(path)(ids_T[None]).logits for path in (folder, source)
    ]
    assert torch.equal(*logits)


def test_a_model_file_with_limits_is_not_trained(inputs, tmp_path):
    file, limited = tmp_path / "m.gguf", tmp_path / "limited.gguf"
    convert(ConvertConfig(source=inputs[0], output=file, outtype="f32"))
    shape = sizes_of(ModelFile.load(file).bare_spec)
    layer = LayerLimits(gate_F=np.full(shape.num_neurons, 0.01, np.float32))
    LimitsFile(model_id=None, layers=(layer,) * shape.num_layers).save(tmp_path / "limits")
    convert(ConvertConfig(source=file, output=limited, limits=tmp_path / "limits"))
    with pytest.raises(HotsplitError, match="limited.gguf: has limits already; give the model"):
        as_checkpoint(limited, tmp_path / "again")
    assert not (tmp_path / "again").exists()


# ---- what it refuses ------------------------------------------------------------------------


def test_a_rate_that_is_too_high_leaves_the_last_good_state(config):
    with pytest.raises(HotsplitError, match="start over with a lower --learning-rate") as error:
        sparsify(replace(config, learning_rate=1e30, warmup_steps=0))
    assert "NaN or infinity in layer" in str(error.value) and "\n" not in str(error.value)
    saved = load_file(config.work_folder / "state.safetensors")
    assert saved["model/0.up_proj.weight"].isfinite().all()


def test_a_full_disk_gives_one_line(config, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state, "save_position", full)
    with pytest.raises(HotsplitError, match="No space left on device.*nothing was saved"):
        sparsify(config, on_tokens=interrupted_after(1))


@pytest.mark.parametrize(
    "changes, line",
    [
        ({"shares": (1.0,)}, "share is 1.0: a layer must lose some neurons and keep some"),
        ({"shares": (0.7, 0.6)}, "the smallest first"),
        ({"rule": "relu"}, "leave --share out"),
        ({"corpora": ()}, "no corpus"),
        ({"micro_tokens": 96}, "is not a whole number of passes"),
        ({"learning_rate": 0.0}, "learning rate is 0.0"),
        ({"layer_weight": -1.0}, "layer weight is -1.0"),
    ],
)
def test_requests_that_make_no_sense_are_refused(config, changes, line):
    with pytest.raises(HotsplitError, match=line):
        replace(config, **changes)


def test_a_short_corpus_is_refused(config, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 12)
    with pytest.raises(HotsplitError, match=r"tokens to train on, wanted 512 or more"):
        sparsify(replace(config, corpora=(path,)))


def damaged(model: Path, folder: Path, change) -> Path:
    """A copy of a checkpoint whose tensors `change` has changed in place."""
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


UP, DOWN = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda t: t.pop(DOWN), "no tensor for 'blk.1.ffn_down.weight'"),
        (lambda t: t.update({"model.layers.1.mlp.x": torch.zeros(3)}), "model.layers.1.mlp.x"),
        (lambda t: t.update({DOWN: t[DOWN][:, :-1].contiguous()}), DOWN),
        (lambda t: t[UP][0, 0].fill_(torch.nan), f"{UP} has values that are NaN or infinite"),
        (lambda t: t[UP][0, 0].fill_(torch.inf), f"{UP} has values that are NaN or infinite"),
        (lambda t: t[UP].mul_(1e38), "hidden states are NaN or infinite"),
    ],
    ids=["missing", "unknown", "shape", "NaN", "infinite", "overflow"],
)
def test_a_damaged_model_is_refused_before_training(config, tmp_path, change, line):
    """transformers itself would fill in missing tensors at random."""
    said = []
    folder = damaged(config.model, tmp_path / "damaged", change)
    with pytest.raises(HotsplitError) as raised:
        sparsify(replace(config, model=folder), said.append)
    assert line in str(raised.value) and "\n" not in str(raised.value)
    assert not any(line.startswith("step") for line in said) and not config.work_folder.exists()


def test_a_refused_run_leaves_no_dense_checkpoint(config, tmp_path):
    """A model file is made into a checkpoint before the text is read."""
    file, text = tmp_path / "m.gguf", tmp_path / "short.txt"
    convert(ConvertConfig(source=config.model, output=file, outtype="f32"))
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 12)
    refused = replace(config, model=file, corpora=(text,))
    with pytest.raises(HotsplitError, match=r"a longer text, or hold out fewer tokens of it$"):
        sparsify(refused)
    assert not refused.work_folder.exists()
    dense = refused.work_folder / "dense"
    dense.mkdir(parents=True)
    (dense / "other.txt").write_text("kept")
    with pytest.raises(HotsplitError):
        sparsify(replace(refused, model=config.model))  # a folder, so `dense` is not this run's
    assert (dense / "other.txt").read_text() == "kept"
    shutil.rmtree(dense)
    as_checkpoint(file, dense)  # made by another run, which has not ended
    with pytest.raises(HotsplitError):
        sparsify(refused)
    assert (dense / "config.json").is_file()


def test_models_that_are_sparse_by_themselves_are_refused(config, tmp_path):
    folder = random_llama(tmp_path / "relu", hidden_act="relu")
    with pytest.raises(HotsplitError, match="sparse by itself and needs no training"):
        sparsify(replace(config, model=folder))
    file = tmp_path / "relu.gguf"
    convert(ConvertConfig(source=folder, output=file, outtype="f32"))
    with pytest.raises(HotsplitError, match="sparse by itself and needs no training"):
        sparsify(replace(config, model=file))


def test_training_that_does_not_fit_in_memory_is_refused_before_it_starts(config, monkeypatch):
    monkeypatch.setattr("hotsplit.sparsify.needs.free_memory_bytes", lambda: 300 << 20)
    with pytest.raises(HotsplitError, match="300.00 MiB of memory are free: it does not fit"):
        sparsify(config)


@pytest.mark.parametrize("is_enough", [False, True])
def test_a_run_whose_results_do_not_fit_on_the_disk_is_refused(config, monkeypatch, is_enough):
    """While it is saved again, the state is on the disk twice: values, two moments and the best
    values, in f32."""
    config = replace(config, tokens=256)
    sparsify(config)
    tensors = load_file(config.model / "model.safetensors")
    count = sum(tensor.numel() for name, tensor in tensors.items() if ".mlp." in name)
    convert(ConvertConfig(source=config.save_checkpoint, output=config.output, outtype="f16"))
    needed = 2 * 16 * count + size_of(config.save_checkpoint) + size_of(config.output)
    for path in (config.work_folder, config.save_checkpoint):
        shutil.rmtree(path)
    config.output.unlink()
    usage = shutil.disk_usage(config.model)._replace(free=int(needed * (1.0 if is_enough else 0.8)))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    said: list[str] = []
    if is_enough:
        sparsify(config, said.append)
        return
    with pytest.raises(HotsplitError) as raised:
        sparsify(config, said.append)
    line = str(raised.value)
    assert re.search(r" MiB free, about \d.*needed for the training's state.*; free space", line), (
        line
    )
    assert not said and "\n" not in line and not config.work_folder.exists()


def size_of(path: Path) -> int:
    files = path.iterdir() if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)


def test_a_type_that_does_not_suit_the_rows_is_told_before_training(config):
    said: list[str] = []
    sparsify(replace(config, tokens=256, outtype="q4_k"), said.append)
    number = next(i for i, line in enumerate(said) if line.startswith("note: "))
    assert "are q5_0, because their rows are not whole q4_k blocks" in said[number]
    assert not any(line.startswith("step") for line in said[:number])
    with pytest.raises(HotsplitError, match="outtype: 'q9_1' is unknown"):
        replace(config, outtype="q9_1")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"device": "cuda:99"}, "device 'cuda:99': torch sees [0-9]+ CUDA devices here"),
        ({"device": "gpu"}, "device 'gpu'; wanted cpu or cuda"),
        ({"rank": 65}, "rank is 65, wanted at most 64, the smaller side of the matrices"),
    ],
)
def test_what_machine_or_model_cannot_do_is_refused_before_training(config, changes, line):
    with pytest.raises(HotsplitError, match=line):
        sparsify(replace(config, **changes))
    assert not config.work_folder.exists()


def test_an_output_that_exists_is_refused(config):
    config.output.write_text("mine")
    with pytest.raises(HotsplitError, match="exists already"):
        sparsify(config)
    assert config.output.read_text() == "mine"


def test_the_command_writes_a_model_file_and_removes_its_work_folder(config, capsys):
    arguments = ["sparsify", str(config.model), "--corpus", str(config.corpora[0]), "-o",
                 str(config.output), "--tokens", "256", "--window", "32", "--batch-tokens", "128",
                 "--micro-tokens", "128", "--held-out-tokens", "128", "--checks", "1", "--device",
                 "cpu"]  # fmt: skip
    assert main([*arguments, "--share", "1.0"]) == 1
    assert "share is 1.0" in capsys.readouterr().err and not config.output.exists()
    assert main(arguments) == 0
    assert f"wrote {config.output}: silent" in capsys.readouterr().err
    with Engine.load(config.output) as engine:
        assert (engine.mode, engine.model.activation) == ("exact", "silu")
    assert sorted(path.name for path in config.output.parent.iterdir()) == ["out.gguf"]
