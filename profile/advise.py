"""Recommends a weight type and a sparsity rule for a model, measured on a user's text and machine.

A point is a weight type, dense or with a rule that saves a share of the bytes. Its quality is
measured against the given model run dense, so that types and rules are comparable. Its speed: each
type is timed dense and with the mixed rule at one share, and the time of other points is linear in
their bytes through those two. The Pareto front has the points that no other beats in both. The
advice is the fastest point within the perplexity increase that the user allows; a rule is advised
only if it gains more than LEAST_GAIN over the fastest dense point.

The caller makes the files, with `convert`.

Letters: T tokens."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from torch import Tensor

from sparkinfer.architecture import SMOOTH
from sparkinfer.errors import SparkinferError
from sparkinfer.limits import LayerLimits, Limits
from sparkinfer.mode_quality import ModeQuality, is_recordable
from sparkinfer.model_file import ModelFile
from sparkinfer.profile.corpus import read_windows
from sparkinfer.profile.limit_meter import Closeness, LimitMeter, fitting
from sparkinfer.profile.limit_scores import LayerScores, sample_scores
from sparkinfer.profile.limit_search import RULES, Allocation, Bytes, allocate, num_probes
from sparkinfer.profile.thresholds import up_to
from sparkinfer.progress import progress
from sparkinfer.runtime.engine import Engine

SHARES = (0.08, 0.12, 0.16, 0.20, 0.24, 0.32)  # of all weight bytes, to save
TIMED_SHARE = 0.16  # the one whose speed is measured
PROBE_TOKENS = 1024
SCORE_TOKENS = 4096
LEAST_GAIN = 0.03  # in speed: a smaller gain is not worth a rule's loss
ROUNDS, STEPS = 7, 24  # of timings; dense and sparse alternate
MIN_TOKENS = 2048


@dataclass(frozen=True, kw_only=True)
class AdviseConfig:
    model: Path
    corpora: tuple[Path, ...]
    max_tokens: int = 16_384
    max_loss: float = 0.01  # relative increase of the perplexity that the user accepts
    rules: tuple[str, ...] = ("gates", "hidden", "mixed")
    shares: tuple[float, ...] = SHARES
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < MIN_TOKENS:
            raise SparkinferError(
                f"tokens is {self.max_tokens}, wanted {MIN_TOKENS} or more: fewer cannot tell"
                " rules apart"
            )
        if not 0 <= self.max_loss < 10:
            raise SparkinferError(f"max loss is {self.max_loss}, wanted 0 or more, e.g. 0.01")


@dataclass(frozen=True, kw_only=True)
class Point:
    type: str
    rule: str  # "dense" or one of limit_search.RULES
    share: float  # of the weight bytes, that the rule was to save
    bytes_per_token: int  # of weights
    close: Closeness
    seconds: float = 0.0  # per token
    is_timed: bool = False  # otherwise estimated from the bytes
    is_on_front: bool = False

    @property
    def name(self) -> str:
        return f"{self.type} dense" if self.rule == "dense" else (
            f"{self.type} {self.rule} {self.share:.0%}"
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Advice:
    points: tuple[Point, ...]  # by type, then by rule and share
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
        if self.model.has_limits:
            raise SparkinferError(
                f"{config.model}: has limits already; give the model that it was made from"
            )
        self.bytes_of = Bytes.of(self.model)
        self.dense_bytes: dict[str, int] = {}  # by type
        self.engine = Engine.of(self.model, mode="exact", device="cpu")
        tune, check = self._texts()
        self.scores = self._scores(tune)
        self.meter = LimitMeter(self.engine, check)
        self.allocation = self._allocate(tune)

    def _texts(self) -> tuple[list[Tensor], list[Tensor]]:
        """A third of the text, to choose limits on, and the rest, to report on."""
        windows = read_windows(
            self.config.corpora, self.engine.codec, context_length=self.engine.context_length,
            max_tokens=self.config.max_tokens, seed=self.config.seed,
        )  # fmt: skip
        if windows.num_tokens < MIN_TOKENS:
            raise SparkinferError(
                f"{self.config.corpora[0]}: {windows.num_tokens} tokens, wanted {MIN_TOKENS} or"
                " more; give a longer text"
            )
        self.text_sha256 = windows.sha256
        cut = max(1, len(windows.ids) // 3)
        check = fitting(windows.ids[cut:], self.model.shape.vocab_size)
        return list(windows.ids[:cut]), check

    def _scores(self, tune: Sequence[Tensor]) -> tuple[LayerScores, ...]:
        with Engine.of(self.model, mode="dense", device="cpu", is_resident=False) as dense:
            return sample_scores(dense, up_to(tune, SCORE_TOKENS))

    def _allocate(self, tune: Sequence[Tensor]) -> Allocation:
        probe = LimitMeter(self.engine, up_to(tune, PROBE_TOKENS))
        count = num_probes(len(self.scores))
        self.say(f"probing {len(self.scores)} layers: {count} runs of {PROBE_TOKENS} tokens")
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
        """Points of one type: dense, and each rule at each share. `engine` is in mode exact."""
        total = self.dense_bytes[kind] = Bytes.of(engine.model).total
        close = self.meter.measure(self.meter.no_limits, engine)
        points = [Point(type=kind, rule="dense", share=0.0, bytes_per_token=total, close=close)]
        if engine is not self.engine:  # it is compared with itself
            self.say(_line(points[-1]))
            if close.perplexity_increase > self.config.max_loss:
                self.say(f"{kind} costs more than {self.config.max_loss:.1%} of perplexity by itself,"
                         " so no rule is tried on it")  # fmt: skip
                return points
        for rule in rules:
            for share in self.config.shares:
                choice = self.allocation.best(rule, share)
                if choice is None:
                    continue
                limits = choice.limits(self.scores, self.model.model_id)
                close = self.meter.measure(limits.layers, engine)
                saved = round(choice.saved_share * total)
                points.append(
                    Point(type=kind, rule=rule, share=share, bytes_per_token=total - saved,
                          close=close)
                )  # fmt: skip
                self.say(_line(points[-1]))
        return points


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
    adviser.meter.dense.clear()
    adviser.engine.close()
    gc.collect()
    timed = adviser.limits("mixed", TIMED_SHARE) if "mixed" in config.rules else None
    for kind, file in files.items():
        sparse = None if timed is None else with_limits(kind, timed)
        points = timed_points(points, kind, *seconds_of(file, sparse))
    points = with_front(points)
    best, why = choose(points, config.max_loss)
    advice = Advice(points=tuple(points), best=best, why=why, num_tokens=best.close.num_tokens)
    return advice, adviser


def seconds_of(dense: Path, sparse: Path | None) -> tuple[float, float | None]:
    """Median seconds per token of a dense model and of the same with limits, timed alternately."""
    files = [(dense, "dense")] + ([(sparse, "exact")] if sparse else [])
    engines = [Engine.load(path, mode=mode, device="cpu") for path, mode in files]  # type: ignore[arg-type]
    try:
        for engine in engines:
            engine.decode_seconds(steps=2)
        rounds = [[e.decode_seconds(steps=STEPS) / STEPS for e in engines] for _ in range(ROUNDS)]
    finally:
        for engine in engines:
            engine.close()
    times = [median(row[number] for row in rounds) for number in range(len(engines))]
    return times[0], times[1] if sparse else None


def timed_points(
    points: Sequence[Point], kind: str, dense_s: float, sparse_s: float | None
) -> list[Point]:
    """Points of a type with their seconds, linear in bytes through the two that were measured."""
    own = [point for point in points if point.type == kind]
    (dense,) = [point for point in own if point.rule == "dense"]
    timed = [p for p in own if p.rule == "mixed" and p.share == TIMED_SHARE]
    s_per_byte = dense_s / dense.bytes_per_token
    if timed and sparse_s is not None:
        s_per_byte = (dense_s - sparse_s) / (dense.bytes_per_token - timed[0].bytes_per_token)

    def with_seconds(point: Point) -> Point:
        saved = dense.bytes_per_token - point.bytes_per_token
        is_timed = point == dense or (point in timed and sparse_s is not None)
        return replace(point, seconds=dense_s - saved * s_per_byte, is_timed=is_timed)

    return [with_seconds(point) if point.type == kind else point for point in points]


def with_front(points: Sequence[Point]) -> list[Point]:
    """Marks each point unless another is at least as close and as fast, and better in one."""

    def is_beaten(point: Point) -> bool:
        return any(
            other.close.kl <= point.close.kl
            and other.seconds <= point.seconds
            and (other.close.kl, other.seconds) != (point.close.kl, point.seconds)
            for other in points
        )

    return [replace(point, is_on_front=not is_beaten(point)) for point in points]


def choose(points: Sequence[Point], max_loss: float) -> tuple[Point, str]:
    """The recommended point, and the reason in a sentence or two."""
    allowed = [p for p in points if p.close.perplexity_increase <= max_loss]
    dense = min((p for p in allowed if p.rule == "dense"), key=lambda p: p.seconds)
    rules = [p for p in allowed if p.rule != "dense"]
    limit = f"{max_loss:.2g} of perplexity" if max_loss < 0.001 else f"{max_loss:.1%} of perplexity"
    if rules:
        rule = min(rules, key=lambda p: p.seconds)
        gain = dense.seconds / rule.seconds - 1
        if gain > LEAST_GAIN:
            return rule, (
                f"{rule.name} is the fastest within {limit}: {gain:+.0%} tokens/s over"
                f" {dense.name}, for {rule.close.perplexity_increase:+.2%} of perplexity"
            )
        said = f"the fastest rule within {limit}, {rule.name}, gains {gain:+.0%} over it"
    else:
        said = f"every rule costs more than {limit}"
    smaller = min((p for p in points if p.rule == "dense"), key=lambda p: p.seconds)
    more = ""
    if smaller is not dense:
        more = (
            f"; {smaller.name} would be {dense.seconds / smaller.seconds - 1:+.0%} faster for"
            f" {smaller.close.perplexity_increase:+.2%} of perplexity"
        )
    return dense, f"no rule pays off here: {said}; take {dense.name}{more}"


def _line(point: Point) -> str:
    close = point.close
    return (
        f"{point.name}: KL {close.kl:.4f} (95 %: {close.kl_error:.4f}), perplexity"
        f" {close.perplexity_increase:+.2%}, same top token {close.same_top:.1%}"
    )


assert all(rule in RULES for rule in AdviseConfig.rules)
