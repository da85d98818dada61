"""Compares two models on the same tokens, with confidence intervals.

Intervals are at 95 %, from batch means: each window is cut into batches of up to BATCH consecutive
tokens, which are treated as independent. Single tokens are not (a mode that does badly at one token
mostly does badly at the next, and texts differ), so per-token intervals would be too narrow.

The mean is a ratio estimator: the batches' sums over their counts. Its variance is that of the
batches' residuals, and the interval uses Student's t. Both models see the same tokens, and the
perplexity increase comes from the mean difference of their losses per token: a paired comparison,
in which tokens that are hard for both cancel.

Letters: T tokens, P tokens of a piece, V vocabulary, B batches."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor
from torch.nn import functional as F

from hotsplit.errors import HotsplitError

PIECE = 64  # tokens compared at a time
BATCH = 128
FEWEST_BATCHES = 8  # a text with fewer whole batches gets shorter ones
LEAST_BATCHES = 4  # with fewer an interval is meaningless
CONFIDENCE = 0.95
HIGH = 0.99  # the reported quantile of the divergence


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean and the half-width of its 95 % confidence interval, None if unknown."""

    mean: float
    half_width: float | None


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One model against the dense one; losses and divergences in nats, agreement as a share."""

    num_tokens: int
    loss: Estimate
    dense_loss: Estimate
    loss_difference: Estimate
    divergence: Estimate
    divergence_p99: float
    divergence_p99_interval: tuple[float, float] | None
    agreement: Estimate


class Comparison:
    """Accumulates the losses of the dense model and of others on the same tokens, and the others'
    divergences and agreements, in float64."""

    def __init__(self, num_others: int) -> None:
        self.dense_loss = list[Tensor]()
        self.loss: list[list[Tensor]] = [[] for _ in range(num_others)]
        self.divergence: list[list[Tensor]] = [[] for _ in range(num_others)]
        self.agreed: list[list[Tensor]] = [[] for _ in range(num_others)]
        self.lengths = list[int]()  # tokens of each window

    def begin_window(self) -> None:
        """Starts a window: tokens up to the next call are one text."""
        self.lengths.append(0)

    def add(self, dense_TV: Tensor, others: Sequence[Tensor], next_T: Tensor) -> None:
        """Adds the logits of all models, and the true next tokens."""
        for start in range(0, len(next_T), PIECE):
            piece = slice(start, start + PIECE)
            want_PV, next_P1 = _log_softmax(dense_TV[piece]), next_T[piece, None]
            chance_PV, first_P = want_PV.exp(), want_PV.argmax(1)
            self.dense_loss.append(-want_PV.gather(1, next_P1)[:, 0])
            for number, other_TV in enumerate(others):
                got_PV = _log_softmax(other_TV[piece])
                self.loss[number].append(-got_PV.gather(1, next_P1)[:, 0])
                self.divergence[number].append((chance_PV * (want_PV - got_PV)).sum(dim=1))
                self.agreed[number].append((got_PV.argmax(1) == first_P).double())
        self.lengths[-1] += len(next_T)

    def result(self, number: int) -> Compared:
        """The result of one of the others. Raises HotsplitError if nothing was added."""
        if not sum(self.lengths):
            raise HotsplitError("the corpus has single tokens only; give a longer text")
        dense_T, loss_T = torch.cat(self.dense_loss), torch.cat(self.loss[number])
        divergence_T = torch.cat(self.divergence[number])
        return Compared(
            num_tokens=len(loss_T),
            loss=batch_mean(loss_T, self.lengths),
            dense_loss=batch_mean(dense_T, self.lengths),
            loss_difference=batch_mean(loss_T - dense_T, self.lengths),
            divergence=batch_mean(divergence_T, self.lengths),
            divergence_p99=divergence_T.quantile(HIGH).item(),
            divergence_p99_interval=quantile_interval(divergence_T, HIGH, self.lengths),
            agreement=batch_mean(torch.cat(self.agreed[number]), self.lengths),
        )


def batch_mean(value_T: Tensor, lengths: Sequence[int]) -> Estimate:
    """The mean of the values, f64 [T], of concatenated windows of these lengths."""
    mean = value_T.mean().item()
    size = max(1, min(BATCH, len(value_T) // FEWEST_BATCHES))
    pieces = [piece for window in value_T.split(list(lengths)) for piece in window.split(size)]
    pieces = [piece for piece in pieces if len(piece)]
    if len(pieces) < LEAST_BATCHES:
        return Estimate(mean=mean, half_width=None)
    sum_B = torch.stack([piece.sum() for piece in pieces])
    count_B = torch.tensor([len(piece) for piece in pieces], dtype=torch.float64)
    residual_B = sum_B - mean * count_B
    freedom = len(pieces) - 1
    variance = residual_B.square().sum().item() * len(pieces) / freedom / len(value_T) ** 2
    return Estimate(mean=mean, half_width=student_t(freedom) * math.sqrt(variance))


def quantile_interval(
    value_T: Tensor, share: float, lengths: Sequence[int]
) -> tuple[float, float] | None:
    """The interval of a quantile (Woodruff 1952): the share of values up to the quantile is a mean
    with an interval, and the quantiles at its two ends are the result. None if the text is too
    short for the upper end."""
    quantile = value_T.quantile(share)
    half = batch_mean((value_T <= quantile).double(), lengths).half_width
    if half is None or share + half >= 1:
        return None
    ends = torch.tensor([max(0.0, share - half), share + half], dtype=value_T.dtype)
    low, high = value_T.quantile(ends).tolist()
    return low, high


def student_t(freedom: int) -> float:
    """Student's t for a two-sided interval of CONFIDENCE, by its expansion in 1 / freedom about the
    normal quantile (Abramowitz and Stegun 26.7.5); 0.7 % too low at 3 degrees of freedom and 0.1 %
    at 5."""
    z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))


def perplexity_of(loss: Estimate) -> Estimate:
    """The perplexity of a mean loss; infinite if it overflows a float."""
    increase = increase_of(loss)
    return Estimate(mean=1 + increase.mean, half_width=increase.half_width)


def increase_of(difference: Estimate) -> Estimate:
    """The relative increase of the perplexity for a mean difference of losses."""
    mean, half = difference.mean, difference.half_width
    try:
        increase = math.expm1(mean)
        if half is None:
            return Estimate(mean=increase, half_width=None)
        return Estimate(mean=increase, half_width=math.exp(mean) * math.sinh(half))
    except OverflowError:
        return Estimate(mean=math.inf, half_width=math.inf)


def _log_softmax(logits_PV: Tensor) -> Tensor:
    return F.log_softmax(logits_PV.double(), dim=1)
