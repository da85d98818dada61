"""`sparkinfer doctor` finds what is broken: torch, Triton, the compiler, the library, the level, a
GPU; and its report has no names and paths."""

import getpass
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
from failing_parts import KEY, fake_parts, halved, with_kernel

from sparkinfer.cli import main
from sparkinfer.device_checks import CheckBook, DeviceKey, Verdict
from sparkinfer.doctor import examine as examining
from sparkinfer.doctor import gpu, machine, probe_gpu
from sparkinfer.doctor.children import Child, Result
from sparkinfer.doctor.finding import HIDDEN, ok, report_of, scrubbed
from sparkinfer.runtime.check import parts as device_parts
from sparkinfer.runtime.kernels.cpu import library

pytestmark = pytest.mark.skipif(not library.is_available(), reason="the C++ kernels are not built")
PROGRAM = "import sys; from sparkinfer.cli import main; sys.exit(main())"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARKINFER_CACHE", str(tmp_path / "cache"))


class Doctor:
    """A run of the command in a process: its code, findings by what they are about, and processor
    seconds, of which a machine at rest needs no more by the clock."""

    def __init__(self, *arguments, **environment):
        began = os.times()
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, "doctor", "--json", *arguments],
            capture_output=True, text=True, timeout=60,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )  # fmt: skip
        ended = os.times()
        self.seconds = ended.children_user - began.children_user
        self.code = done.returncode
        assert "Traceback" not in done.stderr, done.stderr
        self.found = json.loads(done.stdout)["findings"]

    def of(self, about):
        return [each for each in self.found if each["about"] == about]

    def wrong(self):
        return [each["about"] for each in self.found if each["state"] == "wrong"]


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """Puts modules before the installed ones, in every process."""
    folder = tmp_path / "broken"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder))

    def put(name, text):
        (folder / f"{name}.py").write_text(text)

    return put


@pytest.fixture
def light(broken):
    """Without torch and Triton, the command takes a second."""
    for name in ("torch", "triton"):
        broken(name, f"raise ModuleNotFoundError(\"No module named '{name}'\", name='{name}')")


def test_on_this_machine_nothing_is_wrong(tmp_path):
    report = tmp_path / "report.txt"
    found = Doctor("--report", str(report))
    assert found.code == 0 and not found.wrong() and found.seconds < 10
    abouts = [each["about"] for each in found.found]
    assert abouts[:6] == ["versions", "processor", "levels", "kernels", "memory", "cache"]
    assert {"torch", "triton", "driver"} <= set(abouts)
    (kernels,) = found.of("kernels")
    assert "agree with numpy" in kernels["text"]
    assert library.level() in found.of("levels")[0]["text"] or "SPARKINFER_CPU_LEVEL" in os.environ
    text = report.read_text()
    assert len(text.splitlines()) == len(found.found) + 2
    assert str(Path.home()) not in text and "/" not in text.replace("with/without", "")


def test_where_torch_and_triton_are_missing_and_there_is_no_compiler(light):
    """A container without a compiler, from which torch was removed, looks like this."""
    found = Doctor(PATH="/nonexistent", CC="")
    assert found.code == 1 and found.wrong() == ["torch"]
    assert "is not installed" in found.of("torch")[0]["text"]
    assert "pip install torch" in found.of("torch")[0]["advice"]
    assert "is not installed: torch computes its kernels" in found.of("triton")[0]["text"]
    assert "agree with numpy" in found.of("kernels")[0]["text"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "raise OSError('libcudart.so.12: cannot open shared object file')",
            "cannot be imported: ",
        ),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "crashed by SIGILL (at import"),
    ],
)
def test_torch_that_fails_or_crashes(broken, text, said):
    broken("torch", text)
    (finding,) = gpu.torch(Child("sparkinfer.doctor.probe_torch").result())
    assert finding.state == "wrong" and said in finding.text


def test_a_lying_level_is_named_and_does_not_stop_it(light):
    missing = [name for name in library.LEVELS if name not in library.usable_levels()]
    for name in [*missing[:1], "nothing"]:
        found = Doctor(SPARKINFER_CPU_LEVEL=name)
        assert found.code == 1 and found.wrong() == ["levels", "torch"]
        line = found.of("levels")[-1]
        assert f"SPARKINFER_CPU_LEVEL='{name}'" in line["text"] and "unset" in line["advice"]
        assert "agree with numpy" in found.of("kernels")[0]["text"]


def test_a_level_that_is_forced_and_works_is_said():
    done = {"is_built": True, "level": "avx2", "usable": ["avx2", "generic"], "faulty": "avx512",
            "forced": "generic", "wrong": [], "num_tried": 20, "num_threads": 2}  # fmt: skip
    lines = [each.line for each in machine.processor(Result(done=done))]
    assert any(
        "SPARKINFER_CPU_LEVEL=generic is set and used -> unset it for avx2" in x for x in lines
    )
    assert any("advertises avx512, whose instructions fail" in line for line in lines)
    wrong = machine.processor(Result(done=done | {"wrong": ["avx2, q4_0: products are off by 1"]}))
    assert wrong[-1].state == "wrong" and "SPARKINFER_CPU_LEVEL=generic" in wrong[-1].advice


LIBRARY = """
import importlib.util as util
was = util.find_spec
def find_spec(name, package=None):
    if name != "sparkinfer.runtime._cpu":
        return was(name, package)
    return SPEC
util.find_spec = find_spec
"""


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("None", "the C++ library is missing"),
        ("type('Spec', (), {'origin': __file__})", "OSError: sitecustomize.py: invalid ELF header"),
        ("__import__('os').kill(__import__('os').getpid(), 4)", "crashed by SIGILL"),
    ],
)
def test_a_library_that_is_missing_broken_or_of_another_processor(broken, spec, said):
    broken("sitecustomize", LIBRARY.replace("SPEC", spec))
    result = Child("sparkinfer.doctor.probe_kernels").result()
    (finding,) = [each for each in machine.processor(result) if each.about == "kernels"]
    assert finding.state == "wrong" and said in scrubbed(finding.text), finding.text
    assert "install the package again" in finding.advice


def test_a_kernel_that_computes_wrongly_is_found(monkeypatch, capsys):
    from sparkinfer.doctor import probe_kernels

    was = probe_kernels._rows

    def rows(lib, kind, random):
        data, exact = was(lib, kind, random)
        return data, exact * (1.0 + 0.1 * (kind == "q4_0"))

    monkeypatch.setattr(probe_kernels, "_rows", rows)
    monkeypatch.setattr(probe_kernels, "leave_no_core", lambda: None)
    level = library.level()
    try:
        probe_kernels.main()
    finally:
        library.set_level(level)
    done = json.loads(capsys.readouterr().out.splitlines()[-1])["done"]
    assert {line.split(":")[0].split(", ")[1] for line in done["wrong"]} == {"q4_0"}
    assert len(done["wrong"]) == 3 * len(library.usable_levels())


def test_a_child_that_hangs_is_ended(broken, monkeypatch):
    broken("torch", "import time; time.sleep(60)")
    result = Child("sparkinfer.doctor.probe_torch", limit_s=1.0).result()
    (finding,) = gpu.torch(result)
    assert finding.state == "wrong" and finding.text.endswith(
        "took longer than 1 s (at import torch)"
    )


# ---- torch, drivers and GPUs as children report them ---------------------------------------------

CARD = {"index": 0, "name": "Some Card", "free": 6 << 30, "total": 8 << 30, "capability": "8.9"}
DRIVER = {"cuda": "12.8", "driver": "570.1", "gpus": [CARD]}
TORCH = {"version": "2.13.0", "cuda": "12.8", "is_right": True, "num_threads": 1, "gpus": [CARD],
         "runtime_error": None}  # fmt: skip


def lines(findings):
    return "\n".join(each.line for each in findings)


@pytest.mark.parametrize(
    ("driver", "torch", "said"),
    [
        (DRIVER, TORCH, "ok    driver: 570.1, CUDA up to 12.8"),
        ({"cuda": None, "driver": None, "gpus": []}, TORCH | {"gpus": []}, "note  driver: none"),
        (
            DRIVER,
            TORCH | {"gpus": [], "cuda": None},
            "it is built for the CPU -> install torch for",
        ),
        (
            DRIVER | {"cuda": "12.2"},
            TORCH | {"gpus": []},
            "older than torch's CUDA 12.8: update it",
        ),
        (DRIVER, TORCH | {"gpus": [], "gpu_error": "no device"}, "sees no GPU: no device -> check"),
        (DRIVER, {"error": "ImportError: x", "is_missing": False}, "ok    driver"),
    ],
)
def test_drivers(driver, torch, said):
    assert said in lines(gpu.driver(Result(done=driver), Result(done=torch)))


def test_a_library_of_another_version(broken):
    """After an update without a build, a function is missing."""
    assert lines(gpu.torch(Result(done=TORCH))) == "ok    torch: 2.13.0, for CUDA 12.8"
    broken("sitecustomize", "import ctypes\nclass CDLL(ctypes.CDLL):\n"
           "    def __getattr__(self, name):\n"
           "        if name == 'spark_neurons': raise AttributeError('undefined symbol: ' + name)\n"
           "        return super().__getattr__(name)\n"
           "ctypes.CDLL = CDLL\n")  # fmt: skip
    broken("torch", "class Tensor:\n    def __matmul__(self, other): return self\n"
           "    def __eq__(self, other): return self\n    def all(self): return True\n"
           "ones = lambda *shape: Tensor()\n__version__ = '0'\nclass version: cuda = None\n"
           "get_num_threads = lambda: 1\n"
           "float32 = float16 = bfloat16 = uint8 = int32 = dtype = None\n"
           "class cuda: is_available = staticmethod(lambda: False)\n"
           "cuda.device_count = staticmethod(lambda: 0)\n")  # fmt: skip
    found = gpu.torch(Child("sparkinfer.doctor.probe_torch").result())
    assert [each.state for each in found] == ["ok", "wrong"]
    assert "undefined symbol: spark_neurons" in found[1].text and "make build" in found[1].advice


@pytest.mark.parametrize(
    ("capability", "said"),
    [("8.9", "ok    GPU 0: Some Card, compute capability 8.9, 6.00 GiB free of 8.00 GiB"),
     ("7.5", "note  GPU 0"), ("6.1", "use --device cpu"), ("12.0", "ok    GPU 0")],
)  # fmt: skip
def test_gpus(capability, said):
    seen = TORCH | {"gpus": [CARD | {"capability": capability}]}
    assert said in lines(gpu.gpus(Result(done=seen), Result(done=DRIVER)))
    broken = Result(done=None, how="crashed by SIGSEGV")
    driver = DRIVER | {"gpus": seen["gpus"]}
    assert said in lines(gpu.gpus(broken, Result(done=driver)))  # only what the driver reports


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "ok    triton: 3.6.0"),
        ({"error": "ImportError: x", "is_missing": False}, "triton: fails: ImportError: x"),
        ({"error": "", "is_missing": True}, "triton: is not installed"),
        ({"compiler": None}, "a C compiler not found"),
        ({"compiler": None, "has_headers": False}, "a C compiler and Python's headers not found"),
        ({"can_write": False}, "its cache cannot be written, so every load compiles"),
    ],
)
def test_triton(changes, said):
    done = {"version": "3.6.0", "num_files": 5, "num_bytes": 99, "can_write": True,
            "compiler": "gcc", "has_headers": True} | changes  # fmt: skip
    for has_gpu in (True, False):
        found = gpu.triton(Result(done=done), has_gpu=has_gpu)
        assert said in lines(found)
        states = {each.state for each in found if each.state != "ok"}
        assert states == ({"wrong" if has_gpu else "note"} if changes else set())


# ---- checks of GPUs ------------------------------------------------------------------------------


def current(**changes):
    values = {"torch": version("torch"), "package": version("sparkinfer")} | changes
    return DeviceKey(**{**vars(KEY), **values})


def test_what_failed_in_a_check_is_named(light):
    with CheckBook(current()) as book:
        book.finish(Verdict(part="device", why="", seconds=1.0))
        book.finish(Verdict(part="kernel dot f16[64]x1", why="out is off by 1", seconds=1.0))
        book.finish(Verdict(part="kernel attend 4", why="out is off by 1", seconds=1.0))
        book.finish(Verdict(part="graph 0123456789ab", why="RuntimeError: no", seconds=1.0))
    found = Doctor()
    assert found.code == 1 and len(found.wrong()) == 3
    texts = [each["text"] for each in found.of("check of Fake GPU, number 0")]
    assert texts[0].startswith("1 parts work") and len(texts) == 3
    assert texts[1:] == ["kernels attend, dot: out is off by 1", "graph: RuntimeError: no"]
    assert not Doctor("--again").of("check of Fake GPU, number 0")


def test_a_check_of_other_versions_is_no_fault():
    with CheckBook(current(torch="1.0")) as book:
        book.finish(Verdict(part="device", why="bad", seconds=1.0))
        book.start("graph x")
    found = gpu.checks(examining.stored_checks(), has_gpu=True, unfinished=None)
    assert {each.state for each in found} == {"note"}
    assert "graph x: a check of it runs, or ended the process" in lines(found)


def test_a_gpu_without_results_is_checked_with_a_small_model(monkeypatch):
    """In this process and on the CPU; the parts are those that a plan's first load checks."""
    parts = fake_parts(key=current(), kernels=with_kernel("predict", halved))
    monkeypatch.setattr(device_parts, "parts_of", lambda device: parts)
    monkeypatch.setattr("sparkinfer.runtime.weights.gpu_products._replaced", set())
    probe_gpu.check("cpu")
    found = gpu.checks(examining.stored_checks(), has_gpu=True, unfinished=None)
    assert [each.state for each in found] == ["ok", "wrong"] and "kernel predict" in found[1].text
    names = {name.split()[0] for name in examining.stored_checks()[0].verdicts}
    assert names == {"device", "pinned", "kernel", "products", "host", "step"}  # no graph: torch
    crashed = Result(done=None, how="crashed by SIGSEGV", at="a small model on cuda:0")
    assert gpu.checks([], has_gpu=True, unfinished=crashed)[0].state == "wrong"


def test_only_gpus_without_results_are_checked(monkeypatch):
    started = []

    class Started:
        def __init__(self, *arguments, **options):
            started.append(arguments)

        def result(self):
            return Result(done={})

        def end(self):
            pass

    monkeypatch.setattr(examining, "Child", Started)
    assert examining._check([]) is None
    with CheckBook(current()) as book:
        book.finish(Verdict(part="device", why="", seconds=1.0))
    assert examining._check([0]) is None and not started
    examining._check([0, 1])
    assert started == [("sparkinfer.doctor.probe_gpu", "cuda:1")]


# ---- the report ----------------------------------------------------------------------------------


def test_a_report_has_no_names_and_no_paths(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/Mary Ann")
    monkeypatch.setenv("USER", "maryann")
    monkeypatch.setattr(socket, "gethostname", lambda: "marys-box.example.org")
    monkeypatch.setattr(getpass, "getuser", lambda: "maryann")
    text = scrubbed(
        "OSError: /home/Mary Ann/env/lib/libcudart.so.12: no; C:\\Users\\me\\x.gguf, ~/models/secret,"
        " ./own/thing on marys-box as maryann; 3/4 of it, q4_0[64]/16x1, and/or"
    )
    for word in ("Mary", "maryann", "marys", "Users", "secret", "own", "home"):
        assert word not in text, text
    assert "libcudart.so.12: no" in text and "3/4 of it, q4_0[64]/16x1, and/or" in text
    assert report_of([ok("a", f"b {tmp_path}/x y")]).splitlines()[2] == f"ok    a: b {HIDDEN} y"


def test_a_report_is_not_overwritten(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(examining, "examine", lambda again: pytest.fail("too late"))
    (tmp_path / "r").write_text("mine")
    assert main(["doctor", "--report", str(tmp_path / "r")]) == 1
    assert "exists already" in capsys.readouterr().err


NVML = """
#include <string.h>
typedef struct { unsigned long long total, free, used; } Memory;
int nvmlInit_v2(void) { return 0; }
int nvmlSystemGetDriverVersion(char* text, unsigned n) { strncpy(text, "570.1", n); return 0; }
int nvmlDeviceGetCount_v2(unsigned* n) { *n = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void** h) { *h = h; return 0; }
int nvmlDeviceGetName(void* h, char* text, unsigned n) { strncpy(text, "Some Card", n); return 0; }
int nvmlDeviceGetMemoryInfo(void* h, Memory* m) {
    m->total = 8ull << 30; m->free = 6ull << 30; m->used = 2ull << 30; return 0; }
int nvmlDeviceGetCudaComputeCapability(void* h, int* a, int* b) { *a = 8; *b = 9; return 0; }
int cuDriverGetVersion(int* n) { *n = 12080; return 0; }
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no compiler")
def test_a_driver_is_asked_without_torch(tmp_path, monkeypatch):
    (tmp_path / "nvml.c").write_text(NVML)
    for name in ("libnvidia-ml.so.1", "libcuda.so.1"):
        command = ["gcc", "-shared", "-fPIC", "-o", tmp_path / name, tmp_path / "nvml.c"]
        subprocess.run(command, check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    result = Child("sparkinfer.doctor.probe_driver").result()
    assert result.done == DRIVER


def test_an_interrupt_ends_it_with_one_line(broken):
    broken("torch", "import time; time.sleep(60)")
    command = [sys.executable, "-c", PROGRAM, "doctor"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 143 and len(error.splitlines()) == 1, error
