"""The AMX level on emulated tiles, so that a processor with AVX-512 VNNI but no AMX tests it too.

Emulation cannot show that the processor and its operating system behave like emulated_amx.h; the
probe checks that when the library is loaded."""

import platform
import shutil
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cpp_compiler import KERNELS, compiled

VNNI = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c", "-mavx512vnni"]
# Undefined behaviour traps (see test_sanitizers.py): without AMX only this test runs the level's
# code. Address checks are calls, which compile in two thirds of the time and run three times as
# long.
CALLS = "--param=asan-instrumentation-with-call-threshold=0"
SANITIZE = [
    "-fsanitize=address,undefined",
    "-fno-sanitize=null",
    "-fsanitize-undefined-trap-on-error",
    CALLS,
]
EMULATED = ["-include", Path(__file__).with_name("emulated_amx.h")]


def has_vnni() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "avx512_vnni" in cpuinfo.read_text()


pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or platform.machine() != "x86_64" or not has_vnni(),
    reason="needs g++ and AVX-512 VNNI",
)


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("amx")
    sources = {
        "amx": (Path(__file__).with_name("amx_products.cpp"), [*VNNI, *EMULATED, *SANITIZE]),
        "generic": (KERNELS / "rows_generic.cpp", []),
        # Linked with the sanitizer's allocator; its own code need not be instrumented.
        "driver": (Path(__file__).with_name("emulated_amx.cpp"), VNNI),
    }

    def compile_one(name: str) -> Path:
        source, flags = sources[name]
        return compiled(source, folder / f"{name}.o", *flags)

    with ThreadPoolExecutor() as pool:
        objects = [*pool.map(compile_one, sources)]
    subprocess.run(["g++", *SANITIZE, *objects, "-o", folder / "program"], check=True)
    return folder / "program"


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program, *arguments], capture_output=True, text=True, timeout=300, check=False
    )


def test_products_equal_those_of_the_generic_level_bit_for_bit(program):
    done = run(program)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "alike\n"


def test_one_wrong_product_is_found(program):
    done = run(program, "wrong")
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("differs")


@pytest.mark.parametrize(
    "what", ["unconfigured", "released", "reserved", "shape", "twice", "other"]
)
def test_a_misuse_of_tiles_ends_the_program(program, what):
    done = run(program, what)
    assert done.returncode == -signal.SIGABRT
    assert "emulated AMX: " in done.stderr


def test_correct_use_of_tiles_does_not_end_the_program(program):
    assert run(program, "well").returncode == 0
