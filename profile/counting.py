"""Counts, while the model runs, how often each neuron fires and how large its gate is.

Letters: T tokens, L layers, F neurons, B histogram bins."""

import numpy as np
import torch
from torch import Tensor

from sparkinfer.errors import SparkinferError
from sparkinfer.profile_file import EDGES, NUM_BINS
from sparkinfer.runtime.feed_forward import Gate


class Counter:
    """An observer of `ffn_gate`; the sums stay on the device of the layer, in int64."""

    def __init__(self, gates: tuple[Gate, ...], num_neurons: int) -> None:
        self.gates = gates
        self.active_count: list[Tensor | None] = [None] * len(gates)  # [F] a layer
        self.histogram: list[Tensor | None] = [None] * len(gates)  # [B] a layer
        self.num_neurons = num_neurons
        self.num_tokens = 0

    def wants(self, name: str, layer: int | None) -> bool:
        return name == "ffn_gate"

    def observe(self, name: str, layer: int | None, gate_TF: Tensor) -> None:
        """Raises SparkinferError for NaN: such a model has no firings to count."""
        assert layer is not None
        value_TF, fires_TF = self.gates[layer].act(gate_TF, is_dense=False)
        bins = torch.bucketize(value_TF.abs(), _edges(gate_TF.device), right=True) - 1
        if torch.isnan(gate_TF).any():
            raise SparkinferError(
                f"layer {layer}: the model gave NaN; convert its checkpoint again"
            )
        self._add(self.active_count, layer, fires_TF.sum(dim=0))
        self._add(self.histogram, layer, torch.bincount(bins.flatten(), minlength=NUM_BINS))
        if layer == 0:
            self.num_tokens += len(gate_TF)

    @staticmethod
    def _add(sums: list[Tensor | None], layer: int, amount: Tensor) -> None:
        so_far = sums[layer]
        sums[layer] = amount if so_far is None else so_far + amount

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """active_count_LF and gate_histogram_LB, int64."""

        def stack(sums: list[Tensor | None]) -> np.ndarray:
            return np.stack([s.cpu().numpy() for s in sums if s is not None]).astype(np.int64)

        return stack(self.active_count), stack(self.histogram)


_EDGES_ON: dict[torch.device, Tensor] = {}


def _edges(device: torch.device) -> Tensor:
    if device not in _EDGES_ON:
        _EDGES_ON[device] = torch.from_numpy(EDGES).float().to(device)
    return _EDGES_ON[device]


def thresholds_for(histogram_LB: np.ndarray, target_sparsity: float) -> tuple[float, ...]:
    """Per layer the largest bin edge that at most `target_sparsity` of the magnitudes lie below.

    Magnitude thresholds as in CATS (arXiv 2404.08763); f32 values."""
    below_LB = np.cumsum(histogram_LB, axis=1) / histogram_LB.sum(axis=1, keepdims=True)
    bins = (below_LB <= target_sparsity).sum(axis=1)  # whole bins that may be cut off
    return tuple(float(np.float32(EDGES[min(b, NUM_BINS - 1)])) for b in bins)
