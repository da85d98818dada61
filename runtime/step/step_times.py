"""Measures the time and bytes of native steps by part, in an array that a step fills while
attached.

The clock is read between parts, so that their times sum to that of the native call. Without an
array, a step does not read the clock; logits are bit-identical either way.

Letters: L layers, P parts."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from hotsplit.runtime.step.native_step import NativeStep

# Matches enum Timed in kernels/cpu/step.h. A layer's first block of neurons is "neurons", the
# others are "neurons_2"; "other" is the embedding, norms and sums.
PARTS = ("inputs", "attend", "output", "predictor", "neurons", "neurons_2", "head", "other")


@contextmanager
def timed_parts(native: NativeStep) -> Iterator[Tensor]:
    """Yields int64 [L + 1, P, 2]: the nanoseconds, and the bytes of weights as Traffic counts them,
    of all steps inside the `with` block; the last row is for parts outside the layers."""
    counts_LP2 = torch.zeros(native.step.num_layers + 1, len(PARTS), 2, dtype=torch.int64)
    assert native.step.times is None, "the step is being timed already"
    native.step.times = counts_LP2.data_ptr()
    try:
        yield counts_LP2
    finally:
        native.step.times = None
