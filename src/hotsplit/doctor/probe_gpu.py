"""Child process: checks GPUs by loading a small random model on each, once with all neurons on the
GPU and once with all of them on the CPU."""

import sys
from pathlib import Path

import numpy as np

from hotsplit.artifacts.model_file import ModelFile, PredictorInfo
from hotsplit.doctor.children import leave_no_core, tell_at, tell_done
from hotsplit.files.gguf_file import TensorEntry, array_entry
from hotsplit.model.architecture import ARCHITECTURES, ModelShape, layer_shapes, outer_shapes

SHAPE = ModelShape(
    num_layers=2, width=512, num_neurons=1408, num_heads=8, num_kv_heads=4, head_width=64,
    vocab_size=1000, context_length=512, norm_epsilon=1e-5, rope_theta=1e4,
)  # fmt: skip
_RANK = 64


def main() -> None:
    leave_no_core()
    for device in sys.argv[1:]:
        check(device)
    tell_done({})


def check(device: str) -> None:
    """Loads a model twice, which checks the device; hotsplit.artifacts.device_checks stores the results."""
    from hotsplit.runtime.engine import Engine

    model = small_model()
    for cpu_ffn in (False, True):
        where = "the CPU" if cpu_ffn else device
        tell_at(f"a small model on {device}, neurons on {where}")
        with Engine.of(model, mode="predicted", device=device, cpu_ffn=cpu_ffn) as engine:
            engine.decode_seconds(steps=2)


def small_model() -> ModelFile:
    """Random weights in f16, with predictors."""
    graph, count = ARCHITECTURES["llama"], SHAPE.num_layers
    shapes = outer_shapes(graph, SHAPE) | {"output.weight": (SHAPE.vocab_size, SHAPE.width)}
    for layer in range(count):
        in_layer = layer_shapes(graph, SHAPE, "sparse", _RANK)
        shapes |= {f"blk.{layer}.{name}": dims for name, dims in in_layer.items()}
    random = np.random.default_rng(0)
    info = PredictorInfo(kind="linear", rank_L=(_RANK,) * count, threshold_L=(0.0,) * count)
    return ModelFile(
        path=Path("doctor.gguf"), layout="sparse", model_id="0" * 64, shape=SHAPE,
        activation="relu", threshold_L=(0.0,) * count, predictor=info,
        tensors={name: _entry(dims, random) for name, dims in shapes.items()}, extra_keys={},
    )  # fmt: skip


def _entry(dims: tuple[int, ...], random: np.random.Generator) -> TensorEntry:
    if len(dims) == 1:
        return array_entry(np.ones(dims), "f32")
    return array_entry(random.standard_normal(dims) / np.sqrt(dims[-1]), "f16")


if __name__ == "__main__":
    main()
