"""Chooses thresholds on |act(gate)| for SiLU and GELU models, at or below which neurons are
skipped. No training is involved.

A layer's threshold is read off the histogram of its magnitudes for the share of neurons to silence
(CATS, arXiv 2404.08763). The share is either the same for all layers, or found greedily (as TEAL,
arXiv 2408.14690, does within a block): starting with nothing silenced, the share of the layer where
a step costs least is raised by one step, again and again, until a mean share or a perplexity is
reached.

A step's cost is the rise of the whole model's KL divergence from dense, in nats per token; the loss
on a few thousand tokens is too noisy to rank layers, so it only decides when a perplexity budget is
used up.

Letters: T tokens, L layers, B histogram bins, V vocabulary."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hotsplit.artifacts.profile_file import EDGES, NUM_BINS
from hotsplit.errors import HotsplitError
from hotsplit.profile.count.run import Tensors
from hotsplit.runtime.engine import Engine

STEP = 0.05  # the share of a layer's neurons that a step of the search silences
MOST_STEPS = 19  # a layer keeps at least the largest 5 %
TUNE_TOKENS = 4096  # at most, per measurement of the search; their dense logits are kept in memory
CHECK_TOKENS = 8192  # at most, for the reported cost, on other text


def thresholds_for(
    histogram_LB: np.ndarray, sparsity: float | Sequence[float]
) -> tuple[float, ...]:
    """For each layer the threshold, an f32 value, below which a share `sparsity` of the magnitudes
    lies; `sparsity` is one number or one per layer.

    Magnitudes are assumed to be uniform within a bin. For a share that ends in the last bin,
    which has no upper edge, the threshold is that bin's lower edge."""
    shares_L = np.broadcast_to(np.asarray(sparsity, np.float64), len(histogram_LB))
    below_LB = np.cumsum(histogram_LB, axis=1) / histogram_LB.sum(axis=1, keepdims=True)
    thresholds = []
    for below_B, share in zip(below_LB, shares_L, strict=True):
        cut = int(np.searchsorted(below_B, share, side="right"))  # the bin where the share ends
        if cut >= NUM_BINS - 1:  # the last one has no end
            thresholds.append(float(np.float32(EDGES[-1])))
            continue
        start = below_B[cut - 1] if cut else 0.0
        within = (share - start) / (below_B[cut] - start)
        value = EDGES[cut] + within * (EDGES[cut + 1] - EDGES[cut]) if share > 0 else 0.0
        thresholds.append(float(np.float32(value)))
    return tuple(thresholds)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Means per token, in nats: divergence from the dense model, and the loss."""

    divergence: float
    loss: float


class Meter:
    """Compares runs of a text with and without thresholds, in mode "exact"."""

    def __init__(self, engine: Engine, histogram_LB: np.ndarray, windows: Sequence[Tensor]) -> None:
        assert engine.mode == "exact", engine.mode
        self.engine, self.histogram_LB = engine, histogram_LB
        self.windows = [ids_T for ids_T in windows if len(ids_T) > 1]
        if not self.windows:
            raise HotsplitError("thresholds need a text of two tokens or more; give a longer one")
        self.dense_TV: list[Tensor] = []  # log probabilities
        engine.set_thresholds((0.0,) * len(histogram_LB))
        self.dense_TV = [self._log_probabilities(ids_T) for ids_T in self.windows]
        self.dense_loss = self._measure(self.dense_TV).loss
        self.num_runs, self.seconds = 0, 0.0

    def __call__(self, sparsity_L: Sequence[float]) -> Cost:
        """The cost of the thresholds for these shares. Raises HotsplitError if the model gives
        NaN or infinity."""
        self.engine.set_thresholds(thresholds_for(self.histogram_LB, sparsity_L))
        return self.run()

    def run(self) -> Cost:
        """The cost of the engine's current thresholds."""
        began = time.perf_counter()
        cost = self._measure(self._log_probabilities(ids_T) for ids_T in self.windows)
        self.num_runs += 1
        self.seconds += time.perf_counter() - began
        return cost

    @property
    def num_tokens(self) -> int:
        """Predicted tokens."""
        return sum(len(ids_T) - 1 for ids_T in self.windows)

    def increase(self, cost: Cost) -> float:
        """Increase of the perplexity, relative to the dense model's."""
        return math.expm1(cost.loss - self.dense_loss)

    def _log_probabilities(self, ids_T: Tensor) -> Tensor:
        return F.log_softmax(self.engine.logits(ids_T)[:-1], dim=1)

    def _measure(self, got: Iterator[Tensor] | list[Tensor]) -> Cost:
        divergence, loss = 0.0, 0.0
        for ids_T, want_TV, got_TV in zip(self.windows, self.dense_TV, got, strict=True):
            divergence += F.kl_div(got_TV, want_TV, reduction="sum", log_target=True).item()
            loss += F.nll_loss(got_TV, ids_T[1:], reduction="sum").item()
        if not math.isfinite(divergence + loss):
            raise HotsplitError(
                f"{self.engine.model.path}: the model gave NaN or infinity; convert its checkpoint"
                " again"
            )
        return Cost(divergence=divergence / self.num_tokens, loss=loss / self.num_tokens)


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The steps of sparsity of each layer, and their cost."""

    steps_L: tuple[int, ...]
    cost: Cost

    @property
    def sparsity_L(self) -> tuple[float, ...]:
        return tuple(STEP * steps for steps in self.steps_L)

    @property
    def mean_sparsity(self) -> float:
        return STEP * sum(self.steps_L) / len(self.steps_L)


def most_runs(num_layers: int, sparsity: float = 1.0) -> int:
    """Upper bound on the measurements of `greedy` until it reaches a mean sparsity: one to begin
    with and one for each layer, two for each step, and two for each layer that goes no further."""
    steps = min(num_layers * MOST_STEPS, math.ceil(num_layers * sparsity / STEP) + 1)
    return 1 + num_layers + 2 * (steps + num_layers)


def greedy(
    measure: Callable[[Sequence[float]], Cost],
    num_layers: int,
    accepts: Callable[[Cost], bool] = lambda cost: True,
) -> Iterator[Allocation]:
    """Yields allocations: first nothing silenced, then each time one more step in one layer.

    Before each step the two layers that were cheapest when last measured are measured again. A
    layer goes no further once `accepts` refuses its step. Deterministic: ties go to the lower
    layer."""
    known: dict[tuple[int, ...], Cost] = {}

    def cost_of(steps_L: tuple[int, ...]) -> Cost:
        if steps_L not in known:
            known[steps_L] = measure([STEP * steps for steps in steps_L])
        return known[steps_L]

    def raised(steps_L: tuple[int, ...], layer: int) -> tuple[int, ...]:
        return tuple(steps + (index == layer) for index, steps in enumerate(steps_L))

    steps_L = (0,) * num_layers
    here, open_layers = cost_of(steps_L), set(range(num_layers))
    marginal = [
        cost_of(raised(steps_L, layer)).divergence - here.divergence for layer in range(num_layers)
    ]
    yield Allocation(steps_L=steps_L, cost=here)
    while open_layers:
        cheapest = sorted(open_layers, key=lambda layer: (marginal[layer], layer))[:2]
        for layer in cheapest:
            marginal[layer] = cost_of(raised(steps_L, layer)).divergence - here.divergence
        best = min(cheapest, key=lambda layer: (marginal[layer], layer))
        if not accepts(cost_of(raised(steps_L, best))):
            open_layers.remove(best)
            continue
        steps_L = raised(steps_L, best)
        here = cost_of(steps_L)
        if steps_L[best] == MOST_STEPS:
            open_layers.remove(best)
        yield Allocation(steps_L=steps_L, cost=here)


@dataclass(frozen=True, kw_only=True)
class ThresholdReport:
    """Results of a search. Increases of the perplexity are relative to dense, on text that the
    search has not seen; `uniform_increase` is that of the mean sparsity in every layer."""

    sparsity_L: tuple[float, ...]
    perplexity_increase: float
    uniform_increase: float
    tuned_increase: float  # on the text of the search
    check_tokens: int
    num_runs: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Goal:
    """The limits of a search, which ends at the first one reached; infinity and 1 mean no limit."""

    perplexity_budget: float  # relative increase
    sparsity: float  # mean over the layers


def search(
    engine: Engine,
    histogram_LB: np.ndarray,
    tune: Sequence[Tensor],
    check: Sequence[Tensor],
    goal: Goal,
    on_line: Callable[[str], None],
) -> tuple[tuple[float, ...], ThresholdReport]:
    """Thresholds of a greedy search, and their cost; leaves the engine without thresholds.

    Raises HotsplitError if the goal is too small for any step, if the text is too short, and if
    the model gives NaN or infinity."""
    began = time.perf_counter()
    num_layers = len(histogram_LB)
    meter = Meter(engine, histogram_LB, up_to(tune, TUNE_TOKENS))
    found = _follow(meter, num_layers, goal, on_line)
    if not any(found.steps_L):
        raise HotsplitError(
            f"a perplexity budget of {goal.perplexity_budget:.2g} and a sparsity of"
            f" {goal.sparsity:.2g} leave no room for one step of {STEP:.0%} in one layer; give more"
        )
    checker = Meter(engine, histogram_LB, up_to(check, CHECK_TOKENS))
    report = ThresholdReport(
        sparsity_L=found.sparsity_L,
        perplexity_increase=checker.increase(checker(found.sparsity_L)),
        uniform_increase=checker.increase(checker([found.mean_sparsity] * num_layers)),
        tuned_increase=meter.increase(found.cost),
        check_tokens=checker.num_tokens,
        num_runs=meter.num_runs,
        seconds=time.perf_counter() - began,
    )
    engine.set_thresholds((0.0,) * num_layers)
    return thresholds_for(histogram_LB, found.sparsity_L), report


def _follow(
    meter: Meter, num_layers: int, goal: Goal, on_line: Callable[[str], None]
) -> Allocation:
    """The greedy search's last allocation within the goal; reports every 5 % of mean sparsity."""

    def accepts(cost: Cost) -> bool:
        return meter.increase(cost) <= goal.perplexity_budget

    most = most_runs(num_layers, goal.sparsity)
    found, said = None, -1
    for allocation in greedy(meter, num_layers, accepts):
        if allocation.mean_sparsity > goal.sparsity + 1e-9:
            break
        found = allocation
        if sum(found.steps_L) // num_layers > said:
            said = sum(found.steps_L) // num_layers
            pace = meter.seconds / meter.num_runs
            on_line(
                f"thresholds: mean sparsity {found.mean_sparsity:.0%}, perplexity"
                f" {meter.increase(found.cost):+.2%}; {meter.num_runs} of at most {most}"
                f" measurements, {pace:.1f} s each,"
                f" {pace * max(0, most - meter.num_runs) / 60:.0f} min left at most"
            )
    assert found is not None
    return found


class Found(Tensors):
    """The thresholds of a search and its report, so that a resumed run need not search again."""

    def __init__(self, num_layers: int) -> None:
        shapes = {"layers": (2, num_layers), "numbers": (len(_NUMBERS),)}
        tensors = {name: torch.zeros(size, dtype=torch.float64) for name, size in shapes.items()}
        super().__init__(tensors, is_sum=False)

    def set(self, threshold_L: Sequence[float], report: ThresholdReport) -> None:
        numbers = [getattr(report, name) for name in _NUMBERS]
        found = {"layers": [threshold_L, report.sparsity_L], "numbers": numbers}
        self.load({key: torch.tensor(each, dtype=torch.float64) for key, each in found.items()})

    @property
    def threshold_L(self) -> tuple[float, ...]:
        return tuple(self.tensors["layers"][0].tolist())

    @property
    def report(self) -> ThresholdReport:
        numbers = self.tensors["numbers"].tolist()
        return ThresholdReport(
            sparsity_L=tuple(self.tensors["layers"][1].tolist()),
            **dict(zip(_NUMBERS, (*numbers[:4], *map(int, numbers[4:])), strict=True)),
        )


_NUMBERS = ("perplexity_increase", "uniform_increase", "tuned_increase", "seconds",
            "check_tokens", "num_runs")  # fmt: skip


def up_to(windows: Sequence[Tensor], num_tokens: int) -> list[Tensor]:
    """The first windows, as many as `num_tokens` allows; at least one if there are any."""
    chosen: list[Tensor] = []
    used = 0
    for ids_T in windows:
        if chosen and used + len(ids_T) > num_tokens:
            break
        chosen.append(ids_T)
        used += len(ids_T)
    return chosen
