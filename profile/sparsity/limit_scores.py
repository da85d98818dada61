"""Scores limits on a sample of a text, layer by layer: which values they would silence, and what
that would lose.

Each rule ranks values by their contribution, |value| times the norm of the weights that it
multiplies (WINA, arXiv 2505.19427; for neurons the row of `down`). Its loss is an energy, the sum
of the squares of the contributions dropped: the squared error of the output if they are
uncorrelated.

    gate      |act(gate_j)| * E|h_j| / E|act(gate_j)| * |down_j|     saves the rows of up and down
    hidden    |h_j| * |down_j|, known after the up product           saves the rows of down
    qkv       |x_i| * |column i of query, key and value|             saves their columns
    output    |x_i| * |column i of the output projection|            saves its columns
    ffn       |x_i| * |column i of gate and up|                      saves their columns

A value's limit is the threshold on its rank divided by its factor, so that the runtime only
compares magnitudes.

Letters: T tokens of the sample, F neurons, D inputs, N values that a rule ranks (neurons or
inputs), A shares, H inputs of the output projection."""

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

SHARES = tuple(round(0.05 * step, 2) for step in range(20))  # of a layer's values; 0: no limit
SAMPLE_TOKENS = 512  # about, of all windows, evenly spaced; 70 MB per layer of a 7 B model
# Rules on inputs: the tensor each applies to.
INPUTS = {"qkv": "attn_norm", "output": "attn_heads", "ffn": "ffn_norm"}
_SEEN = (*INPUTS.values(), "ffn_gate", "ffn_hidden")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """One rule in one layer: rank = |value| * factor."""

    rank_TN: Tensor  # f32
    factor_N: Tensor

    def threshold(self, share: float) -> float:
        """The rank such that this share of the sample is at or below it."""
        if share <= 0:
            return -1.0
        flat = self.rank_TN.flatten()
        return float(flat.kthvalue(max(1, int(share * len(flat)))).values)

    def limit_N(self, share: float) -> np.ndarray | None:
        """f32 [N]; None for a share of 0. A value whose weights are all zero contributes nothing,
        so it gets the largest f32 as its limit (0 if the threshold is 0)."""
        if share <= 0:
            return None
        limit_N = self.threshold(share) / self.factor_N
        return limit_N.nan_to_num(posinf=torch.finfo(torch.float32).max).clamp(min=0).numpy()

    def lost_A(self) -> np.ndarray:
        """f64 [A]: the energy per token that each of SHARES loses."""
        ordered, _ = self.rank_TN.flatten().sort()
        energy = ordered.double().square().cumsum(0)
        counts = [int(share * len(ordered)) for share in SHARES]
        lost = [energy[count - 1].item() if count else 0.0 for count in counts]
        return np.array(lost) / len(self.rank_TN)


@dataclass(frozen=True, kw_only=True)
class LayerScores:
    gate: Ranks
    hidden: Ranks
    inputs: dict[str, Ranks]  # by the names of INPUTS

    def neurons_lost_AA(self) -> np.ndarray:
        """f64 [A, A]: the energy lost if the gate rule silences the first share, and the hidden
        rule more until the second share is reached; infinity if the second is less than the
        first."""
        lost_AA = np.full((len(SHARES), len(SHARES)), np.inf)
        hidden, order = self.hidden.rank_TN.flatten().sort()
        gate, energy = self.gate.rank_TN.flatten()[order], hidden.double().square()
        counts = [int(share * len(hidden)) for share in SHARES]
        for row, share in enumerate(SHARES):
            is_open = gate > self.gate.threshold(share)
            lost = energy[~is_open].sum().item()
            more = energy[is_open].cumsum(0)
            closed = len(hidden) - len(more)
            for column in range(row, len(SHARES)):
                silenced = min(counts[column] - closed, len(more))
                lost_AA[row, column] = lost + (more[silenced - 1].item() if silenced > 0 else 0.0)
        return lost_AA / len(self.hidden.rank_TN)

    def limits(self, gate: float, hidden: float, inputs: dict[str, float]) -> LayerLimits:
        """Limits for these shares; the share `hidden` includes the neurons that `gate` silences."""
        hidden_F = None
        if hidden > gate:
            is_open = self.gate.rank_TN > self.gate.threshold(gate)
            left = Ranks(rank_TN=self.hidden.rank_TN * is_open, factor_N=self.hidden.factor_N)
            hidden_F = left.limit_N(hidden)
        limit = {name: self.inputs[name].limit_N(share) for name, share in inputs.items()}
        return LayerLimits(
            gate_F=self.gate.limit_N(gate),
            hidden_F=hidden_F,
            qkv_D=limit.get("qkv"),
            output_H=limit.get("output"),
            ffn_D=limit.get("ffn"),
        )

    def uniform_gate(self, share: float) -> LayerLimits:
        """One threshold for all neurons, whatever their contribution (CATS, arXiv 2404.08763)."""
        magnitude_TF = self.gate.rank_TN / self.gate.factor_N
        ones_F = torch.ones_like(self.gate.factor_N)
        return LayerLimits(gate_F=Ranks(rank_TN=magnitude_TF, factor_N=ones_F).limit_N(share))


@dataclass
class _Sample:
    """An observer that keeps some tokens of the tensors that a layer's rules apply to."""

    every: int  # keeps every n-th token, but not a text's first, whose inputs have no limits
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
    attention = layer.attention
    matrices = {
        "qkv": [linear.weight for linear in attention.inputs],
        "output": [attention.output.weight],
        "ffn": [linear.weight for linear in (block.gate, block.up) if linear is not None],
    }
    inputs = {
        name: _ranks(sample.take(seen, number).abs(), _column_norms(matrices[name]))
        for name, seen in INPUTS.items()
    }
    return LayerScores(
        gate=_ranks(gate_TF, mean_up_F * down_F), hidden=_ranks(hidden_TF, down_F), inputs=inputs
    )


def _ranks(magnitude_TN: Tensor, factor_N: Tensor) -> Ranks:
    return Ranks(rank_TN=magnitude_TN * factor_N, factor_N=factor_N)


def _row_norms(matrix: Matrix) -> Tensor:
    """f32 [N]."""
    return torch.cat([rows.norm(dim=1) for rows in _pieces(matrix)])


def _column_norms(matrices: Sequence[Matrix]) -> Tensor:
    """f32 [D], over several matrices with the same inputs."""
    square_D = sum(rows.square().sum(dim=0) for m in matrices for rows in _pieces(m))
    assert isinstance(square_D, Tensor)
    return square_D.sqrt()


def _pieces(matrix: Matrix) -> Iterator[Tensor]:
    """The unpacked rows, some at a time."""
    step = tile_rows(matrix.width)
    for start in range(0, matrix.num_rows, step):
        part = matrix.part(start, min(start + step, matrix.num_rows))
        yield unpack(part.data, part.kind)
