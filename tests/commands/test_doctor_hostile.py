"""The doctor when child processes hang, are interrupted or
leave others behind."""

import re
import signal
import time

import pytest
from test_doctor import broken, cache  # noqa: F401

from hotsplit.doctor import children
from hotsplit.doctor import examine as examining
from hotsplit.doctor import gpu_findings as gpu
from hotsplit.doctor import machine_findings as machine
from hotsplit.doctor.children import Child
from hotsplit.doctor.finding import ok


def test_a_child_that_ends_in_time_is_not_late_because_of_another(broken):  # noqa: F811
    """Its result is read only after its limit, as if the other had been waited for until then."""
    broken("torch", "raise ImportError('some reason')")
    child = Child("torch", limit_s=5.0)
    child._process.wait()
    child._ends = 0.0
    assert "some reason" in gpu.torch(child.result())[0].text


def test_a_process_left_by_a_child_does_not_hide_its_result(broken):  # noqa: F811
    broken(
        "torch",
        "import os, time\nif os.fork() == 0:\n    time.sleep(9)\n    os._exit(0)\n"
        "print('{\"done\": 5}', flush=True)\nraise ImportError('some reason')",
    )
    began = time.monotonic()
    (finding,) = gpu.torch(Child("torch", limit_s=2.0).result())
    assert "some reason" in finding.text and time.monotonic() - began < 8


def test_an_interrupt_ends_the_child_processes(broken, monkeypatch):  # noqa: F811
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


def test_the_wait_for_a_child_is_announced(broken, monkeypatch):  # noqa: F811
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
    assert time.monotonic() - began < 4
    broken("torch", "raise ImportError('some reason')")
    examining._results(["torch"], said.append)
    assert len(said) == 1
