"""The cache of `hotsplit run`: which run waits, what is made again or removed, and what the keys
depend on."""

import dataclasses
import fcntl
import json
import os
import shutil
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from hotsplit.cli import main
from hotsplit.errors import HotsplitError
from hotsplit.run import housekeeping, keys
from hotsplit.run.cache_folder import ENTRY, LOCK, RunCache, cache_folder, current_version
from hotsplit.run.keys import identity_of_source, identity_of_texts
from hotsplit.run.rates import Rates

pytest_plugins = ("run_fixtures",)
pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(autouse=True)
def without_readers(monkeypatch):
    """The artifacts of these tests have any content."""
    for kind, stage in keys.STAGES.items():
        monkeypatch.setitem(keys.STAGES, kind, dataclasses.replace(stage, load=None))


# ---- two at once --------------------------------------------------------------------------------


@contextmanager
def in_a_thread(make, is_making: threading.Event):
    """Another run, which obtains an artifact and has begun to make it."""

    def first() -> None:
        with RunCache.open() as one, suppress(HotsplitError):
            one.obtain("machine", {}, "here", make)

    thread = threading.Thread(target=first)
    thread.start()
    assert is_making.wait(30)
    yield
    thread.join()


def test_the_second_of_two_waits_for_the_first(cache):
    said: list[str] = []
    calls: list[Path] = []
    is_making, may_end = threading.Event(), threading.Event()

    def make(folder: Path) -> dict:
        calls.append(folder)
        is_making.set()
        assert may_end.wait(30)
        (folder / "machine.json").write_text("{}")
        return {"by": "the first"}

    with in_a_thread(make, is_making):
        threading.Timer(0.2, may_end.set).start()
        with RunCache.open(said.append) as two:
            entry = two.obtain("machine", {}, "here", make)
    assert len(calls) == 1 and entry.facts == {"by": "the first"}
    assert said == ["another run is at work on the figures of this machine; waiting for it"]


def test_where_the_first_fails_the_second_does_the_work(cache):
    is_making = threading.Event()

    def fail(folder: Path) -> dict:
        is_making.set()
        time.sleep(0.2)
        raise HotsplitError("no")

    with in_a_thread(fail, is_making), RunCache.open() as two:
        entry = two.obtain("machine", {}, "here", lambda folder: {"by": "the second"})
        assert entry.facts == {"by": "the second"}


def test_two_that_only_read_do_not_wait(cache):
    with RunCache.open() as one, RunCache.open() as two:
        for each in (one, two):
            each.obtain("machine", {}, "here", lambda folder: {})


# ---- the cache ----------------------------------------------------------------------------------


def filled(cache: Path, count: int = 1) -> list[Path]:
    """Makes artifacts of one kind; returns their folders."""
    folders = []
    with RunCache.open() as each:
        for number in range(count):
            entry = each.obtain("machine", {"n": number}, f"source {number}", _write_machine)
            folders.append(entry.folder)
    return folders


def _write_machine(folder: Path) -> dict:
    (folder / "machine.json").write_text("{}")
    return {}


def test_what_another_version_made_is_not_used_and_is_stale(monkeypatch, cache):
    (old,) = filled(cache)
    newer = dataclasses.replace(keys.STAGES["machine"], version=(99,))
    monkeypatch.setitem(keys.STAGES, "machine", newer)
    (new,) = filled(cache)
    assert new != old and current_version("machine")[-1] == 99
    states = {s.name: s.state for s in housekeeping.list_cache(cache)}
    assert states == {old.name: "stale", new.name: "ready"}
    assert housekeeping.clear(cache, ["stale"]).removed == (old.name,)


def test_a_truncated_artifact_is_made_again(cache):
    (folder,) = filled(cache)
    (folder / "machine.json").write_text("{")
    assert housekeeping.list_cache(cache)[0].state == "unfinished"
    filled(cache)
    assert (folder / "machine.json").read_text() == "{}"


def test_a_damaged_entry_is_made_again(cache):
    for content in ("", "{", "[]", "null", '{"format": 1}', "[" * 100_000):
        (folder,) = filled(cache)
        (folder / ENTRY).write_text(content)
        assert housekeeping.list_cache(cache)[0].state == "unfinished"
    (folder,) = filled(cache)
    whole = (folder / ENTRY).read_text()
    assert json.loads(whole)["format"] == "hotsplit.cache-entry"
    for old, new in ((": 2", ": Infinity"), ("machine.json", "a\\u0000"), ("[", "[Infinity,")):
        assert old in whole
        (folder / ENTRY).write_text(whole.replace(old, new, 1))
        assert housekeeping.list_cache(cache)[0].state == "unfinished"
        filled(cache)


NO_FACTS = [{}, {"density": 0.1}, {"density": 0.1, "tokens_per_s": 0}]
NO_FACTS += [{"density": float("nan"), "tokens_per_s": 1}]


@pytest.mark.parametrize("facts", NO_FACTS)
def test_a_look_without_its_numbers_is_made_again(cache, facts):
    good = {"density": 0.0, "tokens_per_s": 5.0}
    with RunCache.open() as each:
        made = each.obtain("look", {}, "here", lambda folder: good)
        content = json.loads((made.folder / ENTRY).read_text())
        (made.folder / ENTRY).write_text(json.dumps(content | {"facts": facts}))
        assert each.obtain("look", {}, "here", lambda folder: good).facts == good


def test_an_artifact_that_is_truncated_while_it_is_used_is_made_again(cache):
    with RunCache.open() as each:
        for _ in range(2):
            entry = each.obtain("machine", {}, "here", _write_machine)
            assert entry.file.read_text() == "{}"
            (entry.folder / "machine.json").write_text("cut")


def test_links_and_pipes_in_the_place_of_our_files(cache, tmp_path):
    """A lock that is a link is neither followed nor removed, and no run waits for a pipe."""
    (folder,) = filled(cache)
    (folder / ENTRY).unlink()
    os.mkfifo(folder / ENTRY)
    assert housekeeping.list_cache(cache)[0].state == "unfinished"
    (folder / LOCK).unlink()
    (folder / LOCK).symlink_to(tmp_path / "none" / "mine")
    with pytest.raises(HotsplitError, match="cannot be written"):
        filled(cache)
    (folder / LOCK).unlink()
    os.mkfifo(folder / LOCK)
    filled(cache)
    assert not housekeeping.list_cache(cache)[0].is_in_use
    assert (folder / ENTRY).is_file() and not (tmp_path / "none").exists()


def test_what_is_in_use_stays(cache):
    with RunCache.open() as each:
        used = each.obtain("machine", {}, "here", _write_machine)
        idle = filled(cache, 2)
        assert [s.is_in_use for s in housekeeping.list_cache(cache) if s.name == used.folder.name]
        cleared = housekeeping.clear(cache)
        assert cleared.kept == ((used.folder.name, "in use"),)
        assert sorted(cleared.removed) == sorted(folder.name for folder in idle)
        assert used.file.read_text() == "{}"
    assert housekeeping.clear(cache).removed == (used.folder.name,)


def test_what_is_not_ours_stays(cache, tmp_path):
    (folder,) = filled(cache)
    (folder / "notes.txt").write_text("mine")
    (folder / "sub").mkdir()
    (folder / "sub" / "machine.json").write_text("mine")
    digits = "0123456789abcdef01234567"
    other = cache / f"model-{digits}"  # named like an artifact, without a lock or an entry
    other.mkdir()
    (other / "model.gguf").write_text("mine")
    outside = tmp_path / "outside"
    shutil.copytree(filled(cache)[0], outside)
    (cache / f"plan-{digits}").symlink_to(outside)
    (cache / "readme").write_text("mine")
    cleared = housekeeping.clear(cache)
    assert cleared.removed == () and "is not ours" in cleared.kept[0][1]
    assert not (folder / ENTRY).exists() and not (folder / "machine.json").exists()
    mine = folder / "notes.txt", folder / "sub" / "machine.json", other / "model.gguf"
    for path in (*mine, cache / "readme"):
        assert path.read_text() == "mine"
    assert (outside / "machine.json").read_text() == "{}"


def test_a_folder_that_is_removed_while_a_run_waits_is_made_again(monkeypatch, cache):
    """Another run removes the folder and its lock file after this one has opened the lock file and
    before it locks it."""
    real, taken = fcntl.flock, []

    def flock(descriptor, how):
        if not taken:
            taken.append(Path(f"/proc/self/fd/{descriptor}").readlink())
            shutil.rmtree(taken[0].parent)
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    (folder,) = filled(cache)
    assert taken and (folder / LOCK).exists() and (folder / "machine.json").exists()


def test_the_command_lists_and_clears(capsys, cache):
    one, two = filled(cache, 2)
    assert main(["cache", "list"]) == 0
    shown = capsys.readouterr()
    assert "source 0" in shown.out and one.name in shown.out and "2 in" in shown.err
    assert main(["cache", "list", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)["entries"]
    assert {each["source"] for each in entries} == {"source 0", "source 1"}
    with RunCache.open() as each:
        each.obtain("corpus", {}, "a\n\x1b[2Jb\udcff", lambda folder: {})
    assert main(["cache", "list"]) == 0
    assert "a\\n\\x1b[2Jb\\udcff" in capsys.readouterr().out
    assert main(["cache", "clear", "source 1"]) == 0
    assert one.exists() and not two.exists()
    assert main(["cache", "clear", "plan", "trial", "stale"]) == 0  # a kind of which there is none
    assert one.exists()
    assert main(["cache", "clear", "nothing"]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert "'nothing': nothing in" in line and "so nothing was removed" in line
    assert main(["cache", "clear", "source 0", "nothing"]) == 1 and one.exists()
    assert main(["cache", "clear"]) == 0 and not one.exists()
    shutil.rmtree(cache)
    assert main(["cache", "list"]) == 0 and main(["cache", "clear"]) == 0
    assert not cache.exists()


def test_the_folder_of_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HOTSPLIT_CACHE", "~/mine")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("HOTSPLIT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "hotsplit"
    for ignored in ("relative", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_folder() == tmp_path / ".cache" / "hotsplit"
    monkeypatch.setenv("HOTSPLIT_CACHE", "~nobody-of-this-name/mine")
    with pytest.raises(HotsplitError, match="no such home folder"):
        cache_folder()


# ---- keys ---------------------------------------------------------------------------------------


def test_a_source_is_identified_by_its_content(silu, tmp_path):
    known = identity_of_source(silu)
    moved = Path(shutil.copytree(silu, tmp_path / "moved"))
    assert identity_of_source(moved) == known
    (moved / "notes.md").write_text("not read by convert")
    assert identity_of_source(moved) == known
    (moved / "config.json").write_text((moved / "config.json").read_text() + "\n")
    assert identity_of_source(moved) != known


def test_a_large_file_is_identified_by_samples_and_its_time(monkeypatch, tmp_path):
    monkeypatch.setattr(keys, "SMALL_BYTES", 1 << 10)
    path = tmp_path / "big.txt"
    path.write_bytes(bytes(1 << 20))
    os.utime(path, ns=(0, 1))
    known = identity_of_texts([path])
    with path.open("r+b") as file:
        file.seek(5000)  # between two samples
        file.write(b"x")
    assert identity_of_texts([path]) != known
    os.utime(path, ns=(0, 1))
    # A change between the samples goes unnoticed only with a forged time.
    assert identity_of_texts([path]) == known
    with path.open("r+b") as file:
        file.write(b"x")
    os.utime(path, ns=(0, 1))
    assert identity_of_texts([path]) != known


def test_a_full_disk_is_an_error_that_names_the_cache(cache, monkeypatch):
    class Full:
        def __enter__(self):
            raise OSError(28, "No space left on device")

        def __exit__(self, *error):
            pass

    wanted = f"{cache}: the cache folder cannot be written: No space left on device; HOTSPLIT_CACHE"
    monkeypatch.setattr("hotsplit.run.rates.TemporaryFile", lambda **options: Full())
    with pytest.raises(HotsplitError) as refused:
        Rates.load(cache, "m").write_bytes_per_s()
    assert str(refused.value).startswith(wanted)

    def make(folder: Path) -> dict:
        raise OSError(28, "No space left on device")

    with RunCache.open() as opened, pytest.raises(HotsplitError, match="HOTSPLIT_CACHE names"):
        opened.obtain("machine", {"a": 1}, "the source", make)
