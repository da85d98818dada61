"""What `hotsplit doctor` says about torch, drivers, GPUs and the results of their checks."""

import dataclasses
import shutil
import subprocess

import pytest
from failing_parts import fake_parts, halved, with_kernel
from test_doctor import Doctor, broken, cache, current, light  # noqa: F401

from hotsplit.artifacts.device_checks import CheckBook, Verdict
from hotsplit.doctor import examine as examining
from hotsplit.doctor import gpu
from hotsplit.doctor.children import Child, Result
from hotsplit.doctor.probes import probe_gpu
from hotsplit.runtime.check import parts as device_parts
from hotsplit.runtime.kernels.cpu import library

pytestmark = pytest.mark.skipif(not library.is_available(), reason="the C++ kernels are not built")

# ---- torch, drivers and GPUs as children report them ---------------------------------------------

CARD = {"index": 0, "name": "Some Card", "free": 6 << 30, "total": 8 << 30, "capability": "8.9"}
DRIVER = {"cuda": "12.8", "driver": "570.1", "gpus": [CARD]}
TORCH = {"version": "2.13.0", "cuda": "12.8", "is_right": True, "gpus": [CARD],
         "runtime_error": None}  # fmt: skip


def lines(findings):
    return "\n".join(each.line for each in findings)


@pytest.mark.parametrize(
    ("driver", "torch", "said"),
    [
        (DRIVER, TORCH, "ok    driver: 570.1, CUDA up to 12.8"),
        (
            {"cuda": None, "driver": None, "gpus": []},
            TORCH | {"gpus": []},
            "note  driver: no NVIDIA driver",
        ),
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


def test_a_library_of_another_version_is_reported(broken):  # noqa: F811
    """After an update without a build, a function is missing."""
    assert lines(gpu.torch(Result(done=TORCH))) == "ok    torch: 2.13.0, for CUDA 12.8"
    broken("sitecustomize", "import ctypes\nclass CDLL(ctypes.CDLL):\n"
           "    def __getattr__(self, name):\n"
           "        if name == 'hs_neurons': raise AttributeError('undefined symbol: ' + name)\n"
           "        return super().__getattr__(name)\n"
           "ctypes.CDLL = CDLL\n")  # fmt: skip
    broken("torch", "class Tensor:\n    def __matmul__(self, other): return self\n"
           "    def __eq__(self, other): return self\n    def all(self): return True\n"
           "ones = lambda *shape: Tensor()\n__version__ = '0'\nclass version: cuda = None\n"
           "float32 = float16 = bfloat16 = uint8 = int32 = dtype = None\n"
           "class cuda: is_available = staticmethod(lambda: False)\n"
           "get_num_threads = lambda: 1\ncuda.device_count = staticmethod(lambda: 0)\n")  # fmt: skip
    found = gpu.torch(Child("torch").result())
    assert [each.state for each in found] == ["ok", "wrong"]
    assert "undefined symbol: hs_neurons" in found[1].text and "make build" in found[1].advice


@pytest.mark.parametrize(
    ("capability", "said"),
    [("8.9", "ok    GPU 0: Some Card, compute capability 8.9, 6.00 GiB free of 8.00 GiB"),
     ("7.5", "note  GPU 0"), ("6.1", "use --device cpu"), ("12.0", "ok    GPU 0")],
)  # fmt: skip
def test_gpus(capability, said):
    found = TORCH | {"gpus": [CARD | {"capability": capability}]}
    assert said in lines(gpu.gpus(Result(done=found), Result(done=DRIVER)))
    crashed = Result(done=None, how="crashed by SIGSEGV")
    driver = DRIVER | {"gpus": found["gpus"]}
    assert said in lines(gpu.gpus(crashed, Result(done=driver)))  # only what the driver reports


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
def test_the_driver_is_queried_without_torch(tmp_path, monkeypatch):
    (tmp_path / "nvml.c").write_text(NVML)
    for name in ("libnvidia-ml.so.1", "libcuda.so.1"):
        command = ["gcc", "-shared", "-fPIC", "-o", tmp_path / name, tmp_path / "nvml.c"]
        subprocess.run(command, check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    result = Child("driver").result()
    assert result.done == DRIVER


# ---- checks of GPUs ------------------------------------------------------------------------------


def test_parts_that_failed_a_check_are_named(light):  # noqa: F811
    with CheckBook(current()) as book:
        book.finish(Verdict(part="device", why="", seconds=1.0))
        book.finish(Verdict(part="kernel dot f16[64]x1", why="out is off by 1", seconds=1.0))
        book.finish(Verdict(part="kernel attend 4", why="out is off by 1", seconds=1.0))
        book.finish(Verdict(part="graph 0123456789ab", why="RuntimeError: no", seconds=1.0))
    found = Doctor()
    assert found.code == 1 and len(found.wrong()) == 3
    texts = [each["text"] for each in found.of("check of Fake GPU, number 0")]
    assert texts[0].startswith("1 part works with ") and len(texts) == 3
    assert texts[1:] == ["kernels attend, dot: out is off by 1", "graph: RuntimeError: no"]
    assert not Doctor("--again").of("check of Fake GPU, number 0")


def test_a_check_of_other_versions_is_only_a_note():
    with CheckBook(current(torch="1.0")) as book:
        book.finish(Verdict(part="device", why="bad", seconds=1.0))
        book.start("graph x")
    found = gpu.checks(examining.stored_checks(), has_gpu=True, unfinished=None)
    assert {each.state for each in found} == {"note"}
    assert "graph x: is being checked, or its check crashed" in lines(found)


def test_a_gpu_without_results_is_checked_with_a_small_model(monkeypatch):
    """In this process, on the CPU. The parts are those that a first load without a plan checks."""
    parts = fake_parts(key=current(), kernels=with_kernel("predict", halved))
    monkeypatch.setattr(device_parts, "parts_of", lambda device: parts)
    monkeypatch.setattr("hotsplit.runtime.weights.gpu_products._replaced", set())
    probe_gpu("cpu")
    found = gpu.checks(examining.stored_checks(), has_gpu=True, unfinished=None)
    assert [each.state for each in found] == ["ok", "wrong", "wrong"]
    # With a part of the neurons on the CPU, the kernel writes the bits twice: a variant of its own.
    assert all("kernel predict" in each.text for each in found[1:])
    names = {name.split()[0] for name in examining.stored_checks()[0].verdicts}
    # No graph, since torch computes a kernel.
    assert names == {"device", "pinned", "kernel", "products", "host", "doorbell", "step"}
    crashed = Result(done=None, how="crashed by SIGSEGV", at="a small model on cuda:0")
    assert gpu.checks([], has_gpu=True, unfinished=crashed)[0].state == "wrong"


class Started:
    """Stands in for Child: records what would be started."""

    arguments: list[tuple[str, ...]] = []

    def __init__(self, *arguments, **options):
        self.arguments.append(arguments)

    def result(self):
        return Result(done={})

    def end(self):
        pass


@pytest.fixture
def started(monkeypatch):
    monkeypatch.setattr(Started, "arguments", [])
    monkeypatch.setattr(examining, "Child", Started)
    return Started.arguments


def seen(index, **changes):
    """A GPU as torch sees it."""
    return {**CARD, "index": index, "key": dataclasses.asdict(current(index=index, **changes))}


def test_only_gpus_without_results_are_checked(started):
    assert examining._check([]) is None
    with CheckBook(current()) as book:
        book.finish(Verdict(part="device", why="", seconds=1.0))
    assert examining._check([seen(0)]) is None and not started
    said = []
    examining._check([seen(0), seen(1)], said.append)
    assert started == [("gpu", "cuda:1")]
    (line,) = said
    assert line.startswith("checking cuda:1 with a small model")
    assert examining._check([CARD]) is None  # no key: torch works, but the runtime does not


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"driver": "9.9"}, "driver"), ({"triton": "9"}, "Triton"),
     ({"memory_bytes": 1, "torch": "9"}, "amount of memory, torch")],
)  # fmt: skip
def test_after_an_update_old_results_count_for_another_configuration(started, changes, words):
    """A load repeats the checks, and so does the doctor."""
    with CheckBook(current()) as book:
        book.finish(Verdict(part="device", why="", seconds=1.0))
        book.finish(Verdict(part="graph 0123456789ab", why="no", seconds=1.0))
    stored, now = examining.stored_checks(), [seen(0, **changes)]
    found = gpu.checks(stored, now, has_gpu=True, unfinished=None)
    assert [each.state for each in found] == ["note", "note"]
    assert f"was made with another {words} (driver 1.2, " in found[0].text
    assert examining._check(now) is not None and len(started) == 1
    found = gpu.checks(stored, [seen(0)], has_gpu=True, unfinished=None)
    assert [each.state for each in found] == ["ok", "wrong"]


def test_results_that_a_load_would_use_are_shown_even_if_others_are_newer(started):
    for key in (current(), current(driver="9.9")):
        with CheckBook(key) as book:
            book.finish(Verdict(part="device", why="", seconds=1.0))
    (finding,) = gpu.checks(examining.stored_checks(), [seen(0)], has_gpu=True, unfinished=None)
    assert finding.state == "ok" and "driver 1.2" in finding.text
    (finding,) = gpu.checks(
        examining.stored_checks(), [seen(0, driver="9.9")], has_gpu=True, unfinished=None
    )
    assert finding.state == "ok" and "driver 9.9" in finding.text
