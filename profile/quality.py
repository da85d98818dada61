"""Measures how close modes of a model are to its dense self, on held-out text.

Letters: T tokens, V vocabulary."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sparkinfer.budget import head_bytes, layer_bytes
from sparkinfer.errors import SparkinferError
from sparkinfer.mode_choice import dense_bytes, mode_meant
from sparkinfer.mode_quality import ModeQuality, is_recordable
from sparkinfer.model_file import ModelFile
from sparkinfer.profile.chat_windows import read_chat_windows
from sparkinfer.profile.comparison import Comparison, increase_of
from sparkinfer.profile.corpus import read_windows
from sparkinfer.runtime.engine import Engine
from sparkinfer.runtime.model.feed_forward import Mode


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    model: Path
    corpora: tuple[Path, ...]
    # None: the plan's, else the one the file's predictors or thresholds are for
    mode: Mode | None = None
    split: Path | None = None
    thresholds: Path | None = None  # a profile; see Engine.load
    max_tokens: int = 16_384
    # Paragraphs as messages: "" by the model's own template, else a name or a file; None: plain
    # text
    chat_template: str | None = None
    device: str | None = None
    seed: int = 0
    # Of keys and values, by name (sparkinfer.cache_types); the dense model keeps its own
    cache_type_k: str | None = None
    cache_type_v: str | None = None

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
    likely token is the same. Half widths are of intervals of 95 % (comparison), None where the text
    is too short for any. Bytes are the weights that a token reads (mode_quality)."""

    mode: Mode
    num_tokens: int
    perplexity: float
    dense_perplexity: float
    perplexity_increase: float  # relative
    perplexity_half_width: float | None  # of the increase
    kl_mean: float
    kl_half_width: float | None
    kl_p99: float
    top1_agreement: float
    top1_half_width: float | None
    bytes_per_token: int
    dense_bytes_per_token: int
    named_share_L: tuple[float, ...]  # of neurons that are predicted; () in other modes
    hidden_share_L: tuple[float, ...]  # of neurons that contribute to the output

    @property
    def line(self) -> str:
        return (
            f"perplexity {self.perplexity:.3f} (dense {self.dense_perplexity:.3f},"
            f" {self.perplexity_increase:+.2%}{_within(self.perplexity_half_width, '.2%')}),"
            f" KL {self.kl_mean:.5f}{_within(self.kl_half_width, '.5f')} (p99 {self.kl_p99:.4f}),"
            f" same top token {self.top1_agreement:.2%}{_within(self.top1_half_width, '.2%')},"
            f" a token reads {self.bytes_per_token / self.dense_bytes_per_token:.0%} of the dense"
            f" bytes, {self.num_tokens:,} tokens"
        )

    def record(self, corpus_sha256: str) -> ModeQuality | None:
        """For the artifacts; None if the text was too short, or the mode is broken."""
        if self.perplexity_half_width is None:
            return None
        quality = ModeQuality(
            perplexity_increase=self.perplexity_increase,
            perplexity_half_width=self.perplexity_half_width,
            kl_mean=max(0.0, self.kl_mean),  # rounding may leave less than zero
            top1_agreement=self.top1_agreement,
            num_tokens=self.num_tokens,
            bytes_per_token=self.bytes_per_token,
            dense_bytes_per_token=self.dense_bytes_per_token,
            corpus_sha256=corpus_sha256,
        )
        return quality if is_recordable(quality) else None


def evaluate(
    config: EvalConfig, on_tokens: Callable[[float], None] = lambda count: None
) -> EvalReport:
    """Runs every window through the dense model and through the mode asked for."""
    with (
        Engine.load(config.model, mode="dense", device=config.device, is_resident=False) as dense,
        Engine.load(
            config.model,
            split=config.split,
            mode=_mode(config, dense.model),
            device=config.device,
            thresholds=config.thresholds,
            is_resident=False,  # whole windows only, no decode steps
            max_loss=math.inf,  # it is about to be measured
            cache_type_k=config.cache_type_k,
            cache_type_v=config.cache_type_v,
        ) as engine,
    ):
        windows, counted = _windows(config, dense, engine)
        return compare_all(dense, [engine], windows, on_tokens, counted)[0]


def _mode(config: EvalConfig, model: ModelFile) -> Mode | None:
    if config.mode is not None or config.split is not None or config.thresholds is not None:
        return config.mode
    return mode_meant(model)


def _windows(
    config: EvalConfig, dense: Engine, engine: Engine
) -> tuple[Sequence[Tensor], Sequence[Tensor] | None]:
    """Token ids and, unless all are counted, which of them are."""
    context = min(dense.context_length, engine.context_length)
    if config.chat_template is not None:
        return read_chat_windows(
            config.corpora, dense.model, dense.codec, template=config.chat_template or None,
            context_length=context, max_tokens=config.max_tokens, seed=config.seed,
        )  # fmt: skip
    windows = read_windows(
        config.corpora, dense.codec, context_length=context,
        max_tokens=config.max_tokens, seed=config.seed,
    )  # fmt: skip
    return windows.ids, None


def compare_all(
    dense: Engine,
    engines: Sequence[Engine],
    windows: Sequence[Tensor],
    on_tokens: Callable[[float], None] = lambda count: None,
    counted: Sequence[Tensor] | None = None,
    dense_shares: "ShareCounter | None" = None,
) -> list[EvalReport]:
    """Runs all engines on the same windows of token ids, by the same path, that of observers: this
    compares modes, not two orders of sums. `counted` says of each token whether its prediction
    counts; `dense_shares` observes the dense model's neurons."""
    shares = [ShareCounter(engine.model) for engine in engines]
    comparison, watcher = Comparison(len(engines)), dense_shares or ShareCounter(dense.model)
    observed = [(dense, watcher), *zip(engines, shares, strict=True)]
    observations = [engine.observe(each.observe, each.wants) for engine, each in observed]
    try:
        for number, ids_T in enumerate(windows):
            comparison.begin_window()
            logits = [engine.logits(ids_T)[:-1] for engine in (dense, *engines)]
            next_T = ids_T[1:]
            if counted is not None:
                is_counted_T = counted[number][1:]
                logits, next_T = [each[is_counted_T] for each in logits], next_T[is_counted_T]
            comparison.add(logits[0], logits[1:], next_T)
            on_tokens(len(ids_T))
    finally:
        for observation in observations:
            observation.remove()
    return [
        report_of(comparison, number, engine.mode, engine.model, shares[number])
        for number, engine in enumerate(engines)
    ]


def report_of(
    comparison: Comparison, number: int, mode: Mode, model: ModelFile, shares: "ShareCounter"
) -> EvalReport:
    """Raises SparkinferError if nothing was compared."""
    found = comparison.result(number)
    increase = increase_of(found.loss_difference)
    return EvalReport(
        mode=mode,
        num_tokens=found.num_tokens,
        perplexity=_exp(found.loss),
        dense_perplexity=_exp(found.dense_loss),
        perplexity_increase=increase.mean,
        perplexity_half_width=increase.half_width,
        kl_mean=found.divergence.mean,
        kl_half_width=found.divergence.half_width,
        kl_p99=found.divergence_p99,
        top1_agreement=found.agreement.mean,
        top1_half_width=found.agreement.half_width,
        bytes_per_token=bytes_read(model, mode, shares),
        dense_bytes_per_token=dense_bytes(model),
        named_share_L=shares.named_share_L,
        hidden_share_L=shares.hidden_share_L,
    )


def bytes_read(model: ModelFile, mode: Mode, shares: "ShareCounter") -> int:
    """Weight bytes per token by the shares of neurons predicted and open; savings by input limits
    are not counted."""
    model = model.row_major
    layers = range(model.shape.num_layers)
    named_L = shares.named_share_L if mode == "predicted" else (1.0,) * len(layers)
    opened_L = (1.0,) * len(layers) if mode == "dense" else shares.hidden_share_L
    total = float(head_bytes(model))
    for layer, named, opened in zip(layers, named_L, opened_L, strict=True):
        sizes = layer_bytes(model, layer)
        neuron = named * sizes.gate_row + opened * (sizes.up_row + sizes.down_row)
        total += sizes.attention + model.shape.num_neurons * neuron
        total += sizes.predictor if mode == "predicted" else 0
    return round(total)


def _exp(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _within(half_width: float | None, form: str) -> str:
    return "" if half_width is None else f" ± {half_width:{form}}"


class ShareCounter:
    """An observer of the shares of neurons that are predicted and that contribute to the output."""

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
        total[0] += torch.count_nonzero(counted).item()
        total[1] += counted.numel()

    @property
    def named_share_L(self) -> tuple[float, ...]:
        return tuple(self.named[layer][0] / self.named[layer][1] for layer in sorted(self.named))

    @property
    def hidden_share_L(self) -> tuple[float, ...]:
        return tuple(self.hidden[layer][0] / self.hidden[layer][1] for layer in sorted(self.hidden))
