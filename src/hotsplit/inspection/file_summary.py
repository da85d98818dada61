"""What `inspect` shows of a file: its facts as one JSON object, or as tables."""

import json
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from hotsplit.artifacts.machine_file import Figure
from hotsplit.files.gguf_parts import num_bytes_of
from hotsplit.files.typed import printable
from hotsplit.model.operations import BlockOp
from hotsplit.system.sizes import format_bytes

MOST_COLUMNS = 8  # of a table of objects; of larger objects, each has a table
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
    def file(self) -> dict[str, Any]:
        return {"path": self.path, "file_bytes": num_bytes_of(self.path)}

    def tables(self, *, all_tensors: bool) -> list[Table]:
        """The same for people. `all_tensors`: of a GGUF, lists all tensors, otherwise those outside
        the layers and those of the first layer."""
        return value_tables(self.kind, self.file | self.content)

    def print(self, *, all_tensors: bool) -> None:
        print_tables(self.tables(all_tensors=all_tensors))


def to_json(summary: Any) -> str:
    """A Summary or a dataclass as strict JSON; non-finite numbers, such as the -inf of a threshold
    that selects all neurons, become "-inf", "inf" or "nan"."""
    if isinstance(summary, Summary):
        summary = {"kind": summary.kind} | summary.file | summary.content
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


def value_tables(title: str, values: Mapping[Any, Any]) -> list[Table]:
    """An object's values as tables, each under its name in the file: the single ones, those by
    layer, and those that are objects or lists of objects."""
    rows: list[Row] = []
    by_layer: dict[str, Iterable[object]] = {}
    further: list[Table] = []
    num_layers = max((len(v) for key, v in values.items() if str(key).endswith("_L")), default=0)
    for key, value in values.items():
        name = str(key)
        items = value if isinstance(value, list | tuple) else ()
        objects = [item for each in items if (item := _values_of(each))]
        texts = [_text(name, item) for item in items]
        if (own := _values_of(value)) is not None:
            further += value_tables(name, own)
        elif objects and len(objects[0]) > MOST_COLUMNS:
            for number, item in enumerate(objects):
                further += value_tables(f"{name} {number}", item)
        elif objects:
            columns = {k: [_text(k, o[k]) for o in objects] for k in objects[0]}
            further.append(columns_table(name, {"": range(len(objects)), **columns}))
        elif items and len(items) == num_layers and len(set(texts)) > 1:
            by_layer[name] = texts
        else:
            same = f"{texts[0]} in all layers" if len(texts) == num_layers > 0 else None
            rows.append((name, same or _text(f"{title} {name}", value)))
    if title.endswith("bytes"):
        rows.append(("all", format_bytes(sum(values.values()))))
    if by_layer:
        further.insert(0, columns_table("by layer", {"layer": range(num_layers), **by_layer}))
    return [facts_table(title, rows), *further] if rows else further


def _values_of(value: Any) -> dict[str, Any] | None:
    is_one = is_dataclass(value) and not isinstance(value, Figure)
    return dict(vars(value)) if is_one else value if isinstance(value, dict) else None


def _text(name: str, value: Any) -> str:
    """The best value of a figure, and the range of the middle half of the rounds."""
    if isinstance(value, Figure):
        if value.quartiles is None:
            return f"{value.best:g} (not measured)"
        low, _, high = value.quartiles
        return f"{value.best:.4g} (half of {value.rounds} rounds {low:.4g} to {high:.4g})"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return format_bytes(value) if "bytes" in name else f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        is_run = all(isinstance(b, int) and b == a + 1 for a, b in pairwise(value))
        value = (
            f"{value[0]} to {value[-1]}"
            if is_run and len(value) > 1
            else ", ".join(map(str, value))
        )
    return "none" if value is None else str(value) or "none"


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
