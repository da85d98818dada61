"""Where the time and bytes of native steps go: an array that a step fills while it is attached.

The clock is read between the parts, so that they sum to the time of the native call. A step without
an array reads no clock, and logits are the same bits with and without one. Which block of neurons
is on which side of a plan is not known here.

Letters: L layers, P parts."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from sparkinfer.runtime.step.native_step import NativeStep

# enum Timed in kernels/cpu/step.h. The first block of a layer's neurons is "neurons", the others are
# "neurons_2"; "other" is the embedding, norms and sums.
PARTS = ("inputs", "attend", "output", "predictor", "neurons", "neurons_2", "head", "other")


@contextmanager
def timed_parts(native: NativeStep) -> Iterator[Tensor]:
    """int64 [L + 1, P, 2]: nanoseconds, and bytes of weights as Traffic counts them, of all steps
    inside the block so far; the last layer is what belongs to none."""
    counts_LP2 = torch.zeros(native.step.num_layers + 1, len(PARTS), 2, dtype=torch.int64)
    assert native.step.times is None, "the step is being timed already"
    native.step.times = counts_LP2.data_ptr()
    try:
        yield counts_LP2
    finally:
        native.step.times = None
