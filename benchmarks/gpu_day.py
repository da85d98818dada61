"""All that a card for ten minutes should be used for, the most important first.

    python benchmarks/gpu_day.py FOLDER [--seconds 600] [--rival build/gpu-rival] [--models build]
        [--only PART,...] [--again PART,...] [--output FILE.json]

Each part is a program of its own with a limit of time; one that hangs is ended, and one that
crashes goes on behind the point of its crash, or is given up. FOLDER/gpu-day.json is saved after
each part. A second call with the same FOLDER goes on where the first ended: parts that ended are
not repeated, unless --again names them, and a part that was cut off keeps its own results so far.
At the end, one page of text is printed and written to FOLDER/gpu-day.txt, and the JSON, with the
results of all parts, is copied to benchmarks/results.

The parts, in their order: handover (gpu_handover.py), tests (the most important of `make
test-gpu`), trained (gpu_trained.py), experts (gpu_experts.py), plans (gpu.py --short), prompts
(gpu_prompts.py), other-tests, bench (gpu.py)."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu_sections import HUNG, page_of

HERE = Path(__file__).parent
ROOT = HERE.parent
TESTS = "test_memory,test_prompt,test_step"
MODELS = ("smollm2/q8_0.gguf", "qwen2.5/qwen2.5-0.5b-instruct-q4_k_m.gguf")
DRIVER = Path("/proc/driver/nvidia/gpus")
LEAST_SECONDS = 20.0  # with less time left, no part is started
END_SECONDS = 5.0  # for the page
MOST_STARTS = 4  # of a part whose program crashes
MOST_LINES = 40  # of a part on the page
ENDED = ("ok", "FAILED", "out of time")


@dataclass(frozen=True, kw_only=True)
class DayPart:
    """A program and its limit. `{seconds}` and `{minutes}` in its command are what it has; its
    results, if they are JSON, are in `result`."""

    name: str
    command: tuple[str, ...]
    most_s: float
    result: Path


class Stopped(Exception):
    """SIGINT or SIGTERM."""


def parts_of(folder: Path, models: Path, rival: Path | None) -> list[DayPart]:
    def part(name: str, most_s: float, program: str, *options: str, file: str) -> DayPart:
        command = (sys.executable, str(ROOT / program), *options)
        return DayPart(name=name, command=command, most_s=most_s, result=folder / name / file)

    def output(name: str, file: str = "") -> tuple[str, str]:
        return "--output", str(folder / name / file)

    beside = ("--rival", str(rival)) if rival else ()
    minutes, seconds = ("--minutes", "{minutes}"), ("--seconds", "{seconds}")
    models_there = [str(models / name) for name in MODELS]
    file, tests, bench = "results.json", "tests/gpu/run.py", "benchmarks/gpu.py"
    return [
        part(
            "handover",
            75,
            "benchmarks/gpu_handover.py",
            *seconds,
            *output("handover", file),
            file=file,
        ),
        part(
            "tests",
            150,
            tests,
            "--only",
            TESTS,
            "--resume",
            *minutes,
            *output("tests"),
            file="test-gpu.json",
        ),
        part(
            "trained",
            170,
            "benchmarks/gpu_trained.py",
            *models_there,
            *seconds,
            *output("trained", file),
            file=file,
        ),
        part(
            "experts",
            420,
            "benchmarks/gpu_experts.py",
            *seconds,
            *beside,
            *output("experts", file),
            file=file,
        ),
        part(
            "plans",
            100,
            bench,
            str(folder / "plans"),
            "--short",
            "--rounds",
            "3",
            *minutes,
            *beside,
            file="gpu.json",
        ),
        part(
            "prompts",
            110,
            "benchmarks/gpu_prompts.py",
            *seconds,
            *beside,
            *output("prompts", file),
            file=file,
        ),
        part(
            "other-tests",
            150,
            tests,
            "--without",
            TESTS,
            "--resume",
            *minutes,
            *output("other-tests"),
            file="test-gpu.json",
        ),
        part("bench", 480, bench, str(folder / "bench"), *minutes, *beside, file="gpu.json"),
    ]


class Day:
    """The parts' states, `content["parts"]` by name: state, seconds, text (what was printed last)
    and result."""

    def __init__(self, folder: Path, parts: list[DayPart], seconds: float) -> None:
        self.folder, self.parts = folder, parts
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "gpu-day.json"
        self.content: dict[str, Any] = {"benchmark": "gpu-day", "parts": {}}
        if self.path.exists():
            self.content = json.loads(self.path.read_text())
        self.content |= {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "device": device(),
        }
        self.deadline = time.monotonic() + seconds - END_SECONDS

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def run(self, wanted: set[str], again: set[str]) -> None:
        for name in again:
            self.content["parts"].pop(name, None)
        for part in self.parts:
            known = self.content["parts"].get(part.name, {})
            is_next = part.name in wanted and known.get("state") not in ENDED
            if is_next and self.seconds_left >= LEAST_SECONDS:
                self._run(part)

    def _run(self, part: DayPart) -> None:
        """Starts the program again after a crash, as long as it has time."""
        limit_s, began = min(part.most_s, self.seconds_left), time.monotonic()
        is_own_limit, state = limit_s == part.most_s, "cut off"
        part.result.parent.mkdir(parents=True, exist_ok=True)
        try:
            for number in range(MOST_STARTS):
                left_s = limit_s - (time.monotonic() - began)
                if number and left_s < LEAST_SECONDS:
                    break
                say(f"{part.name}: at most {left_s:.0f} s")
                state = "cut off"  # by a signal, unless it ends
                status = self._process(part, left_s)
                if status == 0:
                    state = "ok"
                elif is_own_limit:  # else the day's end may be the reason: the next call repeats it
                    state = "out of time" if status is None else "FAILED"
                if status is None or 0 <= status < HUNG:
                    break
        finally:
            self._store(part, state, time.monotonic() - began)

    def _process(self, part: DayPart, seconds: float) -> int | None:
        """The program's exit status; None if it did not end in time. Nothing that it started keeps
        running."""
        figures = {"seconds": f"{max(1, seconds - 5):.0f}", "minutes": f"{(seconds - 8) / 60:.2f}"}
        command = [word.format(**figures) for word in part.command]
        with self._log(part).open("wb") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=self._log(part, "err").open("ab"),
                cwd=ROOT,
                start_new_session=True,
            )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):  # all of it has ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _store(self, part: DayPart, state: str, seconds: float) -> None:
        earlier = self.content["parts"].get(part.name, {}).get("seconds", 0.0)
        self.content["parts"][part.name] = {
            "state": state,
            "seconds": round(earlier + seconds, 1),
            "text": self._log(part).read_text(errors="replace"),
            "errors": self._log(part, "err").read_text(errors="replace")[-2000:],
            "result": json.loads(part.result.read_text()) if part.result.exists() else None,
        }
        say(f"{part.name}: {state}, {seconds:.0f} s")
        self.save()

    def save(self) -> None:
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.content, indent=1) + "\n")
        partial.replace(self.path)

    def page(self) -> str:
        head = f"gpu-day on {self.content['device']}, commit {self.content['commit']}"
        lines = [f"{head}, {self.content['time']}"]
        known = self.content["parts"]
        for part in self.parts:
            found = known.get(part.name, {"state": "not started: no time left", "text": ""})
            seconds = f", {found['seconds']:.0f} s" if "seconds" in found else ""
            lines += ["", f"== {part.name}: {found['state']}{seconds}"]
            text = [line.rstrip() for line in text_of_part(found).splitlines()]
            lines += [line for line in text[-MOST_LINES:] if not line.startswith("{")]
            if found["state"] == "FAILED" and not text:
                lines += found["errors"].splitlines()[-3:]
        left = [
            part.name for part in self.parts if known.get(part.name, {}).get("state") not in ENDED
        ]
        if left:
            lines += ["", f"left for a second call: {', '.join(left)}"]
        return "\n".join(lines)

    def _log(self, part: DayPart, ending: str = "log") -> Path:
        return self.folder / part.name / f"{part.name}.{ending}"


def text_of_part(found: dict[str, Any]) -> str:
    """What the program printed at its end or, if it was cut off, what it had measured."""
    sections = (found.get("result") or {}).get("sections")
    if found["text"] or not sections:
        return str(found["text"])
    return page_of(found["result"], list(sections))


def commit() -> str:
    """The first digits of the commit, or "unknown" in a tree without one."""
    done = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return done.stdout.strip() or "unknown"


def device() -> str:
    """The name of the first GPU, without making a context on it."""
    for path in sorted(DRIVER.glob("*/information")):
        if found := re.search(r"^Model:\s*(.+)$", path.read_text(), re.MULTILINE):
            return found[1].strip()
    return "unknown device"


def say(line: str) -> None:
    print(f"gpu-day: {line}", file=sys.stderr, flush=True)


def command_line() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found.add_argument("folder", type=Path, help="for results, logs and models (30 GB)")
    found.add_argument("--seconds", type=float, default=600.0, help="for all parts")
    found.add_argument("--rival", type=Path, help="folder built by gpu_rival.sh; else no rival")
    found.add_argument("--models", type=Path, default=ROOT / "build")
    found.add_argument("--only", help="parts, separated by commas")
    found.add_argument("--again", default="", help="parts to repeat, separated by commas")
    found.add_argument("--output", type=Path, help="copy of the JSON, else in benchmarks/results")
    return found


def main() -> int:
    """Returns 0 if every wanted part is ok."""
    asked = command_line().parse_args()
    parts = parts_of(asked.folder, asked.models, asked.rival)
    names = [part.name for part in parts]
    wanted = set(asked.only.split(",")) if asked.only else set(names)
    again = set(asked.again.split(",")) - {""}
    if unknown := sorted((wanted | again) - set(names)):
        sys.exit(f"gpu-day: no part {', '.join(unknown)}; there are {', '.join(names)}")
    signal.signal(signal.SIGTERM, stop)
    day = Day(asked.folder, parts, asked.seconds)
    try:
        day.run(wanted, again)
    except (KeyboardInterrupt, Stopped):
        say("interrupted; a second call goes on")
    page = day.page()
    (asked.folder / "gpu-day.txt").write_text(page + "\n")
    slug = re.sub(r"[^a-z0-9]+", "-", day.content["device"].lower()).strip("-")
    output = asked.output or HERE / "results" / f"gpu-day-{slug}.json"
    output.write_text(json.dumps(day.content, indent=1) + "\n")
    print(page)
    print(json.dumps({"benchmark": "gpu-day", "json": str(output)}))
    states = [day.content["parts"].get(name, {}).get("state") for name in wanted]
    return 0 if all(state == "ok" for state in states) else 1


def stop(number: int, frame: object) -> None:
    raise Stopped


if __name__ == "__main__":
    sys.exit(main())
