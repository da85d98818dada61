"""Three plots of a profile and the report on its predictors.

Letters: L layers, F neurons."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from sparkinfer.errors import SparkinferError
from sparkinfer.files import partial_file, require_file
from sparkinfer.profile.report import FORMAT, VERSION, report_paths
from sparkinfer.profile_file import Profile

PICTURES = ("density.png", "firings.png", "recall.png")
MAX_NAMED = 12  # layers in a legend


def draw(profile: Path, folder: Path) -> list[Path]:
    """Plots a profile and the report beside it: writes density.png, firings.png and, if predictors
    were trained, recall.png; returns their paths."""
    pyplot = load_pyplot()
    loaded = Profile.load(profile)
    report = _read_report(report_paths(profile)[0], loaded)
    figures = [_density(pyplot, loaded), _firings(pyplot, loaded)]
    if report["quality_L"]:
        figures.append(_recall(pyplot, report))
    paths = []
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
    neurons_F = 100 * np.arange(1, counts_LF.shape[1] + 1) / counts_LF.shape[1]
    for layer, share_F in enumerate(share_LF):
        axes.plot(neurons_F, 100 * share_F, label=f"layer {layer}")
    axes.set(xlabel="neurons, hottest first, %", ylabel="firings, %", title="Who fires")
    _name_layers(axes, len(counts_LF))
    return figure


def _recall(pyplot: Any, report: dict[str, Any]) -> Any:
    """Every candidate of every layer; the chosen ones stand out."""
    figure, axes = pyplot.subplots(layout="constrained")
    for layer, quality in enumerate(report["quality_L"]):
        points = sorted((q["num_bytes"], 100 * q["recall"]) for q in quality["candidates"])
        (line,) = axes.plot(*zip(*points, strict=True), "o-", markersize=3, linewidth=0.5,
                            label=f"layer {layer}")  # fmt: skip
        chosen = quality["chosen"]
        axes.plot(chosen["num_bytes"], 100 * chosen["recall"], "s", color=line.get_color())
    axes.set(xlabel="bytes of the predictor", ylabel="firings that are named, %",
             title="Recall against bytes, each at its threshold")  # fmt: skip
    _name_layers(axes, len(report["quality_L"]))
    return figure


def _name_layers(axes: Any, num_layers: int) -> None:
    if num_layers <= MAX_NAMED:
        axes.legend()
    else:
        axes.text(0.98, 0.02, f"{num_layers} layers", ha="right", transform=axes.transAxes)


def _read_report(path: Path, profile: Profile) -> dict[str, Any]:
    require_file(path, "report of a profile")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        head = (content["format"], content["version"], content["model_id"])
    except (ValueError, KeyError, TypeError) as error:
        raise SparkinferError(
            f"{path}: not the report of a profile ({error}); profile again"
        ) from error
    if head != (FORMAT, VERSION, profile.model_id) or "quality_L" not in content:
        raise SparkinferError(
            f"{path}: not the report of a profile of model {profile.model_id[:12]}; profile again"
        )
    return content


def load_pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")  # no display
    from matplotlib import pyplot

    return pyplot
