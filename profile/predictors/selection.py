"""Selects a layer's predictor: the one with which a token reads the fewest bytes.

Predictors are compared, on text that they were not trained on, as the runtime will run them,
rounding included. Each gets the largest threshold that still keeps `contribution` of sum |h_j|
|down_j| and loses at most `lost_norm` of the output, |y - y_named| / |y|. A token then reads

    predictor + named * gate_row + open * (up_row + down_row)

bytes, where `named` neurons are predicted and `open` ones also fire, and the candidate with the
fewest wins. Candidates whose predicted neurons fire often enough (`precision`) and that read less
than mode exact take precedence: rows predicted in vain are read from slow memory, the predictor
mostly from fast memory.

`Tally` reads the lost norm from the same histogram as the rest: neurons add to the output in nearly
orthogonal directions, so |sum lost h_j down_j| is the root of the sum of (h_j |down_j|)^2 to 1-3 %
(docs/log/predictors.md). `Examiner`, which measures the chosen predictor on held-out text, runs the
down projection twice for the exact one: for all neurons that fire and for those that are missed.

Letters: T tokens, D model width, F neurons, B histogram bins."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hotsplit.costs.part_bytes import LayerBytes
from hotsplit.files.declared import Count, Line, NotNegative, Share
from hotsplit.profile.predictors.predictor_options import Target
from hotsplit.runtime.ops.predict import Predictor
from hotsplit.runtime.weights.matrix import Matrix

NUM_BINS = 8192
RANGE = 16.0  # in standard deviations of the scores, on either side
Form = Literal["low-rank", "whole"]


@dataclass(frozen=True, kw_only=True)
class Quality:
    """One predictor with one threshold, on tokens that it was not trained on; shares in 0..1."""

    form: Form
    rank: Count
    matrix_kind: Line
    is_trained: bool
    num_bytes: Count
    threshold: float
    density: Share  # of neurons that fire
    predicted_density: Share  # of neurons that are predicted
    recall: Share  # of firings that are predicted
    precision: Share  # of predicted neurons that fire
    contribution: Share  # of sum |h_j| |down_j| that is predicted
    lost_norm: NotNegative  # |y - y_named| / |y|
    bytes_per_token: NotNegative  # of the feed-forward layer: predictor, gate, up and down

    @classmethod
    def of(
        cls,
        candidate: "Candidate",
        threshold: float,
        sizes: LayerBytes,
        *,
        pairs: float,
        fired: float,
        named: float,
        caught: float,
        contribution: float,
        lost_norm: float,
    ) -> "Quality":
        """The quality from counts over `pairs` of tokens and neurons: those that fire, those that
        are predicted, and those that are both."""
        predictor = candidate.predictor
        size, number = predictor.num_bytes, predictor.up.weight.num_rows
        return cls(
            form="whole" if predictor.down is None else "low-rank",
            rank=candidate.rank,
            matrix_kind=predictor.up.weight.kind,
            is_trained=candidate.is_trained,
            num_bytes=size,
            threshold=threshold,
            density=fired / pairs,
            predicted_density=named / pairs,
            recall=caught / max(1, fired),
            precision=caught / max(1, named),
            contribution=contribution,
            lost_norm=lost_norm,
            bytes_per_token=bytes_per_token(size, named / pairs, caught / pairs, number, sizes),
        )

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
    def rank(self) -> int:
        down = self.predictor.down
        return 0 if down is None else down.weight.num_rows


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
        """The quality at the largest threshold that meets the target."""
        above_B = self.sum_B.flip(1).cumsum(1).flip(1)
        named_B, fired_B, given_B, squared_B = above_B
        total = max(self.output_square.item(), 1e-30)
        lost_B = ((squared_B[0] - squared_B).clamp(min=0) / total).sqrt()
        is_enough_B = (given_B >= target.contribution * given_B[0]) & (lost_B <= target.lost_norm)
        first = int(is_enough_B.nonzero().max())
        threshold = self.unit * (first * (2 * RANGE / NUM_BINS) - RANGE)
        # A score equal to the lowest one kept must pass `score > threshold`.
        threshold = -math.inf if first == 0 else threshold - 1e-6 * max(self.unit, abs(threshold))
        return Quality.of(
            self.candidate,
            threshold,
            sizes,
            pairs=named_B[0].item(),
            fired=fired_B[0].item(),
            named=named_B[first].item(),
            caught=fired_B[first].item(),
            contribution=(given_B[first] / given_B[0].clamp(min=1e-30)).item(),
            lost_norm=lost_B[first].item(),
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


class Examiner:
    """Measures a candidate with its threshold on held-out text, by sums over tokens."""

    def __init__(
        self, candidate: Candidate, threshold: float, down: Matrix, sizes: LayerBytes
    ) -> None:
        self.candidate, self.threshold = candidate, threshold
        self.down, self.sizes = down, sizes
        device = down.data.device
        self.fired_F = torch.zeros(down.num_rows, dtype=torch.int64, device=device)
        self.num = torch.zeros(3, dtype=torch.int64, device=device)  # all pairs, predicted, caught
        # contribution of the neurons that fire and of those caught; squared norms of the lost and
        # of the whole output
        self.amount = torch.zeros(4, dtype=torch.float64, device=device)

    def sums(self) -> dict[str, Tensor]:
        """The tensors themselves, which are updated in place."""
        return {"fired_F": self.fired_F, "num": self.num, "amount": self.amount}

    @torch.no_grad()
    def add(self, x_TD: Tensor, fires_TF: Tensor, hidden_TF: Tensor, norm_F: Tensor) -> None:
        """`hidden_TF` has all neurons, `norm_F` the lengths of the rows of `down`."""
        named_TF = self.candidate.predictor.scores(x_TD) > self.threshold
        hidden_TF = hidden_TF * fires_TF
        given_TF = hidden_TF.abs() * norm_F
        self.fired_F += fires_TF.sum(dim=0)
        counts = (
            fires_TF.new_ones(()).long() * fires_TF.numel(),
            named_TF.sum(),
            (named_TF & fires_TF).sum(),
        )
        self.num += torch.stack(counts)
        lost_TD = self.down.combine_many(hidden_TF * ~named_TF)
        y_TD = self.down.combine_many(hidden_TF)
        amounts = (given_TF, given_TF * named_TF, lost_TD.square(), y_TD.square())
        self.amount += torch.stack([amount.double().sum() for amount in amounts])

    @property
    def hottest_fifth(self) -> float:
        """Share of the firings that come from the hottest 20 % of the neurons."""
        sorted_F = self.fired_F.sort(descending=True).values
        first = -(-len(sorted_F) // 5)
        return (sorted_F[:first].sum() / sorted_F.sum().clamp(min=1)).item()

    def quality(self) -> Quality:
        pairs, named, caught = self.num.tolist()
        given, kept, lost_square, output_square = self.amount.tolist()
        return Quality.of(
            self.candidate,
            self.threshold,
            self.sizes,
            pairs=pairs,
            fired=int(self.fired_F.sum()),
            named=named,
            caught=caught,
            contribution=kept / max(given, 1e-30),
            lost_norm=(lost_square / max(output_square, 1e-30)) ** 0.5,
        )
