"""Runs cases one after another, in a process that may not survive them, and reports their
outcomes.

    import fuzz; fuzz.main() with arguments INPUTS WORK LIMIT_S KIND:START:STOP ...

A case is a kind and a number. The number is the seed of its damage, so a case is the same every
time. Kinds are those of fuzz_readers, whose files must be refused or read as valid ones; those
of fuzz_meaning, which must be refused; and `found`, the files of fuzz_corpus. INPUTS holds
valid files (see fuzz_inputs). The first line on stdout is `ready`. Each case has a line with
its kind, number and outcome. `refused` (a HotsplitError of one line, nothing left behind) and
`done` are right, everything else is wrong. A case that takes over LIMIT_S seconds or kills the
process has no line, and ends the output; one that takes over 1 GiB of memory ends in
MemoryError, or kills the process."""

import contextlib
import ctypes
import io
import os
import random
import re
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import forked
from fuzz_damage import another_value, mutated, spots_of
from fuzz_meaning import MEANINGS, misread
from fuzz_readers import KINDS, FuzzCase

from hotsplit.errors import HotsplitError

MEMORY_BYTES = 1 << 30
READY = "ready"  # the first line of a child, printed when it has read the undamaged inputs
MAX_LINE = 1000  # a refusal must have fewer characters
# KIND/NAME.refused and KIND/NAME.done: cases that once ended otherwise.
FOUND = sorted(path for path in (Path(__file__).parent / "fuzz_corpus").glob("*/*"))

# ------------------------------------------------------------------ cases


def damaged(inputs: Path, kind: str, number: int) -> tuple[str, bytes]:
    """The name and the content of the file of a case."""
    target = "config.json" if kind == "pt" and number % 8 == 0 else KINDS[kind].target
    path, rng = inputs / kind / target, random.Random(f"{kind} {number}")
    if KINDS[kind].is_values:
        return target, another_value(path.read_bytes(), rng)
    return target, mutated(path.read_bytes(), spots_of(path), rng)


def read_damaged(inputs: Path, kind: str, number: int, work: Path) -> str:
    return read_file(inputs, kind, *damaged(inputs, kind, number), work, number)


def read_file(
    inputs: Path, kind: str, target: str, content: bytes, work: Path, number: int = 0
) -> str:
    """Reads the folder of a kind with other content in one file; raises as the reader does."""
    folder, output = work / kind, work / "output"
    if not folder.exists():
        shutil.copytree(inputs / kind, folder)
    output.mkdir(exist_ok=True)
    suffix = ".out" if kind in ("profile", "merge") else ".gguf"
    try:
        (folder / target).write_bytes(content)
        KINDS[kind].read(
            FuzzCase(
                number=number,
                path=folder / KINDS[kind].target,
                inputs=inputs,
                output=output / f"out{suffix}",
            )
        )
        shutil.rmtree(output)
    finally:
        shutil.copy(inputs / kind / target, folder / target)
    return "done"


def replay(inputs: Path, kind: str, number: int, work: Path) -> str:
    """Reads a file of fuzz_corpus; its folder names its kind, its suffix the right outcome."""
    path = FOUND[number]
    kind = path.parent.name
    outcome = outcome_of(
        lambda: read_file(inputs, kind, KINDS[kind].target, path.read_bytes(), work), work
    )
    wanted = path.suffix[1:]
    return "done" if outcome == wanted else f"{outcome} where it must be {wanted}: {path.name}"


def misbehave(inputs: Path, kind: str, number: int, work: Path) -> str:
    """Wrong outcomes that the harness must catch: case 2 of each kind goes wrong, the others are
    refused."""
    if number == 2:
        if kind == "crash":
            ctypes.string_at(0)
        if kind == "hang":
            re.match(r"(a*)*b", "a" * 60)  # inside C, like a loop of a library
        if kind == "allocation":
            bytearray(MEMORY_BYTES + (64 << 20))
        if kind == "traceback":
            raise ValueError("not refused")
        if kind == "leftover":
            (work / "output").mkdir(exist_ok=True)
            (work / "output" / "out.gguf.partial").touch()
        if kind == "lines":
            raise HotsplitError("two\nlines")
        if kind == "surrogate":
            raise HotsplitError("\udcff")
        if kind == "length":
            raise HotsplitError("x" * MAX_LINE)
        if kind == "accepted":
            return "done where it must be refused"
    raise HotsplitError("refused")


def _is_unicode(message: str) -> bool:
    """False if it has surrogates, which cannot be printed."""
    try:
        message.encode()
    except UnicodeEncodeError:
        return False
    return True


def outcome_of(case: Callable[[], str], work: Path) -> str:
    try:
        outcome = case()
    except HotsplitError as error:
        message = str(error)
        is_line = "\n" not in message and len(message) < MAX_LINE and _is_unicode(message)
        outcome = "refused" if is_line else f"refused in no line: {message[:200]!r}"
    except BaseException as error:  # noqa: BLE001  # a harness reports everything
        at = error.__traceback__
        while at is not None and at.tb_next is not None:
            at = at.tb_next
        where = f"{at.tb_frame.f_code.co_filename}:{at.tb_lineno}" if at else "?"
        outcome = f"{type(error).__name__} at {where}: {str(error)[:100]!r}"
    left = sorted(path.name for path in (work / "output").glob("*"))
    shutil.rmtree(work / "output", ignore_errors=True)
    return f"left {left} after {outcome}" if left else outcome


def all_kinds() -> list[str]:
    return [*KINDS, *MEANINGS]


def runner_of(kind: str) -> Callable[[Path, str, int, Path], str]:
    if kind in KINDS:
        return read_damaged
    if kind in MEANINGS:
        return misread
    return replay if kind == "found" else misbehave


def warm_up(inputs: Path, kinds: list[str], work: Path) -> None:
    """Reads the undamaged inputs, so that a reader's imports do not count as a case's memory."""
    found = {path.parent.name for path in FOUND} if "found" in kinds else set[str]()
    for kind in {*kinds, *found}:
        of = MEANINGS[kind].kind if kind in MEANINGS else kind
        if of in KINDS:
            target = KINDS[of].target
            read_file(inputs, of, target, (inputs / of / target).read_bytes(), work)


def child(inputs: Path, limit_s: int, ranges: list[str], work: Path) -> None:
    with contextlib.redirect_stderr(io.StringIO()):
        warm_up(inputs, [text.split(":")[0] for text in ranges], work)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(READY, flush=True)
    for text in ranges:
        kind, start, stop = text.split(":")
        for number in range(int(start), int(stop)):
            signal.alarm(limit_s)  # the default action: the process ends, wherever it is
            with contextlib.redirect_stderr(io.StringIO()):
                outcome = outcome_of(partial(runner_of(kind), inputs, kind, number, work), work)
            signal.alarm(0)
            print(kind, number, outcome.replace("\n", " "), flush=True)


# ------------------------------------------------------------------ the parent's side

ENVIRONMENT = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
Cases = dict[str, range]  # the numbers of each kind
Outcomes = dict[tuple[str, int], str]


def run_cases(inputs: Path, work: Path, cases: Cases, limit_s: int = 5) -> Outcomes:
    """The outcome of every case; a process that dies is replaced by another."""
    outcomes: Outcomes = {}
    while len(outcomes) < sum(map(len, cases.values())):
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        missing = [
            (k, i) for k, numbers in cases.items() for i in numbers if (k, i) not in outcomes
        ]
        firsts = dict(reversed(missing))
        ranges = [f"{kind}:{firsts[kind]}:{cases[kind].stop}" for kind in cases if kind in firsts]
        done = forked.run_python(
            "import fuzz; fuzz.main()",
            inputs,
            work,
            limit_s,
            *ranges,
            server="fuzz",
            timeout=3600.0,
            env={**os.environ, **ENVIRONMENT},
        )
        first, *lines = done.stdout.splitlines() or [""]
        if first != READY:
            raise RuntimeError(f"the whole inputs cannot be read: {done.stderr[-2000:]}")
        found = [line.split(" ", 2) for line in lines]
        outcomes |= {(kind, int(number)): outcome for kind, number, outcome in found}
        left = [case for case in missing if case not in outcomes]
        if left:
            outcomes[left[0]] = f"died ({done.returncode}): {done.stderr[-300:]}"
    return outcomes


def wrong_outcomes(outcomes: Outcomes) -> Outcomes:
    return {case: text for case, text in outcomes.items() if text not in ("refused", "done")}


def main() -> None:
    child(Path(sys.argv[1]), int(sys.argv[3]), sys.argv[4:], Path(sys.argv[2]))
