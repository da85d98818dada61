"""The level avxvnni on emulated instructions, so that a processor with AVX2 but no AVX-VNNI tests
it too.

The kernels are compared as by the library when it is loaded: each type and operation with the
generic level's."""

import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cpp_compiler import KERNELS, compiled

AVX2 = ["-mavx2", "-mfma", "-mf16c"]


def has_avx2() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "avx2" in cpuinfo.read_text()


pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or platform.machine() != "x86_64" or not has_avx2(),
    reason="needs g++ and AVX2",
)


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("avxvnni")
    sources = {
        "avxvnni": (
            KERNELS / "rows_avxvnni.cpp",
            [*AVX2, "-include", Path(__file__).with_name("emulated_avxvnni.h")],
        ),
        "generic": (KERNELS / "rows_generic.cpp", []),
        "probe": (KERNELS / "probe.cpp", []),
        "driver": (Path(__file__).with_name("emulated_avxvnni.cpp"), AVX2),
    }

    def compile_one(name: str) -> Path:
        source, flags = sources[name]
        return compiled(source, folder / f"{name}.o", *flags)

    with ThreadPoolExecutor(2) as pool:
        objects = [*pool.map(compile_one, sources)]
    subprocess.run(["g++", *objects, "-o", folder / "program"], check=True)
    return folder / "program"


def test_kernels_agree_with_those_of_the_generic_level(program):
    assert subprocess.run([program], timeout=120, check=False).returncode == 0


def test_a_wrong_sum_is_found(program):
    assert subprocess.run([program, "wrong"], timeout=120, check=False).returncode == 1
