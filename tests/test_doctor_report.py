"""The report of `hotsplit doctor` contains no names or paths."""

import getpass
import socket

import pytest
from test_doctor import cache  # noqa: F401

from hotsplit.cli import main
from hotsplit.doctor import examine as examining
from hotsplit.doctor.finding import HIDDEN, ok, report_of, scrubbed


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
        ("ImportError: /my env/lib/x.so.6: undefined symbol", "ImportError: x.so.6: undefined symbol"),
        ('File "/a b/c.py", line 3', 'File "c.py", line 3'),
        ("see /opt/me/probe.py.", "see probe.py"),
        ("5 / 6 of and/or, a/b", "5 / 6 of and/or, a/b"),
    ],
)  # fmt: skip
def test_a_path_with_spaces_is_hidden_to_its_end(text, shown):
    assert scrubbed(text) == shown


def test_a_report_is_not_overwritten(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(examining, "examine", lambda again: pytest.fail("too late"))
    (tmp_path / "r").write_text("mine")
    assert main(["doctor", "--report", str(tmp_path / "r")]) == 1
    assert "exists already" in capsys.readouterr().err
