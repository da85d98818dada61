"""Runs commands with faults: signals, a full disk, a limit on the size of a file, no write access,
an input that is truncated.

    PYTHONPATH=tests python tests/damage/faults.py [--cases N] [--seed N] [--only COMMAND]

Each case forks a process that runs a command, and one fault strikes at a random moment: after some
time, at a file event, or when some bytes have been written. Afterwards every output must be the old
or the new one (`content_of` leaves out what differs from run to run), and inputs must be unchanged
unless one was truncated. Besides state to resume from, nothing may be left over, except temporary
files (.partial, .old) that the process could not remove: after SIGKILL or a truncated mapping, or
in a read-only folder. stderr must have no traceback, and if the command exits with an error, its
last line must say why. Then the same command runs without a fault: it must give the outputs of a
run that never had one, and leave nothing over. Prints a line for each case that went wrong, then a
JSON object with counts. The full disk is emulated by a preloaded library (full_disk.c), which needs
a C compiler."""

import argparse
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import full_disk
from fault_commands import COMMANDS, WritingCommand, content_of, make_inputs, prepare

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a process that forks must not have threads of torch
NOBODY = 65534
OLD = b"what was there before\n"
SIGNALS = {
    "kill": signal.SIGKILL,
    "term": signal.SIGTERM,
    "int": signal.SIGINT,
    "hup": signal.SIGHUP,
}
LIMITS = ("too large", "disk full")
FAULTS = (*SIGNALS, *LIMITS, "read-only", "input cut")
LEFT_BY_KILL = re.compile(r".*\.[0-9a-f]{8}\.(partial|old)$")
LIMIT_S = 60
CUT = 74  # the exit code for a mapped input that was truncated


@dataclass(frozen=True, kw_only=True)
class FaultlessRun:
    """A run without a fault."""

    outputs: dict[str, object]
    seconds: float
    num_events: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class InjectedFault:
    kind: str
    seconds: float | None = None  # until it strikes
    event: int | None = None  # the file event at which it strikes; 0: after `count` bytes
    count: int = (
        0  # bytes that may be written (to one file: "too large"), or that are left of the input
    )
    input: str = ""

    def __str__(self) -> str:
        if self.kind in LIMITS:
            return f"{self.kind} after {self.count} bytes"
        at = f"at event {self.event}" if self.seconds is None else f"after {self.seconds:.3f} s"
        return f"{self.kind} {at}" + (f" to {self.count} bytes: {self.input}" if self.input else "")


class FaultyRun:
    """Folders of inputs and outputs of one command."""

    def __init__(
        self, command: WritingCommand, inputs: Path, folder: Path, *, has_old: bool
    ) -> None:
        self.command, self.folder = command, folder
        self.input, self.output = folder / "in", folder / "out"
        self.output.mkdir(parents=True)
        self.input.mkdir()
        self.whole = inputs
        self.restore()
        if has_old:
            for name in command.outputs:
                self._make_old(self.output / name)
        self.old = self.found()
        self.stderr = ""

    def restore(self) -> None:
        """Restores the inputs, and the output folder's permissions."""
        self.output.chmod(0o755)
        for name in self.command.inputs:
            source, target = self.whole / name, self.input / name
            (shutil.copytree if source.is_dir() else shutil.copy2)(
                source, target, **({"dirs_exist_ok": True} if source.is_dir() else {})
            )

    def _make_old(self, path: Path) -> None:
        if path.suffix or path.name in ("p", "x"):
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(OLD)
        else:
            path.mkdir()
            name = "activation_7.pt" if path.name == "activation" else "config.json"
            (path / name).write_bytes(OLD)

    def found(self) -> dict[str, object]:
        return {name: content_of(self.output / name) for name in self.command.outputs}

    def left(self) -> list[str]:
        """Names in the output folder that are neither outputs nor state, and partial files inside
        outputs."""
        wanted = {name.split("/")[0] for name in (*self.command.outputs, *self.command.state)}
        found = [path.name for path in self.output.iterdir() if path.name not in wanted]
        inner = [
            p
            for name in wanted
            for p in (self.output / name).rglob("*")
            if name not in self.command.state and p.name.endswith(".partial")
        ]
        return sorted(found + [path.name for path in inner])

    def run(self, fault: InjectedFault | None) -> tuple[int, int, float]:
        """(exit code, negative for a signal; file events, 0 unless `main` returned; seconds)."""
        began = time.monotonic()
        sys.stdout.flush()
        (told, tell), (error, errors) = os.pipe(), os.pipe()
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS.values())
        child = os.fork()
        if child == 0:
            _run_child(self, fault, tell, errors)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS.values())
        os.close(tell)
        os.close(errors)
        status = _wait(child, fault, began)
        seconds = time.monotonic() - began
        with os.fdopen(told, "rb") as count, os.fdopen(error, errors="backslashreplace") as pipe:
            self.stderr = pipe.read()
            return os.waitstatus_to_exitcode(status), int(count.read() or 0), seconds


def _wait(child: int, fault: InjectedFault | None, began: float) -> int:
    sends_at = None
    if fault is not None and fault.seconds is not None:
        sends_at = began + fault.seconds
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        now = time.monotonic()
        if sends_at is not None and now >= sends_at:
            assert fault is not None
            os.kill(child, SIGNALS[fault.kind])
            sends_at = None
        if now > began + LIMIT_S:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return 99 << 8  # hangs
        time.sleep(0.001)


def _run_child(case: FaultyRun, fault: InjectedFault | None, tell: int, errors: int) -> None:
    """Runs the command, and never returns."""
    code = 71
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS.values())
        null = os.open(os.devnull, os.O_RDWR)
        for file, target in ((null, 0), (null, 1), (errors, 2)):
            os.dup2(file, target)
        sys.argv = ["hotsplit", *case.command.argv(case.input, case.output)]
        counter = _arm(case, fault)
        from hotsplit.cli import main

        code = main()
        sys.stderr.flush()
        os.write(tell, str(counter[0]).encode())
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else 1
    except BaseException:  # noqa: BLE001  # the parent reads stderr
        traceback.print_exc()
    finally:
        os._exit(code)


def _arm(case: FaultyRun, fault: InjectedFault | None) -> list[int]:
    """Sets up the fault in this process; returns a counter of file events: audit events that name
    the case's files, or a descriptor."""
    counter, place, is_busy = [0], str(case.folder), [False]

    def strike() -> None:
        assert fault is not None
        if fault.kind in SIGNALS:
            os.kill(os.getpid(), SIGNALS[fault.kind])
        elif fault.kind == "read-only":
            case.output.chmod(0o555)
        elif fault.kind == "input cut":
            os.truncate(case.input / fault.input, fault.count)

    def hear(event: str, arguments: tuple) -> None:
        is_file = event == "open" or event.startswith(("os.", "fcntl.", "mmap."))
        if not is_file or is_busy[0] or event == "os.kill":
            return
        is_descriptor = isinstance(next(iter(arguments), None), int)
        if not is_descriptor and not any(str(each).startswith(place) for each in arguments):
            return
        counter[0] += 1
        if fault is not None and counter[0] == fault.event:
            is_busy[0] = True
            strike()
            is_busy[0] = False

    if fault is not None and fault.kind == "read-only" and os.geteuid() == 0:
        for path in (case.folder, *case.folder.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    if fault is not None and fault.kind == "too large":
        resource.setrlimit(resource.RLIMIT_FSIZE, (fault.count, resource.RLIM_INFINITY))
    if fault is not None and fault.kind == "disk full":
        full_disk.leave(fault.count)
    sys.addaudithook(hear)
    return counter


# ---- cases --------------------------------------------------------------------------------------


def reference_of(command: WritingCommand, inputs: Path, folder: Path) -> FaultlessRun:
    """Runs the command twice without a fault; both runs must give the same outputs."""
    found = []
    for _ in range(2):
        shutil.rmtree(folder, ignore_errors=True)
        case = FaultyRun(command, inputs, folder, has_old=False)
        code, num_events, seconds = case.run(None)
        assert code == 0, (command.name, code, case.stderr)
        assert not case.left(), case.left()
        found.append(case.found())
    first, second = found
    differ = [name for name in first if first[name] != second[name]]
    assert not differ, f"{command.name}: two runs differ in {differ}"
    assert None not in first.values(), first
    files = [path for path in case.output.rglob("*") if path.is_file()]
    return FaultlessRun(
        outputs=first,
        seconds=seconds,
        num_events=num_events,
        num_bytes=sum(path.stat().st_size for path in files),
    )


def fault_of(
    kind: str, command: WritingCommand, reference: FaultlessRun, inputs: Path, rng: random.Random
) -> InjectedFault:
    event = rng.randint(1, max(1, reference.num_events))
    if kind in SIGNALS and rng.random() < 0.4:
        return InjectedFault(kind=kind, seconds=rng.uniform(0, 1.05) * reference.seconds)
    if kind in LIMITS:
        most = reference.num_bytes + 4096
        return InjectedFault(kind=kind, count=int(most * rng.random() ** 2), event=0)
    if kind == "input cut":
        files = [path for name in command.inputs for path in _files(inputs / name)]
        chosen = rng.choice(files)
        size = chosen.stat().st_size
        left = rng.choice((0, rng.randrange(size), rng.randrange(size), size - 1))
        name = str(chosen.relative_to(inputs))
        return InjectedFault(kind=kind, event=event, count=left, input=name)
    return InjectedFault(kind=kind, event=event)


def _files(path: Path) -> list[Path]:
    return [p for p in (path, *path.rglob("*")) if p.is_file() and p.stat().st_size]


def codes_of(kind: str) -> set[int]:
    if kind in SIGNALS:
        number = SIGNALS[kind]
        return {0, -number} if kind == "kill" else {0, -number, 128 + number}
    return {0, 1, CUT} if kind == "input cut" else {0, 1}


def wrong_with(
    case: FaultyRun, reference: FaultlessRun, fault: InjectedFault, code: int
) -> list[str]:
    """What went wrong: the exit code, the message, outputs, inputs or what is left over."""
    wrong, found, error = [], case.found(), case.stderr
    if code not in codes_of(fault.kind):
        wrong.append(f"exit code {code}")
    lines = [line for line in error.splitlines() if line.strip()]
    if "Traceback" in error or "Exception ignored" in error:
        wrong.append("a traceback")
    if (
        code not in (0, -SIGNALS["kill"])
        and code >= 0
        and not (lines[-1:] and ("hotsplit" in lines[-1] or (code > 1 and lines[-1][0] == "[")))
    ):
        wrong.append("no line says why")
    # A signal's default action ends the process before the command handles signals (all outputs are
    # old) or after it has finished (all are new).
    is_whole = code == 0 or (code < 0 and fault.kind != "kill" and found != case.old)
    for name, new in reference.outputs.items():
        allowed = [new] if is_whole else [new, case.old[name]]
        if found[name] not in allowed:
            wrong.append(
                f"{name} is neither old nor new" if found[name] is not None else f"{name} is gone"
            )
    left = case.left()
    # Nothing can be removed from a read-only folder.
    if code in (-SIGNALS["kill"], CUT) or fault.kind == "read-only":
        left = [name for name in left if not LEFT_BY_KILL.match(name)]
    if left:
        wrong.append(f"left {left}")
    if fault.kind != "input cut" and any(
        content_of(case.input / name) != content_of(case.whole / name)
        for name in case.command.inputs
    ):
        wrong.append("an input changed")
    if wrong and lines:
        wrong.append(f"said {lines[-3:]}")
    return wrong


def wrong_after(case: FaultyRun, reference: FaultlessRun) -> list[str]:
    """Runs the same command again, without a fault; returns what went wrong."""
    case.restore()
    code, _, _ = case.run(None)
    wrong = [] if code == 0 else [f"then exit code {code}: {case.stderr[-300:]}"]
    found = case.found()
    wrong += [
        f"then {name} differs" for name, new in reference.outputs.items() if found[name] != new
    ]
    left = case.left() + [name for name in case.command.state if (case.output / name).exists()]
    return wrong + ([f"then left {left}"] if left else [])


def run_cases(num_cases: int, seed: int, only: str | None = None) -> tuple[Counter, list[str]]:
    """(number of cases by fault and exit code, a line for each case that went wrong)."""
    counts: Counter = Counter()
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        work = Path(name)
        work.chmod(0o755)
        make_inputs(work / "inputs")
        prepare()
        commands = [c for c in COMMANDS if only is None or c.name == only]
        kinds = usable_faults()
        references: dict[str, FaultlessRun] = {}
        for number in range(num_cases):
            rng = random.Random(f"{seed} {number}")
            command = commands[number % len(commands)]
            if command.name not in references:
                references[command.name] = reference_of(command, work / "inputs", work / "case")
                shutil.rmtree(work / "case")
            kind = rng.choice([k for k in kinds if k != "input cut" or command.inputs])
            reference = references[command.name]
            fault = fault_of(kind, command, reference, work / "inputs", rng)
            has_old = command.replaces and rng.random() < 0.5
            case = FaultyRun(command, work / "inputs", work / "case", has_old=has_old)
            code, _, _ = case.run(fault)
            wrong = wrong_with(case, reference, fault, code)
            wrong += wrong_after(case, reference)
            counts[f"{kind}: {code}"] += 1
            if wrong:
                line = f"case {number}, {command.name}, {fault}, code {code}: {'; '.join(wrong)}"
                failures.append(line)
                print(line, flush=True)
            shutil.rmtree(case.folder)
    return counts, failures


def usable_faults() -> list[str]:
    """The faults that this machine supports; prints the others."""
    kinds = [*FAULTS]
    if not full_disk.is_loaded():
        kinds.remove("disk full")
        print("skipped: disk full (no C compiler)")
    if os.geteuid() == 0 and not _nobody_reads():
        kinds.remove("read-only")
        print("skipped: read-only (root writes everywhere; the user nobody cannot read this)")
    return kinds


def _nobody_reads() -> bool:
    """True if the user nobody can read this file and torch."""
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            import torch

            places = (Path(__file__), Path(torch.__file__))
            os._exit(0 if all(os.access(path, os.R_OK) for path in places) else 1)
        except OSError:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=[command.name for command in COMMANDS])
    options = parser.parse_args()
    full_disk.preload()
    began = time.monotonic()
    counts, failures = run_cases(options.cases, options.seed, options.only)
    full_disk.remove()
    report = {
        "cases": options.cases,
        "failures": len(failures),
        "ends": dict(sorted(counts.items())),
        "seconds": round(time.monotonic() - began),
    }
    print(json.dumps(report))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
