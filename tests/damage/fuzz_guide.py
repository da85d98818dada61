"""What a long run of the fuzzer knows, kept in a file from run to run: the lines that each kind has
reached, cases that reached new ones, and counts."""

import json
import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fuzz_lines import Line

MOST_SEEDS = 400  # per kind
MOST_BEFORE = 5  # damages before the last one
FROM_SEED = 0.6  # the share of cases that damage a seed further

Chain = tuple[int, ...]  # numbers of damages that a file gets one after another


@dataclass(kw_only=True)
class Known:
    """The state of one kind of input: `cases` have run in `seconds`; `cpu_seconds` is the processor
    time of the processes that lived to their end. `last_new` is the number of cases after which the
    last new line was reached."""

    lines: set[Line] = field(default_factory=set)
    seeds: list[Chain] = field(default_factory=list)
    cases: int = 0
    refused: int = 0
    done: int = 0
    wrong: int = 0
    last_new: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    def chain(self, kind: str, number: int) -> Chain:
        """The damages before that of a case: those of a seed, or none."""
        rng = random.Random(f"seed {kind} {number}")
        if not self.seeds or rng.random() >= FROM_SEED:
            return ()
        return rng.choice(self.seeds)

    def note(self, number: int, before: Chain, new: Iterable[Line], position: int) -> None:
        """Records that a case reached new lines; it was number `position` of its kind, from 1."""
        self.lines |= {(str(name), int(line)) for name, line in new}
        self.last_new = max(self.last_new, position)
        if len(before) < MOST_BEFORE and len(self.seeds) < MOST_SEEDS:
            self.seeds.append((*before, number))


def load(path: Path) -> dict[str, Known]:
    """The file's content by kind; empty if there is no file."""
    if not path.exists():
        return {}
    found = {}
    for kind, values in json.loads(path.read_text()).items():
        lines = {
            (name, number) for name, numbers in values.pop("lines").items() for number in numbers
        }
        seeds = [tuple(chain) for chain in values.pop("seeds")]
        found[kind] = Known(lines=lines, seeds=seeds, **values)
    return found


def save(path: Path, known: dict[str, Known]) -> None:
    content = {
        kind: {**asdict(each), "lines": _by_file(each.lines)} for kind, each in known.items()
    }
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content))
    partial.replace(path)


def _by_file(lines: set[Line]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for name, number in sorted(lines):
        found.setdefault(name, []).append(number)
    return found
