"""Searches for the shares of neurons to silence in each layer that save a given number of bytes at
the least loss, without training.

The loss of a choice is modelled as a sum over layers, KL = sum_l s_l * energy_l(share_l), with
energies from the sample (`limit_scores`) and sensitivities s from probes: the KL divergence of the
whole model from its dense self with limits in one layer. The sensitivities are scaled such that the
KLs of the layers add up to that of one probe with limits in all layers. This takes one probe per
layer and one more, and no gradients. A choice for a number of saved bytes is found by a price per
byte: each layer minimises its loss minus the price times the bytes saved, and the price is
bisected. The caller measures the true cost of a choice.

Letters: L layers, A shares."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hotsplit.artifacts.limits_file import LayerLimits, Limits
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.profile.sparsity.limit_scores import SHARES, LayerScores

PROBE = 0.2  # the share that the probes silence
BISECTIONS = 60
LEAST_KL = 1e-12  # a probe's KL is at least this: rounding can make a harmless one negative


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Bytes of the matrices that a token reads in mode dense: of each layer's up and down, whose
    rows a silent gate saves, and of everything."""

    saved_L: np.ndarray
    total: int

    @classmethod
    def of(cls, model: ModelFile) -> "Bytes":
        def of_layers(*names: str) -> np.ndarray:
            rows = [[_size(model, f"blk.{n}.{name}.weight") for name in names] for n in layers]
            return np.array(rows, np.int64).sum(axis=1)

        layers = range(model.spec.num_layers)
        down_L = of_layers("ffn_down", "ffn_down_t")
        up_L = of_layers("ffn_up")
        other_L = of_layers("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output", "ffn_gate")
        head = _size(model, "output.weight") or _size(model, "token_embd.weight")
        is_gated_L = np.array([layer.neurons.is_gated for layer in model.spec.layers])
        return cls(
            saved_L=np.where(is_gated_L, up_L, 0) + down_L,
            total=head + int((up_L + down_L + other_L).sum()),
        )


def _size(model: ModelFile, name: str) -> int:
    entry = model.tensors.get(name)
    return 0 if entry is None else entry.num_bytes


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The share of silent gates of each layer."""

    share_L: tuple[float, ...]
    loss: float  # nats, as modelled
    saved_share: float  # of the weight bytes of a token

    def limits(self, scores: Sequence[LayerScores], model_id: str | None) -> Limits:
        layers = map(LayerScores.limits, scores, self.share_L)
        return Limits(model_id=model_id, layers=tuple(layers))


class Allocation:
    """The modelled loss, to be minimised for any number of bytes saved."""

    def __init__(self, scores: Sequence[LayerScores], bytes_of: Bytes) -> None:
        self.total_bytes, self.num_layers = bytes_of.total, len(scores)
        self.energy_LA = np.stack([layer.lost_A() for layer in scores])
        self.saved_LA = bytes_of.saved_L[:, None] * np.array(SHARES)
        self.sensitivity_L = np.ones(self.num_layers)

    def calibrate(self, kl_L: Sequence[float], whole_kl: float) -> None:
        """Sets the sensitivities from the KL divergences of the probes: `kl_L` with limits in one
        layer, `whole_kl` in all layers; each at the share PROBE."""
        energy_L = self.energy_LA[:, SHARES.index(PROBE)]
        found_L = np.maximum(LEAST_KL, np.array(kl_L)) / np.maximum(1e-30, energy_L)
        whole = max(LEAST_KL, whole_kl)
        self.sensitivity_L = found_L * whole / max(1e-30, float(found_L @ energy_L))

    def best(self, saved_share: float) -> Choice | None:
        """The choice at the lowest price that saves this share of all bytes: by the model, no
        choice that saves as many bytes loses less. None if silent gates cannot save that share."""
        wanted = saved_share * self.total_bytes
        low, high = 1e-30, 1e30
        if self._take(high).saved_share * self.total_bytes < wanted:
            return None
        for _ in range(BISECTIONS):
            price = (low * high) ** 0.5
            if self._take(price).saved_share * self.total_bytes < wanted:
                low = price
            else:
                high = price
        return self._take(high)

    def _take(self, price: float) -> Choice:
        """The best choice of every layer at a price in nats per byte."""
        lost_LA = self.energy_LA * self.sensitivity_L[:, None]
        best_L = (lost_LA - price * self.saved_LA).argmin(axis=1)
        layers = np.arange(self.num_layers)
        return Choice(
            share_L=tuple(SHARES[best] for best in best_L),
            loss=float(lost_LA[layers, best_L].sum()),
            saved_share=float(self.saved_LA[layers, best_L].sum()) / self.total_bytes,
        )


def num_probes(num_layers: int) -> int:
    return num_layers + 1


def allocate(
    scores: Sequence[LayerScores],
    bytes_of: Bytes,
    kl_of: Callable[[tuple[LayerLimits, ...]], float],
) -> Allocation:
    """The modelled loss, with sensitivities from `num_probes` measurements; `kl_of` returns the
    nats per token of the whole model with given limits. Deterministic."""
    allocation, none = Allocation(scores, bytes_of), LayerLimits()
    limits_L = tuple(layer.limits(PROBE) for layer in scores)
    whole_kl = kl_of(limits_L)
    kl_L = [
        kl_of(tuple(own if n == layer else none for n, own in enumerate(limits_L)))
        for layer in range(len(scores))
    ]
    allocation.calibrate(kl_L, whole_kl)
    return allocation
