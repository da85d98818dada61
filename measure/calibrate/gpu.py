"""Calibrates a CUDA device: memory bandwidth, copies to it, the fixed costs of copies and kernels,
the rate of its kernels for chosen neurons, and what `step_costs` fits to whole steps.

Kernels and copies from pinned memory are timed by CUDA events, the others on the host. The fixed
cost of a copy is that of copying 4 bytes, the fixed cost of a kernel that of one on a single value;
both are means over a captured graph of NUM_NODES nodes in sequence, because the runtime captures
decode steps too.

The rate for chosen neurons is that of gate, up and down of CHOSEN_SHARE of a wide layer's neurons,
in a captured graph over the layers of a model, less the starts of the kernels."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hotsplit.artifacts.machine_file import CHOSEN_SHARE, CpuCosts, Figure, Gpu
from hotsplit.measure.calibrate import step_costs
from hotsplit.measure.timing.interleave import Probe, run_rounds, seconds_of
from hotsplit.runtime.device.bits import pack_bits
from hotsplit.runtime.engine import Engine
from hotsplit.runtime.kernels.gate import Gate
from hotsplit.runtime.kernels.gpu.kernels import Kernels, triton_kernels
from hotsplit.runtime.kernels.gpu.ranges import down_parts
from hotsplit.runtime.weights.neuron_block import NeuronBlock, by_role

READ_BYTES = 1 << 30  # far above any second-level cache
COPY_BYTES = 128 << 20
NUM_NODES = 100
WIDE_BYTES = 6 << 30  # of free memory, from which on the models of shape WIDE are loaded


def measure_gpu(
    index: int,
    time_limit_s: float,
    cpu: CpuCosts,
    host_bytes: int,
    on_probe: Callable[[float], None] = lambda count: None,
) -> Gpu:
    """The figures of one device, of which half of the time is for whole steps; `on_probe` is called
    after each timing. `host_bytes`: free bytes of main memory."""
    device = torch.device("cuda", index)
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    with torch.cuda.device(device):
        found = run_rounds(_probes(device, free), time_limit_s / 2, on_probe)
    torch.cuda.empty_cache()
    wide = step_costs.WIDE if min(free, host_bytes) >= WIDE_BYTES else step_costs.SMALLER
    card = step_costs.Card(
        bandwidth=1e9 * found["bandwidth"].median,
        link=1e9 * found["pinned"].median,
        launch_s=found["launch"].median,
    )
    of_narrow, of_wide = step_costs.time_steps(
        (step_costs.NARROW, wide), device, time_limit_s / 2, on_probe
    )
    costs = step_costs.fit(of_narrow, of_wide, card, cpu)
    model = wide.model(wide.num_layers)
    plan = step_costs.plan_of(model, step_costs.TimedStep(num_layers=wide.num_layers))
    with step_costs.engine_of(model, plan, device) as engine:
        chosen = chosen_rows(engine, triton_kernels(), card, device)
    return Gpu(
        name=properties.name,
        source="measured",
        memory_bytes=total,
        free_bytes=free,
        bandwidth_gb_per_s=found["bandwidth"],
        host_to_device_gb_per_s=found["pinned"],
        host_to_device_pageable_gb_per_s=found["pageable"],
        copy_latency_s=found["copy"],
        launch_s=found["launch"],
        chosen_rows_gb_per_s=chosen,
        kernel_s=costs.kernel_s,
        token_s=costs.token_s,
        hand_over_s=costs.hand_over_s,
        cpu_run_s=costs.cpu_run_s,
    )


def chosen_rows(
    engine: Engine, kernels: Kernels, card: step_costs.Card, device: torch.device
) -> Figure:
    """GB/s of the kernels of CHOSEN_SHARE of the neurons of an engine that is all on a device."""
    runs, num_bytes = [], 0
    for layer in engine.layers:
        block, _ = by_role(layer.ffn.blocks)
        assert isinstance(block, NeuronBlock) and block.up is not None
        count = len(block.id_N)
        is_chosen_N = torch.rand(count, generator=torch.Generator().manual_seed(0)) < CHOSEN_SHARE
        row_bytes = block.gate.weight.row_bytes + block.up.weight.row_bytes + block.down.row_bytes
        num_bytes += int(is_chosen_N.sum()) * row_bytes
        runs.append(_neurons(block, kernels, pack_bits(is_chosen_N), device))

    def run_all() -> None:
        for run in runs:
            run()

    replay = _captured(run_all, 1)
    starts_s = 2 * len(runs) * card.launch_s

    def seconds() -> float:
        taken = event_seconds(replay)
        return max(taken - starts_s, taken / 2)

    return run_rounds([Probe(name="chosen", seconds=seconds, num_bytes=num_bytes)], 1.0)["chosen"]


def _neurons(
    block: NeuronBlock, kernels: Kernels, named_W: Tensor, device: torch.device
) -> Callable[[], None]:
    count, width = len(block.id_N), block.down.width
    x_D = torch.ones(width, device=device)
    hidden_N = torch.empty(count, device=device)
    parts_SD = torch.empty(down_parts(count, width), width, device=device)
    named_W = named_W.to(device)
    up, always = block.up, Gate(activation="fatrelu", threshold=-math.inf)
    assert up is not None

    def run() -> None:
        kernels.gate_up(
            block.gate.weight, None, up.weight, None, None, named_W, x_D, always, hidden_N
        )
        kernels.down(block.down, hidden_N, parts_SD, skips_zeros=True)

    return run


def _probes(device: torch.device, free_bytes: int) -> list[Probe]:
    many = torch.ones(min(READ_BYTES, free_bytes // 4) // 4, device=device)
    into = many[: min(COPY_BYTES // 4, len(many))]
    pageable = torch.ones(len(into))
    pinned = _pinned(len(into))
    one, one_host = torch.ones(1, device=device), _pinned(1)

    def copy_one() -> object:
        return one.copy_(one_host, non_blocking=True)

    copies, launches = _captured(copy_one, NUM_NODES), _captured(lambda: one.mul_(1.0), NUM_NODES)
    return [
        Probe(name="bandwidth", seconds=lambda: event_seconds(many.sum), num_bytes=many.nbytes),
        Probe(
            name="pinned",
            seconds=lambda: event_seconds(lambda: into.copy_(pinned, non_blocking=True)),
            num_bytes=into.nbytes,
        ),
        Probe(
            name="pageable",
            seconds=lambda: seconds_of(lambda: _waited(lambda: into.copy_(pageable))),
            num_bytes=into.nbytes,
        ),
        Probe(name="copy", seconds=lambda: event_seconds(copies) / NUM_NODES),
        Probe(name="launch", seconds=lambda: event_seconds(launches) / NUM_NODES),
    ]


def _captured(run: Callable[[], object], count: int) -> Callable[[], None]:
    """A function that replays a graph of so many runs. It keeps `run`, and with it the memory that
    the graph refers to."""
    _waited(run)  # loads the kernels' code, which may fail inside a capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            run()
    _waited(graph.replay)  # the first launch uploads the graph
    kept = graph, run
    return lambda: kept[0].replay()


def event_seconds(run: Callable[[], object]) -> float:
    """Seconds between two events around the work that is submitted to the current device."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def _waited(run: Callable[[], object]) -> None:
    run()
    torch.cuda.synchronize()


def _pinned(count: int) -> Tensor:
    return torch.ones(count).pin_memory()
