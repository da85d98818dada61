"""Runs the tests that need a CUDA device, and prints a short table of results.

    python tests/gpu/run.py [--output build/test-gpu] [--minutes 5] [--processes N]

Each file, or part of one, runs in its own process, several at a time, because compiling kernels
takes most of the time and one core. Exits with 1 unless each of them ended in time, passed a test
and failed none; those of the sanitizer may be stopped early, or pass none. OUTPUT/test-gpu.json and
a log for each process are written as it goes, so that an interrupted run leaves its results."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
from gpu_ready import PACKAGES, reason  # noqa: E402

from hotsplit.system.processors import processors  # noqa: E402

# A line of pytest -v.
OUTCOME = re.compile(r"^\S+::.* (PASSED|FAILED|SKIPPED|ERROR)\b", re.MULTILINE)
WHY = re.compile(r"^(?:FAILED|ERROR|SKIPPED) .*", re.MULTILINE)
ALONE = ("test_memory",)  # fills the card: runs when the others are done
SLOW = ("test_sanitizer",)  # runs first; may not work on a machine, or not finish
# Files of many tests, in parts that compile different kernels: by words in the tests' names. Each
# has one more part, of all other tests.
PARTS = {
    "test_step": ("f32 or q8_0", "f16", "q4_0 or q4_k", "q5_k or q6_k"),
    "test_gpu_kernels": ("dot or embed or unpack",),
    "test_gpu_neurons": ("gate", "down"),
}
SLOW_SHARE = 0.6  # of the time, after which slow jobs make way for those that run alone
MOST_PROCESSES = 8
MOST_LINES = 20


@dataclass(kw_only=True)
class Job:
    """One file of tests, or a part of one. `state` is waiting, running, ok, FAILED or out of
    time."""

    name: str
    arguments: list[str]
    state: str = "waiting"
    began: float = 0.0  # seconds after the start of the run
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)

    @property
    def is_alone(self) -> bool:
        return self.name in ALONE

    @property
    def is_fine(self) -> bool:
        """True if it ended in time, passed a test and failed none; if slow, if it failed none."""
        if self.name in SLOW:
            return self.state != "FAILED"
        return self.state == "ok" and self.counts.get("passed", 0) > 0


class Runner:
    def __init__(self, jobs: list[Job], folder: Path, seconds: float, processes: int) -> None:
        self.jobs, self.folder, self.processes = jobs, folder, processes
        # Idle threads of torch spin, so each process gets only as many as its share of the cores.
        self.threads = str(max(1, processors().usable // processes))
        self.began, self.seconds = time.monotonic(), seconds
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def passed(self) -> float:
        """Seconds since the start of the run."""
        return time.monotonic() - self.began

    def run(self) -> None:
        try:
            while self.passed < self.seconds and self._is_something_left():
                while (job := self._next()) is not None:
                    self._start(job)
                for job in self.jobs:
                    self._look(job)
                self._make_way()
                time.sleep(0.2)
        finally:  # even after an interrupt, nothing keeps running
            for job in self.jobs:
                self._stop(job)
            self.save()

    def _is_something_left(self) -> bool:
        return any(job.state in ("waiting", "running") for job in self.jobs)

    def _make_way(self) -> None:
        """Ends slow jobs after SLOW_SHARE of the time, if only jobs that run alone are waiting."""
        is_alone_next = not any(job.state == "waiting" and not job.is_alone for job in self.jobs)
        is_waited_for = any(job.state == "waiting" for job in self.jobs)
        if is_alone_next and is_waited_for and self.passed > SLOW_SHARE * self.seconds:
            for job in self.jobs:
                if job.name in SLOW:
                    self._stop(job)

    def _next(self) -> Job | None:
        """The job that may start now: one that runs alone only when nothing else is left to run."""
        waiting = [job for job in self.jobs if job.state == "waiting"]
        together = [job for job in waiting if not job.is_alone]
        limit = self.processes if together else 1
        if not waiting or len(self.running) >= limit:
            return None
        return (together or waiting)[0]

    def _start(self, job: Job) -> None:
        command = [sys.executable, "-m", "pytest", "-v", "-rfEs", "-p", "no:cacheprovider"]
        with self._log(job).open("wb") as log:
            self.running[job.name] = subprocess.Popen(
                [*command, *job.arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={
                    "OMP_NUM_THREADS": self.threads,
                    **os.environ,
                    "PYTHONUNBUFFERED": "1",
                    "COLUMNS": "200",
                },
                start_new_session=True,
            )
        job.state, job.began = "running", self.passed

    def _look(self, job: Job) -> None:
        process = self.running.get(job.name)
        if process is None or process.poll() is None:
            return
        del self.running[job.name]
        self._finish(job, "ok" if process.returncode == 0 else "FAILED")

    def _finish(self, job: Job, state: str) -> None:
        text = self._log(job).read_text(errors="replace")
        job.state, job.seconds = state, round(self.passed - job.began, 1)
        job.counts = dict(Counter(name.lower() for name in OUTCOME.findall(text)))
        job.reasons = WHY.findall(text)
        if state == "FAILED" and not job.reasons:
            job.reasons = [f"{job.name}: {line}" for line in text.splitlines()[-3:]]
        print(
            f"[{self.passed:4.0f} s] {job.name}: {state} {job.counts}", file=sys.stderr, flush=True
        )
        self.save()

    def _stop(self, job: Job) -> None:
        """Kills a running job and the programs that it started; a waiting one will not start."""
        process = self.running.pop(job.name, None)
        if process is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self._finish(job, "out of time")
        elif job.state == "waiting":
            job.state = "out of time"

    def save(self) -> None:
        content = {
            "benchmark": "test-gpu",
            "seconds": round(self.passed, 1),
            "jobs": [asdict(job) for job in self.jobs],
        }
        path = self.folder / "test-gpu.json"
        path.with_suffix(".partial").write_text(json.dumps(content, indent=1) + "\n")
        path.with_suffix(".partial").replace(path)

    def _log(self, job: Job) -> Path:
        return self.folder / f"{job.name}.log"


def jobs_of(device: str) -> list[Job]:
    """All jobs of a device; on the CPU, only the files of this folder."""
    jobs = [job for path in sorted(HERE.glob("test_*.py")) for job in _of(path, "--device", device)]
    if device == "cuda":
        for path in sorted((ROOT / "tests" / "kernels").glob("test_gpu_*.py")):
            jobs += _of(path)
        jobs += _of(ROOT / "tests" / "measure" / "test_calibrate.py", "-m", "gpu")
    return sorted(jobs, key=lambda job: (job.is_alone, job.name not in SLOW))


def _of(path: Path, *options: str) -> list[Job]:
    """One job, or one for each part."""
    parts = PARTS.get(path.stem)
    if parts is None:
        return [Job(name=path.stem, arguments=[*options, str(path)])]
    rest = f"not ({' or '.join(parts)})"
    return [
        Job(name=f"{path.stem}-{number}", arguments=[*options, "-k", part, str(path)])
        for number, part in enumerate((*parts, rest))
    ]


def chosen(jobs: list[Job], only: str | None, without: str | None) -> list[Job]:
    """Jobs whose names contain a word of the one list and none of the other."""
    left_out = without.split(",") if without else []
    return [
        job
        for job in jobs
        if any(word in job.name for word in (only or "").split(","))
        and not any(word in job.name for word in left_out)
    ]


def resume(jobs: list[Job], folder: Path) -> None:
    """Takes over the results of jobs that ended in an earlier run."""
    path = folder / "test-gpu.json"
    known = json.loads(path.read_text())["jobs"] if path.exists() else []
    ended = {each["name"]: each for each in known if each["state"] in ("ok", "FAILED")}
    for job in jobs:
        for name, value in ended.get(job.name, {}).items():
            if name != "arguments":
                setattr(job, name, value)


def table(jobs: list[Job]) -> str:
    lines = [f"{'tests':28} {'passed':>7} {'failed':>7} {'skipped':>7} {'seconds':>8}"]
    for job in jobs:
        counts = job.counts
        failed = counts.get("failed", 0) + counts.get("error", 0)
        lines.append(
            f"{job.name:28} {counts.get('passed', 0):7} {failed:7} {counts.get('skipped', 0):7}"
            f" {job.seconds:8.0f}  {job.state}"
        )
    reasons = [reason for job in jobs for reason in job.reasons]
    more = [f"... and {len(reasons) - MOST_LINES} more"] if len(reasons) > MOST_LINES else []
    return "\n".join([line[:200] for line in reasons[:MOST_LINES]] + more + lines)


def command_line() -> argparse.ArgumentParser:
    listed = "one of these, separated by commas"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "test-gpu")
    parser.add_argument("--minutes", type=float, default=5.0)
    processes = max(1, min(MOST_PROCESSES, processors().usable // 2))
    parser.add_argument("--processes", type=int, default=processes)
    parser.add_argument(
        "--device", default="cuda", choices=("cuda", "cpu"), help="cpu: a trial run"
    )
    parser.add_argument("--only", help=f"only files whose names contain {listed}")
    parser.add_argument("--without", help=f"no files whose names contain {listed}")
    parser.add_argument("--resume", action="store_true", help="repeat no file that ended in OUTPUT")
    return parser


def main() -> int:
    asked = command_line().parse_args()
    packages = PACKAGES.split(",") if asked.device == "cuda" else ["torch", "hotsplit"]
    missing = reason(packages, needs_kernels=True, needs_device=asked.device == "cuda")
    if missing:
        sys.exit(f"test-gpu: {missing}")
    jobs = chosen(jobs_of(asked.device), asked.only, asked.without)
    if asked.resume:
        resume(jobs, asked.output)
    runner = Runner(jobs, asked.output, 60 * asked.minutes, asked.processes)
    runner.run()
    print(table(jobs))
    is_fine = bool(jobs) and all(job.is_fine for job in jobs)
    print(f"test-gpu: {'passed' if is_fine else 'FAILED'} (logs in {asked.output})")
    return 0 if is_fine else 1


if __name__ == "__main__":
    sys.exit(main())
