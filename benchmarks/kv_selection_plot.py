"""Plots, for docs/long-texts.md, attention's mass on what a token reads against the bytes that it
reads, from the results of kv_selection.py.

    python benchmarks/kv_selection_plot.py [FILE]    # docs/images/kv-selection.png by default"""

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure
from table_contents import ZEN_4, path_of

from hotsplit.files.atomic import partial_file

DPI = 120
BLUE, GREY, INK, RED = "#2d6fc8", "#a5acb5", "#3c4149", "#c8452d"
FOLDER = Path(__file__).parent
WANTED = 0.97
# The rules that are plotted: label, colour, line style and marker.
RULES = {
    "oracle": ("the best positions, known in advance", INK, "--", "o"),
    "32 > rest": ("two stages: bounds of 32, codes of 2 bits of the rest", BLUE, "-", "o"),
    "64 > rest": ("two stages with 64", BLUE, ":", "s"),
    "codes 1": ("every key by codes of 1 bit", GREY, "-", "^"),
    "codes 2": ("every key by codes of 2 bits", GREY, "-", "v"),
    "mean 32": ("mean of 32", GREY, "--", "D"),
    "minmax 32": ("bounds of 32 (Quest)", GREY, ":", "x"),
    "infllm": ("InfLLM's units", GREY, "-.", "+"),
    "window": ("sinks and a window", RED, "-", "o"),
}


def points(results: Path) -> dict[str, list[tuple[float, float]]]:
    """(share of the bytes in percent, recall) of each rule."""
    recall = json.loads(results.read_text())["recall"]
    return {
        name: [(100 * float(share), found["mean"]) for share, found in recall[name].items()]
        for name in RULES
    }


def draw(results: Path, path: Path) -> None:
    """Writes a PNG."""
    figure = Figure(figsize=(8, 4.4), layout="constrained")
    axes = figure.add_subplot()
    for name, pairs in points(results).items():
        words, colour, line, mark = RULES[name]
        axes.plot(*zip(*pairs, strict=True), color=colour, linestyle=line, marker=mark, label=words)
    axes.axhline(WANTED, color=GREY, linewidth=0.8)
    axes.text(2, WANTED, f" {WANTED}", color=GREY, fontsize=8, va="bottom")
    axes.set_xticks([2, 5, 10], ["2 %", "5 %", "10 %"])
    axes.set_ylim(0.5, 1.0)
    axes.set_xlabel("bytes read, of the f16 cache's, tables included")
    axes.set_ylabel("share of attention's mass on what is read")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    with partial_file(path) as partial:
        figure.savefig(partial, dpi=DPI, format="png")


if __name__ == "__main__":
    picture = FOLDER.parent / "docs" / "images" / "kv-selection.png"
    draw(path_of(f"kv-selection-{ZEN_4}"), Path(sys.argv[1]) if len(sys.argv) > 1 else picture)
