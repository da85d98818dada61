"""This machine's speed in the stages of `hotsplit run`: measured briefly, or remembered from
earlier runs in the cache's rates.json."""

import json
import os
import platform
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import torch
from gguf.quants import dequantize, quantize

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.errors import HotsplitError
from hotsplit.files.atomic import partial_file
from hotsplit.files.gguf_file import type_of
from hotsplit.files.pipeline import num_threads
from hotsplit.runtime.kernels.threads import threads_of_steps
from hotsplit.system.cache_place import unwritable
from hotsplit.system.processors import processor_name, processors
from hotsplit.system.system_memory import memory_bytes

FILE = "rates.json"
ENCODE_S, MATMUL_S, UNPACK_S = 0.5, 0.3, 0.1  # seconds of each measurement
SLICE_BYTES = 1 << 20
TOO_LARGE = (OverflowError, RecursionError)  # numbers beyond f64, and JSON nested thousands deep
WRITTEN_BYTES = 32 << 20
T, M, N = 512, 1024, 4096  # shape of the timed matrix product


def machine_key() -> dict[str, Any]:
    """Identifies this machine and the threads in use, for results that depend on speed."""
    gpus = [
        (torch.cuda.get_device_name(i), torch.cuda.get_device_properties(i).total_memory)
        for i in range(torch.cuda.device_count())
    ]
    return {
        "cpu": processor_name(),
        "cores": processors().usable,
        "memory": memory_bytes()[0],
        "gpus": gpus,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": threads_of_steps(beside_gpu=bool(gpus)),
    }


@dataclass
class Rates:
    """Remembered rates. `stored` has amounts per second by name."""

    path: Path
    machine: str  # the one that was measured
    stored: dict[str, float] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path, machine: str) -> "Rates":
        """A machine's rates in a cache folder; empty if there is no readable file."""
        rates = cls(path=folder / FILE, machine=machine)
        with suppress(OSError, ValueError, TypeError, AttributeError, *TOO_LARGE):
            found = json.loads(rates.path.read_text(encoding="utf-8")).get(machine, {})
            rates.stored = {str(name): float(rate) for name, rate in found.items() if rate > 0}
        return rates

    def note(self, name: str, rate: float) -> None:
        """Stores a measured rate; a file that cannot be written is ignored."""
        if rate <= 0:
            return
        self.stored[name] = rate
        content: dict[str, dict[str, float]] = {}
        with suppress(OSError, ValueError, *TOO_LARGE):
            found = json.loads(self.path.read_text(encoding="utf-8"))
            content = found if isinstance(found, dict) else {}
        content[self.machine] = self.stored
        with suppress(HotsplitError, OSError), partial_file(self.path) as partial:
            partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def write_bytes_per_s(self) -> float:
        """Write speed of the cache's disk, including fsync."""
        if "write" not in self.stored:
            try:
                with TemporaryFile(dir=self.path.parent) as file:
                    began = time.perf_counter()
                    file.write(os.urandom(1 << 20) * (WRITTEN_BYTES >> 20))
                    file.flush()
                    os.fsync(file.fileno())
                    seconds = time.perf_counter() - began
            except OSError as error:  # a temporary file has no name that the error could give
                raise unwritable(self.path.parent, error) from error
            self.note("write", WRITTEN_BYTES / seconds)
        return self.stored["write"]


def cpu_alone_name(model_id: str) -> str:
    """The name under which the tokens per second of a model on the CPU alone are stored."""
    return f"cpu alone {model_id[:16]}"


def encode_bytes_per_s(model: ModelFile) -> float:
    """Bytes per second at which all threads of a conversion read a planned model file's matrices
    from their source and pack them; estimated from one thread, on slices of the layers."""
    began, count = time.perf_counter(), 0
    for name, entry in model.tensors.items():
        if len(entry.shape) != 2 or not name.startswith("blk."):
            continue
        rows = max(1, min(entry.shape[0], SLICE_BYTES // entry.row_bytes))
        count += entry.read_rows(0, rows).nbytes
        if time.perf_counter() - began > ENCODE_S:
            break
    return num_threads() * count / max(1e-6, time.perf_counter() - began)


def unpack_values_per_s() -> float:
    """Values per second that one thread unpacks from q8_0; verifying takes a multiple."""
    rows = quantize(
        np.random.default_rng(0).standard_normal((64, N)).astype(np.float32), type_of("q8_0")
    )
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < UNPACK_S:
        count += dequantize(rows, type_of("q8_0")).size
    return count / (time.perf_counter() - began)


def matmul_flops(device: torch.device) -> float:
    """Floating-point operations per second of an f32 matrix product; the best of several."""
    one_TM, other_MN = torch.randn(T, M, device=device), torch.randn(M, N, device=device)
    began, best = time.perf_counter(), float("inf")
    while time.perf_counter() - began < MATMUL_S:
        at = time.perf_counter()
        one_TM @ other_MN
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - at)
    return 2.0 * T * M * N / best
