"""The content of a page, and its HTML: one self-contained file.

The template (page.html) escapes all text; only the plots' SVG, which we draw ourselves, is inserted
unescaped."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from hotsplit.report.report_config import ReportConfig
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


PROFILE, MACHINE, PLAN = "model.profile.safetensors", "machine.json", "model.split.gguf"


class Names:
    """The names of the given files, without folders. Files that are not given have default names,
    except a plan, whose name is then ""."""

    def __init__(self, config: ReportConfig, *, has_experts: bool) -> None:
        self.model = shlex.quote(config.model.name)
        self.profile = shlex.quote(config.profile.name) if config.profile else PROFILE
        self.machine = shlex.quote(config.machine.name) if config.machine else MACHINE
        self.split = shlex.quote(config.split.name) if config.split else ""
        profile = f"hotsplit profile {self.model} --corpus text.txt -o {PROFILE}"
        self.no_profile = _missing("profile", "--profile", "makes", profile)
        calibrate = f"hotsplit calibrate -o {MACHINE}"
        self.no_machine = _missing("machine", "--machine", "measures", calibrate)
        self.new_machine = f"hotsplit calibrate --gpu-from card.json -o {MACHINE}"
        solve = (
            f"hotsplit solve {self.model} --profile {self.profile} --machine {self.machine}"
            f" --vram-budget 8GiB -o {PLAN}"
        )
        self.no_split = _missing("plan", "--split", "makes", solve)
        plan = f" --split {self.split}" if self.split else ""
        compare = f"hotsplit eval {self.model}{plan} --corpus held-out.txt --json > eval.json"
        self.no_eval = _missing("comparison", "--eval-json", "makes", compare)
        self.no_predictors = Missing(
            "The predictors' recall is in the .report.json next to a profile (--profile); this"
            " writes both:",
            f"{profile} --train-predictors predictors",
        )
        if has_experts:
            self.no_predictors = Missing("A mixture of experts has routers instead of predictors.")


def _missing(what: str, option: str, does: str, command: str) -> Missing:
    return Missing(f"No {what} was given ({option}); this {does} one:", command)
