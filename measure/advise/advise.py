"""Recommends a weight type and limits, if any, for a model, measured on a user's text and machine.

Limits are first measured on a part of the text, and timed at one share, all in turns
(measure.advise.turns). Then the point that measure.advise.choice recommends is measured on the whole text
and timed, until it recommends one for which both are done. So no recommendation rests on an
estimate.

The caller makes the model files to measure and to time.

Letters: T tokens."""

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from hotsplit.artifacts.limits_file import LayerLimits, Limits
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.errors import HotsplitError
from hotsplit.measure.advise.choice import (
    Point,
    choose,
    contenders,
    timed_points,
    to_time,
    with_front,
)
from hotsplit.measure.advise.config import MIN_TOKENS, AdviseConfig
from hotsplit.measure.advise.timings import Rounds, Timings, Trial
from hotsplit.measure.advise.turns import FEW, MORE, MOST_POSITIONS, STEPS, TextDecoder, Turns
from hotsplit.model.mode_quality import ModeQuality, is_recordable
from hotsplit.model.neurons import SMOOTH
from hotsplit.profile.corpus.corpus import Windows, read_windows
from hotsplit.profile.sparsity.limit_meter import LimitMeter, fitting
from hotsplit.profile.sparsity.limit_search import (
    Allocation,
    Bytes,
    LayerScores,
    allocate,
    num_probes,
    sample_scores,
)
from hotsplit.profile.sparsity.thresholds import up_to
from hotsplit.runtime.engine import Engine
from hotsplit.system.progress import progress

PROBE_TOKENS, PROBE_WINDOW = 512, 128  # short windows, so that they come from several texts
SCORE_TOKENS = 4096
TRIAL_TOKENS = 2048  # limits are first measured on about this many tokens at each share
HOPELESS = 0.1  # rise in perplexity; limits that surely cost more are not tried at larger shares
RULE = "gates"  # the rule of points with limits that are made here


@dataclass(frozen=True, kw_only=True)
class Advice:
    points: tuple[Point, ...]  # all that were measured
    best: Point
    why: str
    num_tokens: int
    reference: Trial  # the dense point that the gains of all timed points refer to
    rounds: tuple[Rounds, ...]  # in which they were timed


class Adviser:
    """The given model, its text, and the measurements of its layers."""

    def __init__(self, config: AdviseConfig, say: Callable[[str], None]) -> None:
        self.config, self.say = config, say
        self.model = ModelFile.load(config.model)
        self.model.refuse_chosen("rules for neurons are", "compare types with hotsplit eval")
        if self.model.activation not in SMOOTH:
            raise HotsplitError(
                f"{config.model}: sparse by itself ({self.model.activation}): mode exact loses"
                " nothing, so no rule is needed; train predictors with hotsplit profile"
            )
        assert not self.model.has_limits, "see advise_own_limits"
        self.bytes_of = Bytes.of(self.model)
        self.dense_bytes: dict[str, int] = {}  # by type
        self.engine = Engine.of(self.model, mode="exact", device="cpu")
        tune, check = self._texts()
        self.scores = self._scores(tune)
        self.meter = LimitMeter(self.engine, check)
        self.allocation = self._allocate(tune)

    def _texts(self) -> tuple[list[Tensor], list[Tensor]]:
        """A third of the text, to choose limits on, and as much of the rest as `fitting` allows, to
        measure on."""
        windows = windows_of(self.config, self.engine)
        self.text_sha256 = windows.sha256
        cut = max(1, len(windows.ids) // 3)
        check = fitting(windows.ids[cut:], self.model.spec.vocab_size)
        return list(windows.ids[:cut]), check

    def _scores(self, tune: Sequence[Tensor]) -> tuple[LayerScores, ...]:
        with Engine.of(self.model, mode="dense", device="cpu", is_resident=False) as dense:
            return sample_scores(dense, up_to(tune, SCORE_TOKENS))

    def _allocate(self, tune: Sequence[Tensor]) -> Allocation:
        windows = up_to([ids_T[:PROBE_WINDOW] for ids_T in tune], PROBE_TOKENS)
        probe = LimitMeter(self.engine, windows)
        count, size = num_probes(len(self.scores)), sum(map(len, windows))
        self.say(f"probing {len(self.scores)} layers: {count} runs of {size} tokens")
        with progress("probing", count, "runs") as advance:

            def kl_of(limits: tuple[LayerLimits, ...]) -> float:
                found = probe.kl(limits)
                advance(1)
                return found

            return allocate(self.scores, self.bytes_of, kl_of)

    def limits(self, share: float) -> Limits | None:
        """Limits that save this share of the bytes; None if no limits can."""
        choice = self.allocation.best(share)
        return None if choice is None else choice.limits(self.scores, self.model.model_id)

    def limits_of(self, point: Point) -> Limits:
        """Limits of a point that is not dense, with its measured quality if that can be
        recorded."""
        limits = self.limits(point.share)
        assert limits is not None, point.name
        close, saved = point.close, point.bytes_per_token
        quality = ModeQuality(
            perplexity_increase=close.perplexity_increase,
            perplexity_half_width=close.perplexity_increase_error,
            kl_mean=max(0.0, close.kl),
            top1_agreement=close.same_top,
            num_tokens=close.num_tokens,
            bytes_per_token=saved,
            dense_bytes_per_token=self.dense_bytes[point.type],
            corpus_sha256=self.text_sha256,
        )
        return replace(limits, quality={"exact": quality} if is_recordable(quality) else {})

    def points_of(self, kind: str, engine: Engine) -> list[Point]:
        """Points of one type: dense, on the whole text, and limits at each share, on a part, up
        to a share that costs too much or that no limits can save; dense alone if a smaller type
        costs more than `max_loss` by itself. `engine` is in mode exact."""
        total = self.dense_bytes[kind] = Bytes.of(engine.model).total
        if engine is self.engine:
            close = self.meter.measure_itself()
        else:
            close = self.meter.measure(self.meter.no_limits, engine)
        points = [Point(type=kind, rule="dense", share=0.0, bytes_per_token=total, close=close)]
        if engine is not self.engine:
            self.say(line_of(points[-1]))
            if close.perplexity_increase > self.config.max_loss:
                self.say(f"{kind} costs more than {self.config.max_loss:.1%} of perplexity by itself,"
                         " so no rule is tried on it")  # fmt: skip
                return points
        return [*points, *self._points_of_rule(kind, engine)]

    def _points_of_rule(self, kind: str, engine: Engine) -> list[Point]:
        points: list[Point] = []
        for share in self.config.shares:
            choice = self.allocation.best(share)
            if choice is None:
                break
            limits = choice.limits(self.scores, self.model.model_id)
            close = self.meter.measure(limits.layers, engine, TRIAL_TOKENS)
            total = self.dense_bytes[kind]
            points.append(
                Point(type=kind, rule=RULE, share=share, close=close,
                      bytes_per_token=total - round(choice.saved_share * total),
                      is_whole=close.num_tokens == self.meter.num_tokens)
            )  # fmt: skip
            self.say(line_of(points[-1]))
            if points[-1].least_increase > max(HOPELESS, self.config.max_loss):
                break
        return points

    def on_whole_text(self, point: Point, file: Path) -> Point:
        """The point of a rule, measured on the whole text; `file` is the model in its type."""
        limits = self.limits(point.share)
        assert limits is not None, point.name
        with Engine.load(file, mode="exact", device="cpu") as engine:
            close = self.meter.measure(limits.layers, engine)
        found = replace(point, close=close, is_whole=True)
        self.say(line_of(found))
        return found


def advise(
    config: AdviseConfig,
    file_of: Callable[[str], Path],
    with_limits: Callable[[str, Limits], Path],
    types: Sequence[str],
    say: Callable[[str], None] = lambda line: None,
    free_disk: Callable[[], float] = lambda: math.inf,
) -> tuple[Advice, Adviser]:
    """Measures and advises. `file_of` returns the file of the model in a given type, `with_limits`
    the same with limits in it; `free_disk` returns the bytes left for such files. `types` begins
    with the model's own type.

    Raises HotsplitError for a model that is sparse by itself, and for a text that is too
    short."""
    adviser = Adviser(config, say)
    points: list[Point] = []
    files: dict[str, Path] = {types[0]: config.model}
    points += adviser.points_of(types[0], adviser.engine)
    for kind in types[1:]:
        files[kind] = file_of(kind)
        with Engine.load(files[kind], mode="exact", device="cpu") as engine:
            points += adviser.points_of(kind, engine)
    ids_T = text_to_time(adviser.meter.windows, adviser.engine)
    adviser.engine.close()
    gc.collect()

    def opened(point: Point) -> TextDecoder:
        limits = None if point.rule == "dense" else adviser.limits(point.share)
        if limits is None:
            return TextDecoder(files[point.type], "dense", ids_T)
        return TextDecoder(with_limits(point.type, limits), "exact", ids_T)

    def size(point: Point) -> int:
        return files[point.type].stat().st_size

    with Turns(points[0], opened, size, len(ids_T), free_disk) as turns:
        points = settled(points, turns, adviser, files)
        times = turns.timings
    advice = advice_of(points, times, config.max_loss, adviser.meter.num_tokens)
    return advice, adviser


def settled(
    points: Sequence[Point], turns: Turns, adviser: Adviser, files: Mapping[str, Path]
) -> list[Point]:
    """The points with their seconds; the recommended one is measured on the whole text and
    timed."""
    max_loss, say = adviser.config.max_loss, adviser.say
    dense = [point for point in points if point.rule == "dense"]
    points = timed(points, [*dense, *to_time(points, max_loss)], turns, max_loss, say)
    while True:
        best, _ = choose(points, max_loss, turns.timings)
        if not best.is_timed:
            points = timed(points, [*dense, best], turns, max_loss, say)
        elif not best.is_whole:
            turns.close()  # the measurement needs their memory
            found = adviser.on_whole_text(best, files[best.type])
            points = [found if point is best else point for point in points]
        else:
            return list(points)


def timed(
    points: Sequence[Point],
    chosen: Sequence[Point],
    turns: Turns,
    max_loss: float,
    say: Callable[[str], None],
) -> list[Point]:
    """The points with their seconds, after FEW rounds of those chosen and MORE of the `contenders`
    among them; if they cannot all be open at once, after FEW + MORE rounds of each."""
    is_together = len(turns.groups(chosen)) == 1
    say(f"timing {len(chosen)} models in rounds of {STEPS} tokens each"
        f"{'' if is_together else ', of which only some fit into memory together'}")  # fmt: skip
    turns.time(chosen, FEW if is_together else FEW + MORE)
    points = timed_points(points, turns.timings)
    if is_together:
        trials = {point.trial for point in chosen}
        left = [p for p in contenders(points, max_loss) if p.trial in trials]
        turns.time(left, MORE)
        points = timed_points(points, turns.timings)
    own = {point.type: point for point in points if point.rule == "dense"}
    for point in (p for p in points if p.rule != "dense" and p.trial in {c.trial for c in chosen}):
        gain = turns.timings.gain(point.trial, own[point.type].trial)
        say(f"{point.name}: {gain.line} tokens/s over dense in {point.num_rounds} rounds, reads"
            f" {point.bytes_per_token / own[point.type].bytes_per_token:.0%} of its bytes")  # fmt: skip
    return points


def advice_of(points: Sequence[Point], times: Timings, max_loss: float, num_tokens: int) -> Advice:
    best, why = choose(points, max_loss, times)
    points = with_front(points)
    best = next(point for point in points if point.trial == best.trial)
    return Advice(points=tuple(points), best=best, why=why, num_tokens=num_tokens,
                  reference=times.reference, rounds=times.groups)  # fmt: skip


def windows_of(config: AdviseConfig, engine: Engine) -> Windows:
    """The text's windows. Raises HotsplitError for a text that is too short to tell points
    apart."""
    windows = read_windows(
        config.corpora, engine.codec, context_length=engine.context_length,
        max_tokens=config.max_tokens, seed=config.seed,
    )  # fmt: skip
    if windows.num_tokens < MIN_TOKENS:
        raise HotsplitError(
            f"{config.corpora[0]}: {windows.num_tokens} tokens, wanted {MIN_TOKENS} or more; give a"
            " longer text"
        )
    return windows


def text_to_time(windows: Sequence[Tensor], engine: Engine) -> list[int]:
    """Tokens to decode while a model is timed."""
    most = min(MOST_POSITIONS, engine.context_length)
    return torch.cat(list(windows))[:most].tolist()


def line_of(point: Point) -> str:
    """A point's quality, for the user."""
    close = point.close
    return (
        f"{point.name}: KL {close.kl:.4f} (95 %: {close.kl_error:.4f}), perplexity"
        f" {close.perplexity_increase:+.2%}, same top token {close.same_top:.1%},"
        f" {close.num_tokens:,} tokens"
    )
