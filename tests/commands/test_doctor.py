"""`hotsplit doctor` finds what is broken: torch, Triton, the compiler, the library, the level or
a GPU; and ends where its child processes hang, are interrupted or leave others behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from fake_cuda import library as fake_library
from fake_cuda.kernels import launched
from fake_cuda.torch_cuda import fake_cuda

from hotsplit.cli import main
from hotsplit.doctor import children
from hotsplit.doctor import examine as examining
from hotsplit.doctor import gpu_findings as gpu
from hotsplit.doctor import machine_findings as machine
from hotsplit.doctor.children import Child, ProbeResult
from hotsplit.doctor.finding import ok
from hotsplit.doctor.probes import probe_gpu
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.kernels.gpu.kernels import reference_kernels

PROGRAM = "import sys; from hotsplit.cli import main; sys.exit(main())"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTSPLIT_CACHE", str(tmp_path / "cache"))


class Doctor:
    """What the command finds: its exit code and its findings. Its child processes, which import
    torch, have minutes: other work on the machine may make them slow."""

    def __init__(self, monkeypatch, capsys, **environment):
        monkeypatch.setattr(children, "LIMIT_S", 300.0)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        began = os.times()
        self.code = main(["doctor", "--json"])
        self.seconds = os.times().children_user - began.children_user
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err, shown.err
        self.found = json.loads(shown.out)["findings"]

    def of(self, about):
        return [each for each in self.found if each["about"] == about]

    def wrong(self):
        return [each["about"] for each in self.found if each["state"] == "wrong"]


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """A function that puts a module in front of the installed one, in child processes."""
    folder = tmp_path / "broken"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder))

    def put(name, text):
        (folder / f"{name}.py").write_text(text)

    return put


@pytest.fixture
def light(broken):
    """Makes imports of torch and Triton fail; without them the command takes about a second."""
    for name in ("torch", "triton"):
        broken(name, f"raise ModuleNotFoundError(\"No module named '{name}'\", name='{name}')")


def test_on_this_machine_nothing_is_wrong(monkeypatch, capsys):
    found = Doctor(monkeypatch, capsys)
    assert found.code == 0 and not found.wrong() and found.seconds < 10
    abouts = list(dict.fromkeys(each["about"] for each in found.found))
    assert abouts[:5] == ["versions", "processor", "kernels", "memory", "cache"]
    assert {"torch", "triton", "driver"} <= set(abouts)
    assert library.level() in found.of("kernels")[0]["text"] or "HOTSPLIT_CPU_LEVEL" in os.environ


def test_missing_torch_and_triton_are_reported(light, monkeypatch, capsys):
    found = Doctor(monkeypatch, capsys)
    assert found.code == 1 and found.wrong() == ["torch"]
    assert "is not installed" in found.of("torch")[0]["text"]
    assert "pip install torch" in found.of("torch")[0]["advice"]
    assert "is not installed: models run on the CPU" in found.of("triton")[0]["text"]
    assert "is the best of" in found.of("kernels")[0]["text"]


def test_a_missing_compiler_is_reported(monkeypatch, capsys):
    pytest.importorskip("triton")
    found = Doctor(monkeypatch, capsys, PATH="/dev/null/bin", CC="")
    assert found.code == 0 and not found.wrong()
    (finding,) = found.of("compiler")
    assert finding["state"] == "note" and "a C compiler" in finding["text"]
    assert "apt install gcc" in finding["advice"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise OSError('libcudart.so.12: cannot open shared object')", "cannot be imported: "),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "crashed by SIGILL (at import"),
    ],
)
def test_a_torch_that_fails_or_crashes_is_reported(broken, text, said):
    broken("torch", text)
    (finding,) = gpu.torch(Child("torch").result())
    assert finding.state == "wrong" and said in finding.text


def test_an_unusable_forced_level_is_reported(light, monkeypatch, capsys):
    missing = [name for name in library.LEVELS if name not in library.usable_levels()]
    for name in [*missing[:1], "nothing"]:
        found = Doctor(monkeypatch, capsys, HOTSPLIT_CPU_LEVEL=name)
        assert found.code == 1 and found.wrong() == ["kernels", "torch"]
        line = found.of("kernels")[-1]
        assert f"HOTSPLIT_CPU_LEVEL='{name}'" in line["text"] and "unset" in line["advice"]
        assert "is the best of" in found.of("kernels")[0]["text"]


def test_a_forced_level_that_works_is_reported():
    done = {"is_built": True, "level": "avx2", "usable": ["avx2", "generic"]}
    done |= {"faulty": "avx512", "forced": "generic"}
    lines = [each.line for each in machine.processor(ProbeResult(done=done))]
    forced = "HOTSPLIT_CPU_LEVEL=generic is set and used -> unset it for avx2"
    assert any(forced in line for line in lines)
    assert any("advertises avx512, whose instructions fail" in line for line in lines)


LIBRARY = """
import importlib.util as util
was = util.find_spec
def find_spec(name, package=None):
    if name != "hotsplit.runtime._cpu":
        return was(name, package)
    return SPEC
util.find_spec = find_spec
"""


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("None", "the C++ library is missing"),
        ("type('Spec', (), {'origin': __file__})", "sitecustomize.py: invalid ELF header"),
        ("__import__('os').kill(__import__('os').getpid(), 4)", "crashed by SIGILL"),
    ],
)
def test_a_library_that_is_missing_broken_or_for_another_processor_is_reported(broken, spec, said):
    broken("sitecustomize", LIBRARY.replace("SPEC", spec))
    result = Child("kernels").result()
    (finding,) = [each for each in machine.processor(result) if each.about == "kernels"]
    assert finding.state == "wrong" and said in finding.text, finding.text
    assert "install the package again" in finding.advice


def test_an_interrupt_ends_the_command_with_one_line(broken, tmp_path):
    started = tmp_path / "started"
    broken("torch", f"open({str(started)!r}, 'w'); import time; time.sleep(60)")
    command = [sys.executable, "-c", PROGRAM, "doctor"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not started.exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 143 and len(error.splitlines()) == 1, error


# ---- torch, drivers and GPUs as children report them ---------------------------------------------

CARD = {"index": 0, "name": "Some Card", "free": 6 << 30, "total": 8 << 30, "capability": "8.9"}
DRIVER = {"cuda": "12.8", "driver": "570.1", "gpus": [CARD]}
TORCH = {"version": "2.13.0", "cuda": "12.8", "is_right": True, "gpus": [CARD]}
TORCH["runtime_error"] = None


def lines(findings):
    return "\n".join(each.line for each in findings)


NONE = {"cuda": None, "driver": None, "gpus": []}
BLIND = TORCH | {"gpus": []}  # torch that sees no GPU


OLDER = "update the driver, which is older than torch's CUDA 12.8"


@pytest.mark.parametrize(
    ("driver", "torch", "said"),
    [
        (DRIVER, TORCH, "ok    driver: 570.1, CUDA up to 12.8"),
        (NONE, BLIND, "note  driver: no NVIDIA driver"),
        (DRIVER, BLIND | {"cuda": None}, "it is built for the CPU -> install torch for"),
        (DRIVER | {"cuda": "12.2"}, BLIND, OLDER),
        (DRIVER, BLIND | {"gpu_error": "no device"}, "sees no GPU: no device -> check"),
        (DRIVER, {"error": "ImportError: x", "is_missing": False}, "ok    driver"),
    ],
)
def test_drivers(driver, torch, said):
    assert said in lines(gpu.driver(ProbeResult(done=driver), ProbeResult(done=torch)))


def test_a_library_of_another_version_is_reported(broken):
    """After an update without a build, a function is missing."""
    assert lines(gpu.torch(ProbeResult(done=TORCH))) == "ok    torch: 2.13.0, for CUDA 12.8"
    broken(
        "sitecustomize",
        "import ctypes\nclass CDLL(ctypes.CDLL):\n"
        "    def __getattr__(self, name):\n"
        "        if name == 'hs_neurons': raise AttributeError('undefined symbol: ' + name)\n"
        "        return super().__getattr__(name)\n"
        "ctypes.CDLL = CDLL\n",
    )
    broken(
        "torch",
        "class Tensor:\n    def __matmul__(self, other): return self\n"
        "    def __eq__(self, other): return self\n    def all(self): return True\n"
        "ones = lambda *shape: Tensor()\n__version__ = '0'\nclass version: cuda = None\n"
        "float32 = float16 = bfloat16 = uint8 = int32 = dtype = None\n"
        "class cuda: is_available = staticmethod(lambda: False)\n"
        "get_num_threads = lambda: 1\ncuda.device_count = staticmethod(lambda: 0)\n",
    )
    found = gpu.torch(Child("torch").result())
    assert [each.state for each in found] == ["ok", "wrong"]
    assert "undefined symbol: hs_neurons" in found[1].text and "make build" in found[1].advice


@pytest.mark.parametrize(
    ("capability", "said"),
    [
        ("8.9", "ok    GPU 0: Some Card, compute capability 8.9, 6.00 GiB free of 8.00 GiB"),
        ("7.5", "note  GPU 0"),
        ("6.1", "use --device cpu"),
        ("12.0", "ok    GPU 0"),
    ],
)
def test_gpus(capability, said):
    found = TORCH | {"gpus": [CARD | {"capability": capability}]}
    assert said in lines(gpu.gpus(ProbeResult(done=found), ProbeResult(done=DRIVER)))
    crashed = ProbeResult(done=None, how="crashed by SIGSEGV")
    driver = DRIVER | {"gpus": found["gpus"]}
    assert said in lines(gpu.gpus(crashed, ProbeResult(done=driver)))  # as the driver reports


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
    done = {"version": "3.6.0", "num_files": 5, "num_bytes": 99, "can_write": True}
    done |= {"compiler": "gcc", "has_headers": True} | changes
    for has_gpu in (True, False):
        found = gpu.triton(ProbeResult(done=done), has_gpu=has_gpu)
        assert said in lines(found)
        states = {each.state for each in found if each.state != "ok"}
        assert states == ({"wrong" if has_gpu else "note"} if changes else set())


SMI = """#!/bin/sh
case "$1" in
--query-gpu=*) echo "570.1, 0, Some Card, 6144, 8192, 8.9" ;;
*) echo "| NVIDIA-SMI 570.1   Driver Version: 570.1   CUDA Version: 12.8 |" ;;
esac
"""
SILENT = "#!/bin/sh\necho 'Failed to initialize NVML'\nexit 9\n"


@pytest.mark.parametrize(
    ("program", "found"), [(SMI, DRIVER), (SILENT, {"cuda": None, "driver": None, "gpus": []})]
)
def test_the_driver_is_queried_without_torch(tmp_path, monkeypatch, program, found):
    (tmp_path / "nvidia-smi").write_text(program)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert Child("driver").result().done == found


# ---- trials of GPUs ------------------------------------------------------------------------------


def test_trials_of_gpus_are_lines():
    results = [
        ProbeResult(done={"why": None}),
        ProbeResult(done={"why": "cuda:1: the logits of a step are off by 0.9"}),
        ProbeResult(done=None, how="crashed by SIGSEGV", at="a small model on cuda:2"),
    ]
    found = gpu.trials(results)
    assert [each.state for each in found] == ["ok", "wrong", "wrong"]
    assert [each.about for each in found] == [f"trial of GPU {n}" for n in range(3)]
    assert "off by 0.9" in found[1].text and "crashed by SIGSEGV" in found[2].text


@pytest.mark.skipif(not fake_library.can_be_built(), reason="needs a C++ compiler, and Linux")
@pytest.mark.parametrize("is_right", [True, False])
def test_a_gpu_is_tried_with_a_small_model(is_right):
    """In this process."""
    right = reference_kernels()
    wrong = right.replaced(down=lambda *arguments, **options: None)
    with fake_cuda(is_checked=True, kernels=launched(right if is_right else wrong)):
        found = probe_gpu("cuda:0")
    assert (found["why"] is None) == is_right
    assert is_right or "the logits of a step are off by" in found["why"]


def test_a_child_that_ends_in_time_is_not_late_because_of_another(broken):
    """Its result is read only after its limit, as if the other had been waited for until then."""
    broken("torch", "raise ImportError('some reason')")
    child = Child("torch", limit_s=5.0)
    child._process.wait()
    child._ends = 0.0
    assert "some reason" in gpu.torch(child.result())[0].text


def test_a_process_left_by_a_child_does_not_hide_its_result(broken):
    broken(
        "torch",
        "import os, time\nif os.fork() == 0:\n    time.sleep(99)\n    os._exit(0)\n"
        "print('{\"done\": 5}', flush=True)\nraise ImportError('some reason')",
    )
    began = time.monotonic()
    (finding,) = gpu.torch(Child("torch", limit_s=2.0).result())
    assert "some reason" in finding.text and time.monotonic() - began < 60


def test_an_interrupt_ends_the_child_processes(broken, monkeypatch):
    broken("torch", "import time; time.sleep(60)")
    started = []

    class Interrupted(Child):
        def result(self, say=None):
            started.append(self)
            raise KeyboardInterrupt

    monkeypatch.setattr(examining, "Child", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        examining._results(["torch"])
    assert started[0]._process.wait(timeout=10) == -signal.SIGKILL


def test_terminal_codes_are_replaced():
    assert ok("a", "\x1b[31mred\u202e").line == "ok    a: ?[31mred?"


def test_a_cache_that_looks_writable_but_is_not_is_reported(monkeypatch):
    monkeypatch.setenv("HOTSPLIT_CACHE", "/proc/hotsplit")
    (finding,) = machine.cache()
    assert finding.state == "wrong"


def test_the_wait_for_a_child_is_announced(broken, monkeypatch):
    """Torch hangs while it is imported; the announcement does not lengthen the wait."""
    broken("torch", "import time; time.sleep(60)")
    monkeypatch.setattr(children, "QUIET_S", 0.5)
    monkeypatch.setattr(children, "LIMIT_S", 2.0)
    began, said = time.monotonic(), []
    (result,) = examining._results(["torch"], said.append)
    (line,) = said
    assert re.fullmatch(r"waiting for the test of torch, at most [01] s more", line)
    (finding,) = gpu.torch(result)
    assert finding.state == "wrong"
    assert finding.text.endswith("took longer than 2 s (at import torch)")
    assert time.monotonic() - began < 30
    monkeypatch.setattr(children, "QUIET_S", 60.0)  # imports take long on a busy machine
    broken("torch", "raise ImportError('some reason')")
    examining._results(["torch"], said.append)
    assert len(said) == 1
