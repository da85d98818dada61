"""Computes the seconds of measured points, marks their Pareto front, and chooses the one to advise.

A point is a weight type, dense or with a rule that saves a share of the bytes. The quality of all
points is measured against one dense model, so that types and rules are comparable. A point is on
the Pareto front unless another is at least as good in both KL and speed, and better in one.
Measurements are left to profile.advise and profile.advise_own_limits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sparkinfer.profile.limit_meter import Closeness

LEAST_GAIN = 0.03  # smallest gain in speed that is worth a rule's loss
LEAST_SPEED = 0.9  # a rule's least speed, relative to what the bytes that it saves promise
Trial = tuple[str, str, float]  # type, rule, share


@dataclass(frozen=True, kw_only=True)
class Point:
    type: str
    rule: str  # "dense", one of limit_search.RULES, or "limits" for those of the file
    share: float  # of the weight bytes that it saves: the target, or for "limits" as measured
    bytes_per_token: int  # of weights
    close: Closeness
    seconds: float = 0.0  # per token
    is_whole: bool = True  # measured on the whole text, otherwise on a part
    is_timed: bool = False  # otherwise estimated from the bytes
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
    """One point of each type and rule: that of the largest share within `max_loss`, or else of the
    smallest share."""
    chosen: dict[tuple[str, str], Point] = {}
    for point in sorted(points, key=lambda p: p.share):
        place = point.type, point.rule
        if point.rule != "dense" and (place not in chosen or point.least_increase <= max_loss):
            chosen[place] = point
    return list(chosen.values())


def timed_points(
    points: Sequence[Point], dense_s: Mapping[str, float], ratios: Mapping[Trial, float]
) -> list[Point]:
    """The points with their seconds. `dense_s` has those of dense points by type, `ratios` those of
    timed trials relative to dense. Others are extrapolated by bytes from the nearest timed share of
    their rule, which includes the rule's overhead, or else from dense."""
    dense = {point.type: point for point in points if point.rule == "dense"}
    bytes_of = {point.trial: point.bytes_per_token for point in points}

    def seconds(point: Point) -> float:
        whole, total = dense_s[point.type], dense[point.type].bytes_per_token
        own = [trial for trial in ratios if trial[:2] == point.trial[:2]]
        if not own:
            return whole * point.bytes_per_token / total
        near = min(own, key=lambda trial: abs(trial[2] - point.share))
        return whole * (ratios[near] + (point.bytes_per_token - bytes_of[near]) / total)

    return [
        replace(p, seconds=seconds(p), is_timed=p.rule == "dense" or p.trial in ratios)
        for p in points
    ]


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
    """The recommended point, and the reason in a sentence or two.

    It is the fastest of those whose `least_increase` is within `max_loss`: a dense one, unless a rule
    is faster than it by more than LEAST_GAIN and has LEAST_SPEED of the speed that its bytes say."""
    dense_of = {point.type: point for point in points if point.rule == "dense"}
    allowed = [p for p in points if p.least_increase <= max_loss]
    dense = min((p for p in allowed if p.rule == "dense"), key=lambda p: p.seconds)
    rules = sorted((p for p in allowed if p.rule != "dense"), key=lambda p: p.seconds)
    limit = f"{max_loss:.2g} of perplexity" if max_loss < 0.001 else f"{max_loss:.1%} of perplexity"
    for rule in rules:
        own, gain = dense_of[rule.type], dense.seconds / rule.seconds - 1
        speed = own.seconds / rule.seconds
        if gain > LEAST_GAIN and speed >= LEAST_SPEED * (1 + rule.gain_by_bytes(own)):
            return rule, (
                f"{rule.name} is the fastest within {limit}: {gain:+.0%} tokens/s over"
                f" {dense.name}, for {rule.close.perplexity_increase:+.2%} of perplexity;"
                f" {speed - 1:+.0%} over {own.name}, of which it reads"
                f" {rule.bytes_per_token / own.bytes_per_token:.0%}"
            )
    said = f"every rule costs more than {limit}"
    if rules:
        rule, own = rules[0], dense_of[rules[0].type]
        said = (
            f"the fastest rule within {limit}, {rule.name}, gains"
            f" {dense.seconds / rule.seconds - 1:+.0%} over {dense.name}, and"
            f" {own.seconds / rule.seconds - 1:+.0%} over {own.name}, where its bytes say"
            f" {rule.gain_by_bytes(own):+.0%}"
        )
    smaller = min((p for p in points if p.rule == "dense"), key=lambda p: p.seconds)
    more = ""
    if smaller is not dense:
        more = (
            f"; {smaller.name} would be {dense.seconds / smaller.seconds - 1:+.0%} faster for"
            f" {smaller.close.perplexity_increase:+.2%} of perplexity"
        )
    return dense, f"no rule pays off here: {said}; take {dense.name}{more}"
