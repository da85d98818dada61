"""What a feed-forward layer asks of the streams of cold weights, which runtime.prefill has.

Letters: A experts."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hotsplit.runtime.weights.expert_block import ExpertBlock
from hotsplit.runtime.weights.neuron_block import NeuronBlock


class ColdNeurons(Protocol):
    """Streams neurons on the CPU to a GPU if there are enough tokens: see cold_stream."""

    device: torch.device
    least_tokens: int

    def has(self, layer: int, block: NeuronBlock) -> bool:
        """True if these neurons are streamed."""

    def run(self, layer: int, add: Callable[[NeuronBlock], None], x: Tensor, y: Tensor) -> None:
        """Calls `add` with each piece of the neurons on the device; `add` reads `x` and adds to
        `y`."""

    def abandon(self) -> None:
        """Ends a pass that failed."""


class ColdExpertStream(Protocol):
    """Streams experts on the CPU to a GPU, if a pass has enough tokens: see expert_stream."""

    device: torch.device
    least_tokens: int

    @property
    def most_experts(self) -> int:
        """Experts that a buffer holds, of any layer."""

    def chosen(self, layer: int, expert_A: np.ndarray, count_A: np.ndarray) -> np.ndarray:
        """Those of a layer's cold experts that are streamed, given how many tokens each has; the CPU
        computes the others at the same time."""

    def run(
        self,
        layer: int,
        parts: Sequence[np.ndarray],
        add: Callable[[int, ExpertBlock], None],
        x: Tensor,
        y: Tensor,
    ) -> None:
        """Calls `add` with the number of each part and its experts on the device, in order; `add`
        reads `x` and writes `y`."""

    def abandon(self) -> None:
        """Ends a pass that failed."""
