"""Values measured on this machine, which several programs may keep at the same time."""

import fcntl
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from threading import Barrier, BrokenBarrierError

import pytest

from hotsplit.system import kept_values
from hotsplit.system.kept_values import keep_value

NAME = "values.json"
KEEPS = """
import sys
from hotsplit.system.kept_values import keep_value
for number in range(20):
    keep_value("values.json", f"{sys.argv[1]} {number}", number)
"""


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HOTSPLIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_programs_that_keep_values_at_once_lose_none(cache):
    commands = [[sys.executable, "-c", KEEPS, name] for name in "abc"]
    for running in [subprocess.Popen(command) for command in commands]:
        assert running.wait(60) == 0
    found = json.loads((cache / NAME).read_text())
    assert found == {f"{name} {number}": number for name in "abc" for number in range(20)}
    assert [path.name for path in cache.iterdir()] == [NAME]


@pytest.mark.parametrize("is_locked", [True, False])
def test_what_another_keeps_meanwhile_stays(monkeypatch, is_locked):
    """Both read before either writes, unless one waits for the other: without a lock one value is
    lost."""
    barrier, read = Barrier(2), kept_values.kept_values

    def read_together(name):
        content = read(name)
        with suppress(BrokenBarrierError):  # the other waits for the lock
            barrier.wait(0.5)
        return content

    monkeypatch.setattr(kept_values, "kept_values", read_together)
    if not is_locked:
        monkeypatch.setattr(kept_values, "_alone_in", lambda folder: nullcontext())
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda key: keep_value(NAME, key, 1), ["a", "b"]))
    assert len(read(NAME)) == (2 if is_locked else 1)


def test_a_lock_that_stays_held_costs_the_value_alone(monkeypatch, cache):
    keep_value(NAME, "a", 1)
    monkeypatch.setattr(kept_values, "MOST_WAIT_S", 0.05)
    descriptor = os.open(cache, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    keep_value(NAME, "b", 2)
    assert kept_values.kept_values(NAME) == {"a": 1}
    os.close(descriptor)
    keep_value(NAME, "b", 2)
    assert kept_values.kept_values(NAME) == {"a": 1, "b": 2}
