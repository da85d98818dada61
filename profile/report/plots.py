"""Plots of a profile and of the report on its predictors.

Letters: L layers, F neurons."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hotsplit.artifacts.profile_file import Profile
from hotsplit.files.atomic import all_or_none, partial_file
from hotsplit.profile.predictors.layer_trainer import LayerQuality
from hotsplit.profile.predictors.selection import Quality
from hotsplit.profile.report.report import load_predictor_report, report_paths

PICTURES = ("density.png", "firings.png", "predictors.png")
OTHERS, CHOSEN = "#777f8a", "#c8452d"
MAX_NAMED = 12  # layers in a legend


def draw(profile: Path, folder: Path) -> list[Path]:
    """Plots a profile and the report beside it: writes density.png, firings.png and, if predictors
    were trained, predictors.png; returns their paths."""
    pyplot = load_pyplot()
    loaded = Profile.load(profile)
    quality_L = load_predictor_report(report_paths(profile)[0], loaded.model_id)
    figures = [_density(pyplot, loaded), _firings(pyplot, loaded)]
    if quality_L:
        figures.append(_predictors(pyplot, quality_L))
    paths = []
    with all_or_none():
        for name, figure in zip(PICTURES, figures, strict=False):
            with partial_file(folder / name) as partial:
                figure.savefig(partial, format="png", dpi=120)
            pyplot.close(figure)
            paths.append(folder / name)
    return paths


def _density(pyplot: Any, profile: Profile) -> Any:
    figure, axes = pyplot.subplots(layout="constrained")
    axes.bar(np.arange(len(profile.density_L)), 100 * profile.density_L)
    axes.set(xlabel="layer", ylabel="neurons that fire, %", title="Density")
    return figure


def _firings(pyplot: Any, profile: Profile) -> Any:
    figure, axes = pyplot.subplots(layout="constrained")
    counts_LF = -np.sort(-profile.active_count_LF, axis=1)
    share_LF = np.cumsum(counts_LF, axis=1) / np.maximum(1, counts_LF.sum(axis=1, keepdims=True))
    for layer, number in enumerate(profile.own_neurons_L):
        neurons_F = 100 * np.arange(1, number + 1) / number
        axes.plot(neurons_F, 100 * share_LF[layer, :number], label=f"layer {layer}")
    axes.set(xlabel="neurons, hottest first, %", ylabel="firings, %", title="Firings")
    if len(counts_LF) <= MAX_NAMED:
        axes.legend()
    else:
        axes.text(0.98, 0.02, f"{len(counts_LF)} layers", ha="right", transform=axes.transAxes)
    return figure


def _predictors(pyplot: Any, quality_L: Sequence[LayerQuality]) -> Any:
    """Plots every candidate of every layer: lost norm over the bytes that a token reads with it, on
    the text that the choice was made on. Lower left is better; the chosen ones are coloured."""
    figure, axes = pyplot.subplots(layout="constrained")
    marks = {"low-rank": ("o", "low-rank"), "whole": ("s", "whole gate")}
    chosen = [_chosen(quality) for quality in quality_L]
    for form, (mark, name) in marks.items():
        others = [q for quality in quality_L for q in quality.candidates if q.form == form]
        taken = [q for q in chosen if q.form == form]
        for points, style, label in (
            ([q for q in others if not q.is_trained], {"markerfacecolor": "none"}, name),
            ([q for q in others if q.is_trained], {}, f"{name}, trained"),
            (taken, {"color": CHOSEN, "markersize": 8}, f"{name}, chosen"),
        ):
            if points:
                axes.plot([q.bytes_per_token / 1024 for q in points],
                          [100 * q.lost_norm for q in points], mark,
                          **{"color": OTHERS, "markersize": 4, "label": label, **style})  # fmt: skip
    axes.set(xlabel="KiB of a feed-forward layer that a token reads", ylabel="lost norm, %",
             title="Predictors, each at its threshold")  # fmt: skip
    axes.legend()
    return figure


def _chosen(quality: LayerQuality) -> Quality:
    """The chosen predictor's quality as a candidate, on the same text as the others; `chosen` if no
    candidate matches it."""
    chosen = quality.chosen
    return next(
        (q for q in quality.candidates if (q.name, q.is_trained, q.threshold)
         == (chosen.name, chosen.is_trained, chosen.threshold)),
        chosen,
    )  # fmt: skip


def load_pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")  # no display
    from matplotlib import pyplot

    return pyplot
