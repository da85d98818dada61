"""Runs llama.cpp within a budget: as many layers on the GPU as fit, by the buffers that it reports.

gpu_rival.sh builds it and rival_worker.py runs it."""

import json
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from worker_process import Process, ProcessError

PROGRAM = Path(__file__).with_name("rival_worker.py")
MOST_LOADS = 4
# Matches "load_tensors:        CUDA0 model buffer size =  3577.56 MiB" and the like for the cache
# and for compute buffers, but not CUDA_Host, which is pinned main memory.
BUFFER = re.compile(r"\bCUDA\d+\s.*buffer size\s*=\s*([0-9.]+) MiB")


@dataclass(frozen=True, kw_only=True)
class GpuRival:
    process: Process
    num_layers: int  # on the GPU; one more than the model's own number includes the head
    gpu_bytes: int


@dataclass(frozen=True, kw_only=True)
class RivalModel:
    folder: Path  # holds the package llama_cpp
    model: Path
    context_length: int
    num_layers: int
    layer_bytes: int


def best_rival(
    rival: RivalModel, budget_bytes: int, log: Path, *, moves_experts: bool = False
) -> GpuRival:
    """The rival with the most layers whose buffers fit the budget, of at most MOST_LOADS counts
    tried. The embedding stays in main memory and is not a layer. With `moves_experts` all layers
    are on the GPU, `num_layers` of them with their experts, whose bytes are then `layer_bytes`.

    Raises ProcessError if it cannot be loaded, or if no count that was tried fits."""
    most, tried = rival.num_layers + (not moves_experts), set[int]()
    count = min(most, budget_bytes // rival.layer_bytes)
    best: GpuRival | None = None
    while count not in tried and len(tried) < MOST_LOADS:
        tried.add(count)
        try:
            found = _loaded(rival, count, log, moves_experts=moves_experts)
        except ProcessError:
            if best is not None:
                best.process.close()
            raise
        room = (budget_bytes - found.gpu_bytes) // rival.layer_bytes  # negative: layers in excess
        is_better = room >= 0 and (best is None or count > best.num_layers)
        worse, best = (best, found) if is_better else (found, best)
        if worse is not None:
            worse.process.close()
        count = min(most, max(0, count + room))
    if best is None:
        raise ProcessError(f"llama.cpp: no number of layers fits into {budget_bytes:,} bytes")
    return best


def _loaded(rival: RivalModel, count: int, log: Path, *, moves_experts: bool) -> GpuRival:
    options = {
        "model": str(rival.model),
        "context": rival.context_length,
        "sequences": 1,
        "batch": None,
        "gpu_layers": rival.num_layers + 1 if moves_experts else count,
        "cpu_experts": rival.num_layers - count if moves_experts else 0,
    }
    command = (sys.executable, PROGRAM, json.dumps(options))
    process = Process.of(command, "llama.cpp", log, rival.folder)
    try:
        buffers = process.about["buffers"]
    except ProcessError:
        process.close()
        raise
    return GpuRival(process=process, num_layers=count, gpu_bytes=gpu_bytes(buffers))


def gpu_bytes(log: Iterable[str]) -> int:
    """The sum of all GPU buffers listed in llama.cpp's log."""
    found = [match for line in log if (match := BUFFER.search(line))]
    return round(sum(float(match[1]) for match in found) * (1 << 20))
