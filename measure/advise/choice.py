"""Computes the seconds of measured points, marks their Pareto front, and chooses the one to advise.

A point is a weight type, dense or with a rule that saves a share of the bytes. The quality of all
points is measured against one dense model, so that types and rules are comparable. A point is on
the Pareto front unless another is at least as good in both KL and speed, and better in one.
Measurements are left to `advise` and `own_limits`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hotsplit.measure.advise.timings import Gain, Timings, Trial
from hotsplit.profile.sparsity.limit_meter import Closeness

LEAST_GAIN = 0.03  # smallest gain in speed that is worth a rule's loss
LEAST_SPEED = 0.9  # a rule's least speed, relative to what the bytes that it saves promise
NEAR = 1.25  # points that take up to this many times as long as the fastest get further rounds


@dataclass(frozen=True, kw_only=True)
class Point:
    type: str
    rule: str  # "dense", "gates" for limits made for this text, or "limits" for those of the file
    share: float  # of the weight bytes that are saved; measured for "limits", otherwise the target
    bytes_per_token: int  # of weights
    close: Closeness
    seconds: float = 0.0  # per token
    is_whole: bool = True  # measured on the whole text, otherwise on a part
    is_timed: bool = False  # otherwise estimated from the bytes
    gain: Gain | None = None  # over the reference of the rounds, if timed
    num_rounds: int = 0
    is_on_front: bool = False

    @property
    def name(self) -> str:
        return f"{self.type} dense" if self.rule == "dense" else (
            f"{self.type} {self.rule} {self.share:.0%}"
        )  # fmt: skip

    @property
    def trial(self) -> Trial:
        return self.type, self.rule, self.share

    @property
    def least_increase(self) -> float:
        """The rise of the perplexity; the lower end of its interval if measured on a part only."""
        error = 0.0 if self.is_whole else self.close.perplexity_increase_error
        return self.close.perplexity_increase - error

    def gain_by_bytes(self, dense: "Point") -> float:
        """The relative gain in speed over `dense`, if speed followed the bytes."""
        return dense.bytes_per_token / self.bytes_per_token - 1


def to_time(points: Sequence[Point], max_loss: float) -> list[Point]:
    """One point with a rule for each type: the one with the largest share within `max_loss`, or else
    the one with the smallest share."""
    chosen: dict[str, Point] = {}
    for point in sorted(points, key=lambda p: p.share):
        is_rule = point.rule != "dense"
        if is_rule and (point.type not in chosen or point.least_increase <= max_loss):
            chosen[point.type] = point
    return list(chosen.values())


def timed_points(points: Sequence[Point], times: Timings) -> list[Point]:
    """The points with their seconds. Those that were not timed are extrapolated by bytes from the
    timed point of their type and rule with the nearest share, or else from their type's dense
    point; all dense points must have been timed."""
    dense = {point.type: point for point in points if point.rule == "dense"}
    timed = [point for point in points if times.num_rounds(point.trial)]

    def with_seconds(point: Point) -> Point:
        count = times.num_rounds(point.trial)
        if count:
            return replace(
                point, seconds=times.seconds(point.trial), is_timed=True, num_rounds=count,
                gain=times.gain(point.trial, times.reference),
            )  # fmt: skip
        own = dense[point.type]
        alike = [other for other in timed if other.trial[:2] == point.trial[:2]]
        near = min(alike, key=lambda other: abs(other.share - point.share), default=own)
        ratio = 1 / (1 + times.gain(near.trial, own.trial).median)
        ratio += (point.bytes_per_token - near.bytes_per_token) / own.bytes_per_token
        return replace(point, seconds=times.seconds(own.trial) * ratio)

    return [with_seconds(point) for point in points]


def contenders(points: Sequence[Point], max_loss: float) -> list[Point]:
    """The points worth timing further: timed ones within `max_loss` that take at most NEAR times as
    long as the fastest of them, and the dense points of types whose rules are among them."""
    allowed = [p for p in points if p.is_timed and p.least_increase <= max_loss]
    most = NEAR * min(p.seconds for p in allowed)
    near = [p for p in allowed if p.seconds <= most]
    types = {p.type for p in near if p.rule != "dense"}
    return [p for p in points if p in near or (p.rule == "dense" and p.type in types)]


def with_front(points: Sequence[Point]) -> list[Point]:
    """The points, with those on the Pareto front marked: no other point is at least as close and as
    fast, and better in one of the two."""

    def is_beaten(point: Point) -> bool:
        return any(
            other.close.kl <= point.close.kl
            and other.seconds <= point.seconds
            and (other.close.kl, other.seconds) != (point.close.kl, point.seconds)
            for other in points
        )

    return [replace(point, is_on_front=not is_beaten(point)) for point in points]


def choose(points: Sequence[Point], max_loss: float, times: Timings) -> tuple[Point, str]:
    """The recommended point, and the reason in a sentence or two.

    Only points whose `least_increase` is within `max_loss` count. A rule pays if it beats every
    dense point (`_beats`) and reaches LEAST_SPEED of the speed that its bytes promise. The fastest
    rule that pays is recommended, or else the fastest dense point. Where the timings do not show
    that it is clearly faster than others like it, the one of them with the smallest KL is."""
    dense_of = {point.type: point for point in points if point.rule == "dense"}
    allowed = sorted((p for p in points if p.least_increase <= max_loss), key=lambda p: p.seconds)
    whole = [p for p in allowed if p.rule == "dense"]
    rules = [p for p in allowed if p.rule != "dense"]
    limit = f"{max_loss:.2g} of perplexity" if max_loss < 0.001 else f"{max_loss:.1%} of perplexity"

    def pays(rule: Point) -> bool:
        own = dense_of[rule.type]
        speed = 1 + _gain(rule, own, times).median
        if speed < LEAST_SPEED * (1 + rule.gain_by_bytes(own)):
            return False
        return all(_beats(rule, dense, times) for dense in whole)

    paying = list(filter(pays, rules))
    if paying:
        best = _closest_of_fastest(paying, times)
        return best, _why_rule(best, whole[0], dense_of[best.type], limit, times)
    dense = _closest_of_fastest(whole, times)
    if rules:
        why = _why_no_rule(rules[0], whole[0], dense_of[rules[0].type], limit, times)
    elif any(point.rule != "dense" for point in points):
        why = f"no rule pays off here: every rule costs more than {limit}"
    else:
        why = "no rule was measured"
    return dense, _why_dense(dense, whole[0], why, list(dense_of.values()), times)


def _gain(point: Point, over: Point, times: Timings) -> Gain:
    """The gain of `point` over another, estimated unless both are timed."""
    if point.is_timed and over.is_timed:
        return times.gain(point.trial, over.trial)
    gain = over.seconds / point.seconds - 1
    return Gain(median=gain, low=gain, high=gain)


def _beats(rule: Point, dense: Point, times: Timings) -> bool:
    """True if the rule is clearly faster, by more than LEAST_GAIN in the median, or if its median
    is faster and its KL smaller."""
    gain = _gain(rule, dense, times)
    if gain.median > LEAST_GAIN and gain.is_clear:
        return True
    return gain.median > 0 and rule.close.kl < dense.close.kl


def _closest_of_fastest(points: Sequence[Point], times: Timings) -> Point:
    """The point with the smallest KL among the first and, if it is timed, the timed ones that it is
    not clearly faster than."""
    first = points[0]
    alike = [p for p in points if p is first or (
        p.is_timed and first.is_timed and not _gain(first, p, times).is_clear)]  # fmt: skip
    return min(alike, key=lambda p: p.close.kl)


def _why_rule(rule: Point, dense: Point, own: Point, limit: str, times: Timings) -> str:
    gain = _gain(rule, dense, times)
    small = "" if gain.is_clear else " not distinguishable from 0, but its loss is smaller,"
    over = "" if own is dense else f" {_gain(rule, own, times).line} over {own.name};"
    return (
        f"{rule.name} is the fastest within {limit}: {gain.line} tokens/s over {dense.name},{small}"
        f" for {rule.close.perplexity_increase:+.2%} of perplexity;{over} it reads"
        f" {rule.bytes_per_token / own.bytes_per_token:.0%} of {own.name}'s bytes"
    )


def _why_no_rule(rule: Point, fastest: Point, own: Point, limit: str, times: Timings) -> str:
    """`rule` is the fastest rule within the limit, `fastest` the fastest dense point within it, and
    `own` the dense point of the rule's type."""
    gain = _gain(rule, fastest, times)
    is_small = gain.median > 0 and not gain.is_clear and rule.close.kl >= fastest.close.kl
    small = ", not distinguishable from 0, so the smaller loss counts" if is_small else ""
    over = f", and {_gain(rule, own, times).line} over {own.name}" if own is not fastest else ""
    return (
        f"no rule pays off here: the fastest rule within {limit}, {rule.name}, gains {gain.line}"
        f" over {fastest.name}{small}{over}, where its bytes say {rule.gain_by_bytes(own):+.0%}"
    )


def _why_dense(
    dense: Point, fastest: Point, why_no_rule: str, types: Sequence[Point], times: Timings
) -> str:
    """`fastest` is the fastest dense point within the limit."""
    more = ""
    if fastest is not dense:
        more = (
            f"; {fastest.name} gains {_gain(fastest, dense, times).line} over it, not"
            " distinguishable from 0, and loses more"
        )
    smallest = min(types, key=lambda p: p.seconds)
    if smallest is not fastest and smallest is not dense:
        more += (
            f"; {smallest.name} would be {_gain(smallest, dense, times).line} faster for"
            f" {smallest.close.perplexity_increase:+.2%} of perplexity"
        )
    return f"{why_no_rule}; take {dense.name}{more}"
