"""The plot of a plan: a heat map of layers by ranks of hotness.

Letters: L layers, R columns of ranks."""

from pathlib import Path

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.split_file import Split
from hotsplit.files.atomic import partial_file
from hotsplit.solver.assumed import profile_for
from hotsplit.solver.placed import device_of_ranks, firings_on_gpu, units_of
from hotsplit.solver.solve import SolveConfig
from hotsplit.system.sizes import format_bytes

DPI = 120
CPU_COLOUR = "#d9dde3"
GPU_COLOURS = ("#c8452d", "#2d6fc8", "#2f9e62", "#8a4fbf")


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
    with partial_file(path) as partial:
        figure.savefig(partial, dpi=DPI, format="png")
