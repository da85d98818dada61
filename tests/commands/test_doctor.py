"""`hotsplit doctor` finds what is broken: torch, Triton, the compiler, the library, the level or
a GPU."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from hotsplit.doctor import gpu_findings as gpu
from hotsplit.doctor import machine_findings as machine
from hotsplit.doctor.children import Child, ProbeResult
from hotsplit.runtime.kernels.cpu import library

PROGRAM = "import sys; from hotsplit.cli import main; sys.exit(main())"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTSPLIT_CACHE", str(tmp_path / "cache"))


class Doctor:
    """Runs the command in a process; keeps its exit code, its findings, and its seconds of user CPU
    time, which other load on the machine lengthens less than wall-clock time."""

    def __init__(self, *arguments, **environment):
        began = os.times()
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, "doctor", "--json", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )
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


def test_on_this_machine_nothing_is_wrong():
    found = Doctor()
    assert found.code == 0 and not found.wrong() and found.seconds < 10
    abouts = list(dict.fromkeys(each["about"] for each in found.found))
    assert abouts[:5] == ["versions", "processor", "kernels", "memory", "cache"]
    assert {"torch", "triton", "driver"} <= set(abouts)
    assert library.level() in found.of("kernels")[0]["text"] or "HOTSPLIT_CPU_LEVEL" in os.environ


def test_missing_torch_and_triton_are_reported(light):
    found = Doctor()
    assert found.code == 1 and found.wrong() == ["torch"]
    assert "is not installed" in found.of("torch")[0]["text"]
    assert "pip install torch" in found.of("torch")[0]["advice"]
    assert "is not installed: models run on the CPU" in found.of("triton")[0]["text"]
    assert "is the best of" in found.of("kernels")[0]["text"]


def test_a_missing_compiler_is_reported():
    pytest.importorskip("triton")
    found = Doctor(PATH="/dev/null/bin", CC="")
    assert found.code == 0 and not found.wrong()
    (finding,) = found.of("compiler")
    assert finding["state"] == "note" and "a C compiler" in finding["text"]
    assert "apt install gcc" in finding["advice"]


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
def test_a_torch_that_fails_or_crashes_is_reported(broken, text, said):
    broken("torch", text)
    (finding,) = gpu.torch(Child("torch").result())
    assert finding.state == "wrong" and said in finding.text


def test_an_unusable_forced_level_is_reported_and_the_rest_is_checked(light):
    missing = [name for name in library.LEVELS if name not in library.usable_levels()]
    for name in [*missing[:1], "nothing"]:
        found = Doctor(HOTSPLIT_CPU_LEVEL=name)
        assert found.code == 1 and found.wrong() == ["kernels", "torch"]
        line = found.of("kernels")[-1]
        assert f"HOTSPLIT_CPU_LEVEL='{name}'" in line["text"] and "unset" in line["advice"]
        assert "is the best of" in found.of("kernels")[0]["text"]


def test_a_forced_level_that_works_is_reported():
    done = {
        "is_built": True,
        "level": "avx2",
        "usable": ["avx2", "generic"],
        "faulty": "avx512",
        "forced": "generic",
    }
    lines = [each.line for each in machine.processor(ProbeResult(done=done))]
    assert any(
        "HOTSPLIT_CPU_LEVEL=generic is set and used -> unset it for avx2" in x for x in lines
    )
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


def test_an_interrupt_ends_the_command_with_one_line(broken):
    broken("torch", "import time; time.sleep(60)")
    command = [sys.executable, "-c", PROGRAM, "doctor"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 143 and len(error.splitlines()) == 1, error
