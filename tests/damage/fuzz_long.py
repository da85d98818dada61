"""Long fuzzing: cases of all kinds with numbers that no test uses, guided by the lines they reach.

    PYTHONPATH=tests python tests/damage/fuzz_long.py --minutes 60 [--only KIND]... [--start 1000000] [--keep FOLDER]

Kinds take turns, a batch of cases each, until the time is over. If a case reaches a line of the
readers that none of its kind reached before, later cases may damage its file further (fuzz_lines,
fuzz_guide). What is known stays in FOLDER/guide.json, and another run goes on from there. It prints
for each kind how many cases were refused, done and wrong, and after how many the last new line was
reached, and keeps the outcome of each wrong case, with its file unless it is a pair. It exits with
1 if any was wrong in this run."""

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from fuzz import GUIDE, all_kinds, damaged, run_cases, wrong_outcomes
from fuzz_guide import Chain, Known, load, save
from fuzz_inputs import make_inputs
from fuzz_lines import all_lines
from fuzz_meaning import MEANINGS, changed
from fuzz_meaning import save as save_content
from fuzz_odd import ODDS, odd
from fuzz_pairs import PAIRS
from fuzz_readers import KINDS
from paths import TESTS

LIMIT_S = 30  # per case, on a machine that may be busy
OVERDUE = "died (-14)"  # killed by its alarm; such a case is tried once more


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--only", action="append", metavar="KIND", choices=all_kinds())
    parser.add_argument("--start", type=int, default=1_000_000, help="the first number")
    parser.add_argument("--batch", type=int, default=400, help="cases of a kind in a process")
    parser.add_argument("--keep", type=Path, default=TESTS.parent / "build" / "fuzz")
    parser.add_argument("--missed", action="store_true", help="list lines that no case reached")
    asked = parser.parse_args()
    asked.keep.mkdir(parents=True, exist_ok=True)
    known = load(asked.keep / "guide.json")
    with tempfile.TemporaryDirectory() as name:
        last, num_wrong = fuzz(asked.only or all_kinds(), asked, Path(name), known)
    print_counts(known)
    print_lines(known, asked.missed)
    print(f"go on with --start {last}")
    return int(num_wrong > 0)


def fuzz(
    kinds: list[str], asked: argparse.Namespace, folder: Path, known: dict[str, Known]
) -> tuple[int, int]:
    """(the first number that was not used, number of wrong cases); updates `known`."""
    make_inputs(folder / "inputs")
    until, start, num_wrong, tried = time.monotonic() + 60 * asked.minutes, asked.start, 0, set()
    while time.monotonic() < until:
        for kind in kinds:
            if time.monotonic() >= until and kind in tried:
                continue
            tried.add(kind)
            of_kind = known.setdefault(kind, Known())
            num_wrong += run_batch(kind, range(start, start + asked.batch), asked, folder, of_kind)
            save(asked.keep / "guide.json", known)
        start += asked.batch
    return start, num_wrong


def run_batch(
    kind: str, numbers: range, asked: argparse.Namespace, folder: Path, known: Known
) -> int:
    """Runs these cases of a kind; returns how many were wrong."""
    began, before = time.monotonic(), {number: known.chain(kind, number) for number in numbers}
    found: list[tuple[int, list]] = []
    used: list[float] = []
    save(folder / GUIDE, {kind: known})
    outcomes = run_cases(
        folder / "inputs",
        folder / "work",
        {kind: numbers},
        LIMIT_S,
        lambda kind, number, new: found.append((number, new)),
        used.append,
    )
    for late in [case for case, text in outcomes.items() if text.startswith(OVERDUE)]:
        again = {kind: range(late[1], late[1] + 1)}  # the machine may have been held up
        outcomes |= run_cases(folder / "inputs", folder / "work", again, LIMIT_S, None, used.append)
    wrong = wrong_outcomes(outcomes)
    for (_, number), text in wrong.items():
        print(f"{kind} {number} after {before[number]}: {text}", file=sys.stderr, flush=True)
        keep_case(folder / "inputs", kind, number, before[number], text, asked.keep)
    for number, new in found:
        known.note(number, before[number], new, known.cases + number - numbers.start + 1)
    counts = Counter("wrong" if case in wrong else text for case, text in outcomes.items())
    known.refused += counts["refused"]
    known.done += counts["done"]
    known.wrong += counts["wrong"]
    known.cases += len(numbers)
    known.seconds += time.monotonic() - began
    known.cpu_seconds += sum(used)
    shutil.rmtree(folder / "work", ignore_errors=True)
    return len(wrong)


def keep_case(
    inputs: Path, kind: str, number: int, before: Chain, outcome: str, keep: Path
) -> None:
    """Saves the damaged file as KIND-NUMBER-NAME (none for pairs) and its outcome in
    KIND-NUMBER.txt."""
    note = f"{kind} {number} after {before}: {outcome}\n"
    if kind in KINDS:
        name, content = damaged(inputs, kind, number, before)
        (keep / f"{kind}-{number}-{name}").write_bytes(content)
    elif kind in MEANINGS:
        change, content = changed(inputs, kind, number)
        note += f"change: {change}\n"
        target = KINDS[MEANINGS[kind].kind].target
        is_header = MEANINGS[kind].is_header
        save_content(keep / f"{kind}-{number}-{target}", content, is_header=is_header)
    elif kind in ODDS:
        target = KINDS[ODDS[kind]].target
        save_content(keep / f"{kind}-{number}-{target}", odd(inputs, kind, number, before))
    else:
        assert kind in PAIRS, kind
    (keep / f"{kind}-{number}.txt").write_text(note)


COLUMNS = ("cases", "refused", "done", "wrong", "lines", "last_new", "seeds", "minutes", "cpu_min")


def print_counts(known: dict[str, Known]) -> None:
    """Prints a table: outcomes, the readers' lines that a kind reached, and the number of cases
    after which it reached the last new one. The last row is of all kinds together, where a line
    counts once and `last_new` is the largest."""
    print(f"{'kind':18}" + "".join(f"{name:>9}" for name in COLUMNS))
    rows = {kind: row_of(each) for kind, each in known.items()}
    whole = [sum(column) for column in zip(*rows.values(), strict=True)]
    whole[COLUMNS.index("lines")] = len({line for each in known.values() for line in each.lines})
    whole[COLUMNS.index("last_new")] = max((each.last_new for each in known.values()), default=0)
    for kind, row in {**rows, "all": whole}.items():
        print(f"{kind:18}" + "".join(f"{number:9.0f}" for number in row))


def row_of(known: Known) -> list[float]:
    counts = (known.cases, known.refused, known.done, known.wrong, len(known.lines), known.last_new)
    return [*counts, len(known.seeds), known.seconds / 60, known.cpu_seconds / 60]


def print_lines(known: dict[str, Known], is_listed: bool) -> None:
    """Prints how many of the readers' lines were reached; if `is_listed`, lists the others."""
    wanted = all_lines()
    missed = wanted - {line for each in known.values() for line in each.lines}
    print(f"{len(wanted) - len(missed)} of {len(wanted)} lines of the readers were reached")
    if is_listed:
        for name in sorted({name for name, _ in missed}):
            print(f"{name}: {', '.join(str(n) for file, n in sorted(missed) if file == name)}")


if __name__ == "__main__":
    sys.exit(main())
