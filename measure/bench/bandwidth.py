"""Measures memory bandwidth: on the CPU with the runtime's matrix-vector product and threads, on a
GPU with torch's sum. The buffer has at most 1 GiB and exceeds most caches unless free memory is
short.

The bandwidth is measured again in every round, so that whatever slows the model in a round also
slows the probe."""

from collections.abc import Callable

import numpy as np
import torch

from hotsplit.files.gguf_file import array_entry
from hotsplit.measure.calibrate.cpu_bandwidth import buffer_bytes
from hotsplit.measure.calibrate.gpu import READ_BYTES, event_seconds
from hotsplit.measure.timing.interleave import seconds_of
from hotsplit.runtime.weights.resident import Residence

ROW_VALUES = 4096
TRIES = 3  # the fastest counts

Bandwidth = Callable[[], float]  # measures bytes per second


def cpu_bandwidth() -> Bandwidth:
    """A probe that times an f32 matrix-vector product over memory allocated like weights."""
    num_rows = max(1, buffer_bytes() // (4 * ROW_VALUES))
    ones = array_entry(np.ones((num_rows, ROW_VALUES), np.float32), "f32")
    matrix = Residence().matrix(ones)
    x_D = torch.ones(ROW_VALUES)

    def measure() -> float:
        best = min(seconds_of(lambda: matrix.dot(x_D)) for _ in range(TRIES))
        return matrix.num_bytes / best

    return measure


def gpu_bandwidth(device: torch.device) -> Bandwidth:
    """A probe that times torch's sum over a buffer, with two CUDA events."""
    free, _ = torch.cuda.mem_get_info(device)
    values = torch.ones(min(READ_BYTES, free // 4) // 4, device=device)

    def measure() -> float:
        with torch.cuda.device(device):
            return values.nbytes / min(event_seconds(values.sum) for _ in range(TRIES))

    return measure
