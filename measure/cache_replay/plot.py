"""Plots a replay: milliseconds per token by policy, with the bound, hit rates and copies."""

from pathlib import Path

from matplotlib.figure import Figure

from hotsplit.files.atomic import partial_file
from hotsplit.measure.cache_replay.replay import ReplayReport

DPI = 120
BLUE, GREY, RED = "#2d6fc8", "#a5acb5", "#c8452d"


def plot_replay(report: ReplayReport, path: Path) -> None:
    """Writes a PNG. Bars longer than four times that of `static` are cut off and marked."""
    results = [*report.policies, report.hindsight]
    static_ms = report.of["static"].ms
    most = 4 * static_ms
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.add_subplot()
    colours = [BLUE if result.name == "ours" else GREY for result in results]
    bars = axes.barh(
        [result.name for result in results],
        [min(result.ms, most) for result in results],
        color=colours,
    )
    labels = [
        f"{result.ms:.2f} ms, hits {result.hit_rate:.0%}, {result.copied:.0f} copied"
        + (" (cut off)" if result.ms > most else "")
        for result in results
    ]
    axes.bar_label(bars, labels, padding=4, fontsize=8)
    axes.axvline(report.bound_ms, color=RED, linewidth=1, label="lower bound")
    axes.set_xlim(0, 1.5 * min(most, max(result.ms for result in results)))
    axes.set_xlabel("milliseconds per token, computed from the plan's times")
    axes.invert_yaxis()
    axes.legend(loc="lower right", fontsize=8)
    with partial_file(path) as partial:
        figure.savefig(partial, dpi=DPI, format="png")
