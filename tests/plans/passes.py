"""Passes of an engine's model by a plan, with both roles on the CPU, for tests."""

import torch

from hotsplit.runtime.gpu_setup import cold_blocks, cold_streams
from hotsplit.runtime.kernels.gpu.kernels import reference_kernels
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.step import hybrid_builder
from hotsplit.runtime.step.backend import plain_backend
from hotsplit.runtime.step.batch import rows_of
from hotsplit.runtime.step.pass_device import PassSetup

CPU = torch.device("cpu")


def passing(engine, split, *, backend=None, setup=None, neuron_cache=None, max_rows=4):
    """The step of a loaded engine with a plan, with passes of up to 256 rows."""
    placement = Placement.of_split(split, (CPU,) * len(split.budgets))
    return hybrid_builder.build(
        engine._live.weights,
        placement,
        engine.traffic,
        backend or plain_backend(reference_kernels()),
        neuron_cache,
        max_rows=max_rows,
        passes=setup or PassSetup(num_rows=256),
    )


def streaming(engine, split, *, pieces=3, is_staged=True, least_tokens=1, rates=None, only=None):
    """(a step whose passes stream cold weights, its streams by layer). `pieces`: the least pieces
    that a buffer has room for; `only`: kinds of blocks."""
    placement = Placement.of_split(split, (CPU,) * len(split.budgets))
    blocks = cold_blocks(engine._live.weights, placement, CPU)
    blocks = {n: each for n, each in blocks.items() if only is None or isinstance(each, only)}
    made = {}

    def streams(device, main, buffers):
        found = cold_streams(device, blocks, main, buffers, rates)
        for stream in found.values():
            stream.least_tokens = least_tokens
            stream.staging = stream.staging if is_staged else None
        made.update(found)
        return found

    size = max((pieces * each.least_piece_bytes for each in blocks.values()), default=0)
    setup = PassSetup(
        num_rows=256,
        piece_bytes={CPU: size} if blocks else {},
        streamed=frozenset(blocks),
        streams=streams,
    )
    return passing(engine, split, setup=setup), made


def logits(step, ids):
    """Logits f32 [T, V] of a text by passes."""
    pieces = range(0, len(ids), step.most_tokens)
    return torch.cat(
        [step.run_pass(rows_of(ids[i : i + step.most_tokens], i, "all")) for i in pieces]
    )
