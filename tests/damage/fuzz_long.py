"""Long fuzzing: cases of all kinds with numbers that no test uses.

    python tests/damage/fuzz_long.py --minutes 60 [--only KIND]... [--start N]      (make fuzz)

Kinds take turns, a batch of cases each, until the time is over. Prints the outcome of each wrong
case, by whose kind and number it can be run again, and how many of each kind were refused, done and
wrong. Exits with 1 if any was wrong."""

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from fuzz import all_kinds, run_cases, wrong_outcomes
from fuzz_inputs import make_inputs

LIMIT_S = 30  # per case, on a machine that may be busy
OVERDUE = "died (-14)"  # killed by its alarm; such a case is tried once more


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--only", action="append", metavar="KIND", choices=all_kinds())
    parser.add_argument("--start", type=int, default=1_000_000, help="the first number")
    parser.add_argument("--batch", type=int, default=400, help="cases of a kind in a process")
    asked = parser.parse_args()
    kinds, start, until = (
        asked.only or all_kinds(),
        asked.start,
        time.monotonic() + 60 * asked.minutes,
    )
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    with tempfile.TemporaryDirectory() as name:
        make_inputs(Path(name) / "inputs")
        while time.monotonic() < until:
            for kind in kinds:
                if time.monotonic() < until or not counts[kind]:
                    counts[kind] += run_batch(kind, range(start, start + asked.batch), Path(name))
            start += asked.batch
    for kind, of_kind in counts.items():
        print(
            f"{kind:18}"
            + "".join(f"{of_kind[end]:9} {end}" for end in ("refused", "done", "wrong"))
        )
    print(f"go on with --start {start}")
    return int(any(of_kind["wrong"] for of_kind in counts.values()))


def run_batch(kind: str, numbers: range, folder: Path) -> Counter[str]:
    """How many of these cases of a kind were refused, done and wrong."""
    inputs, work = folder / "inputs", folder / "work"
    outcomes = run_cases(inputs, work, {kind: numbers}, LIMIT_S)
    for _, late in [case for case, text in outcomes.items() if text.startswith(OVERDUE)]:
        outcomes |= run_cases(inputs, work, {kind: range(late, late + 1)}, LIMIT_S)
    wrong = wrong_outcomes(outcomes)
    for (_, number), text in wrong.items():
        print(f"{kind} {number}: {text}", file=sys.stderr, flush=True)
    return Counter("wrong" if case in wrong else text for case, text in outcomes.items())


if __name__ == "__main__":
    sys.exit(main())
