"""Measures how far limits or another type move a model from its dense self.

The dense log probabilities are kept, so that a measurement is one pass.

Letters: T tokens, V vocabulary, W windows, S sums of a window, L layers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from hotsplit.artifacts.limits_file import LayerLimits, Limits
from hotsplit.errors import HotsplitError
from hotsplit.profile.sparsity.thresholds import up_to
from hotsplit.runtime.engine import Engine

KEPT_BYTES = 2 << 30  # memory for dense log probabilities, f32
PIECE = 256  # tokens compared at a time


@dataclass(frozen=True, kw_only=True)
class Closeness:
    """Means per token (the KL in nats) and the half-widths of their 95 % intervals, which treat the
    windows as a random sample of texts of this kind."""

    kl: float
    kl_error: float
    perplexity: float
    perplexity_increase: float  # relative to dense
    perplexity_increase_error: float
    same_top: float  # share of tokens with the same most likely successor
    num_tokens: int


def fitting(windows: Sequence[Tensor], vocab_size: int) -> list[Tensor]:
    """The first windows whose log probabilities fit into KEPT_BYTES together; at least one."""
    return up_to(windows, KEPT_BYTES // (4 * vocab_size))


class LimitMeter:
    """Measures an engine in mode exact or dense; the engine keeps the limits that were set last."""

    def __init__(self, engine: Engine, windows: Sequence[Tensor]) -> None:
        """The dense side is `engine` without limits."""
        self.windows = [ids_T for ids_T in windows if len(ids_T) > 1]
        if not self.windows:
            raise HotsplitError("the text has no window of two tokens or more; give a longer one")
        self.no_limits = tuple(LayerLimits() for _ in engine.layers)
        set_limits(engine, self.no_limits)
        self.dense = [_log_probabilities(engine, ids_T) for ids_T in self.windows]
        self.engine = engine

    def kl(self, limits_L: tuple[LayerLimits, ...]) -> float:
        """Nats per token."""
        return self.measure(limits_L).kl

    @property
    def num_tokens(self) -> int:
        """Tokens that a measurement counts: all but the first of each window."""
        return sum(len(ids_T) - 1 for ids_T in self.windows)

    def measure_itself(self) -> Closeness:
        """The dense model compared with itself, from the kept log probabilities."""
        pairs = zip(self.windows, self.dense, strict=True)
        return _closeness(
            torch.tensor(
                [_compare(want_TV, want_TV, ids_T[1:]) for ids_T, want_TV in pairs],
                dtype=torch.float64,
            )
        )

    def measure(
        self,
        limits_L: tuple[LayerLimits, ...] | None,
        engine: Engine | None = None,
        most_tokens: int | None = None,
    ) -> Closeness:
        """Measures this engine, or another with the same vocabulary, with these limits (None: the
        current ones), on all windows or on the first ones until they have `most_tokens`.

        Raises HotsplitError if the model gives NaN or infinity."""
        engine = engine or self.engine
        if limits_L is not None:
            set_limits(engine, limits_L)
        sums: list[tuple[float, ...]] = []
        for ids_T, want_TV in zip(self.windows, self.dense, strict=True):
            if most_tokens is not None and sum(row[-1] for row in sums) >= most_tokens:
                break
            sums.append(_compare(want_TV, _log_probabilities(engine, ids_T), ids_T[1:]))
        found = _closeness(torch.tensor(sums, dtype=torch.float64))
        if not math.isfinite(found.kl):
            raise HotsplitError(
                f"{engine.model.path}: the model gave NaN or infinity; convert its checkpoint again"
            )
        return found


def set_limits(engine: Engine, limits_L: tuple[LayerLimits, ...]) -> None:
    engine.set_limits(Limits(model_id=engine.model.model_id, layers=limits_L))


def _log_probabilities(engine: Engine, ids_T: Tensor) -> Tensor:
    """f32 [T - 1, V]."""
    return F.log_softmax(engine.logits(ids_T)[:-1], dim=1)


def _compare(want_TV: Tensor, got_TV: Tensor, next_T: Tensor) -> tuple[float, ...]:
    """Sums over a window: KL, loss, dense loss, tokens with the same top, and all tokens."""
    kl, same = 0.0, 0
    for want, got in zip(want_TV.split(PIECE), got_TV.split(PIECE), strict=True):
        kl += F.kl_div(got, want, reduction="sum", log_target=True).item()
        same += int((want.argmax(1) == got.argmax(1)).sum())
    losses = [F.nll_loss(side, next_T, reduction="sum").item() for side in (got_TV, want_TV)]
    return (kl, *losses, float(same), float(len(next_T)))


def _closeness(sums_WS: Tensor) -> Closeness:
    """Means per token, from the sums of `_compare` for each window. The intervals are those of a
    ratio of sums over windows treated as drawn independently (Cochran 1977, section 2.11)."""
    kl_W, loss_W, dense_W, same_W, count_W = sums_WS.unbind(1)
    count = count_W.sum()

    def mean(sum_W: Tensor) -> float:
        return (sum_W.sum() / count).item()

    def error(sum_W: Tensor) -> float:
        size = len(sum_W)
        if size < 2:
            return math.inf
        residual_W = sum_W - mean(sum_W) * count_W
        variance = residual_W.square().sum() / (size - 1) * size / count.square()
        return 1.96 * math.sqrt(variance.item())

    increase = math.expm1(mean(loss_W - dense_W))
    return Closeness(
        kl=mean(kl_W),
        kl_error=error(kl_W),
        perplexity=math.exp(mean(loss_W)),
        perplexity_increase=increase,
        perplexity_increase_error=(1 + increase) * error(loss_W - dense_W),
        same_top=mean(same_W),
        num_tokens=int(count.item()),
    )
