"""Random faults in commands that write, and two writers of one artifact; see faults.py and
two_writers.py."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import faults
import pytest
import two_writers
from fault_commands import COMMANDS
from paths import SEARCH_PATH

from hotsplit.files import renaming

HERE = Path(__file__).parent


def run_faults(*options: object) -> subprocess.CompletedProcess:
    command = [sys.executable, str(HERE / "faults.py"), *map(str, options)]
    env = os.environ | {"PYTHONPATH": SEARCH_PATH}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


def test_no_fault_breaks_an_artifact():
    """Two faults for each command; make fuzz tries more."""
    result = run_faults("--cases", 2 * len(COMMANDS), "--seed", 1)
    *lines, last = result.stdout.splitlines()
    assert result.returncode == 0, (lines, result.stderr[-2000:])
    report = json.loads(last)
    assert (report["cases"], report["failures"]) == (2 * len(COMMANDS), 0)
    # Most kinds must occur, and most faults must strike; otherwise the cases test little.
    kinds = {end.split(":")[0] for end in report["ends"]}
    done = sum(count for end, count in report["ends"].items() if end.endswith(": 0"))
    assert len(kinds) >= 6 and done < report["cases"] / 2, report


@pytest.fixture
def case(tmp_path):
    """A command that is not run; the tests write its leftovers."""
    command = next(command for command in COMMANDS if command.name == "gpuidx")
    (tmp_path / "whole").mkdir()
    for name in command.inputs:
        (tmp_path / "whole" / name).write_bytes(b"input")
    made = faults.FaultyRun(command, tmp_path / "whole", tmp_path / "case", has_old=True)
    made.stderr = "hotsplit: interrupted\n"
    return made


REFERENCE = faults.FaultlessRun(outputs={"x": b"new"}, seconds=1.0, num_events=9, num_bytes=9)


@pytest.mark.parametrize(
    "kind, code", [("term", 143), ("int", 130), ("disk full", 1), ("kill", -9)]
)
def test_old_and_new_outputs_are_accepted(case, kind, code):
    fault = faults.InjectedFault(kind=kind)
    assert faults.wrong_with(case, REFERENCE, fault, code) == []
    (case.output / "x").write_bytes(b"new")
    assert faults.wrong_with(case, REFERENCE, fault, code) == []
    assert faults.wrong_with(case, REFERENCE, fault, 0) == []


def test_damage_is_reported(case):
    fault, x = faults.InjectedFault(kind="term"), case.output / "x"

    def wrong(code: int = 143) -> str:
        return "; ".join(faults.wrong_with(case, REFERENCE, fault, code))

    x.write_bytes(b"ne")
    assert "neither old nor new" in wrong()
    x.unlink()
    assert "is gone" in wrong()
    x.write_bytes(faults.OLD)
    assert "neither old nor new" in wrong(0)  # it reported success
    assert "exit code 70" in wrong(70) and "exit code 1" in wrong(1)
    (case.output / "x.01234567.partial").touch()
    assert "left ['x.01234567.partial']" in wrong()
    assert not faults.wrong_with(case, REFERENCE, faults.InjectedFault(kind="kill"), -9)
    (case.output / "x.01234567.partial").unlink()
    for said, what in (
        ("Traceback (most recent call last)", "a traceback"),
        ("", "no line says why"),
    ):
        case.stderr = said
        assert what in wrong()
    case.stderr = "hotsplit: interrupted"
    assert not wrong()
    (case.input / "plan.gguf").write_bytes(b"picture")
    assert "an input changed" in wrong()


@pytest.mark.parametrize("kind, rounds", [("gguf", 20), ("json", 60), ("folder", 15)])
def test_of_two_writers_the_second_one_wins_or_is_refused(tmp_path, kind, rounds):
    options = ["--kind", kind, "--rounds", str(rounds)]
    command = [sys.executable, str(HERE / "two_writers.py"), *options]
    env = os.environ | {"PYTHONPATH": SEARCH_PATH}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert result.returncode == 0, result.stderr[-2000:]
    found = json.loads(result.stdout)
    assert sum(found["second"][kind].values()) == rounds
    assert sum(found["refused"][kind].values()) == rounds


def test_a_writer_with_a_fixed_temporary_name_is_found(tmp_path, monkeypatch):
    def write(path: Path, value: int) -> None:
        partial = path.with_name(path.name + ".partial")
        with partial.open("xb") as file:
            file.write(bytes([value]) * 100_000)
        partial.replace(path)

    monkeypatch.setitem(two_writers.KINDS, "json", write)
    with pytest.raises(AssertionError):
        two_writers.run_rounds("json", 200, tmp_path)


@pytest.mark.parametrize("kind, rounds", [("json", 60), ("folder", 15)])
def test_of_two_writers_one_is_refused_where_the_system_has_no_links(
    tmp_path, monkeypatch, kind, rounds
):
    """And no renaming that refuses to replace. As many rounds as with links, above."""
    no_links(monkeypatch)
    assert sum(two_writers.run_new_rounds(kind, rounds, tmp_path).values()) == rounds


def test_where_the_system_has_no_links_a_failed_renaming_leaves_no_empty_file(
    tmp_path, monkeypatch
):
    def fail(self, target):
        assert target.exists()
        raise OSError(errno.EIO, "broken", str(self))

    no_links(monkeypatch)
    partial, path = tmp_path / "partial", tmp_path / "new"
    partial.write_text("whole")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", fail)
        with pytest.raises(OSError, match="broken"):
            renaming.put_new(partial, path)
    assert [*tmp_path.iterdir()] == [partial]
    renaming.put_new(partial, path)
    assert [*tmp_path.iterdir()] == [path] and path.read_text() == "whole"


def no_links(monkeypatch) -> None:
    def link(source, target):
        raise OSError(errno.EPERM, "no links here", str(source))

    monkeypatch.setattr(renaming, "_renamed", lambda one, other, how: False)
    monkeypatch.setattr(os, "link", link)


def test_a_writer_that_replaces_a_new_file_is_found(tmp_path, monkeypatch):
    """A writer that looks for the name and then renames would replace a file made in between."""
    monkeypatch.setattr("hotsplit.files.atomic.put_new", os.replace)
    with pytest.raises(AssertionError, match=r"\[0, 0\]"):
        two_writers.run_new_rounds("json", 200, tmp_path)
