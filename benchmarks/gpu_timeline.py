"""Plots one decode step: GPU kernels, copies, and the CPU's cold neurons.

    python gpu_timeline.py TRACE.json PICTURE.png [STEPS]

It reads a Chrome trace of torch's profiler, in which the CUDA library reports kernels and copies
but not host functions. A cold block runs between a copy to the host and the next copy from it; its
bar is drawn from the end of the first to the beginning of the second, waiting included. Times are
microseconds, as in the trace."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

Span = tuple[float, float]  # begin, end
ROWS = ("GPU, kernels", "GPU, copies", "CPU, cold neurons")


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Spans in time order, of one step that begins at 0."""

    kernels: tuple[Span, ...]
    copies: tuple[Span, ...]
    host: tuple[Span, ...]

    @property
    def rows(self) -> tuple[tuple[Span, ...], ...]:
        return (self.kernels, self.copies, self.host)

    @property
    def length(self) -> float:
        return max((end for row in self.rows for _, end in row), default=0.0)

    @property
    def overlapped(self) -> float:
        """The share of the host's spans during which kernels run; 0 without any."""
        total = sum(end - begin for begin, end in self.host)
        return overlap(self.host, self.kernels) / total if total else 0.0


def timeline_of(events: Sequence[dict], num_steps: int) -> Timeline:
    """The last of `num_steps` equally long steps among a trace's events."""
    found = [e for e in events if e.get("ph") == "X" and e.get("cat") in ("kernel", "gpu_memcpy")]
    if not found:
        return Timeline(kernels=(), copies=(), host=())
    first, last = min(e["ts"] for e in found), max(e["ts"] + e["dur"] for e in found)
    start = last - (last - first) / num_steps
    in_step = sorted((e for e in found if e["ts"] >= start), key=lambda e: e["ts"])
    copies = [e for e in in_step if e["cat"] == "gpu_memcpy"]
    return Timeline(
        kernels=tuple(_span(e, start) for e in in_step if e["cat"] == "kernel"),
        copies=tuple(_span(e, start) for e in copies),
        host=tuple(_between(copies, start)),
    )


def _span(event: dict, start: float) -> Span:
    return event["ts"] - start, event["ts"] + event["dur"] - start


def _between(copies: Sequence[dict], start: float) -> list[Span]:
    """Spans from the end of the last of several copies to the host to the first copy back."""
    spans, there = [], None
    for event in copies:
        if "DtoH" in event["name"]:
            there = event["ts"] + event["dur"]
        elif "HtoD" in event["name"] and there is not None:
            spans.append((there - start, event["ts"] - start))
            there = None
    return spans


def overlap(some: Sequence[Span], others: Sequence[Span]) -> float:
    """The duration of the overlap; the spans of one row must be disjoint."""
    return sum(
        max(0.0, min(end, other_end) - max(begin, other_begin))
        for begin, end in some
        for other_begin, other_end in others
    )


def draw(timeline: Timeline, picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 1.9), layout="constrained")
    for height, (name, row) in enumerate(zip(ROWS, timeline.rows, strict=True)):
        spans = [(begin, end - begin) for begin, end in row]
        axes.broken_barh(spans, (-height - 0.4, 0.8), label=name, color=f"C{height}")
    axes.set_yticks([-0.0, -1.0, -2.0], ROWS)
    axes.set_xlabel("microseconds of one step")
    axes.set_xlim(0, timeline.length or 1)
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)


def main(trace: str, picture: str, num_steps: str = "3") -> None:
    timeline = timeline_of(json.loads(Path(trace).read_text())["traceEvents"], int(num_steps))
    if not timeline.kernels:
        sys.exit(f"{trace}: contains no kernels; record it on a CUDA device")
    draw(timeline, Path(picture))
    print(f"{timeline.length:.0f} us, {timeline.overlapped:.0%} of the CPU's time overlaps kernels")


if __name__ == "__main__":
    main(*sys.argv[1:])
