"""Recommends a weight type and a sparsity rule for a model, measured on a user's text and machine.

Rules are first measured on a part of the text, and each is timed at one share. Then the point that
profile.advice_choice recommends is measured on the whole text and timed itself, until it recommends
one for which this is done. So most of the time goes into points that may be recommended, and no
recommendation rests on an estimate.

The caller makes the files, with `convert`.

Letters: T tokens."""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from torch import Tensor

from sparkinfer.architecture import SMOOTH
from sparkinfer.errors import SparkinferError
from sparkinfer.limits import LayerLimits, Limits
from sparkinfer.mode_quality import ModeQuality, is_recordable
from sparkinfer.model_file import ModelFile
from sparkinfer.profile.advice_choice import (
    Point,
    Trial,
    choose,
    timed_points,
    to_time,
    with_front,
)
from sparkinfer.profile.advise_config import AdviseConfig
from sparkinfer.profile.corpus import read_windows
from sparkinfer.profile.limit_meter import LimitMeter, fitting
from sparkinfer.profile.limit_scores import LayerScores, sample_scores
from sparkinfer.profile.limit_search import RULES, Allocation, Bytes, allocate, num_probes
from sparkinfer.profile.thresholds import up_to
from sparkinfer.progress import progress
from sparkinfer.runtime.engine import Engine
from sparkinfer.runtime.model.feed_forward import Mode

PROBE_TOKENS, PROBE_WINDOW = 512, 128  # short windows, so that they come from several texts
SCORE_TOKENS = 4096
TRIAL_TOKENS = 2048  # that every rule is measured on at every share
HOPELESS = 0.1  # rise in perplexity; a rule that surely costs more is not tried at larger shares
ROUNDS, STEPS = 7, 24  # rounds of timings, and tokens in each; models alternate


@dataclass(frozen=True, kw_only=True)
class Advice:
    points: tuple[Point, ...]  # all that were measured
    best: Point
    why: str
    num_tokens: int


class Adviser:
    """The given model, its text, and the measurements of its layers."""

    def __init__(self, config: AdviseConfig, say: Callable[[str], None]) -> None:
        self.config, self.say = config, say
        self.model = ModelFile.load(config.model)
        if self.model.activation not in SMOOTH:
            raise SparkinferError(
                f"{config.model}: sparse by itself ({self.model.activation}): mode exact loses"
                " nothing, so no rule is needed; train predictors with sparkinfer profile"
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
        """A third of the text, to choose limits on, and as much of the rest as fits into memory, to
        report on."""
        windows = read_windows(
            self.config.corpora, self.engine.codec, context_length=self.engine.context_length,
            max_tokens=self.config.max_tokens, seed=self.config.seed,
        )  # fmt: skip
        self.config.check_text(windows.num_tokens)
        self.text_sha256 = windows.sha256
        cut = max(1, len(windows.ids) // 3)
        check = fitting(windows.ids[cut:], self.model.shape.vocab_size)
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

    def limits(self, rule: str, share: float) -> Limits | None:
        """Limits by a rule; None if the rule cannot save that much."""
        choice = self.allocation.best(rule, share)
        return None if choice is None else choice.limits(self.scores, self.model.model_id)

    def limits_of(self, point: Point) -> Limits:
        """Limits of a point that is not dense, with their measured cost in its type."""
        limits = self.limits(point.rule, point.share)
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

    def points_of(self, kind: str, engine: Engine, rules: Sequence[str]) -> list[Point]:
        """Points of one type: dense, on the whole text, and each rule at each share, on a part, up to
        a share that costs too much; dense alone if a smaller type costs more than `max_loss` by
        itself. `engine` is in mode exact."""
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
        for rule in rules:
            points += self._points_of_rule(kind, engine, rule)
        return points

    def _points_of_rule(self, kind: str, engine: Engine, rule: str) -> list[Point]:
        points: list[Point] = []
        for share in self.config.shares:
            choice = self.allocation.best(rule, share)
            if choice is None:
                break
            limits = choice.limits(self.scores, self.model.model_id)
            close = self.meter.measure(limits.layers, engine, TRIAL_TOKENS)
            total = self.dense_bytes[kind]
            points.append(
                Point(type=kind, rule=rule, share=share, close=close,
                      bytes_per_token=total - round(choice.saved_share * total),
                      is_whole=close.num_tokens == self.meter.num_tokens)
            )  # fmt: skip
            self.say(line_of(points[-1]))
            if points[-1].least_increase > max(HOPELESS, self.config.max_loss):
                break
        return points

    def on_whole_text(self, point: Point, file: Path) -> Point:
        """The point of a rule, measured on the whole text; `file` is the model in its type."""
        limits = self.limits(point.rule, point.share)
        assert limits is not None, point.name
        with Engine.load(file, mode="exact", device="cpu") as engine:
            close = self.meter.measure(limits.layers, engine)
        found = replace(point, close=close, is_whole=True)
        self.say(line_of(found))
        return found


class Timer:
    """Times models alternately, so that a busy machine slows all of them alike."""

    def __init__(
        self,
        files: Mapping[str, Path],
        with_limits: Callable[[str, Limits], Path],
        adviser: Adviser,
    ) -> None:
        self.files, self.with_limits, self.adviser = files, with_limits, adviser
        times = seconds_in_turns([(path, "dense") for path in files.values()])
        self.dense_s = dict(zip(files, times, strict=True))
        self.ratios: dict[Trial, float] = {}

    def time(self, point: Point) -> None:
        """Times a rule beside the dense model of its type."""
        limits = self.adviser.limits(point.rule, point.share)
        assert limits is not None, point.name
        sparse = self.with_limits(point.type, limits)
        dense_s, sparse_s = seconds_in_turns([(self.files[point.type], "dense"), (sparse, "exact")])
        self.ratios[point.trial] = sparse_s / dense_s
        self.adviser.say(
            f"{point.name}: {dense_s / sparse_s - 1:+.1%} tokens/s over dense, reads"
            f" {point.bytes_per_token / self.adviser.dense_bytes[point.type]:.0%} of its bytes"
        )

    def timed(self, points: Sequence[Point]) -> list[Point]:
        return timed_points(points, self.dense_s, self.ratios)


def advise(
    config: AdviseConfig,
    file_of: Callable[[str], Path],
    with_limits: Callable[[str, Limits], Path],
    types: Sequence[str],
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Advice, Adviser]:
    """Measures and advises. `file_of` returns the file of the model in a given type, `with_limits`
    the same with limits in it; `types` begins with the model's own type."""
    adviser = Adviser(config, say)
    points: list[Point] = []
    files: dict[str, Path] = {types[0]: config.model}
    points += adviser.points_of(types[0], adviser.engine, config.rules)
    for kind in types[1:]:
        files[kind] = file_of(kind)
        with Engine.load(files[kind], mode="exact", device="cpu") as engine:
            points += adviser.points_of(kind, engine, [r for r in config.rules if r == "mixed"])
    adviser.engine.close()
    gc.collect()
    timer = Timer(files, with_limits, adviser)
    for point in to_time(points, config.max_loss):
        timer.time(point)
    points = settled(points, timer, config.max_loss)
    best, why = choose(points, config.max_loss)
    points = with_front(points)
    best = next(point for point in points if point.trial == best.trial)
    tokens = adviser.meter.num_tokens
    return Advice(points=tuple(points), best=best, why=why, num_tokens=tokens), adviser


def settled(points: Sequence[Point], timer: Timer, max_loss: float) -> list[Point]:
    """The points with their seconds, with the recommended one measured on the whole text and timed."""
    points = timer.timed(points)
    while True:
        best, _ = choose(points, max_loss)
        if not best.is_whole:
            found = timer.adviser.on_whole_text(best, timer.files[best.type])
            points = [found if point is best else point for point in points]
        elif not best.is_timed:
            timer.time(best)
            points = timer.timed(points)
        else:
            return points


def seconds_in_turns(files: Sequence[tuple[Path, Mode]]) -> list[float]:
    """Median seconds per token of each model in its mode."""
    engines = [Engine.load(path, mode=mode, device="cpu") for path, mode in files]
    try:
        for engine in engines:
            engine.decode_seconds(steps=2)
        rounds = [[e.decode_seconds(steps=STEPS) / STEPS for e in engines] for _ in range(ROUNDS)]
    finally:
        for engine in engines:
            engine.close()
    return [median(row[number] for row in rounds) for number in range(len(engines))]


def line_of(point: Point) -> str:
    """A point's quality, for the user."""
    close = point.close
    return (
        f"{point.name}: KL {close.kl:.4f} (95 %: {close.kl_error:.4f}), perplexity"
        f" {close.perplexity_increase:+.2%}, same top token {close.same_top:.1%},"
        f" {close.num_tokens:,} tokens"
    )


assert all(rule in RULES for rule in AdviseConfig.rules)
