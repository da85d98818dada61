"""Fixtures shared by the tests of bench: two small models, a plan, and a quick bandwidth."""

import numpy as np
import pytest
from models import byte_level_keys, decided_predictors, make_model, make_sizes
from test_runtime import make_split


@pytest.fixture(scope="module")
def bench_files(tmp_path_factory):
    """A model with predictors and one without, in q8_0, and a plan for the first."""
    folder = tmp_path_factory.mktemp("bench")
    shape = make_sizes(num_layers=3, num_neurons=96, context_length=64, vocab_size=300)
    model = make_model(sizes=shape, kind="q8_0", predictor_rank=32, extra_keys=byte_level_keys()[0])
    model.tensors.update(decided_predictors(3, 96))
    model.save(folder / "predicted.gguf")
    make_model(sizes=shape, kind="q8_0", is_tied=True, seed=1).save(folder / "dense.gguf")
    hot = [np.arange(40), np.zeros(0), np.arange(96)]
    dense = (True, False, True)
    make_split(model, hot, dense_on_gpu=dense, context_length=32).save(folder / "plan.gguf")
    return folder


@pytest.fixture
def small_buffer(monkeypatch):
    """Measures bandwidth over very little memory, which takes no time."""
    monkeypatch.setattr("hotsplit.measure.bench.runner.buffer_bytes", lambda: 1 << 20)
