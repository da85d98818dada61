"""Draws plots as inline SVG: text stays text, and colours follow the page's light and dark themes.

matplotlib draws with placeholder colours, which become CSS variables (page.html defines them); a
picture in a file of its own has the light theme's. A plot has the width of a phone and is scaled up
on wider screens."""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.colors import get_named_colors_mapping
from matplotlib.figure import Figure

from hotsplit.files.atomic import partial_file

# The page's colours, as in the light theme.
LIGHT = {
    "ink": "#1a1f29",
    "soft": "#565e6c",
    "line": "#dde1e7",
    "card": "#ffffff",
    "blue": "#2463b8",
    "orange": "#b85c12",
    "green": "#1f7a4d",
    "purple": "#7a45ad",
    "cpu": "#c3cad4",
    "pale": "#d5e2f4",
}
# Placeholders (#010101, #020202, ...), and the variables that replace them.
VARIABLES = {"#" + 3 * f"{number:02x}": name for number, name in enumerate(LIGHT, 1)}
INK, SOFT, LINE, CARD, BLUE, ORANGE, GREEN, PURPLE, CPU, PALE = (f"page:{name}" for name in LIGHT)
GPUS = (BLUE, ORANGE, GREEN, PURPLE)
WIDTH, POINTS = 345, 72.0  # a plot's width in points, and points per inch
DPI = 200  # of a picture
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "hotsplit",
    "font.size": 10.0,
    "text.color": INK,
    "axes.labelcolor": SOFT,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": SOFT,
    "ytick.labelcolor": SOFT,
    "axes.edgecolor": LINE,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "axes.linewidth": 0.8,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.0,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "lines.linewidth": 1.8,
}


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A plot. `alt` describes it in a sentence; `caption` says how to read it."""

    name: str
    svg: Markup
    alt: str
    caption: str


@contextmanager
def new_figure(height: int, *, is_picture: bool = False) -> Iterator[Figure]:
    """A figure of the common width and `height` points, to be drawn and rendered within this."""
    named = get_named_colors_mapping()
    for placeholder, name in VARIABLES.items():
        named[f"page:{name}"] = LIGHT[name] if is_picture else placeholder
    with matplotlib.rc_context(STYLE):
        yield Figure(figsize=(WIDTH / POINTS, height / POINTS), layout="constrained")


def gridded(axes: Axes, which: Literal["both", "x", "y"] = "y") -> None:
    """Draws grid lines behind a plot instead of ticks."""
    axes.grid(True, axis=which)
    axes.tick_params(length=0)


def plot_of(name: str, figure: Figure, *, alt: str, caption: str) -> Plot:
    """Renders a figure as a Plot. The same figure always gives the same SVG."""
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    return Plot(name=name, svg=Markup(_inline(written.getvalue(), name)), alt=alt, caption=caption)


def save_picture(figure: Figure, path: Path) -> None:
    """Writes a figure as PNG."""
    with partial_file(path) as partial:
        figure.savefig(partial, dpi=DPI, format="png", facecolor=LIGHT["card"])


def _inline(text: str, name: str) -> str:
    """The bare svg element with the page's font and colours and without a fixed size. Ids contain
    the plot's name, so that plots do not clash. The element is hidden from screen readers, which
    get `alt`."""
    start = text.index("<svg")
    view = re.search(r'viewBox="[^"]+"', text)
    assert view is not None
    text = text[text.index(">", start) + 1 :]
    for pattern in (r"<metadata>.*?</metadata>", r"<style.*?</style>", r"<!--.*?-->"):
        text = re.sub(pattern, "", text, flags=re.DOTALL)
    text = re.sub(r"font-family: [^;\"]+;? ?", "", text)
    numbers: dict[str, int] = {}  # matplotlib makes some ids from memory addresses

    def renamed(found: re.Match[str]) -> str:
        return f"{found[1]}{name}-{numbers.setdefault(found[2], len(numbers))}"

    text = re.sub(r'(id="|href="#|url\(#)([^")]+)', renamed, text)
    text = re.sub(r"#0([1-9a])(?:0[1-9a]){2}\b", lambda m: f"var(--{VARIABLES[m.group()]})", text)
    text = re.sub(r"\s*\n\s*", " ", text)
    return f'<svg {view.group()} aria-hidden="true" focusable="false">{text.strip()}'
