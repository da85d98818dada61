"""Compiles every kernel variant of a 7B plan for a device that need not be present, and times it:

    PYTHONPATH=tests python tests/kernels/gpu_variants.py ARCH KIND

It prints a JSON object per variant, with the processor seconds of Triton's compiler and ptxas, and
one for all. The model, filled with zeros, has the widths of a 7B model and four layers, each divided
differently; the variants do not depend on the number of layers. Run it without TRITON_INTERPRET. It
is run by test_gpu_variants.py and is not a test itself."""

import dataclasses
import json
import os
import resource
import sys
import tempfile
from pathlib import Path

import numpy as np

# Set before Triton is imported: nothing compiled earlier is used, and nothing is left behind.
_cache = tempfile.TemporaryDirectory(prefix="gpu-variants-")
os.environ["TRITON_CACHE_DIR"] = _cache.name

import torch  # noqa: E402
from gpu_compilation import AbsentDevice, compile_instead_of_launching  # noqa: E402
from kernel_launches import Launch, launches_of  # noqa: E402
from models import family_spec, make_sizes, required_shapes  # noqa: E402
from test_runtime import make_split  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402

from hotsplit.artifacts.model_file import ModelFile, PredictorInfo  # noqa: E402
from hotsplit.files.gguf_file import TensorEntry, row_bytes  # noqa: E402
from hotsplit.runtime import gpu_setup  # noqa: E402
from hotsplit.runtime.device.device_memory import DeviceMemory  # noqa: E402
from hotsplit.runtime.kernels.gpu.kernels import triton_kernels  # noqa: E402
from hotsplit.runtime.model.loader import load_weights  # noqa: E402
from hotsplit.runtime.model.placement import Placement  # noqa: E402
from hotsplit.runtime.step.plain_backend import plain_backend  # noqa: E402
from hotsplit.runtime.weights.upload import Uploader  # noqa: E402

CARD = torch.device("cpu", 0)  # a placement distinguishes it from "cpu": the GPU's part goes here
CONTEXT = 4096
RANKS = (1024, 512, 1024, 512)
HOT = (300, 1200, 4000, 11008)  # the number of each layer's neurons on the GPU
SHAPE = make_sizes(
    num_layers=len(HOT),
    width=4096,
    num_neurons=11008,
    num_heads=32,
    num_kv_heads=32,
    vocab_size=32000,
    context_length=CONTEXT,
)


def model_of(kind: str) -> ModelFile:
    """A model of zeros with predictors."""
    zeros = (0.0,) * len(HOT)
    model = ModelFile(
        path=Path("7b.gguf"),
        layout="sparse",
        model_id="0" * 64,
        bare_spec=family_spec("llama", SHAPE),
        threshold_L=zeros,
        predictor=PredictorInfo(kind="linear", rank_L=RANKS, threshold_L=zeros),
        tensors={},
        extra_keys={},
    )
    shapes = required_shapes(model)
    return dataclasses.replace(
        model, tensors={name: _zeros(dims, kind) for name, dims in shapes.items()}
    )


def _zeros(dims: tuple[int, ...], kind: str) -> TensorEntry:
    if len(dims) == 1:
        return TensorEntry(
            shape=dims, kind="f32", read_rows=lambda a, b: np.zeros(b - a, np.float32)
        )
    if kind == "f16":
        return TensorEntry(
            shape=dims, kind=kind, read_rows=lambda a, b: np.zeros((b - a, dims[1]), np.float16)
        )
    size = row_bytes(dims[1], kind)
    return TensorEntry(
        shape=dims, kind=kind, read_rows=lambda a, b: np.zeros((b - a, size), np.uint8)
    )


def launches(kind: str) -> tuple[Launch, ...]:
    """The launches of a plan of the model, on tensors laid out as on a GPU."""
    model = model_of(kind)
    split = make_split(model, [np.arange(n) for n in HOT], context_length=CONTEXT)
    split = dataclasses.replace(split, mode="predicted")
    placement = Placement.of_split(split, (CARD,))
    size = gpu_setup.slab_bytes(model, split.gpu_bytes, CONTEXT, sum(HOT))
    uploaders = {CARD: Uploader(memory=DeviceMemory.of(CARD, size))}
    weights = load_weights(
        model, placement, "predicted", CONTEXT, notice=print, uploaders=uploaders
    )
    take = plain_backend(triton_kernels()).take
    return launches_of(weights, placement, take)


def seconds() -> float:
    """Processor seconds of this process and of the compilers that it started."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def main() -> None:
    arch, kind = int(sys.argv[1]), sys.argv[2]
    driver.set_active(AbsentDevice(arch))
    compiled: list = []
    compile_instead_of_launching(compiled)
    kernels, found, spent = triton_kernels(), launches(kind), 0.0
    codes = set()
    for launch in found:
        began = seconds()
        launch.run(kernels)
        taken = seconds() - began
        spent += taken
        codes |= {(name, kernel.hash) for name, kernel in compiled}
        print(json.dumps({"variant": launch.variant, "seconds": round(taken, 2)}), flush=True)
        compiled.clear()
    size = sum(path.stat().st_size for path in Path(_cache.name).rglob("*") if path.is_file())
    print(
        json.dumps(
            {
                "arch": arch,
                "kind": kind,
                "variants": len(found),
                "programs": len(codes),
                "seconds": round(spent, 1),
                "cache_bytes": size,
            }
        )
    )


if __name__ == "__main__":
    main()
