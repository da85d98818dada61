"""The C++ kernels under the address and undefined-behaviour sanitizers, in a separate program."""

import platform
import shutil
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cpp_compiler import KERNELS, compiled

from hotsplit.runtime.kernels.cpu import library

AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
PLAIN = "dispatch probe thread_pool neurons operation step row_copies step_server rows_generic"
SOURCES = dict.fromkeys(PLAIN.split(), list[str]()) | {
    "rows_avx2": AVX2,
    "rows_avxvnni": [*AVX2, "-mavxvnni"],
    "rows_avx512": AVX512,
    "rows_avx512vnni": [*AVX512, "-mavx512vnni"],
    "rows_avx512bf16": [*AVX512, "-mavx512vnni", "-mavx512bf16"],
    "rows_amx": [*AVX512, "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-int8"],
}
# A null pointer needs no separate check: the address sanitizer reports the access.
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize=null", "-pthread"]
# Undefined behaviour traps: this compiles in half the time that messages with line numbers take. A
# program that fails is compiled again with such messages.
TRAPS = ["-fsanitize-undefined-trap-on-error"]
SAYS = ["-g", "-fno-sanitize-recover=all"]
# dispatch.cpp never calls levels that the processor lacks; test_amx.py and test_avxvnni.py run two
# of them on emulated instructions.
LACKING = '#include "kernels.h"\nconst Kernels kernels_{} = {{}};\n'

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or platform.machine() != "x86_64", reason="needs g++ on x86-64"
)


def all_compiled(folder: Path, how: list[str]) -> list[Path]:
    """Compiles the kernels and their driver, two files at a time, as CI has two cores."""
    sources = {name: (KERNELS / f"{name}.cpp", flags) for name, flags in SOURCES.items()}
    usable = library.usable_levels()
    for name in sources if usable else ():
        level = name.removeprefix("rows_")
        if level != name and level not in usable:
            (folder / f"no_{level}.cpp").write_text(LACKING.format(level))
            sources[name] = (folder / f"no_{level}.cpp", [f"-I{KERNELS}"])
    sources["driver"] = (Path(__file__).with_name("sanitized_kernels.cpp"), [])

    def compile_one(name: str) -> Path:
        source, flags = sources[name]
        return compiled(source, folder / f"{name}.o", *SANITIZE, *how, *flags)

    with ThreadPoolExecutor(2) as pool:
        return [*pool.map(compile_one, sources)]


def linked(objects: list[Path], output: Path) -> Path:
    subprocess.run(["g++", *SANITIZE, *objects, "-o", output], check=True)
    return output


def ran(driver: Path, *fault: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [driver, *fault], capture_output=True, text=True, timeout=900, check=False
    )


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sanitized")
    return linked(all_compiled(folder, TRAPS), folder / "driver")


def said_in_full(folder: Path) -> str:
    """Compiles the program again with messages and line numbers, runs it, returns its output."""
    done = ran(linked(all_compiled(folder, SAYS), folder / "says"))
    return done.stdout + done.stderr


def test_no_kernel_reads_or_writes_out_of_bounds(driver, tmp_path):
    done = ran(driver)
    assert done.returncode == 0, said_in_full(tmp_path)
    levels = library.usable_levels()
    assert sorted(done.stdout.split()[::2]) == sorted(f"{level}:" for level in levels)


@pytest.mark.parametrize(
    "fault, is_noticed",
    [
        ("a row too many", lambda done: "heap-buffer-overflow" in done.stderr),
        (
            "a shift too far",
            lambda done: done.returncode in (-signal.SIGILL, -signal.SIGTRAP, -signal.SIGABRT),
        ),
    ],
    ids=["a row too many", "a shift too far"],
)
def test_the_sanitizers_find_planted_faults(driver, fault, is_noticed):
    done = ran(driver, fault)
    assert done.returncode != 0 and is_noticed(done), (done.returncode, done.stderr)
