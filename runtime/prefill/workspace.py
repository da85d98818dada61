"""Measures the memory that a forward pass takes besides weights and cache.

A prefill chunk at the end of the context, where a pass takes the most memory, runs through two
layers and the head on the CPU while torch reports every allocation and release. Two layers are
enough: only their shapes matter, and they run in sequence. Memory that matrix libraries allocate
themselves is not reported.

Letters: T tokens, D model width."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.costs.budget import LOGITS_CHUNK, SHORT_CHUNK, layer_bytes
from hotsplit.model.modes import Mode
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.model.layers import Weights
from hotsplit.runtime.model.loader import Builder
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.ops.observers import Observers
from hotsplit.runtime.prefill.pass_bytes import planned_bytes
from hotsplit.runtime.step import native_step
from hotsplit.runtime.step.decoder import Decoder
from hotsplit.runtime.weights.matrix import Linear, matrix_of
from hotsplit.runtime.weights.resident import Residence
from hotsplit.runtime.weights.store import Stores

# Covers the allocator's rounding and a few more small tensors.
ROUNDED_TO = 64 << 10
# Shares of hot neurons other than those measured took up to 0.8 % more.
MARGIN = 1.02
# Divided layers take more: the hot block's results are kept while the cold block is computed. The
# fewer neurons are hot, the more the cold block takes.
HOT_SHARE = 1 / 16


def measure_workspace(model: ModelFile, context_length: int, mode: Mode) -> int:
    """Peak bytes of a pass over a prefill chunk, native or observed, rounded up; at least what
    `planned_bytes` asks for.

    Reads one layer and the head of the file, which takes about a second for 7 B parameters."""
    tokens = min(SHORT_CHUNK, context_length)
    ids_T = torch.arange(tokens) % model.spec.vocab_size
    most = 0
    for hot_share in (None, HOT_SHARE):
        decoder = _two_layers(model, context_length, mode, hot_share)

        @torch.inference_mode()
        def run(decoder: Decoder = decoder) -> None:
            hidden_TD = decoder.forward(ids_T, context_length - tokens)
            decoder.logits(hidden_TD[-LOGITS_CHUNK:])

        run()  # makes permanent allocations before the measurement
        most = max(most, peak_bytes(run), native_step.step_workspace_bytes(decoder.weights))
    most = max(int(MARGIN * most), planned_bytes(model, context_length, mode))
    return -(-most // ROUNDED_TO) * ROUNDED_TO


def peak_bytes(run: Callable[[], object]) -> int:
    """Peak bytes of torch's CPU tensors during `run`, beyond those alive before it."""
    with _quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    events = profiled.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), i, e.nbytes()) for i, e in enumerate(events)
                     if e.name() == "[memory]")  # fmt: skip
    alive = peak = 0
    for _, _, num_bytes in changes:
        alive += num_bytes
        peak = max(peak, alive)
    return peak


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses the lines that torch's profiler writes to file descriptor 2."""
    kept = os.dup(2)
    try:
        with Path(os.devnull).open("wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _two_layers(
    model: ModelFile, context_length: int, mode: Mode, hot_share: float | None
) -> Decoder:
    """A decoder that runs the layer with the largest predictor twice. `hot_share`: the share of its
    neurons that are hot; None: they are not divided."""
    cpu, num_layers = torch.device("cpu"), model.spec.num_layers
    observers = Observers()
    observers.add(lambda name, layer, tensor: None, None)  # plans allow for observers too
    placement = Placement.on_one_device(num_layers, cpu)
    if hot_share is not None:
        step = round(1 / hot_share)
        ids = np.arange(0, model.spec.most_neurons, step, dtype=np.int32)
        placement = replace(placement, hot=(ids,) * num_layers)
    # As in an engine whose weights fit into memory. (Rows selected from a mapped file take one more
    # copy of each tile.)
    residence = Residence() if library.is_available() else None
    stores = Stores.of(residence)
    builder = Builder(model, placement, mode, context_length, stores=stores)
    largest = max(range(num_layers), key=lambda index: layer_bytes(model, index).predictor)
    layer = builder.layer(largest)
    positions = model.tensors.get("position_embd.weight")
    weights = Weights(
        spec=builder.spec.with_layers([layer.spec] * 2),
        embedding=matrix_of(model.tensors["token_embd.weight"], cpu),
        positions=matrix_of(positions, cpu) if positions else None,
        layers=(layer, layer),
        output_norm=builder.output_norm(cpu),
        head=Linear(weight=matrix_of(model.tensors[model.head_name], cpu)),
        head_device=cpu,
    )
    native = "only whole passes are measured"
    return Decoder(weights=weights, observers=observers, native=native)
