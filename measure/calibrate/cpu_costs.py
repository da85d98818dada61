"""Measures what the runtime itself reaches on the CPU: the costs that plans are priced with.

Rows of every type are read in the form in which the runtime holds them, with its threads: all of
them, tiled, by a product with a vector and with the tokens of a short prompt, and the gate, up and
down rows of a tenth of the neurons, interleaved, by the native call for a block of neurons.

The fixed cost of a layer is what is left of it without the work on its bytes. It comes from decode
steps of models of FEW and of MANY layers. In those of TINY width nothing is divided among threads;
in those of DIVIDED width every matrix is, as real ones are, and they still fit into a cache. With
one of n threads, such a layer takes its work and what a tiny one takes; with all of them, a share
of the work and its fixed cost, which therefore is

    seconds with n threads - (seconds with one - seconds of a tiny layer) / n

The rest of a step is that of a token; a logit's cost is that of sampling from many and from few.
The cost of reading keys and values is the difference between steps at the end and at the beginning
of a long context.

Letters: N rows, D row width, A chosen rows, L layers, W words of a bit mask, V vocabulary."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median

import numpy as np
import torch
from torch import Tensor

from hotsplit.artifacts.machine_file import CHOSEN_SHARE, PASS_TOKENS, CpuCosts, Figure
from hotsplit.artifacts.random_weights import random_model
from hotsplit.families.decoder_sizes import Sizes
from hotsplit.families.plain_decoder import decoder_spec
from hotsplit.files.gguf_file import TensorEntry, row_bytes
from hotsplit.measure.timing.interleave import Probe, seconds_of, sum_of_rounds, time_rounds
from hotsplit.model.modes import Mode, runs_predictors
from hotsplit.model.spec import Rotary
from hotsplit.model.weight_types import BY_NAME, NAMES
from hotsplit.options.generation_options import SamplingOptions
from hotsplit.runtime.device.bits import pack_bits
from hotsplit.runtime.engine import Engine
from hotsplit.runtime.generate.sampler_chain import SamplerChain
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.kernels.gate import Gate
from hotsplit.runtime.kernels.stored import FLOATS
from hotsplit.runtime.kernels.tiled import TILE_ROWS
from hotsplit.runtime.ops.neurons.native import NativeNeurons
from hotsplit.runtime.weights.matrix import Linear, Matrix
from hotsplit.runtime.weights.neuron_block import NeuronBlock
from hotsplit.runtime.weights.resident import Residence

ROW_VALUES = 4096
MODES: tuple[Mode, ...] = ("exact", "predicted")
FEW, MANY = 2, 6
STEPS = 20
HEAD_DIM = 32
TINY, DIVIDED = 64, 192  # square f16 matrices of 8 and 72 KiB; INLINE_BYTES of thread_pool.h are 64
FEW_LOGITS, MANY_LOGITS = 512, 65536
SAMPLES = 20
LEAST_S = 1e-7  # of a difference of times
CACHE_STEPS = 8
# Layers, tokens, key-value heads and their width: 64 MiB of keys and values in f16.
CACHE_LAYERS, CACHE_TOKENS, CACHE_HEADS, CACHE_WIDTH = 4, 4096, 8, 128


def measure_costs(
    buffer_bytes: int, time_limit_s: float, on_probe: Callable[[float], None]
) -> CpuCosts:
    """Measures with the kernels' threads; two matrices of a type take up to `buffer_bytes`."""
    probes = [p for kind in NAMES for p in _row_probes(kind, buffer_bytes // 2)]
    threads = library.num_threads()
    for mode in MODES:
        for num_layers in (FEW, MANY):
            probes.append(_step_probe(mode, _small_engine(mode, TINY, num_layers), threads))
            engine = _small_engine(mode, DIVIDED, num_layers)
            probes += [_step_probe(mode, engine, count) for count in {1, threads}]
    probes += [_cache_probe(), _logits_probe(FEW_LOGITS), _logits_probe(MANY_LOGITS)]
    times = time_rounds(probes, time_limit_s, on_probe)
    found = {probe.name: probe.figure(times[probe.name]) for probe in probes}
    few, many = (_step_name("exact", TINY, count, threads) for count in (FEW, MANY))
    of_layers = FEW / (MANY - FEW)
    more = MANY_LOGITS - FEW_LOGITS
    logits = {_logits_name(MANY_LOGITS): 1 / more, _logits_name(FEW_LOGITS): -1 / more}
    return CpuCosts(
        all_rows_gb_per_s={kind: found[f"{kind}, all rows"] for kind in NAMES},
        chosen_rows_gb_per_s={kind: found[f"{kind}, chosen rows"] for kind in NAMES},
        kv_gb_per_s=found["cache"],
        layer_s={mode: _layer_seconds(times, mode, threads) for mode in MODES},
        token_s=sum_of_rounds(times, {few: 1 + of_layers, many: -of_layers}, least=LEAST_S),
        logit_s=sum_of_rounds(times, logits, least=LEAST_S / MANY_LOGITS),
        pass_rows_gb_per_s={kind: found[f"{kind}, all rows in a pass"] for kind in NAMES},
    )


def _layer_seconds(times: Mapping[str, Sequence[float]], mode: str, threads: int) -> Figure:
    """The fixed cost of a layer with these threads, by the formula of the module's docstring."""
    shares = Counter({(DIVIDED, threads): 1.0})
    shares.update({(DIVIDED, 1): -1 / threads, (TINY, threads): 1 / threads})
    factors = {
        _step_name(mode, width, num_layers, count): share * sign / (MANY - FEW)
        for (width, count), share in shares.items()
        for num_layers, sign in ((MANY, 1), (FEW, -1))
    }
    return sum_of_rounds(times, factors, least=LEAST_S)


def _row_probes(kind: str, num_bytes: int) -> list[Probe]:
    """Probes of one type: all rows times a vector and times several, and a tenth of the neurons
    made of the rows. Each timing takes another tenth, since the previous one may still be in a
    cache."""
    entry = _random_rows(kind, num_bytes)
    matrix, whole = Residence().matrix(entry), Residence().whole(entry, "tiled")
    x_D, x_TD = torch.ones(ROW_VALUES), torch.ones(PASS_TOKENS, ROW_VALUES)
    chosen, chosen_bytes = _tenth_of_neurons(matrix)
    return [
        Probe(
            name=f"{kind}, all rows",
            seconds=lambda: seconds_of(lambda: whole.dot(x_D)),
            num_bytes=whole.num_bytes,
        ),
        Probe(
            name=f"{kind}, all rows in a pass",
            seconds=lambda: seconds_of(lambda: whole.product(x_TD)),
            num_bytes=whole.num_bytes,
        ),
        Probe(name=f"{kind}, chosen rows", seconds=chosen, num_bytes=chosen_bytes),
    ]


def _tenths(count: int) -> list[Tensor]:
    """Ten disjoint random sets of indices below `count`, of one size, each ascending."""
    order = torch.rand(count, generator=torch.Generator().manual_seed(0)).argsort()
    num_sets = round(1 / CHOSEN_SHARE)
    return [order[n::num_sets][: count // num_sets].sort().values for n in range(num_sets)]


def _tenth_of_neurons(matrix: Matrix) -> tuple[Callable[[], float], int]:
    """(timer of a tenth of the neurons, bytes read): three rows of the matrix make a neuron."""
    count = matrix.num_rows // 3
    gate, up, down = (replace(matrix, data=matrix.data[i : 3 * count : 3]) for i in range(3))
    block = NeuronBlock(
        role="hot",
        gate=Linear(weight=gate),
        up=Linear(weight=up),
        down=down,
        id_N=torch.arange(count),
        row_N=None,
        is_whole=True,
    )
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
        return seconds_of(neurons.node.run)

    return seconds, 3 * len(tenths[0]) * matrix.row_bytes


def _random_rows(kind: str, num_bytes: int) -> TensorEntry:
    """Rows whose values are all 1, or rows of blocks whose bytes are all 1, except that f16 scales
    are near 1.0. They fill whole tiles, as those of models do: others would not be tiled."""
    size = row_bytes(ROW_VALUES, kind)
    count = num_bytes // (TILE_ROWS * size) * TILE_ROWS
    if kind in FLOATS:
        data = torch.ones(count, ROW_VALUES, dtype=FLOATS[kind])
        raw = (data.view(torch.uint8) if kind == "bf16" else data).numpy()
    else:
        raw = np.ones((count, size), np.uint8)
        # The upper bytes of f16 numbers, and exponents, are those of about 1.0: the speed does not
        # depend on the values, except for denormals.
        each = BY_NAME[kind]
        blocks = raw[:, each.row_head :].reshape(count, -1, each.block_bytes)
        halves = each.halves and slice(each.halves[0] + 1, each.halves[1], 2)
        blocks[..., halves or slice(0, each.head_bytes)] = 0x3C
    return TensorEntry(shape=(count, ROW_VALUES), kind=kind, read_rows=lambda a, b: raw[a:b])


def _cache_probe() -> Probe:
    sizes = Sizes(
        num_layers=CACHE_LAYERS,
        hidden_size=64,
        num_neurons=64,
        num_heads=4 * CACHE_HEADS,
        num_kv_heads=CACHE_HEADS,
        head_dim=CACHE_WIDTH,
        vocab_size=FEW_LOGITS,
        context_length=CACHE_TOKENS,
    )
    engine = _engine_of(sizes, "exact")
    end = CACHE_TOKENS - CACHE_STEPS

    def seconds() -> float:
        far = engine.decode_seconds(steps=CACHE_STEPS, start=end)
        return max(1e-7, far - engine.decode_seconds(steps=CACHE_STEPS)) / CACHE_STEPS

    num_bytes = 2 * 2 * CACHE_LAYERS * end * CACHE_HEADS * CACHE_WIDTH  # keys and values in f16
    return Probe(name="cache", seconds=seconds, num_bytes=num_bytes)


def _step_name(mode: str, width: int, num_layers: int, threads: int) -> str:
    return f"{mode} step, width {width}, {num_layers} layers, {threads} threads"


def _step_probe(mode: str, engine: Engine, threads: int) -> Probe:
    spec = engine.model.spec

    def seconds() -> float:
        before = library.num_threads()
        library.set_threads(threads)
        try:
            return step_seconds(engine, STEPS)
        finally:
            library.set_threads(before)

    name = _step_name(mode, spec.hidden_size, spec.num_layers, threads)
    return Probe(name=name, seconds=seconds)


def step_seconds(engine: Engine, count: int) -> float:
    """The median over this many decode steps, which one pause of this process does not change."""
    engine.decode_seconds(steps=2)  # wakes the threads
    return median(engine.decode_seconds(steps=1, start=place) for place in range(count))


def _logits_name(count: int) -> str:
    return f"{count} logits"


def _logits_probe(count: int) -> Probe:
    """Copying logits and choosing the most probable token; a mean over SAMPLES."""
    chain = SamplerChain(SamplingOptions(temperature=0.0), count)
    source_V, logits_V = torch.rand(count), torch.empty(count)

    def choose() -> None:
        for _ in range(SAMPLES):
            np.copyto(logits_V.numpy(), source_V.numpy())
            chain.sample(logits_V, ())

    return Probe(name=_logits_name(count), seconds=lambda: seconds_of(choose) / SAMPLES)


def _small_engine(mode: Mode, width: int, num_layers: int) -> Engine:
    heads = width // HEAD_DIM
    sizes = Sizes(
        num_layers=num_layers,
        hidden_size=width,
        num_neurons=width,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=HEAD_DIM,
        vocab_size=FEW_LOGITS,
        context_length=64,
    )
    return _engine_of(sizes, mode)


def _engine_of(sizes: Sizes, mode: Mode) -> Engine:
    """An engine with random weights in f16, so that keys and values are f16 too."""
    spec = decoder_spec(sizes, Rotary(theta=1e4, pairing="adjacent"), "relu")
    model = random_model(spec, predictor_rank=8 if runs_predictors(mode) else None)
    return Engine.of(model, mode=mode, device="cpu")
