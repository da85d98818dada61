"""The seconds of llama.cpp's steps and prompts for a division of a model, from what a machine's
memories reach and what its own code adds.

The constants are fitted to published measurements of many machines (benchmarks/public_cells.py;
docs/plan.md has the table): nothing of them was measured here. What they say:

- A layer on a GPU costs its kernels' starts beside its bytes: more with experts, most with a
  recurrent mixer, which has the most small operations.
- Experts of a layer on the CPU cost a hand-over, and their bytes at the rate of main memory: the
  time of a token is linear in the number of such layers.
- The CPU reads weights at the rate of memory, unless its cores unpack a type more slowly.
- Keys and values are read at a lower rate than weights. Cards before the RTX 30 read quantised ones
  at a quarter of that.
- A prompt runs in batches. For each, weights that are in main memory are copied to the GPU, which
  computes them: experts once a batch, however few tokens choose them.

Letters: L layers."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import ceil, prod

from hotsplit.artifacts.data_sheets import tensor_tflops
from hotsplit.artifacts.machine_file import Gpu, Machine
from hotsplit.costs import part_bytes
from hotsplit.model.spec import LayerSpec
from hotsplit.options.cache_types import CacheTypes
from hotsplit.solver.inputs import Inputs

# Seconds of a layer on a GPU and of one on the CPU, beside their bytes; of a wait for experts.
DENSE_LAYER_S, EXPERTS_LAYER_S, RECURRENT_LAYER_S = 36e-6, 88e-6, 108e-6
CPU_LAYER_S = 30e-6
HAND_OVER_S = 56e-6
# Of the rate of weights, that of keys and values: on a GPU, on one before the RTX 30 if they are
# quantised, and on the CPU.
GPU_KEYS, OLD_GPU_KEYS, CPU_KEYS = 0.46, 0.14, 0.33
OLD_GPUS = ("rtx-20", "gtx-", "t4-")
# GB/s of weights that a core unpacks and multiplies by one row (a Zen 4 with two threads, ik's
# comparison of May 2025, and a Core i5-12400F with two to six).
CORE_GB_PER_S = {
    "f32": 30.0,
    "f16": 30.0,
    "bf16": 30.0,
    "q8_0": 22.0,
    "q4_0": 24.0,
    "q4_k": 21.0,
    "q5_k": 18.0,
    "q6_k": 23.0,
    "q3_k": 14.0,
    "q2_k": 18.0,
    "iq4_xs": 14.0,
    "iq4_nl": 14.0,
    "mxfp4": 14.0,
}
IQ_CORE_GB_PER_S = 6.4  # of types with grids: measured of iq3_s
# Types whose products do not reach the rate of memory with any number of cores.
SHARE_OF_TYPE = {"mxfp4": 0.76}
# 1e9 operations a second of a core in a prompt (the same Zen 4 with 16 threads), of types.
CORE_GFLOPS = {
    "bf16": 74.0,
    "f16": 74.0,
    "q8_0": 139.0,
    "q4_0": 144.0,
    "q4_k": 102.0,
    "q6_k": 77.0,
    "q2_k": 130.0,
    "iq4_xs": 70.0,
}
OTHER_CORE_GFLOPS, IQ_CORE_GFLOPS, ATTENTION_CORE_GFLOPS = 80.0, 28.0, 42.0
# Of a card's operations a second on its data sheet, those of a prompt: whole matrices, experts,
# attention, and attention of a card before the RTX 30.
DENSE_FLOPS, EXPERTS_FLOPS, ATTENTION_FLOPS, OLD_ATTENTION_FLOPS = 0.9, 0.42, 0.8, 0.3
COPIED_SHARE = 0.6  # of the rate from pinned memory, that of a prompt's weights
LEAST_COPIED = 32  # rows of a batch from which weights in main memory are copied to a GPU
BATCH = 512  # llama.cpp's -ub


@dataclass(frozen=True, kw_only=True)
class Division:
    """The GPU of each layer (None: the CPU), the layers among those on a GPU whose experts are in
    main memory, the GPU of the head, and the types of keys and values (None: the model's)."""

    homes: tuple[int | None, ...]
    cold: Collection[int] = ()
    head: int | None = None
    cache: CacheTypes | None = None


def step_seconds(inputs: Inputs, division: Division) -> float:
    """Seconds of a token in the middle of the context."""
    machine, model = inputs.machine, inputs.model
    total = 0.0
    for layer, home in enumerate(division.homes):
        gpu = None if home is None else inputs.gpus[home]
        total += _layer_seconds(inputs, layer, gpu, division)
    head = part_bytes.head_bytes(model)
    if division.head is not None:
        return total + head / gpu_rate(inputs.gpus[division.head])
    return total + head / cpu_rate(machine, model.tensors[model.head_name].kind)


def _layer_seconds(inputs: Inputs, layer: int, gpu: Gpu | None, division: Division) -> float:
    model, machine, is_cold = inputs.model, inputs.machine, layer in division.cold
    spec, types = model.spec.layers[layer], division.cache or inputs.cache_types
    keys = part_bytes.kv_read(model, layer, inputs.context_length, types)
    if gpu is None:
        total = CPU_LAYER_S + keys / (CPU_KEYS * machine.best_cpu_bandwidth_gb_per_s * 1e9)
    else:
        total = own_seconds(spec) + keys / (_keys_share(gpu, types) * gpu_rate(gpu))
        total += HAND_OVER_S * is_cold
    for name, entry in model.layer_tensors[layer].items():
        if part_bytes.is_predictor(name):
            continue
        read = part_bytes.read_share(model, layer, name) * entry.num_bytes
        is_here = is_cold and part_bytes.is_expert(name)
        total += read / (gpu_rate(gpu) if gpu and not is_here else cpu_rate(machine, entry.kind))
    return total


def own_seconds(spec: LayerSpec) -> float:
    """Seconds of a layer on a GPU beside its bytes."""
    if spec.recurrent is not None:
        return RECURRENT_LAYER_S
    return DENSE_LAYER_S if spec.route is None else EXPERTS_LAYER_S


def cpu_rate(machine: Machine, kind: str) -> float:
    """Bytes of weights of a type that llama.cpp's products read in a second."""
    core = CORE_GB_PER_S.get(kind, IQ_CORE_GB_PER_S)
    reached = SHARE_OF_TYPE.get(kind, 1.0) * machine.best_cpu_bandwidth_gb_per_s
    return 1e9 * min(reached, machine.num_threads * core)


def gpu_rate(gpu: Gpu) -> float:
    return 1e9 * gpu.bandwidth_gb_per_s.median


def _keys_share(gpu: Gpu, types: CacheTypes) -> float:
    is_slow = types.key.name != "f16" and gpu.name.startswith(OLD_GPUS)
    return OLD_GPU_KEYS if is_slow else GPU_KEYS


def prompt_seconds(
    inputs: Inputs, division: Division, num_tokens: int, *, batch: int = BATCH, depth: int = 0
) -> float | None:
    """Seconds of a prompt after `depth` other tokens; None where a card's operations a second are
    not known (it is none of a data sheet). A card computes prompts even if all weights are in main
    memory."""
    model, machine = inputs.model, inputs.machine
    speeds = [tensor_tflops(gpu.name) for gpu in inputs.gpus]
    if any(inputs.budgets) and None in speeds:
        return None
    num_batches = ceil(num_tokens / batch)
    is_copied = any(inputs.budgets) and min(batch, num_tokens) >= LEAST_COPIED
    total = 0.0
    for layer, home in enumerate(division.homes):
        gpu, flops_s = inputs.gpus[home or 0], 1e12 * (speeds[home or 0] or 1.0)
        attention = _attention_flops(model.spec.layers[layer], num_tokens, depth)
        if home is None and not is_copied:
            total += attention / (1e9 * machine.num_threads * ATTENTION_CORE_GFLOPS)
        else:
            is_old = gpu.name.startswith(OLD_GPUS)
            total += attention / ((OLD_ATTENTION_FLOPS if is_old else ATTENTION_FLOPS) * flops_s)
        for name, entry in model.layer_tensors[layer].items():
            if part_bytes.is_predictor(name) or len(entry.shape) < 2:
                continue
            is_expert = part_bytes.is_expert(name)
            flops = 2 * part_bytes.read_share(model, layer, name) * prod(entry.shape) * num_tokens
            is_there = home is not None and not (is_expert and layer in division.cold)
            if not is_there and not is_copied:
                total += flops / _cpu_flops(machine, entry.kind)
                continue
            total += flops / ((EXPERTS_FLOPS if is_expert else DENSE_FLOPS) * flops_s)
            if not is_there:
                copied = COPIED_SHARE * gpu.host_to_device_gb_per_s.median * 1e9
                total += num_batches * entry.num_bytes / copied
    return total


def _cpu_flops(machine: Machine, kind: str) -> float:
    other = IQ_CORE_GFLOPS if kind.startswith(("iq1", "iq2", "iq3")) else OTHER_CORE_GFLOPS
    return 1e9 * machine.num_threads * CORE_GFLOPS.get(kind, other)


def _attention_flops(spec: LayerSpec, num_tokens: int, depth: int) -> float:
    """Operations of the scores and sums of a prompt; on average a token sees half of it."""
    if spec.attention is None:
        return 0.0
    window = spec.attention.window or depth + num_tokens
    return 4 * spec.attention.query_size * num_tokens * min(window, depth + num_tokens / 2)


def whole(inputs: Inputs, cold: Sequence[int] = ()) -> Division:
    """All on the first GPU, but for the experts of these layers."""
    return Division(homes=(0,) * inputs.model.spec.num_layers, cold=tuple(cold), head=0)
