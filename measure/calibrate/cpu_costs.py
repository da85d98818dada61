"""Measures what the runtime itself reaches on the CPU: the costs that plans are priced with.

Rows of every type are read as the runtime reads them: all of them by a product with a vector, and
the gate, up and down rows of a tenth of the neurons by the native call for a block of neurons (in
torch if the C++ kernels are not built). Fixed costs per layer and per token come from decode steps
of models of FEW and of MANY layers, whose weights are so small that they stay in a cache. The cost
of reading keys and values is the difference between steps at the end and at the beginning of a long
context.

Letters: N rows, D row width, A chosen rows, L layers, W words of a bit mask."""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from hotsplit.artifacts.machine_file import CHOSEN_SHARE, CpuCosts, Figure
from hotsplit.artifacts.random_model import random_model
from hotsplit.families.llama import llama_spec
from hotsplit.families.sizes import Sizes
from hotsplit.files.gguf_file import TensorEntry, row_bytes
from hotsplit.measure.timing.interleave import Probe, run_rounds, seconds_of
from hotsplit.model.modes import Mode, runs_predictors
from hotsplit.model.spec import Rotary
from hotsplit.model.weight_types import BY_NAME, NAMES
from hotsplit.runtime.device.bits import pack_bits
from hotsplit.runtime.engine import Engine
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.kernels.stored import FLOATS
from hotsplit.runtime.ops.neurons.native import NativeNeurons
from hotsplit.runtime.weights.matrix import Linear, Matrix, matrix_of
from hotsplit.runtime.weights.neuron_block import Gate, NeuronBlock
from hotsplit.runtime.weights.resident import Residence

CPU = torch.device("cpu")
ROW_VALUES = 4096
FEW, MANY = 2, 10
STEPS = 20
SMALL = Sizes(
    num_layers=FEW, hidden_size=64, num_neurons=64, num_heads=8, num_kv_heads=2, head_dim=8,
    vocab_size=512, context_length=64,
)  # fmt: skip
CACHE_STEPS = 8
# Layers, tokens, key-value heads and their width: 64 MiB of keys and values in f16.
CACHE_LAYERS, CACHE_TOKENS, CACHE_HEADS, CACHE_WIDTH = 4, 4096, 8, 128


def measure_costs(
    buffer_bytes: int, time_limit_s: float, on_probe: Callable[[float], None]
) -> CpuCosts:
    """Measures with the threads that the kernels use now; matrices take up to `buffer_bytes` each."""
    probes = [p for kind in NAMES for p in _row_probes(kind, buffer_bytes)]
    engines = {
        (mode, n): _small_engine(replace(SMALL, num_layers=n), has_predictors=runs_predictors(mode))
        for mode in ("exact", "predicted")
        for n in (FEW, MANY)
    }
    probes += [_step_probe(mode, n, engine) for (mode, n), engine in engines.items()]
    probes.append(_cache_probe())
    found = run_rounds(probes, time_limit_s, on_probe)
    few, many = (found[f"exact step, {n} layers"] for n in (FEW, MANY))
    layer_s = {
        mode: _difference(found[f"{mode} step, {MANY} layers"], found[f"{mode} step, {FEW} layers"])
        for mode in ("exact", "predicted")
    }
    return CpuCosts(
        all_rows_gb_per_s={kind: found[f"{kind}, all rows"] for kind in NAMES},
        chosen_rows_gb_per_s={kind: found[f"{kind}, chosen rows"] for kind in NAMES},
        kv_gb_per_s=found["cache"],
        layer_s=layer_s,
        token_s=_rest(few, layer_s["exact"]),
    )


def _difference(many: Figure, few: Figure) -> Figure:
    """Seconds per layer, from the MANY - FEW layers that only one of the models has."""
    count = MANY - FEW
    assert many.quartiles is not None and few.quartiles is not None
    values = [(m - f) / count for m, f in zip(many.quartiles, few.quartiles, strict=True)]
    return _positive((many.best - few.best) / count, values, many.rounds)


def _rest(few: Figure, layer: Figure) -> Figure:
    """Seconds of a step of FEW layers, less those of its layers."""
    assert few.quartiles is not None and layer.quartiles is not None
    values = [f - FEW * layer.quartiles[1] for f in few.quartiles]
    return _positive(few.best - FEW * layer.best, values, few.rounds)


def _positive(best: float, quartiles: Sequence[float], rounds: int) -> Figure:
    """The figure of a difference; each number is at least 1e-7."""
    low, median, high = sorted(max(1e-7, value) for value in quartiles)
    return Figure(best=max(1e-7, best), quartiles=(low, median, high), rounds=rounds)


def _row_probes(kind: str, num_bytes: int) -> list[Probe]:
    """Probes of one type: all rows times a vector, and a tenth of the neurons made of the rows.

    Each timing takes another tenth, since the previous one may still be in a cache."""
    entry = _random_rows(kind, num_bytes)
    matrix = Residence().matrix(entry) if library.is_available() else matrix_of(entry, CPU)
    x_D = torch.ones(ROW_VALUES)
    chosen, chosen_bytes = _native_tenth(matrix) if library.is_available() else _torch_tenth(matrix)
    return [
        Probe(
            name=f"{kind}, all rows",
            seconds=lambda: seconds_of(lambda: matrix.dot(x_D)),
            num_bytes=matrix.num_bytes,
        ),
        Probe(name=f"{kind}, chosen rows", seconds=chosen, num_bytes=chosen_bytes),
    ]


def _tenths(count: int) -> list[Tensor]:
    """Ten random sets of indices below `count`, each ascending, of one size and without a common
    index."""
    order = torch.rand(count, generator=torch.Generator().manual_seed(0)).argsort()
    num_sets = round(1 / CHOSEN_SHARE)
    return [order[n::num_sets][: count // num_sets].sort().values for n in range(num_sets)]


def _native_tenth(matrix: Matrix) -> tuple[Callable[[], float], int]:
    """(timer of a tenth of the neurons, bytes read): three rows of the matrix make a neuron."""
    count = matrix.num_rows // 3
    gate, up, down = (replace(matrix, data=matrix.data[i : 3 * count : 3]) for i in range(3))
    block = NeuronBlock(
        role="hot", gate=Linear(weight=gate), up=Linear(weight=up), down=down,
        id_N=torch.arange(count), row_N=None, is_whole=True,
    )  # fmt: skip
    # With this threshold every predicted neuron fires.
    always = Gate(activation="fatrelu", threshold=-math.inf)
    neurons = NativeNeurons.of(block, always, count, is_named=True)
    neurons.x_D.fill_(1.0)
    tenths = _tenths(count)
    masks = [pack_bits(torch.zeros(count).bool().index_fill_(0, ids, True)) for ids in tenths]
    turn = itertools.count()

    def seconds() -> float:
        assert neurons.named_W is not None
        neurons.named_W.copy_(masks[next(turn) % len(masks)])
        return seconds_of(neurons.run)

    return seconds, 3 * len(tenths[0]) * matrix.row_bytes


def _torch_tenth(matrix: Matrix) -> tuple[Callable[[], float], int]:
    """The same with torch: a product with two thirds of a tenth of the rows, for gate and up, and a
    weighted sum of the last third, for down."""
    x_D, turn, tenths = torch.ones(ROW_VALUES), itertools.count(), _tenths(matrix.num_rows)
    weight_A = torch.ones(len(tenths[0]))

    def seconds() -> float:
        rows_A = tenths[next(turn) % len(tenths)].to(torch.int32)
        third = len(rows_A) // 3
        began = time.perf_counter()
        matrix.dot(x_D, rows_A[: 2 * third])
        matrix.combine(weight_A[: len(rows_A) - 2 * third], rows_A[2 * third :])
        return time.perf_counter() - began

    return seconds, len(tenths[0]) * matrix.row_bytes


def _random_rows(kind: str, num_bytes: int) -> TensorEntry:
    """Rows whose values are all 1, or rows of blocks whose bytes are all 1, except that f16 scales
    are near 1.0."""
    size = row_bytes(ROW_VALUES, kind)
    count = num_bytes // size
    if kind in FLOATS:
        data = torch.ones(count, ROW_VALUES, dtype=FLOATS[kind])
        raw = (data.view(torch.uint8) if kind == "bf16" else data).numpy()
    else:
        raw = np.ones((count, size), np.uint8)
        # The upper bytes of f16 numbers are those of 1.0: the speed does not depend on the values,
        # except for denormals.
        start, stop = BY_NAME[kind].halves or (0, 0)
        raw.reshape(-1, BY_NAME[kind].block_bytes)[:, start + 1 : stop : 2] = 0x3C
    return TensorEntry(shape=(count, ROW_VALUES), kind=kind, read_rows=lambda a, b: raw[a:b])


def _cache_probe() -> Probe:
    """The time of steps at the end of a context, less that of steps at its beginning."""
    sizes = replace(
        SMALL, num_layers=CACHE_LAYERS, context_length=CACHE_TOKENS, num_heads=4 * CACHE_HEADS,
        num_kv_heads=CACHE_HEADS, head_dim=CACHE_WIDTH,
    )  # fmt: skip
    engine = _small_engine(sizes, has_predictors=False)
    end = CACHE_TOKENS - CACHE_STEPS

    def seconds() -> float:
        far = engine.decode_seconds(steps=CACHE_STEPS, start=end)
        return max(1e-7, far - engine.decode_seconds(steps=CACHE_STEPS)) / CACHE_STEPS

    num_bytes = 2 * 2 * CACHE_LAYERS * end * CACHE_HEADS * CACHE_WIDTH  # keys and values in f16
    return Probe(name="cache", seconds=seconds, num_bytes=num_bytes)


def _step_probe(mode: str, num_layers: int, engine: Engine) -> Probe:
    """One decode step of a small model, the engine's overhead included, as a mean over STEPS."""

    def seconds() -> float:
        engine.decode_seconds(steps=2)
        return engine.decode_seconds(steps=STEPS) / STEPS

    return Probe(name=f"{mode} step, {num_layers} layers", seconds=seconds)


def _small_engine(sizes: Sizes, *, has_predictors: bool) -> Engine:
    """An engine with random weights. Matrices are f16, so keys and values are too, as for any model
    that is not in f32."""
    spec = llama_spec(sizes, Rotary(theta=1e4, pairing="adjacent"), "relu")
    model = random_model(spec, predictor_rank=8 if has_predictors else None)
    mode: Mode = "predicted" if has_predictors else "exact"
    return Engine.of(model, mode=mode, device="cpu")
