"""Two plots: predicted speed against the budget, and a plan as a heat map.

Letters: L layers, F neurons, R columns of ranks."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.profile_file import Profile
from hotsplit.artifacts.split_file import Split
from hotsplit.files.atomic import partial_file
from hotsplit.solver.assumed import profile_for
from hotsplit.solver.solve import SolveConfig
from hotsplit.solver.sweep import Sweep
from hotsplit.system.sizes import format_bytes, unit_of

DPI = 120
NUM_COLUMNS = 512  # maximum columns of ranks
CPU_COLOUR = "#d9dde3"
GPU_COLOURS = ("#c8452d", "#2d6fc8", "#2f9e62", "#8a4fbf")
BLUE, GREY, ORANGE, RED = "#2d6fc8", "#777f8a", "#d98a1f", "#c8452d"


def plot_sweep(found: Sweep, path: Path) -> None:
    """Plots tokens per second of the plan, the layer split and the limit against the budget."""
    figure = Figure(figsize=(8, 5.4), layout="constrained")
    axes = figure.add_subplot()
    unit_name, unit = unit_of(found.points[-1].budget_bytes)
    budget = [point.budget_bytes / unit for point in found.points]
    curves = [
        ("limit: the plan's bytes at full bandwidth, both sides at once", "limit_s", GREY, ":"),
        ("hotsplit's plan", "objective_s", BLUE, "-"),
        ("llama.cpp's layer split: whole layers, every weight read", "layer_split_s", ORANGE, "--"),
    ]
    for label, field, colour, style in curves:
        speed = [1 / getattr(point, field) for point in found.points]
        axes.plot(budget, speed, style, color=colour, label=label, marker="o", markersize=3)
    axes.axhline(1 / found.cpu_only_s, color=RED, linewidth=0.8, label="hotsplit on the CPU alone")
    if budget[0] < found.fits_from_bytes / unit < budget[-1]:
        axes.axvline(
            found.fits_from_bytes / unit, color="black", linewidth=0.8, linestyle=(0, (1, 3)),
            label=f"everything fits from {format_bytes(found.fits_from_bytes)} on",
        )  # fmt: skip
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=budget[-1] > 4))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda speed, _: f"{speed:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(f"GPU memory granted ({unit_name})")
    axes.set_ylabel("predicted tokens a second (log scale)")
    axes.set_title(
        f"{found.model}, {found.mode}, {found.context_length:,} tokens of context\n"
        f"{found.gpu}; {found.cpu}",
        fontsize=10,
    )
    axes.grid(True, which="both", linewidth=0.3)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    _save(figure, path)


def plot_heat_map(config: SolveConfig, path: Path) -> None:
    """Plots the plan at the config's output: layers by ranks of hotness, coloured by device."""
    split = Split.load(config.output)
    profile = profile_for(ModelFile.load(config.model), config.profile, split.mode)
    device_LR, units = device_of_ranks(split, profile), units_of(split, profile)
    num_layers, num_gpus = len(split.hot), len(split.budgets)
    home_L = np.array(split.home[:-1] or (0,) * num_layers)
    dense_L = np.where(split.dense_on_gpu, home_L + 1, 0)
    height = max(3.6, min(9.0, 2.0 + 0.14 * num_layers))
    figure = Figure(figsize=(9, height), layout="constrained")
    blocks, ranks, firings = figure.subplots(1, 3, width_ratios=(1, 14, 4), sharey=True)
    colours = ListedColormap([CPU_COLOUR, *GPU_COLOURS[:num_gpus]])
    limits = {"cmap": colours, "vmin": -0.5, "vmax": num_gpus + 0.5, "interpolation": "nearest"}
    blocks.imshow(dense_L[:, None], aspect="auto", **limits)
    blocks.set_title("dense\nblock", fontsize=9)
    blocks.set_xticks([])
    blocks.set_ylabel("layer")
    ranks.imshow(device_LR, aspect="auto", extent=(0, 100, num_layers - 0.5, -0.5), **limits)
    ranks.set_title(f"{units.name}, by place", fontsize=9)
    ranks.set_xlabel(f"{units.name} of the layer, hottest first (%)")
    share_L = firings_on_gpu(split, profile)
    bars = [colours(int(home) + 1) for home in home_L]
    firings.barh(np.arange(num_layers), np.full(num_layers, 100), height=1, color=CPU_COLOUR)
    firings.barh(np.arange(num_layers), 100 * share_L, height=1, color=bars)
    firings.set_title(f"{units.events}, by place", fontsize=9)
    firings.set_xlabel(f"of the layer's {units.events} (%)")
    firings.set_xlim(0, 100)
    names = ["on the CPU"]
    names += [f"on GPU {k} ({format_bytes(limit)})" for k, limit in enumerate(split.budgets)]
    handles = [Patch(color=colours(number), label=label) for number, label in enumerate(names)]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(names), fontsize=9)
    head = f"GPU {split.home[-1] if split.home else 0}" if split.head_on_gpu else "the CPU"
    figure.suptitle(
        f"{config.model.name}: {1 / split.objective_s:,.1f} tokens/s predicted; output head on {head}\n"
        "(a dense block is attention, norms, predictor and KV cache of a layer)",
        fontsize=10,
    )
    _save(figure, path)


@dataclass(frozen=True, kw_only=True)
class Units:
    """What a plan places, by layer: neurons and how often they fired, or the experts of a mixture and
    how often they were chosen. `hot`: the ids of those on a GPU."""

    name: str
    events: str
    count_LF: np.ndarray
    hot: tuple[np.ndarray, ...]


def units_of(split: Split, profile: Profile) -> Units:
    """The units of a plan; a mixture's layer without experts counts as as many equal parts, all on one
    side."""
    if not split.num_experts:
        return Units(
            name="neurons", events="firings", count_LF=profile.active_count_LF, hot=split.hot
        )
    assert profile.expert_count_LE is not None
    count_LE = profile.expert_count_LE.copy()
    is_dense_L = count_LE.sum(axis=1) == 0
    count_LE[is_dense_L] = profile.num_tokens
    hot = tuple(
        np.arange(split.num_experts if len(ids) else 0) if is_dense else ids
        for ids, is_dense in zip(split.hot, is_dense_L.tolist(), strict=True)
    )
    return Units(name="experts", events="choices", count_LF=count_LE, hot=hot)


def firings_on_gpu(split: Split, profile: Profile) -> np.ndarray:
    """Share of a layer's firings that come from hot neurons, or of its choices that are of hot experts,
    f64 [L]; 0 if nothing fires."""
    units = units_of(split, profile)
    pairs = zip(units.count_LF, units.hot, strict=True)
    hot_L = np.array([row_F[ids].sum() for row_F, ids in pairs])
    return hot_L / np.maximum(1, units.count_LF.sum(axis=1))


def device_of_ranks(split: Split, profile: Profile, num_columns: int = NUM_COLUMNS) -> np.ndarray:
    """The device of most neurons, or experts, in each column of ranks, int [L, R]: 0 is the CPU, k + 1
    GPU k."""
    units = units_of(split, profile)
    num_layers, num_neurons = units.count_LF.shape
    num_columns = min(num_columns, num_neurons)
    column_F = np.arange(num_neurons) * num_columns // num_neurons
    sizes_R = np.bincount(column_F)
    device_LR = np.zeros((num_layers, num_columns), np.int64)
    for layer, ids in enumerate(units.hot):
        order_F = np.argsort(-units.count_LF[layer], kind="stable")
        rank_F = np.empty(num_neurons, np.int64)
        rank_F[order_F] = np.arange(num_neurons)
        hot_R = np.bincount(column_F[rank_F[ids]], minlength=num_columns)
        home = split.home[layer] if split.home else 0
        device_LR[layer] = np.where(2 * hot_R >= sizes_R, home + 1, 0) * (hot_R > 0)
    return device_LR


def _save(figure: Figure, path: Path) -> None:
    with partial_file(path) as partial:
        figure.savefig(partial, dpi=DPI, format="png")
