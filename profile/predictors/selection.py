"""Selects a layer's predictor: the one with which a token reads the fewest bytes.

Predictors are compared, on text that they were not trained on, as the runtime will run them,
rounding included. Each gets the largest threshold that still keeps `contribution` of sum |h_j|
|down_j| and loses at most `lost_norm` of the output, |y - y_named| / |y|. A token then reads

    predictor + named * gate_row + open * (up_row + down_row)

bytes, where `named` neurons are predicted and `open` ones also fire, and the candidate with the
fewest wins. Candidates whose predicted neurons fire often enough (`precision`) and that read less
than mode exact take precedence: rows predicted in vain are read from slow memory, the predictor
mostly from fast memory.

The lost norm is read from the same histogram as the rest: neurons add to the output in nearly
orthogonal directions, so |sum lost h_j down_j| is the root of the sum of (h_j |down_j|)^2 to 1-3 %
(docs/log/predictors.md).

Letters: T tokens, F neurons, B histogram bins."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hotsplit.costs.budget import LayerBytes
from hotsplit.profile.predictors.options import Target
from hotsplit.runtime.ops.predict import Predictor

NUM_BINS = 8192
RANGE = 16.0  # in standard deviations of the scores, on either side
Form = Literal["low-rank", "whole"]


@dataclass(frozen=True, kw_only=True)
class Quality:
    """One predictor with one threshold, on tokens that it was not trained on; shares in 0..1."""

    form: Form
    rank: int
    matrix_kind: str
    is_trained: bool
    num_bytes: int
    threshold: float
    density: float  # of neurons that fire
    predicted_density: float  # of neurons that are predicted
    recall: float  # of firings that are predicted
    precision: float  # of predicted neurons that fire
    contribution: float  # of sum |h_j| |down_j| that is predicted
    lost_norm: float  # |y - y_named| / |y|
    bytes_per_token: float  # of the feed-forward layer: predictor, gate, up and down

    @property
    def name(self) -> str:
        what = "whole" if self.form == "whole" else f"rank {self.rank}"
        return f"{what} {self.matrix_kind}"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A predictor as the runtime runs it; its threshold is not used."""

    predictor: Predictor
    is_trained: bool

    @property
    def form(self) -> Form:
        return "whole" if self.predictor.down is None else "low-rank"

    @property
    def rank(self) -> int:
        down = self.predictor.down
        return 0 if down is None else down.weight.num_rows

    @property
    def matrix_kind(self) -> str:
        return self.predictor.up.weight.kind


class Tally:
    """Statistics of one candidate for every threshold: each bin of its scores has the number of
    scores, the firings among them, and the sums of their contributions and of the squares."""

    def __init__(self, candidate: Candidate, unit: float, device: torch.device) -> None:
        """`unit` is about the standard deviation of the scores."""
        self.candidate, self.unit = candidate, max(unit, 1e-12)
        self.sum_B = torch.zeros(4, NUM_BINS, dtype=torch.float64, device=device)
        self.output_square = torch.zeros((), dtype=torch.float64, device=device)

    def sums(self) -> dict[str, Tensor]:
        """The tensors themselves, which are updated in place."""
        return {"sum_B": self.sum_B, "output_square": self.output_square}

    def add(self, score_TF: Tensor, fires_TF: Tensor, given_TF: Tensor, square: float) -> None:
        """`given_TF` is |h_j| |down_j|, `square` |y|^2 of all tokens."""
        position = (score_TF / self.unit + RANGE) * (NUM_BINS / (2 * RANGE))
        bins = position.clamp(0, NUM_BINS - 1).long().flatten()
        given = given_TF.flatten().double()
        amounts = (None, fires_TF.flatten().double(), given, given.square())
        for row_B, amount in zip(self.sum_B, amounts, strict=True):
            row_B += torch.bincount(bins, amount, minlength=NUM_BINS)
        self.output_square += square

    def quality(self, target: Target, sizes: LayerBytes) -> Quality:
        """The quality at the largest threshold that meets the targets for contribution and lost
        norm."""
        above_B = self.sum_B.flip(1).cumsum(1).flip(1)
        named_B, fired_B, given_B, squared_B = above_B
        total = max(self.output_square.item(), 1e-30)
        lost_B = ((squared_B[0] - squared_B).clamp(min=0) / total).sqrt()
        is_enough_B = (given_B >= target.contribution * given_B[0]) & (lost_B <= target.lost_norm)
        first = int(is_enough_B.nonzero().max())
        pairs = named_B[0].item()
        named, fired = named_B[first].item(), fired_B[first].item()
        threshold = self.unit * (first * (2 * RANGE / NUM_BINS) - RANGE)
        # A score equal to the lowest one kept must pass `score > threshold`.
        threshold = -math.inf if first == 0 else threshold - 1e-6 * max(self.unit, abs(threshold))
        neurons = self.candidate.predictor.up.weight.num_rows
        return Quality(
            form=self.candidate.form,
            rank=self.candidate.rank,
            matrix_kind=self.candidate.matrix_kind,
            is_trained=self.candidate.is_trained,
            num_bytes=self.candidate.predictor.num_bytes,
            threshold=threshold,
            density=fired_B[0].item() / pairs,
            predicted_density=named / pairs,
            recall=fired / max(1.0, fired_B[0].item()),
            precision=fired / max(1.0, named),
            contribution=(given_B[first] / given_B[0].clamp(min=1e-30)).item(),
            lost_norm=lost_B[first].item(),
            bytes_per_token=bytes_per_token(
                self.candidate.predictor.num_bytes, named / pairs, fired / pairs, neurons, sizes
            ),
        )


def bytes_per_token(
    predictor_bytes: int, named: float, opened: float, num_neurons: int, sizes: LayerBytes
) -> float:
    """Bytes that a token reads of a layer if a share `named` of its neurons is predicted, and a
    share `opened` is predicted and fires."""
    rest = sizes.up_row + sizes.down_row
    return predictor_bytes + num_neurons * (named * sizes.gate_row + opened * rest)


def choose(qualities: Sequence[Quality], target: Target, exact_bytes: float) -> int:
    """The index of the candidate with the fewest bytes per token among those that are precise
    enough and read less than `exact_bytes`, which a token reads without a predictor; if there are
    none, among all."""
    precise = [
        i
        for i, q in enumerate(qualities)
        if q.precision >= target.precision and q.bytes_per_token < exact_bytes
    ]
    return min(precise or range(len(qualities)), key=lambda i: qualities[i].bytes_per_token)
