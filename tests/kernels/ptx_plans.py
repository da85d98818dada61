"""Kernel launches of plans, as the runtime lists them for its check of a device, each reduced in
size and compared with float64.

A launch of a plan determines which machine code a kernel needs (its variant). The code depends on
widths and types, and on a matrix's number of rows only through the rows per program. So a launch
keeps its variant when its matrices are replaced by a few random rows."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from gpu_matrices import REFERENCE, make_matrix
from kernel_check import check_launch
from kernel_launches import Launch, launches_of
from models import make_sizes, shape_only
from paths import ROOT
from test_runtime import make_split
from torch import Tensor

from hotsplit.artifacts.model_file import ModelFile, PredictorInfo
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.files.gguf_file import TensorEntry, row_bytes
from hotsplit.model.spec import LayerSpec, Neurons
from hotsplit.runtime import gpu_setup
from hotsplit.runtime.device.device_memory import DeviceMemory
from hotsplit.runtime.kernels.gpu import launch as layouts
from hotsplit.runtime.kernels.gpu.kernels import Kernels
from hotsplit.runtime.kernels.stored import StoredMatrix
from hotsplit.runtime.model.loader import load_weights
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.step.backend import plain_backend
from hotsplit.runtime.weights.matrix import Matrix
from hotsplit.runtime.weights.upload import Uploader

CARD = torch.device("cpu", 0)  # unlike "cpu", treated as a GPU by a placement
ROWS = 17  # of a matrix, at most
NEURONS = 83  # rows of `down`, at most
# Kernels of prompts that test_ptx_products.py and test_prompt_attention.py execute, or the
# interpreter alone.
_APART = ("multiply", "multiply_down", "round_tokens", "hidden_tokens", "attend_tokens")


def launches(
    model: ModelFile, *, mode: str, context: int, num_rows: int = 1, num_sequences: int = 1
) -> tuple[Launch, ...]:
    """The launches of steps of `num_rows` rows, for a plan whose layers in turn have all, a third,
    or one of their neurons on the GPU."""
    every = np.arange(model.spec.most_neurons)
    hot = [(every, every[::3], every[:1])[i % 3] for i in range(model.spec.num_layers)]
    split = make_split(model, hot, context_length=context, num_sequences=num_sequences)
    split = dataclasses.replace(split, mode="predicted" if mode == "predicted" else "exact")
    placement = Placement.of_split(split, (CARD,))
    size = gpu_setup.slab_bytes(
        model, split.gpu_bytes, context, sum(map(len, hot)), num_rows, num_sequences
    )
    uploaders = {CARD: Uploader(memory=DeviceMemory.of(CARD, size))}
    weights = load_weights(
        model,
        placement,
        mode,
        context,
        notice=print,
        uploaders=uploaders,
        num_sequences=num_sequences,
    )
    take = plain_backend(REFERENCE).take
    found = launches_of(weights, placement, take, num_rows, num_rows)
    return tuple(each for each in found if each.kernel not in _APART)


def like(
    model: ModelFile,
    *,
    kind: str | None = None,
    layers: int = 3,
    neurons: int | None = None,
    rank: int = 0,
    predictor: str = "linear",
    **changes,
) -> ModelFile:
    """A model of zeros with the architecture and widths of `model`, and predictors of rank `rank`.
    Its matrices have the type `kind`, or if that is None, the types of the first layer of `model`
    (f16 for those that it lacks). Its vocabulary is cut to 4,096 tokens."""
    bare, count = model.bare_spec, neurons or model.spec.most_neurons
    first = bare.layers[0]
    blocks = [
        dataclasses.replace(
            block, number=count, activation=changes.get("activation", model.activation)
        )
        if isinstance(block, Neurons)
        else block
        for block in first.blocks
    ]
    spec = dataclasses.replace(
        bare,
        layers=(LayerSpec(blocks=tuple(blocks)),) * layers,
        vocab_size=min(bare.vocab_size, 4096),
    )
    zeros, predictor_info = (0.0,) * layers, None
    if rank:
        predictor_info = PredictorInfo(kind=predictor, rank_L=(rank,) * layers, threshold_L=zeros)
    made = dataclasses.replace(
        model,
        bare_spec=spec,
        layout="sparse",
        model_id="0" * 64,
        threshold_L=zeros,
        predictor=predictor_info,
        quality={},
    )
    return dataclasses.replace(made, tensors=_zeros(model, made, kind))


def _zeros(model: ModelFile, made: ModelFile, kind: str | None) -> dict[str, TensorEntry]:
    dims, _ = made.expected_shapes()
    if "output.weight" in model.tensors:
        dims |= {"output.weight": (made.spec.vocab_size, made.spec.hidden_size)}
    found = {}
    for name, size in dims.items():
        own = model.tensors.get(name.replace(f"blk.{name.split('.')[1]}.", "blk.0."))
        wanted = kind or (own.kind if own is not None else "f16")
        found[name] = _zero(size, "f32" if len(size) == 1 else wanted)
    return found


def _zero(size: tuple[int, ...], kind: str) -> TensorEntry:
    if kind in ("f32", "f16"):
        dtype = np.float32 if kind == "f32" else np.float16
        return TensorEntry(
            shape=size, kind=kind, read_rows=lambda a, b: np.zeros((b - a, *size[1:]), dtype)
        )
    count = row_bytes(size[1], kind)
    return TensorEntry(
        shape=size, kind=kind, read_rows=lambda a, b: np.zeros((b - a, count), np.uint8)
    )


# ---- a small launch ------------------------------------------------------------------------


@contextmanager
def small(launch: Launch) -> Iterator[Launch]:
    """The launch with few rows, of random weights, and the same number of rows per program."""
    given = dict(launch.arguments)
    rows = next((m.num_rows for m in given.values() if isinstance(m, StoredMatrix)), None)
    count = rows and min(rows, NEURONS if launch.kernel == "down" else ROWS)
    for name, value in given.items():
        if isinstance(value, StoredMatrix):
            made = make_matrix(value.kind, count, value.width, seed=ord(name[0]))
            given[name] = Matrix(data=made.data, kind=value.kind, width=value.width)
        elif isinstance(value, Tensor):
            given[name] = _small_tensor(launch.kernel, name, value, count)
    if launch.kernel == "predict":
        given["threshold"] = 0.3
    if launch.kernel == "rotate_append" and given["frequency_W2"] is not None:
        half = len(given["frequency_W2"])
        given["frequency_W2"].copy_(10000.0 ** -(torch.arange(half) / half))
    if launch.kernel == "gate_up" and given["id_N"] is not None and given["named_B"] is not None:
        given["id_N"].copy_(torch.arange(count) * 3 % (len(given["named_B"]) * 32))
    before = layouts.LEAST_PROGRAMS
    wanted = rows and [layouts.rows_of_program(rows, most) for most in (4, 2)]
    if rows:
        layouts.LEAST_PROGRAMS = _least_programs(count, wanted)
    try:
        made = Launch.of(launch.declared, **given)
        assert made.variant == launch.variant, (made.variant, launch.variant)
        yield made
    finally:
        layouts.LEAST_PROGRAMS = before


def _least_programs(count: int, wanted: list[int]) -> int:
    for least in range(1, 513):
        layouts.LEAST_PROGRAMS = least
        if [layouts.rows_of_program(count, most) for most in (4, 2)] == wanted:
            return least
    raise AssertionError((count, wanted))


_PER_ROW = {"out_N", "bias_N", "gate_bias_N", "up_bias_N", "id_N", "hidden_N", "bias_F"}
_PER_ROW |= {"index_A", "out_AD"}


def _small_tensor(kernel: str, name: str, value: Tensor, count: int) -> Tensor:
    """A tensor with the alignment of `value`, cut to `count` rows; floats are random."""
    size = list(value.shape)
    if name in _PER_ROW:
        axis = 0 if name == "out_AD" else -1
        size[axis] = min(size[axis], count)
    if name in ("named_B", "copy_B") and kernel == "predict":
        size[-1] = -(-count // 32)
    skipped = value.data_ptr() % 16 // value.element_size()
    whole = torch.zeros(skipped + int(np.prod(size)) + 4, dtype=value.dtype)
    made = whole[skipped : skipped + int(np.prod(size))].view(size)
    if value.stride() != value.contiguous().stride() and len(size) == 3:  # a cache by heads
        order = sorted(range(3), key=lambda axis: -value.stride(axis))
        back = [order.index(axis) for axis in range(3)]
        made = made.flatten().view([size[axis] for axis in order]).permute(back)
    if value.dtype.is_floating_point:
        made.copy_(torch.randn(size, generator=torch.Generator().manual_seed(len(name))))
    return made


def assert_right(launch: Launch, kernels: Kernels) -> None:
    """Raises Wrong if what the kernel writes differs from the float64 reference by more than
    rounding."""
    with small(launch) as made:
        check_launch(made, kernels, REFERENCE, lambda: None)


# ---- the plans of docs/gpu-proof.md
# ----------------------------------------------------------------

ARCHITECTURES = (89, 120)
CONTEXT = 512
_KINDS = ("f32", "f16", "q8_0", "q4_0", "q4_k", "q5_k", "q6_k")
# By name: (model, type of the weights, mode, kind of predictors).
PLANS = {
    **{
        f"{model}, {kind}, {mode}": (model, kind, mode, "")
        for model in ("tiny-relu", "tiny-silu")
        for kind in ("f16", "q8_0", "q4_0")
        for mode in ("dense", "exact")
    },
    **{
        f"tiny-relu, {kind}, predicted ({predictor})": ("tiny-relu", kind, "predicted", predictor)
        for kind in ("f16", "q8_0", "q4_0")
        for predictor in ("linear", "relu")
    },
    **{
        f"SmolLM2, {kind}, {mode}": ("SmolLM2", kind, mode, "")
        for kind in ("f16", "q8_0", "q4_0")
        for mode in ("dense", "exact")
    },
    **{f"7B, {kind}, exact": ("7B", kind, "exact", "") for kind in _KINDS},
    **{f"7B, {kind}, predicted": ("7B", kind, "predicted", "linear") for kind in _KINDS},
}


def launches_of_plan(name: str, folder: Path) -> tuple:
    """The launches of a plan; empty if the model is missing."""
    whose, kind, mode, predictor = PLANS[name]
    model = _model(whose, kind, folder)
    if model is None:
        return ()
    rank = 1024 if whose == "7B" else 40 if kind == "f16" else 64
    if whose == "7B":
        model = like(model, kind=kind, rank=rank if predictor else 0)
    elif predictor:
        model = like(model, kind=kind, rank=rank, predictor=predictor)
    return launches(model, mode=mode, context=CONTEXT)


def _model(whose: str, kind: str, folder: Path):
    if whose == "7B":  # its width and heads, with fewer layers and neurons and a smaller vocabulary
        return shape_only(
            make_sizes(
                num_layers=3,
                width=4096,
                num_neurons=2560,
                num_heads=32,
                num_kv_heads=32,
                vocab_size=4096,
                context_length=4096,
            )
        )
    if whose == "SmolLM2":
        path = ROOT / "build" / "smollm2" / f"{kind}.gguf"
        return ModelFile.load(path) if path.exists() else None
    path = folder / f"{whose}-{kind}.gguf"
    if not path.exists():
        convert(ConvertConfig(source=ROOT / "examples" / whose, output=path, outtype=kind))
    return ModelFile.load(path)
