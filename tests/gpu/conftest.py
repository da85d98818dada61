"""Tests of the runtime on a CUDA device: `make test-gpu`. Those that need one fail, rather than
skip, without it.

With `--device cpu`, test_step runs with both roles on the CPU, to check the tests themselves; tests
that need CUDA are skipped."""

import dataclasses

import numpy as np
import pytest
import torch
from models import byte_level_keys, decided_predictors, make_model, make_sizes


def pytest_addoption(parser):
    parser.addoption("--device", default="cuda", choices=("cuda", "cpu"))


@pytest.fixture
def device(request):
    name = request.config.getoption("--device")
    assert name == "cpu" or torch.cuda.is_available(), "no CUDA device here"
    return name


@pytest.fixture
def cuda(request):
    """Fails a test that needs CUDA if there is none; skips it with `--device cpu`."""
    if request.config.getoption("--device") == "cpu":
        pytest.skip("only a CUDA device has this")
    assert torch.cuda.is_available(), "no CUDA device here"
    return "cuda"


@pytest.fixture
def long_model(tmp_path):
    """A random model with room for a text of 1,100 tokens, none of which ends it."""
    keys, vocab_size = byte_level_keys()
    shape = make_sizes(num_layers=4, num_neurons=96, vocab_size=vocab_size, context_length=1100)
    model = make_model(sizes=shape, kind="f16", predictor_rank=8, extra_keys=keys)
    model = dataclasses.replace(model, path=tmp_path / "long.gguf")
    model.save(model.path)
    return model


@pytest.fixture
def large_model(tmp_path):
    """200 MB of weights, since torch's allocator cannot enforce a budget below 128 MiB."""
    shape = make_sizes(
        num_layers=6,
        width=1024,
        num_neurons=4096,
        num_heads=8,
        num_kv_heads=8,
        vocab_size=512,
        context_length=256,
    )
    model = make_model(sizes=shape, kind="f16", predictor_rank=32)
    tensors = model.tensors | decided_predictors(6, 4096)
    model = dataclasses.replace(model, tensors=tensors, path=tmp_path / "large.gguf")
    model.save(model.path)
    return model


@pytest.fixture
def some_neurons():
    """Every third neuron of the large model's layers."""
    return [np.arange(0, 4096, 3, dtype=np.int32)] * 6
