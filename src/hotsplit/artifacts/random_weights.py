"""A model file in memory with random weights, for measurements and checks of machines."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from hotsplit.artifacts.model_file import ModelFile, PredictorInfo
from hotsplit.files.gguf_file import TensorEntry, array_entry
from hotsplit.model.spec import ModelSpec

MOST_VALUES = (1 << 20) - 3  # odd, so that the rows of no common width are alike


def random_model(spec: ModelSpec, *, predictor_rank: int | None = None) -> ModelFile:
    """Matrices in f16, whose products neither grow nor vanish, norms of ones, and if there is a
    rank, linear predictors of it with threshold 0."""
    zeros = (0.0,) * spec.num_layers
    info = None
    if predictor_rank is not None:
        ranks = (predictor_rank,) * spec.num_layers
        info = PredictorInfo(kind="linear", rank_L=ranks, threshold_L=zeros)
    empty = ModelFile(
        path=Path("random.gguf"),
        layout="sparse",
        model_id="0" * 64,
        bare_spec=spec,
        threshold_L=zeros,
        predictor=info,
        tensors={},
        extra_keys={},
    )
    required, _ = empty.expected_shapes()
    required["output.weight"] = (spec.vocab_size, spec.hidden_size)
    random = np.random.default_rng(0)
    return replace(empty, tensors={name: _entry(dims, random) for name, dims in required.items()})


def _entry(dims: tuple[int, ...], random: np.random.Generator) -> TensorEntry:
    if len(dims) == 1:
        return array_entry(np.ones(dims), "f32")
    # Large matrices repeat their values, which takes a tenth of the time to draw them all.
    count = min(int(np.prod(dims)), MOST_VALUES)
    values = (random.standard_normal(count) / np.sqrt(dims[-1])).astype(np.float16)
    return array_entry(np.resize(values, dims), "f16")
