"""Searches for the shares of neurons to silence in each layer that save a given number of bytes at
the least loss, without training.

A sample of a text gives each layer's scores. Neurons are ranked by their expected contribution,
|act(gate_j)| * E|h_j| / E|act(gate_j)| * |down_j| (WINA, arXiv 2505.19427, ranks by magnitude times
the norm of the weights). The loss is an energy, the sum of the squares of the contributions
|h_j| * |down_j| dropped: the squared error of the output if they are uncorrelated. A neuron's limit
is the threshold on its rank divided by its factor, so that the runtime only compares magnitudes.

The loss of a choice is modelled as a sum over layers, KL = sum_l s_l * energy_l(share_l), with
sensitivities s from probes: the KL divergence of the whole model from its dense self with limits in
one layer. The sensitivities are scaled such that the KLs of the layers add up to that of one probe
with limits in all layers. This takes one probe per layer and one more, and no gradients. A choice
for a number of saved bytes is found by a price per byte: each layer minimises its loss minus the
price times the bytes saved, and the price is bisected. The caller measures the true cost of a
choice.

Letters: L layers, T tokens of the sample, F neurons, A shares."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hotsplit.artifacts.limits_file import LayerLimits, Limits
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.errors import HotsplitError
from hotsplit.profile.predictors.layer_trainer import row_norms
from hotsplit.runtime.engine import Engine
from hotsplit.runtime.model.layers import Layer

SHARES = tuple(round(0.05 * step, 2) for step in range(20))  # of a layer's neurons; 0: no limit
SAMPLE_TOKENS = 512  # about, of all windows, evenly spaced; 70 MB per layer of a 7 B model
_SEEN = ("ffn_gate", "ffn_hidden")


@dataclass(frozen=True, kw_only=True)
class LayerScores:
    """Ranks of a layer's neurons, rank = |act(gate)| * factor, and their contributions."""

    rank_TF: Tensor  # f32
    factor_F: Tensor
    given_TF: Tensor  # f32, |h_j| * |down_j|

    def threshold(self, share: float) -> float:
        """The rank such that this share of the sample is at or below it."""
        if share <= 0:
            return -1.0
        flat = self.rank_TF.flatten()
        return float(flat.kthvalue(max(1, int(share * len(flat)))).values)

    def lost_A(self) -> np.ndarray:
        """f64 [A]: the energy per token that each of SHARES loses."""
        energy_TF = self.given_TF.double().square()
        lost = [energy_TF[self.rank_TF <= self.threshold(share)].sum().item() for share in SHARES]
        return np.array(lost) / len(self.rank_TF)

    def limits(self, share: float) -> LayerLimits:
        """Limits that silence this share of the sample; none for a share of 0. A neuron whose
        weights are all zero contributes nothing, so it gets the largest f32 as its limit (0 if the
        threshold is 0)."""
        if share <= 0:
            return LayerLimits()
        limit_F = self.threshold(share) / self.factor_F
        limit_F = limit_F.nan_to_num(posinf=torch.finfo(torch.float32).max).clamp(min=0)
        return LayerLimits(gate_F=limit_F.numpy())


@dataclass
class _Sample:
    """An observer that keeps some tokens of the gates and hidden values of a layer."""

    every: int  # keeps every n-th token
    values: dict[tuple[str, int], list[Tensor]] = field(default_factory=dict)

    def wants(self, name: str, layer: int | None) -> bool:
        return name in _SEEN

    def observe(self, name: str, layer: int | None, tensor: Tensor) -> None:
        assert layer is not None
        self.values.setdefault((name, layer), []).append(
            tensor[max(1, self.every - 1) :: self.every].float().cpu()
        )

    def take(self, name: str, layer: int) -> Tensor:
        value = torch.cat(self.values.pop((name, layer)))
        if not torch.isfinite(value).all():
            raise HotsplitError(
                f"{name} of layer {layer} is not finite; convert its checkpoint again"
            )
        return value


def sample_scores(engine: Engine, windows: Sequence[Tensor]) -> tuple[LayerScores, ...]:
    """Scores of a dense engine's layers on a text. Raises HotsplitError for NaN or infinity."""
    assert engine.mode == "dense", engine.mode
    count = sum(len(ids_T) for ids_T in windows)
    sample = _Sample(every=max(1, count // SAMPLE_TOKENS))
    with engine.observe(sample.observe, sample.wants):
        for ids_T in windows:
            engine.hidden(ids_T)
    return tuple(_scores(sample, layer, number) for number, layer in enumerate(engine.layers))


def _scores(sample: _Sample, layer: Layer, number: int) -> LayerScores:
    gate_TF = layer.ffn.gate.before_threshold(sample.take("ffn_gate", number)).abs()
    hidden_TF = sample.take("ffn_hidden", number).abs()
    (block,) = layer.ffn.blocks
    down_F = row_norms(block.down)
    mean_up_F = hidden_TF.mean(0) / gate_TF.mean(0).clamp(min=torch.finfo(torch.float32).tiny)
    factor_F = mean_up_F * down_F
    return LayerScores(rank_TF=gate_TF * factor_F, factor_F=factor_F, given_TF=hidden_TF * down_F)


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
