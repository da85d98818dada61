"""The plots of the report page, and the map of a plan as a picture. Those of the page contain no
text from files; file names are in the page, escaped.

Letters: L layers, F neurons, R columns of ranks, N plotted shares of the neurons."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path as Outline
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from hotsplit.artifacts.profile_file import Profile
from hotsplit.artifacts.split_file import Split
from hotsplit.costs.part_bytes import ITEMS, Items
from hotsplit.profile.predictors.layer_trainer import LayerQuality
from hotsplit.report import svg
from hotsplit.solver.explain import device_of_ranks, firings_on_gpu, meanings_of, units_of
from hotsplit.solver.sweep import Sweep
from hotsplit.system.sizes import format_bytes, unit_of

NUM_SHARES = 101
MAX_THIN = 12  # most layers with a line each
MAX_LINEAR = 15  # highest ratio of the last speed to the first on a linear axis


def firing_curves(profile: Profile) -> np.ndarray:
    """Share of a layer's firings that come from its hottest neurons, f64 [L, N], at 0 to 100% of
    the neurons; 0 if none fires."""
    counts_LF = -np.sort(-profile.active_count_LF, axis=1)
    taken_LF = np.cumsum(counts_LF, axis=1) / np.maximum(1, counts_LF.sum(axis=1, keepdims=True))
    taken_LF = np.concatenate([np.zeros((len(counts_LF), 1)), taken_LF], axis=1)
    rows = zip(taken_LF, profile.own_neurons_L, strict=True)
    at_LN = [(np.linspace(0, number, NUM_SHARES), row_F) for row_F, number in rows]
    return np.stack([np.interp(at_N, np.arange(len(row_F)), row_F) for at_N, row_F in at_LN])


def plot_firings(profile: Profile) -> svg.Plot:
    """Plots the mean firing curve, within the band that the curves of all layers span."""
    curve_LN = 100 * firing_curves(profile)
    share_N = np.linspace(0, 100, NUM_SHARES)
    mean_N = curve_LN.mean(axis=0)
    with svg.new_figure(240) as figure:
        axes = figure.add_subplot()
        low_N, high_N = curve_LN.min(axis=0), curve_LN.max(axis=0)
        axes.fill_between(share_N, low_N, high_N, color=svg.PALE, linewidth=0, label="all layers")
        if len(curve_LN) <= MAX_THIN:
            for curve_N in curve_LN:
                axes.plot(share_N, curve_N, color=svg.BLUE, linewidth=0.5, alpha=0.6)
        axes.plot(share_N, mean_N, color=svg.BLUE, label="mean of the layers")
        equal, dotted = "if all fired equally often", (0, (2, 3))
        axes.plot([0, 100], [0, 100], color=svg.SOFT, linewidth=0.8, linestyle=dotted, label=equal)
        axes.set(xlabel="neurons of a layer, hottest first (%)", ylabel="of its firings (%)")
        axes.set(xlim=(0, 100), ylim=(0, 101))
        svg.gridded(axes, "both")
        axes.legend(loc="lower right")
        fifth = curve_LN[:, NUM_SHARES // 5]
        return svg.plot_of(
            "firings",
            figure,
            alt=f"The hottest fifth of a layer's neurons takes {mean_N[NUM_SHARES // 5]:.0f}% of"
            f" its firings on average, from {fifth.min():.0f}% to {fifth.max():.0f}% by layer.",
            caption="The higher the curve, the fewer neurons a GPU has to hold.",
        )


def plot_density(profile: Profile) -> svg.Plot:
    """Plots density as a bar per layer."""
    density_L = 100 * profile.density_L
    mean = density_L.mean()
    with svg.new_figure(240) as figure:
        axes = figure.add_subplot()
        axes.bar(np.arange(len(density_L)), density_L, color=svg.BLUE, width=0.75)
        label = f"mean of the layers, {mean:.1f}%"
        axes.axhline(mean, color=svg.INK, linewidth=1, linestyle=(0, (4, 2)), label=label)
        figure.legend(loc="outside upper right")
        _layers_below(axes)
        axes.set(ylabel="neurons that fire for a token (%)", ylim=(0, None))
        svg.gridded(axes)
        low, high = int(density_L.argmin()), int(density_L.argmax())
        return svg.plot_of(
            "density",
            figure,
            alt=f"Of a layer's neurons {mean:.1f}% fire for a token on average: least in layer"
            f" {low} ({density_L[low]:.1f}%), most in layer {high} ({density_L[high]:.1f}%).",
            caption="Up and down rows of neurons that do not fire need not be read.",
        )


def plot_curve(curve: Sweep, split: Split | None) -> svg.Plot:
    """Plots predicted tokens per second over GPU memory: of the best plan, of a split by whole
    layers, of the CPU alone, and of `split` if it is for one GPU."""
    label, unit = unit_of(max(point.budget_bytes for point in curve.points))
    budget = [point.budget_bytes / unit for point in curve.points]
    first, last = (1 / curve.points[i].objective_s for i in (0, -1))
    alt = (
        f"The best plan reaches {first:,.0f} tokens a second with"
        f" {format_bytes(curve.points[0].budget_bytes)} of GPU memory and {last:,.0f} with"
        f" {format_bytes(curve.points[-1].budget_bytes)}, by prediction."
    )
    with svg.new_figure(250) as figure:
        axes = figure.add_subplot()
        for text, field, colour, line in (
            ("best plan", "objective_s", svg.BLUE, "-"),
            ("split by whole layers", "layer_split_s", svg.ORANGE, "--"),
        ):
            speed = [1 / getattr(point, field) for point in curve.points]
            axes.plot(budget, speed, line, color=colour, label=text)
        cpu_per_s, dotted = 1 / curve.cpu_only_s, (0, (1, 2))
        axes.axhline(
            cpu_per_s, color=svg.SOFT, linewidth=1, linestyle=dotted, label="the CPU alone"
        )
        if split is not None and len(split.budgets) == 1:
            at = split.budgets[0] / unit
            per_s = 1 / split.objective_s
            (dot,) = axes.plot([at], [per_s], "o", color=svg.BLUE, markersize=9, label="this plan")
            dot.set_markeredgecolor(svg.INK)
            alt += f" The plan, at {format_bytes(split.budgets[0])}, reaches {per_s:,.0f}."
        axes.set(xlabel=f"GPU memory granted ({label})", ylabel="tokens a second, predicted")
        axes.set_xlim(0, None)
        if last > MAX_LINEAR * first:
            axes.set_yscale("log")
            axes.yaxis.set_minor_locator(NullLocator())
        else:
            axes.set_ylim(0, None)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        svg.gridded(axes, "both")
        figure.legend(loc="outside lower center", ncols=2)
        return svg.plot_of(
            "curve", figure, alt=alt, caption="Where the curve is flat, more memory buys nothing."
        )


def plot_map(split: Split, profile: Profile) -> svg.Plot:
    """Plots a row per layer, coloured by device: dense block, neurons by hotness, and firings, or
    experts and choices."""
    units, share_L = units_of(split, profile), firings_on_gpu(split, profile)
    fired_LF = units.count_LF
    hot = sum(map(len, units.hot)) / fired_LF.size
    hot_fired = (share_L * fired_LF.sum(axis=1)).sum() / max(1, fired_LF.sum())
    in_main = split.kv_offload is not None
    cache = "; the KV cache is in main memory" if in_main else ", with its KV cache"
    with svg.new_figure(_map_height(split)) as figure:
        _draw_map(figure, split, profile)
        return svg.plot_of(
            "map",
            figure,
            alt=f"{hot:.1%} of the {units.name}, with {hot_fired:.1%} of the {units.events}, are on"
            f" a GPU; so are the dense blocks of {sum(split.dense_on_gpu)} of {len(split.hot)}"
            " layers.",
            caption=f"A dense block is the attention, norms and predictor of a layer{cache}.",
        )


def save_map(split: Split, profile: Profile, model: str, path: Path) -> None:
    """Writes the same plot as PNG, with the model's name and the predicted speed as its title."""
    with svg.new_figure(_map_height(split) + 20, is_picture=True) as figure:
        _draw_map(figure, split, profile)
        figure.suptitle(f"{model}: {1 / split.objective_s:,.1f} tokens/s predicted", fontsize=8)
        svg.save_picture(figure, path)


def _map_height(split: Split) -> int:
    return min(560, 120 + max(6 * len(split.hot), 100))


def _draw_map(figure: Figure, split: Split, profile: Profile) -> None:
    units, num_layers, num_gpus = units_of(split, profile), len(split.hot), len(split.budgets)
    home_L = np.array(split.home[:-1] or (0,) * num_layers)
    dense_L = np.where(split.dense_on_gpu, home_L + 1, 0)
    blocks, ranks, firings = figure.subplots(1, 3, width_ratios=(1.2, 10, 4), sharey=True)
    _rows(blocks, dense_L[:, None], num_gpus)
    _rows(ranks, device_of_ranks(split, profile), num_gpus)
    at_L = np.arange(num_layers)
    firings.barh(at_L, 100, height=0.86, color=svg.CPU)
    colours = [svg.GPUS[home % len(svg.GPUS)] for home in home_L]
    firings.barh(at_L, 100 * firings_on_gpu(split, profile), height=0.86, color=colours)
    blocks.set(xticks=[], ylabel="layer", ylim=(num_layers - 0.5, -0.5), xlabel="dense\nblock")
    blocks.xaxis.label.set_fontsize(8)
    blocks.yaxis.set_major_locator(MaxNLocator(nbins=10, integer=True))
    ranks.set(xlabel=f"{units.name}, hottest first (%)", xlim=(0, 100))
    firings.set(xlabel=f"{units.events} (%)", xlim=(0, 100), xticks=[0, 50, 100])
    for axes in (blocks, ranks, firings):
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    handles = [Patch(color=svg.CPU, label="CPU")]
    handles += [Patch(color=svg.GPUS[k % len(svg.GPUS)], label=f"GPU {k}") for k in range(num_gpus)]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))


def name_of(item: str, units: str) -> str:
    """An item's name for a reader; `units`: whether its neurons are experts."""
    return meanings_of(has_experts=units == "experts")[item]


def plot_bytes(gpus: Sequence[Items], cpu: Items, units: str) -> svg.Plot:
    """Plots a bar per item, divided by device."""
    items = [item for item in ITEMS if cpu[item] or any(gpu[item] for gpu in gpus)][::-1]
    totals = {item: cpu[item] + sum(gpu[item] for gpu in gpus) for item in items}
    label, unit = unit_of(max(totals.values()))
    with svg.new_figure(80 + 22 * len(items)) as figure:
        axes = figure.add_subplot()
        left = np.zeros(len(items))
        sides = [(f"GPU {k}", gpu, svg.GPUS[k % len(svg.GPUS)]) for k, gpu in enumerate(gpus)]
        for text, side, colour in [*sides, ("CPU", cpu, svg.CPU)]:
            size = np.array([side[item] / unit for item in items])
            names = [name_of(item, units) for item in items]
            axes.barh(names, size, left=left, color=colour, height=0.7, label=text)
            left += size
        axes.set(xlabel=label)
        axes.tick_params(axis="y", labelcolor=svg.INK)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
        svg.gridded(axes, "x")
        axes.spines["bottom"].set_visible(False)
        figure.legend(loc="outside lower center", ncols=len(sides) + 1)
        largest = max(totals, key=lambda item: totals[item])
        on_gpus = sum(sum(gpu.values()) for gpu in gpus)
        return svg.plot_of(
            "bytes",
            figure,
            alt=f"{format_bytes(on_gpus)} are on GPUs and {format_bytes(sum(cpu.values()))} in main"
            f" memory; the largest item is {name_of(largest, units)},"
            f" {format_bytes(totals[largest])}.",
            caption="Workspace is what a pass needs besides weights and KV cache.",
        )


def plot_predictors(quality_L: Sequence[LayerQuality]) -> svg.Plot:
    """Plots recall and precision per layer, above the lost norm."""
    at_L = np.arange(len(quality_L))
    recall_L = 100 * np.array([q.chosen.recall for q in quality_L])
    precision_L = 100 * np.array([q.chosen.precision for q in quality_L])
    lost_L = 100 * np.array([q.chosen.lost_norm for q in quality_L])
    with svg.new_figure(300) as figure:
        shares, lost = figure.subplots(2, 1, height_ratios=(3, 2), sharex=True)
        size = 6 if len(at_L) <= 40 else 3.5
        shares.plot(at_L, precision_L, "s", color=svg.GREEN, markersize=size, label="precision")
        shares.plot(at_L, recall_L, "o", color=svg.BLUE, markersize=size, label="recall")
        shares.set(ylabel="share (%)", ylim=(None, 101.5))
        lost.bar(at_L, lost_L, color=svg.ORANGE, width=0.75)
        lost.set(ylabel="lost norm (%)", ylim=(0, None))
        _layers_below(lost)
        svg.gridded(shares)
        svg.gridded(lost)
        figure.legend(loc="outside upper center", ncols=2)
        return svg.plot_of(
            "predictors",
            figure,
            alt=f"On average over the layers, recall is {recall_L.mean():.1f}%, precision"
            f" {precision_L.mean():.1f}% and the lost norm {lost_L.mean():.2f}%; the most is lost"
            f" in layer {int(lost_L.argmax())}, {lost_L.max():.2f}%.",
            caption="Recall: the share of firing neurons that are named. Precision: the share of"
            " named neurons that fire. Lost norm: the part of the layer's output that is missed.",
        )


def plot_quality(rows: Sequence[tuple[str, float, float | None]]) -> svg.Plot:
    """Plots measurements, each a (name, increase of the perplexity, half of its interval)."""
    with svg.new_figure(76 + 26 * len(rows)) as figure:
        axes = figure.add_subplot()
        dot: dict[str, Any] = {"fmt": "o", "color": svg.BLUE, "markersize": 6}
        dot |= {"capsize": 4, "linewidth": 1.4}
        for number, (_, increase, half_width) in enumerate(rows):
            axes.errorbar([100 * increase], [number], xerr=100 * (half_width or 0.0), **dot)
        axes.axvline(0, color=svg.INK, linewidth=0.8)
        axes.set(xlabel="perplexity above dense (%), 95% interval", ylim=(len(rows) - 0.5, -0.5))
        axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
        axes.tick_params(axis="y", labelcolor=svg.INK)
        axes.margins(x=0.15)
        svg.gridded(axes, "x")
        axes.spines[["left", "bottom"]].set_visible(False)
        told = "; ".join(f"{name}: {increase:+.2%}" for name, increase, _ in rows)
        return svg.plot_of(
            "quality",
            figure,
            alt=f"Perplexity above that of the dense model: {told}.",
            caption="Where the interval contains zero, there may be no loss.",
        )


def _layers_below(axes: Axes) -> None:
    axes.set_xlabel("layer")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True))


def _rows(axes: Axes, device_LR: np.ndarray, num_gpus: int) -> None:
    num_columns = device_LR.shape[1]
    for device in range(num_gpus + 1):
        boxes = []
        for layer, device_R in enumerate(device_LR):
            edges = np.flatnonzero(np.diff(np.concatenate([[0], device_R == device, [0]])))
            low, high = layer - 0.43, layer + 0.43
            for start, stop in edges.reshape(-1, 2) * 100 / num_columns:
                corners = [(start, low), (stop, low), (stop, high), (start, high), (start, low)]
                boxes.append(Outline(corners, closed=True))
        if boxes:
            colour = svg.CPU if device == 0 else svg.GPUS[(device - 1) % len(svg.GPUS)]
            outline = Outline.make_compound_path(*boxes)
            axes.add_patch(PathPatch(outline, facecolor=colour, linewidth=0))
    axes.set_xlim(0, 100)
