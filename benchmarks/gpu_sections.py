"""Named measurements whose results are saved one by one, so that an interrupted program goes on
where it ended.

A section that raises, takes too long or ends the process is recorded and does not stop the others:
the first is caught, the second ends the process with HUNG, and the program that started it
(gpu_day.py) starts it again. Sections that have a result are not repeated."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MOST_TRIES = 3  # of a section that ends the process, or is cut off
HUNG = 3  # exit status after a section that took too long


@dataclass(frozen=True, kw_only=True)
class SectionTable:
    """What a section measured; the first column names the rows. `note` is printed below."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    note: str = ""


class Sections:
    """The results of one program, `content["sections"]` by name, in the JSON file at `path`."""

    def __init__(self, path: Path, benchmark: str, seconds: float) -> None:
        self.path, self.deadline = path, time.monotonic() + seconds
        self.content: dict[str, Any] = {"benchmark": benchmark, "facts": {}, "sections": {}}
        if path.exists():
            self.content = json.loads(path.read_text())
        path.parent.mkdir(parents=True, exist_ok=True)

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def run(
        self,
        name: str,
        measure: Callable[[], Sequence[SectionTable]],
        *,
        least_s: float = 3.0,
        most_s: float = 60.0,
    ) -> None:
        """Measures a section unless it has a result or less than `least_s` are left. After `most_s`
        the process ends with HUNG."""
        known = self.content["sections"].get(name, {})
        if "tables" in known or "error" in known:
            return
        tries = known.get("tries", 0)
        if tries >= MOST_TRIES:
            self._store(name, error=f"began {tries} times and never ended")
            return
        if self.seconds_left < least_s:
            return
        self._store(name, tries=tries + 1)
        began = time.monotonic()
        watch = threading.Timer(most_s, self._give_up, (name, most_s))
        watch.daemon = True
        watch.start()
        try:
            found = {"tables": [asdict(table) for table in measure()]}
        except Exception as error:  # noqa: BLE001  the other sections are measured all the same
            found = {"error": first_line(error)}
        watch.cancel()
        self._store(name, **found, seconds=round(time.monotonic() - began, 1))
        print(f"{name}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)

    def add_facts(self, **facts: object) -> None:
        self.content["facts"] |= facts
        self.save()

    def is_fine(self, names: Sequence[str]) -> bool:
        """True if each section has a result."""
        return all("tables" in self.content["sections"].get(name, {}) for name in names)

    def save(self) -> None:
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.content, indent=1) + "\n")
        partial.replace(self.path)

    def _store(self, name: str, **found: object) -> None:
        self.content["sections"][name] = found
        self.save()

    def _give_up(self, name: str, seconds: float) -> None:
        self._store(name, error=f"no end after {seconds:.0f} s")
        os._exit(HUNG)


def page_of(content: dict[str, Any], names: Sequence[str]) -> str:
    """All facts, errors and tables, and the sections that there was no time for."""
    lines = [f"{name}: {value}" for name, value in content["facts"].items()]
    tables = list[dict[str, Any]]()
    for name in names:
        found = content["sections"].get(name, {})
        if "error" in found:
            lines.append(f"{name}: FAILED: {found['error']}")
        elif "tables" not in found:
            lines.append(f"{name}: not measured: no time left")
        tables += found.get("tables", ())
    return "\n".join([*lines, *(f"\n{text_of(table)}" for table in joined(tables))])


def joined(tables: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbours of the same title and columns as one table."""
    found = list[dict[str, Any]]()
    for table in tables:
        last = found[-1] if found else {}
        if all(last.get(key) == table[key] for key in ("title", "columns")):
            notes = "; ".join(note for note in (last["note"], table["note"]) if note)
            found[-1] = last | {"rows": [*last["rows"], *table["rows"]], "note": notes}
        else:
            found.append(table)
    return found


def text_of(table: dict[str, Any]) -> str:
    rows = [[str(cell) for cell in row] for row in (table["columns"], *table["rows"])]
    sizes = [max(len(row[i]) for row in rows) for i in range(len(table["columns"]))]
    lines = [table["title"]]
    for first, *rest in rows:
        cells = [cell.rjust(size) for cell, size in zip(rest, sizes[1:], strict=True)]
        lines.append("  " + "  ".join([first.ljust(sizes[0]), *cells]).rstrip())
    return "\n".join([*lines, *([f"  {table['note']}"] if table["note"] else [])])


def first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip() if lines else ''}"[:200]
