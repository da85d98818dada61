"""Fixtures shared by the tests of `hotsplit run`: models, a text, and a cache for each test."""

import json
from pathlib import Path

import pytest
from checkpoints import random_llama
from models import make_machine

from hotsplit.cli import main
from hotsplit.run import stages
from hotsplit.run.choice import run_bytes
from hotsplit.run.source import look_at

MIB = 1 << 20


@pytest.fixture(scope="session")
def relu(tmp_path_factory) -> Path:
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64}
    return random_llama(tmp_path_factory.mktemp("relu") / "relu", **sizes)


@pytest.fixture(scope="session")
def silu(tmp_path_factory) -> Path:
    return random_llama(tmp_path_factory.mktemp("silu") / "silu", hidden_act="silu")


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "t.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    return path


def budget_below(source: Path, less: int, context: int, texts: int = 1) -> str:
    """A --vram that lacks `less` bytes of what the whole model takes in q8_0; how much its
    temporaries take depends on the processor."""
    found = look_at(source, None, source.parent / "none.gguf")
    model = found.own or found.draft("q8_0")
    return f"{run_bytes(model, context, MIB, texts) - less}B"


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """A separate cache for the test; the machine is measured only briefly."""
    monkeypatch.setenv("HOTSPLIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("hotsplit.run.rates.ENCODE_S", 0.01)
    monkeypatch.setattr("hotsplit.run.rates.MATMUL_S", 0.01)
    monkeypatch.setattr("hotsplit.run.rates.UNPACK_S", 0.01)
    monkeypatch.setattr("hotsplit.run.rates.WRITTEN_BYTES", MIB)
    return tmp_path / "cache"


@pytest.fixture
def card(monkeypatch):
    """The figures of a machine with a slow CPU and a fast GPU."""

    def calibrate(config, on_probe):
        fast = {"launch_s": 1e-9, "hand_over_s": 1e-9, "copy_latency_s": 1e-9}
        machine = make_machine(cpu_gb_per_s=0.01, **fast)
        machine.save(config.output)
        on_probe(1)
        return machine

    monkeypatch.setattr(stages, "calibrate", calibrate)
    monkeypatch.setattr(stages, "load_now", lambda: 0.0)


def told(capsys, *words: object) -> tuple[dict, list[str]]:
    """The report of a run that succeeds, and the lines for the user."""
    argv = ["run", *map(str, words), *["-p", "the", "-n", "3", "--seed", "0", "--json", "-t", "1"]]
    code = main(argv)
    shown = capsys.readouterr()
    assert code == 0, shown.err
    return json.loads(shown.out), shown.err.splitlines()
