"""Fixtures shared by the tests of `hotsplit run`: models, a text, and a cache for each test."""

from pathlib import Path

import pytest
from checkpoints import random_llama

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


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """A separate cache for the test; the machine is measured only briefly."""
    monkeypatch.setenv("HOTSPLIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("hotsplit.run.rates.ENCODE_S", 0.01)
    monkeypatch.setattr("hotsplit.run.rates.MATMUL_S", 0.01)
    monkeypatch.setattr("hotsplit.run.rates.UNPACK_S", 0.01)
    monkeypatch.setattr("hotsplit.run.rates.WRITTEN_BYTES", MIB)
    return tmp_path / "cache"
