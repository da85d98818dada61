"""How close a mode of a model is to its dense self, on text that neither was fitted to.

Letters: T tokens, V vocabulary."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from sparkinfer.errors import SparkinferError
from sparkinfer.model_file import ModelFile
from sparkinfer.profile.corpus import read_windows
from sparkinfer.runtime.engine import Engine
from sparkinfer.runtime.model.feed_forward import Mode

PIECE = 64  # tokens whose probabilities are in memory at a time


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    model: Path
    corpora: tuple[Path, ...]
    mode: Mode | None = None  # None: the engine's choice
    split: Path | None = None
    thresholds: Path | None = None  # a profile; see Engine.load
    max_tokens: int = 16_384
    device: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.corpora:
            raise SparkinferError("no corpus; give one or more text files with --corpus")
        if self.max_tokens < 2:
            raise SparkinferError(f"tokens is {self.max_tokens}, wanted 2 or more")
        if self.seed < 0:
            raise SparkinferError(f"seed is {self.seed}, wanted 0 or more")


@dataclass(frozen=True, kw_only=True)
class EvalReport:
    """Perplexities, the KL divergence of `mode` from dense in nats, and how often the most
    likely token is the same; `computed_share_L` is the share of neurons computed per layer."""

    mode: str
    num_tokens: int
    perplexity: float
    dense_perplexity: float
    kl_mean: float
    kl_p99: float
    top1_agreement: float
    named_share_L: tuple[float, ...]  # of neurons that the predictor names; () in other modes
    hidden_share_L: tuple[float, ...]  # of neurons that add to the output

    @property
    def perplexity_increase(self) -> float:
        return self.perplexity / self.dense_perplexity - 1


def evaluate(
    config: EvalConfig, on_tokens: Callable[[float], None] = lambda count: None
) -> EvalReport:
    """Runs every window through the dense model and through the mode asked for."""
    with (
        Engine.load(config.model, mode="dense", device=config.device, is_resident=False) as dense,
        Engine.load(
            config.model,
            split=config.split,
            mode=config.mode,
            device=config.device,
            thresholds=config.thresholds,
            is_resident=False,  # whole windows only, no decode steps
        ) as engine,
    ):
        windows = read_windows(
            config.corpora,
            dense.codec,
            context_length=min(dense.context_length, engine.context_length),
            max_tokens=config.max_tokens,
            seed=config.seed,
        )
        return compare(dense, engine, windows.ids, on_tokens)


def compare(
    dense: Engine,
    engine: Engine,
    windows: Sequence[Tensor],
    on_tokens: Callable[[float], None] = lambda count: None,
) -> EvalReport:
    """Both engines on the same windows of token ids, by the same path, that of observers: a mode is
    compared, not two orders of sums."""
    shares, comparison = ShareCounter(engine.model), Comparison()
    with engine.observe(shares.observe, shares.wants), dense.observe(nothing, shares.wants):
        for ids_T in windows:
            comparison.add(dense.logits(ids_T)[:-1], engine.logits(ids_T)[:-1], ids_T[1:])
            on_tokens(len(ids_T))
    return comparison.report(engine.mode, shares)


def nothing(name: str, layer: int | None, tensor: Tensor) -> None:
    """An observer that has its model take the path of observers."""


class Comparison:
    """Sums up what two models say of the same tokens, in float64."""

    def __init__(self) -> None:
        self.loss, self.dense_loss, self.agreed = 0.0, 0.0, 0
        self.divergences: list[Tensor] = []

    def add(self, dense_TV: Tensor, other_TV: Tensor, next_T: Tensor) -> None:
        """Logits of both, and the tokens that really followed."""
        pieces = (tensor.split(PIECE) for tensor in (dense_TV, other_TV, next_T))
        for dense_PV, other_PV, next_P in zip(*pieces, strict=True):
            want_PV, got_PV = (F.log_softmax(x.double(), dim=1) for x in (dense_PV, other_PV))
            self.dense_loss += F.nll_loss(want_PV, next_P, reduction="sum").item()
            self.loss += F.nll_loss(got_PV, next_P, reduction="sum").item()
            self.divergences.append((want_PV.exp() * (want_PV - got_PV)).sum(dim=1))
            self.agreed += int((want_PV.argmax(1) == got_PV.argmax(1)).sum())

    def report(self, mode: Mode, shares: "ShareCounter") -> EvalReport:
        """Raises SparkinferError where nothing was added."""
        count = sum(map(len, self.divergences))
        if not count:
            raise SparkinferError("the corpus has single tokens only; give a longer text")
        divergence_T = torch.cat(self.divergences)
        return EvalReport(
            mode=mode,
            num_tokens=count,
            perplexity=math.exp(self.loss / count),
            dense_perplexity=math.exp(self.dense_loss / count),
            kl_mean=divergence_T.mean().item(),
            kl_p99=divergence_T.quantile(0.99).item(),
            top1_agreement=self.agreed / count,
            named_share_L=shares.named_share_L,
            hidden_share_L=shares.hidden_share_L,
        )


class ShareCounter:
    """An observer: which share of the neurons is named, and which adds to the output."""

    def __init__(self, model: ModelFile) -> None:
        self.thresholds = model.predictor.threshold_L if model.predictor else ()
        self.named: dict[int, list[float]] = {}
        self.hidden: dict[int, list[float]] = {}

    def wants(self, name: str, layer: int | None) -> bool:
        return name in ("ffn_predicted", "ffn_hidden")

    def observe(self, name: str, layer: int | None, tensor: Tensor) -> None:
        assert layer is not None
        if name == "ffn_predicted":
            counted, sums = tensor > self.thresholds[layer], self.named
        else:
            counted, sums = tensor != 0, self.hidden
        total = sums.setdefault(layer, [0.0, 0.0])
        total[0] += counted.sum().item()
        total[1] += counted.numel()

    @property
    def named_share_L(self) -> tuple[float, ...]:
        return tuple(self.named[layer][0] / self.named[layer][1] for layer in sorted(self.named))

    @property
    def hidden_share_L(self) -> tuple[float, ...]:
        return tuple(self.hidden[layer][0] / self.hidden[layer][1] for layer in sorted(self.hidden))
