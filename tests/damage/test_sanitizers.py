"""Tests of the C++ kernels, run with a library that the address and undefined-behaviour sanitizers
watch. Buffers of these tests are torch's: what lies behind their last value is no kernel's."""

import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cpp_compiler import KERNELS, compiled
from paths import ROOT, SEARCH_PATH

from hotsplit.runtime.kernels.cpu import library

# A null pointer needs no separate check: the address sanitizer reports the access. Undefined
# behaviour traps: this compiles in half the time that messages with line numbers take.
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize=null", "-pthread", "-fPIC"]
SANITIZE += ["-fsanitize-undefined-trap-on-error"]
OPTIONS = re.compile(r'(rows_\w+)\.cpp PROPERTIES COMPILE_OPTIONS\s+"([^"]+)"')
# dispatch.cpp never calls levels that the processor lacks; test_amx.py runs one
# of them on emulated instructions.
LACKING = '#include "kernels.h"\nconst Kernels kernels_{} = {{}};\n'
SHIFTED = 'extern "C" int shifted(int count) { return 1 << count; }\n'
# At the edges of blocks and tiles, of every kind and at every level; then steps of every family.
TESTS = """
    kernels/test_cpu_kernels.py::test_dot_rows
    kernels/test_cpu_kernels.py::test_accumulate_rows
    kernels/test_cpu_kernels.py::test_rows_may_be_strided
    kernels/test_cpu_kernels.py::test_packed_rows_are_the_chosen_ones
    kernels/test_cpu_kernels.py::test_unpack_rows
    kernels/test_grouped.py kernels/test_tiled.py kernels/test_grids.py
    step/test_native_step.py step/test_native_neurons.py
    cache/test_key_selection.py::test_a_token_reads_the_keys_of_the_reference
    families/test_families.py::test_rows_at_once_equal_single_steps
"""
# The sanitizers' own memory grows, so a bound on the process's would fail. The others read no more
# places than the rest, and take a third of the time.
LEFT_OUT = "not (no_more_memory or number_of_threads or long_contexts or dense_model_adds_groups)"

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or platform.machine() != "x86_64", reason="needs g++ on x86-64"
)


def sources(folder: Path) -> dict[Path, list[str]]:
    """The kernels' files with their flags; those of levels that are lacking define nothing."""
    flags = dict(OPTIONS.findall((KERNELS / "CMakeLists.txt").read_text()))
    assert len(flags) > 4
    found, usable = {}, [*library.usable_levels(), "grids"]  # which is no level of its own
    for source in sorted(KERNELS.glob("*.cpp")):
        level = source.stem.removeprefix("rows_")
        if source.stem in flags and level not in usable:
            own = folder / f"no_{level}.cpp"
            own.write_text(LACKING.format(level))
            found[own] = [f"-I{KERNELS}"]
        else:
            found[source] = flags[source.stem].split(";") if source.stem in flags else []
    (folder / "shifted.cpp").write_text(SHIFTED)
    return found | {folder / "shifted.cpp": []}


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory) -> Path:
    """The library; two files are compiled at a time, as CI has two cores."""
    folder = tmp_path_factory.mktemp("sanitized")

    def compile_one(source: Path, flags: list[str]) -> Path:
        return compiled(source, folder / f"{source.stem}.o", *SANITIZE, *flags)

    with ThreadPoolExecutor(2) as pool:
        objects = [*pool.map(compile_one, *zip(*sources(folder).items(), strict=True))]
    path = folder / "_cpu.so"
    subprocess.run(["g++", *SANITIZE, "-shared", *objects, "-o", path], check=True)
    return path


def ran(sanitized: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs a Python program in which the library is the sanitized one."""
    preloaded = [
        subprocess.run(
            ["g++", f"-print-file-name={name}"], check=True, capture_output=True, text=True
        ).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    own = {
        "LD_PRELOAD": ":".join(preloaded),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter frees little at its end
        "PYTHONPATH": SEARCH_PATH,
        "SANITIZED": str(sanitized),
    }
    command = [sys.executable, *words]
    return subprocess.run(
        command, env=os.environ | own, cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_no_kernel_reads_or_writes_out_of_bounds(sanitized):
    tests = [f"tests/{name}" for name in TESTS.split()]
    done = ran(sanitized, "-m", "pytest", "-q", "-x", "-p", "sanitized", "-k", LEFT_OUT, *tests)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


LOADS = """
import sanitized, torch
from hotsplit.runtime.kernels.cpu import library
l, w, x, y = library._lib, torch.zeros(3, 64), torch.zeros(64), torch.zeros(4)
def dot_rows(n):
    l.hs_dot_rows(0, w.data_ptr(), 256, n, 64, x.data_ptr(), 1, None, n, y.data_ptr())
dot_rows(3), l.shifted(3), print("right", flush=True)
"""


@pytest.mark.parametrize(
    "fault, ends, words",
    [
        ("dot_rows(4)", (1,), "heap-buffer-overflow"),
        ("l.shifted(40)", (-signal.SIGILL, -signal.SIGTRAP, -signal.SIGABRT), ""),
    ],
)
def test_the_sanitizers_find_planted_faults(sanitized, fault, ends, words):
    done = ran(sanitized, "-c", LOADS + fault)
    assert done.stdout == "right\n" and done.returncode in ends, (done.returncode, done.stderr)
    assert words in done.stderr
