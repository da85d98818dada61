"""The C++ kernels under the address and undefined-behaviour sanitizers, in a program of their own."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
KERNELS = ROOT / "runtime" / "kernels" / "cpu"
AVX512 = "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c".split()
SOURCES = {
    "dispatch": [],
    "probe": [],
    "thread_pool": [],
    "neurons": [],
    "step": [],
    "rows_generic": [],
    "rows_avx2": "-mavx2 -mfma -mf16c".split(),
    "rows_avx512": AVX512,
    "rows_avx512vnni": [*AVX512, "-mavx512vnni"],
    "rows_amx": [*AVX512, "-mavx512vnni", "-mamx-tile", "-mamx-int8"],
}
FLAGS = "-std=c++17 -O1 -g -w -ffp-contract=off -fno-sanitize-recover=all -pthread".split()
# Blocks of 18 and 34 bytes lie where they lie: their loads say so, and x86 takes them.
SANITIZE = ["-fsanitize=address,undefined"]

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or platform.machine() != "x86_64",
    reason="needs g++ on x86-64",
)


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sanitized")
    jobs = [
        subprocess.Popen(["g++", *FLAGS, *SANITIZE, *flags, "-c", source, "-o", folder / f"{n}.o"])
        for n, source, flags in [
            *((name, KERNELS / f"{name}.cpp", flags) for name, flags in SOURCES.items()),
            ("driver", ROOT / "tests" / "sanitized_kernels.cpp", []),
        ]
    ]
    assert not any(job.wait() for job in jobs)
    return sorted(folder.glob("*.o"))


def linked(objects, output):
    subprocess.run(["g++", *SANITIZE, "-pthread", *objects, "-o", output], check=True)
    return subprocess.run([output], capture_output=True, text=True, timeout=900, check=False)


def test_no_kernel_reads_or_writes_where_it_must_not(objects, tmp_path):
    done = linked(objects, tmp_path / "driver")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "generic: fine" in done.stdout


def test_the_sanitizer_sees_a_row_too_many(objects, tmp_path):
    """One more row than there is must end the program."""
    source = (ROOT / "tests" / "sanitized_kernels.cpp").read_text()
    right = "const uint8_t* w = weights(kind, A, D);"
    assert right in source
    source = source.replace(right, "const uint8_t* w = weights(kind, A > 1 ? A - 1 : A, D);")
    source = source.replace('"../runtime', f'"{ROOT}/runtime')
    (tmp_path / "wrong.cpp").write_text(source)
    wrong = tmp_path / "wrong.o"
    command = ["g++", *FLAGS, *SANITIZE, "-c", tmp_path / "wrong.cpp", "-o", wrong]
    subprocess.run(command, check=True)
    others = [path for path in objects if path.name != "driver.o"]
    done = linked([*others, wrong], tmp_path / "wrong")
    assert done.returncode != 0 and "heap-buffer-overflow" in done.stderr
