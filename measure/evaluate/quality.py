"""Measures how close modes of a model are to its dense self on a text.

Letters: T tokens, L layers, F neurons."""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge, Le
from torch import Tensor

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.costs.bytes_read import bytes_read
from hotsplit.costs.default_mode import dense_bytes, mode_meant
from hotsplit.costs.part_bytes import layer_bytes
from hotsplit.errors import HotsplitError, about
from hotsplit.files.declared import Count, CountFrom1, Line, Share, read_declared
from hotsplit.files.json_file import read_object
from hotsplit.files.typed import shown
from hotsplit.measure.evaluate.comparison import (
    Comparison,
    Estimate,
    batch_mean,
    increase_of,
    perplexity_of,
)
from hotsplit.measure.evaluate.evaluate_config import EvalConfig
from hotsplit.model.mode_quality import ModeQuality, is_recordable
from hotsplit.model.modes import Mode, computes_all, runs_predictors
from hotsplit.profile.corpus.corpus import read_chat_windows, read_windows
from hotsplit.runtime.engine import Engine, load_engine

MOST = 1e12  # the largest figure that is stored
Perplexity = Annotated[float, Ge(1), Le(MOST)]
HalfWidth = Annotated[float, Ge(0), Le(MOST)] | None
Change = Annotated[float, Ge(-1), Le(MOST)]  # rounding may make a divergence negative


@dataclass(frozen=True, kw_only=True)
class EvalReport:
    """Perplexities, the KL divergence of `mode` from dense in nats, and the share of tokens after
    which the most likely next token is the same. Half-widths are those of 95 % intervals (see
    comparison), None if the text is too short. Bytes are those of the weights that a token reads
    (see mode_quality). The interval of a perplexity is wide, because it reflects how much texts
    differ; that of the increase comes from a paired comparison, token by token."""

    model_id: Line
    mode: Mode
    num_tokens: CountFrom1
    perplexity: Perplexity
    perplexity_own_half_width: HalfWidth
    dense_perplexity: Perplexity
    dense_perplexity_half_width: HalfWidth
    perplexity_increase: Change  # relative
    perplexity_half_width: HalfWidth  # of the increase
    kl_mean: Change
    kl_half_width: HalfWidth
    kl_p99: Change
    kl_p99_interval: tuple[Change, Change] | None
    top1_agreement: Share
    top1_half_width: HalfWidth
    bytes_per_token: Count
    bytes_half_width: HalfWidth
    dense_bytes_per_token: CountFrom1
    named_share_L: tuple[Share, ...]  # of neurons that are predicted; () unless in mode predicted
    named_half_width: HalfWidth  # of the mean over the layers
    hidden_share_L: tuple[Share, ...]  # of neurons that contribute to the output
    hidden_half_width: HalfWidth
    notes: tuple[Line, ...] = ()  # what to know about the figures

    @property
    def line(self) -> str:
        p99, dense_bytes = "", self.dense_bytes_per_token
        if self.kl_p99_interval is not None:
            p99 = " in {:.4f}..{:.4f}".format(*self.kl_p99_interval)
        share_half = None if self.bytes_half_width is None else self.bytes_half_width / dense_bytes
        return (
            f"perplexity {self.perplexity:.3f}{_within(self.perplexity_own_half_width, '.2f')}"
            " (dense"
            f" {self.dense_perplexity:.3f}{_within(self.dense_perplexity_half_width, '.2f')},"
            f" {self.perplexity_increase:+.2%}{_within(self.perplexity_half_width, '.2%')}), KL"
            f" {self.kl_mean:.5f}{_within(self.kl_half_width, '.5f')} (p99 {self.kl_p99:.4f}{p99}),"
            f" same top token {self.top1_agreement:.2%}{_within(self.top1_half_width, '.2%')},"
            f" a token reads {self.bytes_per_token / dense_bytes:.1%}{_within(share_half, '.1%')}"
            f" of the dense bytes, {self.num_tokens:,} tokens"
        )

    @property
    def neurons_line(self) -> str:
        """Means over the layers."""
        shares = {
            "named": (self.named_share_L, self.named_half_width),
            "computed": (self.hidden_share_L, self.hidden_half_width),
        }
        told = [
            f"{what} {sum(share_L) / len(share_L):.1%}{_within(half_width, '.1%')}"
            for what, (share_L, half_width) in shares.items()
            if share_L
        ]
        return f"{', '.join(told)} of the neurons"

    def record(self, corpus_sha256: str) -> ModeQuality | None:
        """The record for artifacts; None if the text was too short or a value out of range."""
        if self.perplexity_half_width is None:
            return None
        quality = ModeQuality(
            perplexity_increase=self.perplexity_increase,
            perplexity_half_width=self.perplexity_half_width,
            kl_mean=max(0.0, self.kl_mean),  # rounding may make it negative
            top1_agreement=self.top1_agreement,
            num_tokens=self.num_tokens,
            bytes_per_token=self.bytes_per_token,
            dense_bytes_per_token=self.dense_bytes_per_token,
            corpus_sha256=corpus_sha256,
        )
        return quality if is_recordable(quality) else None


def evaluate(
    config: EvalConfig,
    on_tokens: Callable[[float], None] = lambda count: None,
    on_total: Callable[[int], None] = lambda count: None,
) -> EvalReport:
    """Runs every window through the dense model and through the mode asked for. `on_total` is
    called once with the number of tokens to run, `on_tokens` after each window with its number of
    tokens. The total is below `max_tokens` for a short text, and may be above it with a chat
    template, whose own tokens are run too."""
    own = ("cache_type_k", "cache_type_v", "kv_offload", "neuron_cache")
    plain: dict[str, Any] = dict.fromkeys(own)
    # Whole windows only, no decode steps; no limit of the loss: it is about to be measured.
    # Observers see the values of the CPU.
    device = config.engine.device or "cpu"
    common = replace(config.engine, device=device, is_resident=False, max_loss=math.inf)
    with ExitStack() as stack:
        as_dense = replace(common, mode="dense", **plain)
        dense = stack.enter_context(load_engine(config.model, None, as_dense))
        if config.engine.mode is None and config.split is None:
            common = replace(common, mode=mode_meant(dense.model))
        engine = stack.enter_context(load_engine(config.model, config.split, common))
        sizes: dict[str, Any] = {
            "context_length": min(dense.context_length, engine.context_length),
            "max_tokens": config.max_tokens,
            "seed": config.seed,
        }
        counted: Sequence[Tensor] | None = None
        if config.chat_template is None:
            windows: Sequence[Tensor] = read_windows(config.corpora, dense.codec, **sizes).ids
        else:
            template = config.chat_template or None
            windows, counted = read_chat_windows(
                config.corpora, dense.model, dense.codec, template=template, **sizes
            )
        on_total(sum(len(ids_T) for ids_T in windows))
        return compare_all(dense, [engine], windows, on_tokens, counted)[0]


def compare_all(
    dense: Engine,
    engines: Sequence[Engine],
    windows: Sequence[Tensor],
    on_tokens: Callable[[float], None] = lambda count: None,
    counted: Sequence[Tensor] | None = None,
    dense_shares: "ShareCounter | None" = None,
) -> list[EvalReport]:
    """Runs all engines on the same windows of token ids, and returns a report on each of `engines`.
    All are observed, and thus take the same code path, so that modes are compared and not orders of
    summation. `counted` marks the tokens whose prediction counts (None: all); `dense_shares`
    observes the dense model's neurons. Raises HotsplitError if no token is compared."""
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
    """The report on one mode. Raises HotsplitError if nothing was compared."""
    found = comparison.result(number)
    increase = increase_of(found.loss_difference)
    own, dense = perplexity_of(found.loss), perplexity_of(found.dense_loss)
    bytes_half_width: float | None = 0.0
    if not computes_all(mode):  # only the numbers of neurons vary from token to token
        bytes_T = torch.zeros((), dtype=torch.float64)
        for layer in range(model.spec.num_layers):
            sizes = layer_bytes(model, layer)
            fired_bytes = sizes.up_row + sizes.down_row
            bytes_T = bytes_T + fired_bytes * shares.per_token("ffn_hidden", layer)
            if runs_predictors(mode):
                bytes_T = bytes_T + sizes.gate_row * shares.per_token("ffn_predicted", layer)
        bytes_half_width = batch_mean(bytes_T, [len(bytes_T)]).half_width
    return EvalReport(
        model_id=model.model_id,
        mode=mode,
        num_tokens=found.num_tokens,
        perplexity=own.mean,
        perplexity_own_half_width=own.half_width,
        dense_perplexity=dense.mean,
        dense_perplexity_half_width=dense.half_width,
        perplexity_increase=increase.mean,
        perplexity_half_width=increase.half_width,
        kl_mean=found.divergence.mean,
        kl_half_width=found.divergence.half_width,
        kl_p99=found.divergence_p99,
        kl_p99_interval=found.divergence_p99_interval,
        top1_agreement=found.agreement.mean,
        top1_half_width=found.agreement.half_width,
        bytes_per_token=mean_bytes(model, mode, shares),
        bytes_half_width=bytes_half_width,
        dense_bytes_per_token=dense_bytes(model),
        named_share_L=shares.named_share_L,
        named_half_width=shares.mean_share("ffn_predicted").half_width,
        hidden_share_L=shares.hidden_share_L,
        hidden_half_width=shares.mean_share("ffn_hidden").half_width,
    )


def mean_bytes(model: ModelFile, mode: Mode, shares: "ShareCounter") -> int:
    """Weight bytes per token, from the shares of neurons that are named and that fire."""
    return round(
        bytes_read(
            model,
            shares.named_share_L if runs_predictors(mode) else None,
            None if computes_all(mode) else shares.hidden_share_L,
            has_predictor=runs_predictors(mode),
        )
    )


def _within(half_width: float | None, form: str) -> str:
    return "" if half_width is None else f" ± {half_width:{form}}"


class ShareCounter:
    """An observer of the shares of neurons that are predicted, and that fire."""

    def __init__(self, model: ModelFile) -> None:
        self.thresholds = model.predictor.threshold_L if model.predictor else ()
        self.num_neurons_L = tuple(layer.neurons.number for layer in model.spec.layers)
        self.counts: dict[str, dict[int, list[Tensor]]] = {"ffn_predicted": {}, "ffn_hidden": {}}

    def wants(self, name: str, layer: int | None) -> bool:
        return name in self.counts

    def observe(self, name: str, layer: int | None, tensor: Tensor) -> None:
        assert layer is not None
        is_one = tensor > self.thresholds[layer] if name == "ffn_predicted" else tensor != 0
        counts_T = torch.count_nonzero(is_one, dim=-1).to(torch.int32).reshape(-1).cpu()
        self.counts[name].setdefault(layer, []).append(counts_T)

    def per_token(self, name: str, layer: int) -> Tensor:
        """f64 [T]: the number of a layer's neurons that are predicted (ffn_predicted) or fire
        (ffn_hidden) for each token."""
        return torch.cat(self.counts[name][layer]).double()

    def mean_share(self, name: str) -> Estimate:
        """Mean over layers and tokens; the half-width is None if too little was observed."""
        layers = [layer for layer in sorted(self.counts[name]) if self.num_neurons_L[layer]]
        if not layers:
            return Estimate(mean=0.0, half_width=None)
        share_T = torch.stack(
            [self.per_token(name, layer) / self.num_neurons_L[layer] for layer in layers]
        ).mean(dim=0)
        return batch_mean(share_T, [len(share_T)])

    @property
    def named_share_L(self) -> tuple[float, ...]:
        return self._share_L("ffn_predicted")

    @property
    def hidden_share_L(self) -> tuple[float, ...]:
        return self._share_L("ffn_hidden")

    def _share_L(self, name: str) -> tuple[float, ...]:
        return tuple(
            self.per_token(name, layer).mean().item() / max(1, self.num_neurons_L[layer])
            for layer in sorted(self.counts[name])
        )


FORMAT, VERSION = "hotsplit.eval", 1
_WHAT = "comparison (hotsplit eval --json)"


def eval_content(report: EvalReport) -> dict[str, object]:
    """The object to print. Raises HotsplitError if `load_eval` would refuse it: for figures that
    are not finite or too large, such as the perplexity of a broken mode."""
    content = asdict(report)
    try:
        read_declared(EvalReport, content)
    except HotsplitError as error:
        raise HotsplitError(
            f"mode {report.mode}: {error}, so the comparison cannot be stored; without --json, all"
            " its figures are shown"
        ) from error
    return {"format": FORMAT, "version": VERSION, **content}


def load_eval(path: Path) -> EvalReport:
    """The comparison. Raises HotsplitError unless it is complete, finite and of this version."""
    values = read_object(path, _WHAT)
    kind, version = values.pop("format", None), values.pop("version", None)
    if (kind, version) != (FORMAT, VERSION):
        raise HotsplitError(
            f"{path}: format {shown(kind)}, version {shown(version)};"
            f" wanted a {_WHAT} of version {VERSION}"
        )
    with about(path, "; run hotsplit eval --json again"):
        return read_declared(EvalReport, values)
