"""Files written in pieces by several threads: the same bytes, bounded memory, nothing left after an
error."""

import os
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from hotsplit.errors import HotsplitError
from hotsplit.files import gguf_file
from hotsplit.files.atomic import partial_file
from hotsplit.files.gguf_file import TensorEntry, array_entry, read_gguf, write_gguf
from hotsplit.files.pipeline import in_order


def our_threads():
    return [t for t in threading.enumerate() if t.name.startswith("hotsplit")]


def test_results_come_in_order_and_a_few_at_a_time():
    begun = []

    def task(number):
        begun.append(number)
        time.sleep(0.002 * (number % 3))
        return number

    for taken, result in enumerate(in_order((partial(task, i) for i in range(40)), 3)):
        assert result == taken
        assert len(begun) <= taken + 1 + 2 * 3
    assert sorted(begun) == list(range(40)) and not our_threads()


def test_a_failing_task_raises_in_its_turn():
    begun, taken = [], []

    def task(number):
        begun.append(number)
        if number == 5:
            raise HotsplitError("five")
        return number

    with pytest.raises(HotsplitError, match="five"):
        taken.extend(in_order((partial(task, i) for i in range(1000)), 2))
    assert taken == [0, 1, 2, 3, 4] and len(begun) < 20 and not our_threads()
    results = in_order((partial(task, i) for i in range(1000)), 2)
    assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
    results.close()
    assert not our_threads()


def entries():
    """One to three dimensions, and sizes that are not multiples of the alignment."""
    random = np.random.default_rng(0)
    arrays = {"a": (7,), "b": (33, 5), "c": (4, 3, 6), "d": (1, 1)}
    return {n: array_entry(random.standard_normal(s), "f32") for n, s in arrays.items()}


@pytest.mark.parametrize("piece_values", [1, 5, 16, 1 << 20])
def test_pieces_make_the_same_file(tmp_path, monkeypatch, piece_values):
    monkeypatch.setattr(gguf_file, "PIECE_VALUES", piece_values)
    told = []
    tensors = entries()
    write_gguf(tmp_path / "m.gguf", "test", {"x": 1 == 1}, tensors, on_bytes=told.append)
    assert sum(told) == sum(entry.num_bytes for entry in tensors.values())
    keys, found = read_gguf(tmp_path / "m.gguf", "file")
    assert keys["x"] is True and found.keys() == tensors.keys()
    for name, entry in tensors.items():
        assert found[name].shape == entry.shape
        assert found[name].read().tobytes() == entry.read().tobytes() != bytes(entry.num_bytes)
    offsets = [tensor.data_offset for tensor in GGUFReader(tmp_path / "m.gguf").tensors]
    assert all(offset % 32 == 0 for offset in offsets)
    assert (tmp_path / "m.gguf").stat().st_size % 32 == 0


def test_a_large_tensor_is_never_whole_in_memory(tmp_path):
    """64 MiB of rows in pieces; at any time, only a few are requested and not yet written."""
    asked, written, most = [], [], []

    def read_rows(start, stop):
        asked.append(stop - start)
        most.append(sum(asked) * 4096 * 2 - sum(written))
        return np.zeros((stop - start, 4096), np.float16)

    entry = TensorEntry(shape=(8192, 4096), kind="f16", read_rows=read_rows)
    write_gguf(tmp_path / "m.gguf", "test", {}, {"a": entry}, on_bytes=written.append)
    piece = gguf_file.PIECE_VALUES * 2
    assert max(asked) * 4096 * 2 <= piece and len(asked) >= 8
    assert max(most) <= (2 * gguf_file.num_threads() + 1) * piece


@pytest.mark.parametrize("error", [HotsplitError("bad rows"), KeyboardInterrupt(), MemoryError()])
@pytest.mark.parametrize("where", ["read", "told"])
def test_nothing_is_left_after_an_error(tmp_path, monkeypatch, error, where):
    monkeypatch.setattr(gguf_file, "PIECE_VALUES", 32)

    def fail(*arguments):
        raise error

    def read_rows(start, stop):
        return fail() if where == "read" and start >= 10 else np.ones((stop - start, 8), np.float32)

    entry = TensorEntry(shape=(100, 8), kind="f32", read_rows=read_rows)
    on_bytes = fail if where == "told" else lambda num_bytes: None
    with pytest.raises(type(error)):
        write_gguf(tmp_path / "m.gguf", "test", {}, {"a": entry}, on_bytes=on_bytes)
    assert not list(tmp_path.iterdir()) and not our_threads()


def test_a_file_is_synced_before_it_gets_its_name(tmp_path, monkeypatch):
    synced = []

    def fsync(descriptor):
        synced.append(
            (str(Path(f"/proc/self/fd/{descriptor}").readlink()), (tmp_path / "x").exists())
        )

    monkeypatch.setattr(os, "fsync", fsync)
    with partial_file(tmp_path / "x") as unfinished:
        unfinished.write_text("whole")
        assert synced == []
    assert synced == [(str(unfinished), False), (str(tmp_path), True)]
