"""Two pictures: predicted speed against the budget, and a plan as a heat map.

What this module does not know: how either was found. Letters: L layers, R columns of ranks."""

from pathlib import Path

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from sparkinfer.files import partial_file
from sparkinfer.profile_file import Profile
from sparkinfer.solver.solve import SolveConfig
from sparkinfer.solver.sweep import Sweep
from sparkinfer.split_file import Split

GIB = 1 << 30
DPI = 120
NUM_COLUMNS = 512  # of ranks, at most
CPU_COLOUR = "#d9dde3"
GPU_COLOURS = ("#c8452d", "#2d6fc8", "#2f9e62", "#8a4fbf")
BLUE, GREY, ORANGE, RED = "#2d6fc8", "#777f8a", "#d98a1f", "#c8452d"


def plot_sweep(found: Sweep, path: Path) -> None:
    """Tokens a second of the plan, the layer split and the limit over the budget."""
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.add_subplot()
    budget = [point.budget_bytes / GIB for point in found.points]
    curves = [
        ("limit of this machine for the plan's bytes", "limit_s", GREY, ":"),
        ("this plan", "objective_s", BLUE, "-"),
        ("llama.cpp's layer split (dense), at best", "layer_split_s", ORANGE, "--"),
    ]
    for label, field, colour, style in curves:
        speed = [1 / getattr(point, field) for point in found.points]
        axes.plot(budget, speed, style, color=colour, label=label, marker="o", markersize=3)
    axes.axhline(1 / found.cpu_only_s, color=RED, linewidth=0.8, label="the CPU alone")
    if budget[0] < found.fits_from_bytes / GIB < budget[-1]:
        axes.axvline(
            found.fits_from_bytes / GIB, color="black", linewidth=0.8, linestyle=(0, (1, 3)),
            label=f"everything fits from {found.fits_from_bytes / GIB:.1f} GiB on",
        )  # fmt: skip
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda speed, _: f"{speed:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("GPU memory granted (GiB)")
    axes.set_ylabel("predicted tokens a second (log scale)")
    axes.set_title(
        f"{found.model}, {found.mode}, {found.context_length:,} tokens of context\n"
        f"{found.gpu}; {found.cpu}",
        fontsize=10,
    )
    axes.grid(True, which="both", linewidth=0.3)
    axes.legend(fontsize=8)
    _save(figure, path)


def plot_heat_map(config: SolveConfig, path: Path) -> None:
    """The plan at the config's output: layers by ranks of hotness, coloured by device."""
    draw_heat_map(Split.load(config.output), Profile.load(config.profile), config.model.name, path)


def draw_heat_map(split: Split, profile: Profile, name: str, path: Path) -> None:
    """The same of what is loaded; `name` is the model's."""
    device_LR = device_of_ranks(split, profile)
    num_layers, num_gpus = len(split.hot), len(split.budgets)
    home_L = np.array(split.home[:-1] or (0,) * num_layers)
    dense_L = np.where(split.dense_on_gpu, home_L + 1, 0)
    figure = Figure(figsize=(9, max(3.2, min(9.0, 1.6 + 0.14 * num_layers))), layout="constrained")
    blocks, ranks = figure.subplots(1, 2, width_ratios=(1, 18), sharey=True)
    colours = ListedColormap([CPU_COLOUR, *GPU_COLOURS[:num_gpus]])
    limits = {"cmap": colours, "vmin": -0.5, "vmax": num_gpus + 0.5, "interpolation": "nearest"}
    blocks.imshow(dense_L[:, None], aspect="auto", **limits)
    ranks.imshow(device_LR, aspect="auto", extent=(0, 100, num_layers - 0.5, -0.5), **limits)
    blocks.set_xticks([])
    blocks.set_xlabel("dense\nblock")
    blocks.set_ylabel("layer")
    ranks.set_xlabel("neurons of the layer, hottest first (%)")
    names = ["CPU", *(f"GPU {number}" for number in range(num_gpus))]
    handles = [Patch(color=colours(number), label=name) for number, name in enumerate(names)]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(names), fontsize=8)
    head = f"GPU {split.home[-1] if split.home else 0}" if split.head_on_gpu else "the CPU"
    budgets = " + ".join(f"{limit / GIB:.2f} GiB" for limit in split.budgets)
    figure.suptitle(
        f"{name} in {budgets}: {1 / split.objective_s:,.1f} tokens/s predicted;"
        f" output head on {head}",
        fontsize=10,
    )
    _save(figure, path)


def device_of_ranks(split: Split, profile: Profile) -> np.ndarray:
    """0 for the CPU, k + 1 for GPU k: where most neurons of a column of ranks are; int [L, R]."""
    num_layers, num_neurons = profile.active_count_LF.shape
    num_columns = min(NUM_COLUMNS, num_neurons)
    column_F = np.arange(num_neurons) * num_columns // num_neurons
    sizes_R = np.bincount(column_F)
    device_LR = np.zeros((num_layers, num_columns), np.int64)
    for layer, ids in enumerate(split.hot):
        order_F = np.argsort(-profile.active_count_LF[layer], kind="stable")
        rank_F = np.empty(num_neurons, np.int64)
        rank_F[order_F] = np.arange(num_neurons)
        hot_R = np.bincount(column_F[rank_F[ids]], minlength=num_columns)
        home = split.home[layer] if split.home else 0
        device_LR[layer] = np.where(2 * hot_R >= sizes_R, home + 1, 0) * (hot_R > 0)
    return device_LR


def _save(figure: Figure, path: Path) -> None:
    with partial_file(path) as partial:
        figure.savefig(partial, dpi=DPI, format="png")
