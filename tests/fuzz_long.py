"""Long fuzzing: cases of all kinds with numbers that no test has.

    python tests/fuzz_long.py --minutes 60 [--only KIND ...] [--start 1000000] [--keep FOLDER]

Kinds take turns, some cases each, until the time is over. It prints how many cases of each kind
were refused, done and wrong, and the number to continue from; keeps the file of each wrong case
with its outcome. It exits with 1 if any was wrong."""

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parent
LIMIT_S = 30  # per case, on a machine that may be busy


def main() -> int:
    from fuzz import all_kinds

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--only", action="append", metavar="KIND", choices=all_kinds())
    parser.add_argument("--start", type=int, default=1_000_000, help="the first number")
    parser.add_argument("--batch", type=int, default=200, help="cases of a kind in a process")
    parser.add_argument("--keep", type=Path, default=TESTS.parent / "build" / "fuzz")
    asked = parser.parse_args()
    kinds = asked.only or all_kinds()
    with tempfile.TemporaryDirectory() as name:
        counts, last = fuzz(kinds, asked, Path(name))
    print_counts(counts)
    print(f"go on with --start {last}")
    return int(any(count["wrong"] for count in counts.values()))


def fuzz(
    kinds: list[str], asked: argparse.Namespace, folder: Path
) -> tuple[dict[str, Counter[str]], int]:
    """(counts by kind, the first number that was not used)."""
    from fuzz import run_cases, wrong_outcomes
    from fuzz_inputs import make_inputs

    make_inputs(folder / "inputs")
    counts = {kind: Counter[str]() for kind in kinds}
    until, start = time.monotonic() + 60 * asked.minutes, asked.start
    while time.monotonic() < until:
        for kind in kinds:
            if time.monotonic() >= until and counts[kind]:
                continue
            cases = {kind: range(start, start + asked.batch)}
            outcomes = run_cases(folder / "inputs", folder / "work", cases, LIMIT_S)
            wrong = wrong_outcomes(outcomes)
            counts[kind].update("wrong" if c in wrong else text for c, text in outcomes.items())
            for (_, number), text in wrong.items():
                print(f"{kind} {number}: {text}", file=sys.stderr, flush=True)
                keep_case(folder / "inputs", kind, number, text, asked.keep)
        start += asked.batch
    return counts, start


def keep_case(inputs: Path, kind: str, number: int, outcome: str, keep: Path) -> None:
    """Saves the damaged file as KIND-NUMBER-NAME, and its outcome in KIND-NUMBER.txt."""
    from fuzz import damaged
    from fuzz_meaning import MEANINGS, changed, save
    from fuzz_odd import ODDS, odd
    from fuzz_pairs import PAIRS
    from fuzz_readers import KINDS

    keep.mkdir(parents=True, exist_ok=True)
    note = f"{kind} {number}: {outcome}\n"
    if kind in KINDS:
        name, content = damaged(inputs, kind, number)
        (keep / f"{kind}-{number}-{name}").write_bytes(content)
    elif kind in MEANINGS:
        change, content = changed(inputs, kind, number)
        note += f"change: {change}\n"
        target = KINDS[MEANINGS[kind].kind].target
        is_header = MEANINGS[kind].is_header
        save(keep / f"{kind}-{number}-{target}", content, is_header=is_header)
    elif kind in ODDS:
        target = KINDS[ODDS[kind]].target
        save(keep / f"{kind}-{number}-{target}", odd(inputs, kind, number))
    else:
        assert kind in PAIRS, kind
    (keep / f"{kind}-{number}.txt").write_text(note)


def print_counts(counts: dict[str, Counter[str]]) -> None:
    names = ("refused", "done", "wrong")
    total = sum(counts.values(), Counter[str]())
    print(f"{'kind':18}{'cases':>9}" + "".join(f"{name:>9}" for name in names))
    for kind, count in [*counts.items(), ("all", total)]:
        cells = "".join(f"{count[name]:9}" for name in names)
        print(f"{kind:18}{sum(count.values()):9}{cells}")


if __name__ == "__main__":
    sys.exit(main())
