"""Scores limits on a sample of a text, layer by layer: which gates they would silence, and what that
would lose.

Neurons are ranked by their expected contribution, |act(gate_j)| * E|h_j| / E|act(gate_j)| * |down_j|
(WINA, arXiv 2505.19427, ranks by magnitude times the norm of the weights). The loss is an energy,
the sum of the squares of the contributions |h_j| * |down_j| dropped: the squared error of the output
if they are uncorrelated.

A neuron's limit is the threshold on its rank divided by its factor, so that the runtime only
compares magnitudes.

Letters: T tokens of the sample, F neurons, A shares."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hotsplit.artifacts.limits_file import LayerLimits
from hotsplit.costs.budget import tile_rows
from hotsplit.errors import HotsplitError
from hotsplit.runtime.engine import Engine
from hotsplit.runtime.kernels.stored import unpack
from hotsplit.runtime.model.layers import Layer
from hotsplit.runtime.weights.matrix import Matrix

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
        return _threshold(self.rank_TF, share)

    def lost_A(self) -> np.ndarray:
        """f64 [A]: the energy per token that each of SHARES loses."""
        energy_TF = self.given_TF.double().square()
        lost = [energy_TF[self.rank_TF <= self.threshold(share)].sum().item() for share in SHARES]
        return np.array(lost) / len(self.rank_TF)

    def limits(self, share: float) -> LayerLimits:
        """Limits that silence this share of the sample."""
        return _limits(self.rank_TF, self.factor_F, share)

    def uniform_gate(self, share: float) -> LayerLimits:
        """One threshold for all neurons, whatever their contribution (CATS, arXiv 2404.08763)."""
        magnitude_TF = self.rank_TF / self.factor_F
        return _limits(magnitude_TF, torch.ones_like(self.factor_F), share)


def _threshold(rank_TF: Tensor, share: float) -> float:
    if share <= 0:
        return -1.0
    flat = rank_TF.flatten()
    return float(flat.kthvalue(max(1, int(share * len(flat)))).values)


def _limits(rank_TF: Tensor, factor_F: Tensor, share: float) -> LayerLimits:
    """None for a share of 0. A neuron whose weights are all zero contributes nothing, so it gets the
    largest f32 as its limit (0 if the threshold is 0)."""
    if share <= 0:
        return LayerLimits()
    limit_F = _threshold(rank_TF, share) / factor_F
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
    """Scores of a dense engine's layers on a text. Raises HotsplitError for NaN and
    infinities."""
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
    down_F = _row_norms(block.down)
    mean_up_F = hidden_TF.mean(0) / gate_TF.mean(0).clamp(min=torch.finfo(torch.float32).tiny)
    factor_F = mean_up_F * down_F
    return LayerScores(rank_TF=gate_TF * factor_F, factor_F=factor_F, given_TF=hidden_TF * down_F)


def _row_norms(matrix: Matrix) -> Tensor:
    """f32 [N]."""
    return torch.cat([rows.norm(dim=1) for rows in _pieces(matrix)])


def _pieces(matrix: Matrix) -> Iterator[Tensor]:
    """The unpacked rows, some at a time."""
    step = tile_rows(matrix.width)
    for start in range(0, matrix.num_rows, step):
        part = matrix.part(start, min(start + step, matrix.num_rows))
        yield unpack(part.data, part.kind)
