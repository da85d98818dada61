"""Runs kernels under NVIDIA's compute-sanitizer, which finds out-of-bounds accesses and races in
shared memory.

Kernels are much slower under it, so only a few of their tests run. Where the tool is missing or
does not work (it needs the driver's debugging interface), the test is skipped with the reason,
which `run.py` repeats above its table."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parent.parent.parent
TESTS = [
    f"tests/kernels/test_gpu_{name}"
    for name in (
        "kernels.py::test_dot[q4_0_planar-1]",
        "kernels.py::test_dot[q6_k_planar-3]",
        "kernels.py::test_unpack[q6_k_planar]",
        "neurons.py::test_gate_up[q4_0_planar-1]",
        "neurons.py::test_down[q4_0_planar-True-True]",
        "attention.py::test_add_norm[96-True]",
        "attention.py::test_attend_within_a_window[128-65]",
        "rows.py::test_attend_to_blocks[None-8-dtype2]",
    )
]
SECONDS = 100
ERROR = 86  # the exit code of a run in which the tool found something
HAZARD = re.compile(
    r"Race reported between (?P<one>\w+) access at (?P<first>\S+).*\n"
    r".*and (?P<other>\w+) access at (?P<second>\S+)"
)
# Reads one value, 1 GiB after the start of a tensor of 4 MiB.
BAD = """
import torch, triton, triton.language as tl
@triton.jit
def read(source, target):
    tl.store(target, tl.load(source + (1 << 28)))
x, y = torch.ones(1 << 20, device="cuda"), torch.ones(1, device="cuda")
read[(1,)](x, y)
torch.cuda.synchronize()
"""
GOOD = "import torch; torch.ones(8, device='cuda').add_(1).sum().item()"


def sanitized(*arguments, tool="memcheck"):
    """(exit code, output) of a Python under the tool; the code is None if it took too long."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(ERROR), sys.executable]
    tool_process = subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        # Each tensor gets an allocation of its own; otherwise memory past its end would be torch's.
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )
    try:
        output, _ = tool_process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        kill_with_children(tool_process.pid)
        tool_process.communicate()
        return None, f"compute-sanitizer took more than {SECONDS} s"
    return tool_process.returncode, output


def kill_with_children(pid):
    """Kills a process and all below it, since the tool leaves its Python running. They stay in the
    process group of this test, which `run.py` kills when its time is over."""
    children = [
        int(child)
        for listed in Path(f"/proc/{pid}/task").glob("*/children")
        for child in listed.read_text().split()
    ]
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    for child in children:
        kill_with_children(child)


def test_a_killed_process_leaves_no_children():
    sleeps = "import time; time.sleep(100)"
    starts = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {sleeps!r}]);"
    starts += "print(p.pid, flush=True); p.wait()"
    parent = subprocess.Popen([sys.executable, "-c", starts], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    os.kill(child, 0)
    kill_with_children(parent.pid)
    assert parent.wait(10) == -signal.SIGKILL
    for _ in range(100):
        status = Path(f"/proc/{child}/status")
        if not status.exists() or "zombie" in status.read_text():
            break
        time.sleep(0.1)
    else:
        raise AssertionError(f"process {child} still runs")


@pytest.fixture(scope="module")
def working(tmp_path_factory):
    """Skips unless memcheck passes a correct program and finds the error of a faulty one here."""
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("no compute-sanitizer on the PATH")
    bad = tmp_path_factory.mktemp("bad") / "bad.py"  # Triton reads a kernel's source from its file
    bad.write_text(BAD)
    code, output = sanitized("-c", GOOD)
    if code != 0:
        pytest.skip(f"compute-sanitizer does not work here: {output.strip()[-150:]}")
    code, output = sanitized(bad)
    if code is None:
        pytest.skip(output)
    if code != ERROR:
        pytest.skip(f"compute-sanitizer misses an error made on purpose (exit code {code})")


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_kernels_are_clean(cuda, working, tool):
    code, output = sanitized("-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS, tool=tool)
    if code is None:
        pytest.skip(output)
    if tool == "racecheck" and code == ERROR:
        found, others = races(output)
        assert found and not others, output[-3000:]
        return
    assert code == 0, output[-3000:]


def races(output):
    """(hazards that racecheck counts, those that are races). Triton lets all threads of a sum store
    it, by one instruction; nothing else may be written twice (tests/ptx/races.py)."""
    counted = re.search(r"RACECHECK SUMMARY: (\d+) hazards? displayed", output)
    others = [
        pair.groups()
        for pair in HAZARD.finditer(output)
        if pair["first"] != pair["second"] or {pair["one"], pair["other"]} != {"Write"}
    ]
    if counted is None or int(counted[1]) != len(HAZARD.findall(output)) or "passed" not in output:
        others.append(output[-200:])  # not what this understands
    return int(counted[1]) if counted else 0, others


SUMS = """
========= COMPUTE-SANITIZER
..========= Error: Race reported between Write access at _dot+0x300 in blocks.py:249
=========     and Write access at _dot+0x300 in blocks.py:249 [9 hazards]
8 passed in 7.53s
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


@pytest.mark.parametrize(
    "before, after, is_race",
    [
        ("", "", False),
        ("and Write", "and Read", True),
        ("and Write access at _dot+0x300", "and Write access at _dot+0x310", True),
        (": 1 hazard", ": 2 hazard", True),
        ("8 passed", "8 failed", True),
    ],
)
def test_only_sums_stored_by_all_threads_are_no_race(before, after, is_race):
    _, others = races(SUMS.replace(before, after))
    assert bool(others) == is_race
