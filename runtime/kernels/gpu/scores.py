"""Triton: what becomes of the products of queries with keys, in a step and in a prompt: scores, and
their shares.

Letters: H heads."""

from typing import NamedTuple

from torch import Tensor

from hotsplit.model.spec import Attention
from hotsplit.runtime.kernels.gpu.activation import capped
from hotsplit.runtime.kernels.gpu.language import tl, triton
from hotsplit.runtime.kernels.stored import Vectors


class ScoreArguments(NamedTuple):
    """The numbers of scores as an argument of a kernel, which is compiled without those that are
    None."""

    scale: float
    cap: float | None
    head_sinks: Tensor | None  # [H]


def scores_of(spec: Attention, vectors: Vectors) -> ScoreArguments:
    sinks = vectors["head_sinks"] if spec.head_sinks else None
    return ScoreArguments(scale=spec.score_scale, cap=spec.score_cap, head_sinks=sinks)


@triton.jit
def finished(score, scores):
    """The scores that count, of scaled products."""
    if scores.cap is not None:
        score = capped(score, scores.cap)
    return score


@triton.jit
def finished_peak(peak, scores, head):
    """The largest score of a head, that of no key included."""
    if scores.head_sinks is not None:
        peak = tl.maximum(peak, tl.load(scores.head_sinks + head))
    return peak


@triton.jit
def finished_weight(weight, peak, scores, head):
    """The sum of e^(score - peak) of a head, with the score of no key."""
    if scores.head_sinks is not None:
        weight += tl.exp(tl.load(scores.head_sinks + head) - peak)
    return weight
