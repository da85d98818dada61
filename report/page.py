"""The content of a page, and its HTML: one self-contained file.

The template (page.html) escapes all text; only the plots' SVG, which we draw ourselves, is inserted
unescaped."""

from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from hotsplit.report.svg import Plot

TEMPLATE = "page.html"
MAX_ROWS = 256  # of a table
NONE = "–"  # in a table, for a number that there is not


@dataclass(frozen=True)
class Tile:
    """A headline number: its label, value and unit, and what to compare it with."""

    label: str
    value: str
    note: str
    unit: str = ""


@dataclass(frozen=True)
class Table:
    """A table. The first `num_texts` columns are words, the others numbers; `head` is () for a
    table without a header. A folded table opens on a click and in print; a wide one takes the full
    width, with no plot beside it."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    num_texts: int = 1
    is_folded: bool = False
    is_wide: bool = False

    @property
    def shown(self) -> tuple[tuple[str, ...], ...]:
        return self.rows[:MAX_ROWS]

    @property
    def num_left_out(self) -> int:
        return max(0, len(self.rows) - MAX_ROWS)


@dataclass(frozen=True)
class Missing:
    """A note on a missing or doubtful input, and the command that makes it ("": there is none)."""

    line: str
    command: str = ""


@dataclass(frozen=True)
class Section:
    name: str  # its anchor in the page
    title: str
    lead: str
    plots: tuple[Plot, ...] = ()
    tables: tuple[Table, ...] = ()
    missing: tuple[Missing, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Page:
    title: str
    facts: tuple[str, ...]
    summary: str
    tiles: tuple[Tile, ...]
    sections: tuple[Section, ...]
    files: Table
    program: str


def render(page: Page) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(TEMPLATE).render(page=page)
