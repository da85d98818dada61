"""Plots advice: divergence from the dense model against tokens per second."""

from pathlib import Path
from typing import TYPE_CHECKING

from hotsplit.files.atomic import partial_file
from hotsplit.profile.report.plots import load_pyplot

if TYPE_CHECKING:
    from hotsplit.measure.advise.advise import Advice

MARKS = {"dense": "s", "gates": "^", "limits": "P"}
LEAST_KL = 1e-4  # the axis is logarithmic: smaller divergences, such as 0, are drawn here


def draw(advice: "Advice", path: Path) -> None:
    """Writes a PNG with one colour per type and one marker per rule; a line joins the Pareto front,
    and a ring marks the advice."""
    plot = load_pyplot()
    figure, axes = plot.subplots(layout="constrained")
    types = sorted({point.type for point in advice.points})
    for number, kind in enumerate(types):
        for rule, mark in MARKS.items():
            chosen = [p for p in advice.points if (p.type, p.rule) == (kind, rule)]
            if chosen:
                axes.plot([1 / p.seconds for p in chosen],
                          [max(LEAST_KL, p.close.kl) for p in chosen], mark, color=f"C{number}",
                          label=f"{kind} {rule}")  # fmt: skip
    front = sorted((p for p in advice.points if p.is_on_front), key=lambda p: p.seconds)
    axes.plot([1 / p.seconds for p in front], [max(LEAST_KL, p.close.kl) for p in front],
              color="0.6", linewidth=1, zorder=0)  # fmt: skip
    axes.plot([1 / advice.best.seconds], [max(LEAST_KL, advice.best.close.kl)], "o", markersize=16,
              fillstyle="none", color="black", label="advice")  # fmt: skip
    axes.set(xlabel="tokens/s", ylabel="KL from the dense model, nats a token", yscale="log")
    axes.legend(fontsize="small")
    with partial_file(path) as partial:
        figure.savefig(partial, format="png", dpi=120)
    plot.close(figure)
