"""Models of the smallest and largest sizes pass each stage tested, or are refused in one line."""

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
from checkpoints import random_llama
from models import make_machine, make_sizes, shape_only
from reference import rel_error
from transformers import AutoModelForCausalLM

from hotsplit import Engine
from hotsplit.cli import main
from hotsplit.files import gguf_file

TEXT = "the quick brown fox jumps over the lazy dog\n" * 1500


def run(*words: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    out, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(errors):
        code = main([str(word) for word in words])
    return code, out.getvalue(), errors.getvalue()


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_hidden_layers": 1},
        {"intermediate_size": 1},
        {
            "num_hidden_layers": 1,
            "intermediate_size": 1,
            "hidden_size": 32,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
        },
    ],
    ids=["one layer", "one neuron", "one of each"],
)
def test_all_stages_with_extreme_sizes(tmp_path, sizes):
    folder = random_llama(tmp_path / "checkpoint", **sizes)
    (tmp_path / "text.txt").write_text(TEXT)
    make_machine().save(tmp_path / "machine")
    text, machine = tmp_path / "text.txt", tmp_path / "machine"
    model, profile, full = tmp_path / "m.gguf", tmp_path / "p", tmp_path / "full.gguf"
    plan, predictors = tmp_path / "plan.gguf", tmp_path / "predictors"
    for line in (
        f"convert {folder} -o {model} --outtype f32",
        f"profile {model} --corpus {text} -o {profile} --tokens 6000 --train-predictors"
        f" {predictors}",
        f"convert {model} -o {full} --predictors {predictors}",
        f"solve {full} --profile {profile} --machine {machine} -vb 1MiB -o {plan}",
        f"generate {full} --split {plan} -p the -n 4 --temp 0 --device cpu",
        f"eval {full} --corpus {text} --tokens 256 --mode predicted",
        f"inspect {full}",
    ):
        words = line.split()
        code, _, errors = run(*words)
        assert code == 0, (words, errors)
    ids = torch.randint(320, (12,), generator=torch.Generator().manual_seed(0))
    wanted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids[None]).logits[0]
    with Engine.load(model, mode="exact") as engine:
        assert rel_error(engine.logits(ids), wanted.detach()) < 1e-5


def test_a_vocabulary_of_one_token(tmp_path):
    folder = random_llama(
        tmp_path / "c", vocab_size=1, has_tokenizer=False, bos_token_id=None, eos_token_id=None
    )
    code, _, errors = run("convert", folder, "-o", tmp_path / "m.gguf", "--outtype", "f32")
    assert code == 0, errors
    ids = torch.zeros(5, dtype=torch.int64)
    wanted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids[None]).logits[0]
    with Engine.load(tmp_path / "m.gguf") as engine:
        assert rel_error(engine.logits(ids), wanted.detach()) < 1e-5
    for words in (("generate", tmp_path / "m.gguf", "-p", "a"), ("inspect", tmp_path / "m.gguf")):
        code, _, errors = run(*words)
        assert (code, errors.count("\n")) == ((1, 1) if words[0] == "generate" else (0, 0)), errors


def test_a_context_of_one_token(tmp_path):
    folder = random_llama(tmp_path / "c", max_position_embeddings=1)
    (tmp_path / "text.txt").write_text(TEXT)
    model = tmp_path / "m.gguf"
    assert run("convert", folder, "-o", model)[0] == 0
    with Engine.load(model) as engine:
        assert engine.logits(torch.tensor([3])).isfinite().all()
    refused = [
        run("profile", model, "--corpus", tmp_path / "text.txt", "-o", tmp_path / "p"),
        run("eval", model, "--corpus", tmp_path / "text.txt"),
        run("generate", model, "-p", "the quick brown fox"),
    ]
    assert all(code == 1 and errors.count("\n") == 1 for code, _, errors in refused), refused


def test_a_file_of_100_gb_is_shown_without_being_read(tmp_path, monkeypatch):
    """A sparse file, whose weights take no space on disk."""

    def resident_kib() -> int:
        return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0])

    shape = make_sizes(
        num_layers=80,
        width=8192,
        num_neurons=24_576,
        num_heads=64,
        num_kv_heads=8,
        vocab_size=128_256,
        context_length=8192,
    )
    path = tmp_path / "large.gguf"
    model = shape_only(shape)
    monkeypatch.setattr(gguf_file, "_pieces", lambda entry: [])
    model.save(path)
    monkeypatch.undo()
    total = sum(-(-entry.num_bytes // 32) * 32 for entry in model.tensors.values())
    assert total > 100 * 10**9
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + total)
    before = resident_kib()
    code, out, errors = run("inspect", path, "--json")
    assert code == 0, errors
    assert resident_kib() - before < 1 << 20
    assert json.loads(out)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 33)
    code, _, errors = run("inspect", path)
    assert code == 1 and errors.count("\n") == 1
