"""What `inspect` shows of a file: its facts as one JSON object, or as tables."""

import json
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from hotsplit.artifacts.model_file import PredictorInfo
from hotsplit.files.gguf_parts import num_bytes_of
from hotsplit.files.typed import printable
from hotsplit.model.operations import BlockOp
from hotsplit.system.sizes import format_bytes

WIDTH_OF_A_PIPE = 120  # columns if stdout is not a terminal
Row = Sequence[object]


@dataclass(frozen=True)
class Summary(ABC):
    path: Path

    @property
    @abstractmethod
    def kind(self) -> str:
        """The kind of the file."""

    @property
    @abstractmethod
    def content(self) -> dict[str, Any]:
        """The facts of the JSON object, besides the kind, the path and the size of the file."""

    @property
    @abstractmethod
    def facts(self) -> list[Row]:
        """Names and values for people, besides the same."""

    @abstractmethod
    def tables(self, *, all_tensors: bool) -> list[Table]:
        """Further tables. `all_tensors`: of a GGUF, lists all tensors, otherwise those outside the
        layers and those of the first layer."""

    def print(self, *, all_tensors: bool) -> None:
        size = format_bytes(num_bytes_of(self.path))
        head = facts_table(self.kind, [("file", self.path), ("size", size), *self.facts])
        print_tables([head, *self.tables(all_tensors=all_tensors)])


def to_json(summary: Any) -> str:
    """A Summary or a dataclass as strict JSON; non-finite numbers, such as the -inf of a threshold
    that selects all neurons, become "-inf", "inf" or "nan"."""
    if isinstance(summary, Summary):
        file = {"path": summary.path, "file_bytes": num_bytes_of(summary.path)}
        summary = {"kind": summary.kind, **file, **summary.content}
    return json.dumps(_plain(summary), allow_nan=False)


def _plain(value: Any) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        own = {"operation": value.kind} if isinstance(value, BlockOp) else {}
        value = own | {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | frozenset):
        return [_plain(item) for item in (sorted(value) if isinstance(value, frozenset) else value)]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


# ---- tables, whatever their cells hold ------------------------------------------------------


def print_facts(title: str, rows: Iterable[Row]) -> None:
    """Prints one table of names and values on stdout."""
    print_tables([facts_table(title, rows)])


def print_tables(tables: Iterable[Table]) -> None:
    """Prints tables on stdout, in a pipe or a file without rich's trailing spaces."""
    console = Console(file=sys.stdout, markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = WIDTH_OF_A_PIPE
    with console.capture() as captured:
        for table in tables:
            console.print(table)
    text = captured.get()
    if not console.is_terminal:
        text = "".join(f"{line.rstrip(' ')}\n" for line in text.splitlines())
    console.file.write(text)


def facts_table(title: str, rows: Iterable[Row]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=box.SIMPLE)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(_printable(name), _printable(value))
    return table


_TEXTS = ("type", "shape", "part", "device", "operation", "reads", "writes")


def columns_table(title: str, columns: Mapping[str, Iterable[object]]) -> Table:
    """A table of cells by column. The first column and those in _TEXTS are left-aligned, all others
    right-aligned; what stands behind a NUL in a name only tells columns of one heading apart."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for number, column in enumerate(columns):
        is_text = number == 0 or column in _TEXTS
        name = column.partition("\0")[0]
        table.add_column(name, justify="left" if is_text else "right", overflow="fold")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*map(_printable, row))
    return table


def formatted(form: str, values: Iterable[object]) -> list[str]:
    """Each of the values in a format, e.g. ".1%"."""
    return [format(value, form) for value in values]


def _printable(value: object) -> str:
    """The value as text, with escapes for controls and for what stdout cannot encode."""
    encoding = sys.stdout.encoding or "utf-8"
    return printable(str(value).encode(encoding, "backslashreplace").decode(encoding))


def span(values: Sequence[float], form: str = "g") -> str:
    """One number if all layers have the same, otherwise the range; "unknown" without values."""
    if not values:
        return "unknown"
    low, high = format(min(values), form), format(max(values), form)
    return f"{low} in all layers" if low == high else f"{low} to {high}"


def predictor_facts(predictor: PredictorInfo | None) -> list[Row]:
    if predictor is None:
        return [("predictors", "none")]
    offset = predictor.input_layer_offset
    return [
        ("predictors", predictor.kind),
        ("predictor ranks", span(predictor.rank_L)),
        ("predictor input", f"the FFN input of {'the layer before' if offset else 'its layer'}"),
        ("predictor thresholds", span(predictor.threshold_L)),
        ("predicted density", span(predictor.density_L, ".1%")),
    ]


def predictor_layers(predictor: PredictorInfo) -> Table:
    count = len(predictor.rank_L)
    columns = {
        "layer": range(count),
        "rank": predictor.rank_L,
        "threshold": formatted("g", predictor.threshold_L),
        "predicted density": formatted(".2%", predictor.density_L) or ["unknown"] * count,
    }
    return columns_table("predictors by layer", columns)
