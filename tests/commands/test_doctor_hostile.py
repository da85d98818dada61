"""The doctor with odd files, names and paths, and when child processes hang, are interrupted or
leave others behind."""

import getpass
import re
import signal
import socket
import time

import pytest
from test_doctor import broken, cache  # noqa: F401

from hotsplit.cli import main
from hotsplit.doctor import children, gpu, machine
from hotsplit.doctor import examine as examining
from hotsplit.doctor.children import Child
from hotsplit.doctor.finding import HIDDEN, ok, report_of, scrubbed


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


def test_paths_are_hidden_and_terminal_codes_replaced():
    text = scrubbed("No such file: '/opt/my own/x', '/opt/my own/libx.so.1' isn't, 'a' and 'b/c'")
    assert text == f"No such file: '{HIDDEN}', 'libx.so.1' isn't, 'a' and 'b/c'"
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


# ---- the report contains no names or paths ------------------------------------------------------


def test_a_report_contains_no_names_or_paths(monkeypatch, tmp_path):
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
    assert report_of([ok("a", f"b {tmp_path}/x y")]).splitlines()[2] == f"ok    a: b {HIDDEN}"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("OSError: /mnt/My Drive/secret model.gguf: no", f"OSError: {HIDDEN}: no"),
        ("cannot open /mnt/My Drive", f"cannot open {HIDDEN}"),
        ("is in /mnt/My Drive -> move it", f"is in {HIDDEN} -> move it"),
        ("(/mnt/My Films (old)/x y)", f"({HIDDEN})"),
        ("/opt/My Libs/libx.so.1 of /opt/me too is old", f"libx.so.1 of {HIDDEN}"),
        (
            "ImportError: /my env/lib/x.so.6: undefined symbol",
            "ImportError: x.so.6: undefined symbol",
        ),
        ('File "/a b/c.py", line 3', 'File "c.py", line 3'),
        ("see /opt/me/probe.py.", "see probe.py"),
        ("5 / 6 of and/or, a/b", "5 / 6 of and/or, a/b"),
    ],
)
def test_a_path_with_spaces_is_hidden_to_its_end(text, shown):
    assert scrubbed(text) == shown


def test_a_report_is_not_overwritten(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(examining, "examine", lambda say: pytest.fail("too late"))
    (tmp_path / "r").write_text("mine")
    assert main(["doctor", "--report", str(tmp_path / "r")]) == 1
    assert "exists already" in capsys.readouterr().err
