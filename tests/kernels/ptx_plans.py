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
from gpu_matrices import EPS, REFERENCE, assert_close, make_matrix, product_bound, rounding, sizes
from kernel_launches import Launch, launches_of
from models import make_sizes, shape_only
from paths import ROOT
from test_gpu_attention import norm_bound
from test_gpu_neurons import down_bound, hidden_bound
from test_runtime import make_split
from torch import Tensor

from hotsplit.artifacts.model_file import ModelFile, PredictorInfo
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.files.gguf_file import TensorEntry, row_bytes
from hotsplit.model.spec import LayerSpec, Neurons
from hotsplit.runtime import gpu_setup
from hotsplit.runtime.device.bits import unpack_bits
from hotsplit.runtime.device.device_memory import DeviceMemory
from hotsplit.runtime.kernels.gpu import launch as layouts
from hotsplit.runtime.kernels.gpu.kernels import Kernels
from hotsplit.runtime.kernels.stored import StoredMatrix
from hotsplit.runtime.model.loader import load_weights
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.step.plain_backend import plain_backend
from hotsplit.runtime.weights.matrix import Matrix
from hotsplit.runtime.weights.upload import Uploader

CARD = torch.device("cpu", 0)  # unlike "cpu", treated as a GPU by a placement
ROWS = 17  # of a matrix, at most
NEURONS = 83  # rows of `down`, at most
# Kernels of prompts that test_ptx_products.py and test_prompt_attention.py execute, or the interpreter
# alone.
_APART = ("multiply", "multiply_down", "round_tokens", "hidden_tokens", "attend_tokens")
POSITION = 100  # of the token, if the context is long enough


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
    """The launch with few rows and random values, and the same number of rows per program."""
    given = dict(launch.arguments)
    rows = next((m.num_rows for m in given.values() if isinstance(m, StoredMatrix)), None)
    count = rows and min(rows, NEURONS if launch.kernel == "down" else ROWS)
    random = torch.Generator().manual_seed(len(launch.variant))
    for name, value in given.items():
        if isinstance(value, StoredMatrix):
            made = make_matrix(value.kind, count, value.width, seed=ord(name[0]))
            given[name] = Matrix(data=made.data, kind=value.kind, width=value.width)
        elif isinstance(value, Tensor):
            given[name] = _small_tensor(launch.kernel, name, value, count, random)
    if launch.kernel == "predict":
        given["threshold"] = 0.3
    _fill_special(launch.kernel, given)
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


def _small_tensor(kernel: str, name: str, value: Tensor, count, random) -> Tensor:
    """A tensor with the alignment of `value`, cut to `count` rows, filled with random floats or
    int32, or with zeros if it has another type."""
    per_row = name in (
        "out_N",
        "bias_N",
        "gate_bias_N",
        "up_bias_N",
        "id_N",
        "hidden_N",
        "bias_F",
        "index_A",
        "out_AD",
    )
    size = list(value.shape)
    if per_row:
        size[0] = min(size[0], count)
    if name in ("named_B", "copy_B") and kernel == "predict":
        size[0] = -(-count // 32)
    skipped = value.data_ptr() % 16 // value.element_size()
    whole = torch.zeros(skipped + int(np.prod(size)) + 4, dtype=value.dtype)
    made = whole[skipped : skipped + int(np.prod(size))].view(size)
    if value.stride() != value.contiguous().stride() and len(size) == 3:  # a cache by heads
        order = sorted(range(3), key=lambda axis: -value.stride(axis))
        back = [order.index(axis) for axis in range(3)]
        made = made.flatten().view([size[axis] for axis in order]).permute(back)
    if value.dtype.is_floating_point:
        made.copy_(torch.randn(size, generator=random))
    elif value.dtype == torch.int32:
        limits = torch.iinfo(torch.int32)
        made.copy_(torch.randint(limits.min, limits.max, size, generator=random))
    return made


def _fill_special(kernel: str, given: dict) -> None:
    if kernel == "rotate_append":
        given["position_1"].fill_(min(POSITION, len(given["key_CKW"]) - 1))
        if given["frequency_W2"] is not None:
            half = len(given["frequency_W2"])
            given["frequency_W2"].copy_(10000.0 ** -(torch.arange(half) / half))
    elif kernel == "attend":
        given["position_1"].fill_(min(POSITION, len(given["key_CKW"]) - 1))
    elif kernel == "embed":
        given["index_1"].fill_(given["matrix"].num_rows - 1)
    elif kernel == "gate_up" and given["id_N"] is not None and given["named_B"] is not None:
        bits = len(given["named_B"]) * 32
        given["id_N"].copy_(torch.arange(len(given["id_N"])) * 3 % bits)
    elif kernel == "down" and given["skips_zeros"]:
        given["hidden_N"][1::3] = 0


# ---- comparison ----------------------------------------------------------------------------


def assert_right(launch: Launch, kernels: Kernels) -> None:
    """Asserts that what the kernel writes differs from the float64 reference by rounding only."""
    with small(launch) as made:
        got, want = (_copied(made.arguments) for _ in range(2))
        getattr(kernels, made.kernel)(**got)
        getattr(REFERENCE, made.kernel)(**want)
        _COMPARE[made.kernel](made.arguments, got, want)


def _copied(given: dict) -> dict:
    """Copies of the tensors with their strides and alignment; one that occurs twice is copied
    once."""
    copies: dict[int, Tensor] = {}

    def copy(value):
        if not isinstance(value, Tensor):
            return value
        key = value.data_ptr()
        if key not in copies:
            whole = value.untyped_storage().clone()
            copies[key] = torch.empty(0, dtype=value.dtype).set_(
                whole, value.storage_offset(), value.shape, value.stride()
            )
        return copies[key]

    return {name: copy(value) for name, value in given.items()}


def _dot(given, got, want) -> None:
    bound = product_bound(given["matrix"], given["x_D"], given["bias_N"])
    assert_close(got["out_N"], want["out_N"], bound)


def _embed(given, got, want) -> None:
    row = given["scale"] * sizes(given["matrix"])[int(given["index_1"])]
    assert_close(got["out_D"], want["out_D"], 4 * EPS * (row + given["out_D"].abs()))


def _unpack(given, got, want) -> None:
    eps = max(2 * EPS, torch.finfo(given["out_AD"].dtype).eps)
    index = given["index_A"]
    size = sizes(given["matrix"])
    bound = eps * (size if index is None else size[index.long()])
    assert_close(got["out_AD"], want["out_AD"], bound)


def _add_norm(given, got, want) -> None:
    parts = given["parts_PD"]
    total = given["x_D"].double() + (0 if parts is None else parts.double().sum(dim=0))
    size = given["x_D"].abs() + (0 if parts is None else parts.abs().sum(dim=0))
    if given["term_D"] is not None:
        total, size = total + given["term_D"].double(), size + given["term_D"].abs()
    bound = rounding(2 if parts is None else len(parts) + 1) * size
    if got["x_out_D"] is not None:
        assert_close(got["x_out_D"], want["x_out_D"], bound)
    if got["out_D"] is not None:
        assert_close(got["out_D"], want["out_D"], norm_bound(want["out_D"], total, given["bias_D"]))
    if got["copy_D"] is not None:
        assert torch.equal(got["copy_D"], got["out_D"])


def _rotate_append(given, got, want) -> None:
    size = (want["qkv"].abs().max() + want["key_CKW"].abs().max().float()).double()
    width = given["key_CKW"].shape[2]
    off = 16 * EPS + 4 * rounding(width)
    assert_close(got["qkv"], want["qkv"], off * size)
    for name in ("key_CKW", "value_CKW"):
        assert_close(got[name], want[name], (torch.finfo(got[name].dtype).eps + off) * size)


def _attend(given, got, want) -> None:
    width = given["key_CKW"].shape[2]
    bound = 8 * (rounding(width) * width**0.5 + rounding(int(given["position_1"]) + 1))
    assert_close(got["out_HW"], want["out_HW"], bound)


def _predict(given, got, want) -> None:
    """Compares every bit whose score is further from the threshold than rounding explains."""
    up, bias = given["up"], given["bias_F"]
    score = torch.empty(up.num_rows)
    REFERENCE.dot(up, bias, given["inner_R"], score)
    bound = 1.2 * product_bound(up, given["inner_R"], bias) + 16 * EPS
    is_clear = (score.double() - given["threshold"]).abs() > bound
    mine, right = (unpack_bits(which["named_B"]) for which in (got, want))
    assert torch.equal(mine[: len(score)][is_clear], right[: len(score)][is_clear])
    assert not mine[len(score) :].any() and is_clear.sum() > 0.9 * len(score)
    assert got["copy_B"] is None or torch.equal(got["copy_B"], got["named_B"])


def _gate_up(given, got, want) -> None:
    bound = hidden_bound(
        given["gate"],
        given["gate_bias_N"],
        given["up"],
        given["up_bias_N"],
        given["x_D"],
        want["hidden_N"],
    ).nan_to_num()
    assert_close(got["hidden_N"], want["hidden_N"], bound)
    assert (
        got["hidden_N"][want["hidden_N"] == 0].double().abs() <= bound[want["hidden_N"] == 0]
    ).all()


def _down(given, got, want) -> None:
    assert_close(got["parts_SD"], want["parts_SD"], down_bound(given["down"], given["hidden_N"]))


_COMPARE = {
    "dot": _dot,
    "embed": _embed,
    "unpack": _unpack,
    "add_norm": _add_norm,
    "rotate_append": _rotate_append,
    "attend": _attend,
    "predict": _predict,
    "gate_up": _gate_up,
    "down": _down,
}


# ---- the plans of docs/gpu-proof.md ----------------------------------------------------------------

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
