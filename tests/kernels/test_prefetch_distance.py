"""The distance at which weights are prefetched on processors that the kernels do not know."""

import json

import pytest
import torch

from hotsplit.errors import HotsplitError
from hotsplit.run.housekeeping import clear
from hotsplit.runtime.kernels import prefetch_distance
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.kernels.prefetch_distance import (
    DISTANCES,
    KINDS,
    ROUNDS,
    set_for_this_processor,
)
from hotsplit.system.cache_place import PREFETCH_FILE


@pytest.fixture(autouse=True)
def as_in_a_new_process(monkeypatch, tmp_path):
    before = library.prefetch_distance()
    monkeypatch.setenv("HOTSPLIT_CACHE", str(tmp_path / "cache"))
    prefetch_distance._set_once.cache_clear()
    yield
    prefetch_distance._set_once.cache_clear()
    library.set_prefetch_distance(before)


@pytest.fixture
def unknown(monkeypatch):
    """A processor that the kernels do not know; lists the measurements, which find 2304."""
    found = []

    def measured():
        found.append(library.num_threads())
        return 2304

    monkeypatch.setattr(library, "knows_prefetch_distance", lambda: False)
    monkeypatch.setattr(library, "prefers_tiles", lambda: True)
    monkeypatch.setattr(prefetch_distance, "measured", measured)
    return found


def again():
    prefetch_distance._set_once.cache_clear()
    set_for_this_processor()


@pytest.mark.parametrize(
    "seconds, wanted",
    [
        ({0: 1.0, 1024: 1.0, 2304: 0.8, 4608: 0.7, 9216: 0.9}, 4608),
        ({0: 1.0, 1024: 0.96, 2304: 0.96, 4608: 0.96, 9216: 0.96}, 0),  # too small a gain
        ({0: 1.0, 1024: 2.0, 2304: 2.0, 4608: 2.0, 9216: 2.0}, 0),
    ],
)
def test_the_fastest_distance_is_chosen(monkeypatch, seconds, wanted):
    calls = timed(monkeypatch, seconds)
    before = library.prefetch_distance()
    assert prefetch_distance.measured() == wanted
    assert library.prefetch_distance() == before
    assert {kind for kind, _ in calls} == set(KINDS)


def timed(monkeypatch, seconds, scale=1e-3):
    """Lets a product take so many units of `scale` seconds, by distance, and some rounds longer;
    returns the list of calls. After the first comparison, the values are those of "again"."""
    now, calls = [0.0], []

    def dot_rows(data, kind, x_D):
        calls.append((kind, library.prefetch_distance()))
        is_again = len(calls) > len(KINDS) * (ROUNDS + 1) * len(DISTANCES)
        own = seconds.get("again", seconds) if is_again else seconds
        # Only the fastest of several rounds counts, and the first warms up.
        late = 0.5 * (len(calls) % 3) if len(calls) > len(DISTANCES) else -0.5
        now[0] += scale * (own[library.prefetch_distance()] + late)

    monkeypatch.setattr(prefetch_distance.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(library, "dot_rows", dot_rows)
    return calls


def test_a_gain_must_be_found_twice(monkeypatch):
    first = {0: 1.0, 1024: 1.0, 2304: 0.7, 4608: 1.0, 9216: 1.0}
    timed(monkeypatch, first | {"again": {0: 1.0, 2304: 0.97}})
    assert prefetch_distance.measured() == 0


def test_a_slow_measurement_is_given_up(monkeypatch):
    calls = timed(monkeypatch, dict.fromkeys(DISTANCES, 1.0) | {2304: 0.5}, scale=0.1)
    assert prefetch_distance.measured() == 0 and len(calls) < 20


@pytest.mark.parametrize("error", [OSError, MemoryError, RuntimeError, HotsplitError])
def test_where_memory_is_short_nothing_is_measured(unknown, monkeypatch, tmp_path, error):
    def measured():
        raise error("no memory")

    monkeypatch.setattr(prefetch_distance, "measured", measured)
    before = library.prefetch_distance()
    again()
    assert library.prefetch_distance() == before and not (tmp_path / "cache").exists()


def test_levels_without_tiles_measure_nothing(unknown, monkeypatch):
    monkeypatch.setattr(library, "prefers_tiles", lambda: False)
    again()
    assert not unknown


def test_the_measurement_runs_on_any_processor():
    assert prefetch_distance.measured() in DISTANCES


def test_it_is_measured_once_for_a_processor_and_a_number_of_threads(
    unknown, monkeypatch, tmp_path
):
    library.set_prefetch_distance(0)
    again(), again()
    assert len(unknown) == 1 and library.prefetch_distance() == 2304
    monkeypatch.setattr(library, "num_threads", lambda: 77)
    again(), again()
    assert unknown[1:] == [77]
    monkeypatch.setattr(prefetch_distance, "processor", lambda: "another")
    again(), again()
    assert len(unknown) == 3
    assert len(json.loads((tmp_path / "cache" / PREFETCH_FILE).read_text())) == 3
    clear(tmp_path / "cache", ())
    again()
    assert len(unknown) == 4


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", "[" * 9999, '{"%s": true}', '{"%s": 17}', '{"%s": "0"}', '{"%s": 1024.0}'],
)
def test_damaged_files_are_rewritten(unknown, tmp_path, text):
    again()
    path = tmp_path / "cache" / PREFETCH_FILE
    (processor,) = json.loads(path.read_text())
    path.write_text(text.replace("%s", processor))
    again()
    assert len(unknown) == 2 and json.loads(path.read_text()) == {processor: 2304}


def test_known_processors_are_not_measured(unknown, monkeypatch):
    monkeypatch.setattr(library, "knows_prefetch_distance", lambda: True)
    library.set_prefetch_distance(1024)
    again()
    assert not unknown and library.prefetch_distance() == 1024


@pytest.mark.parametrize("kind", KINDS)
def test_the_distance_does_not_change_a_bit(kind):
    random = torch.Generator().manual_seed(0)
    data = torch.randint(0, 59, (64, KINDS[kind]), dtype=torch.uint8, generator=random)
    x_D = torch.randn(2048, generator=random)
    found = []
    for distance in DISTANCES:
        library.set_prefetch_distance(distance)
        library.evict(data)
        found.append(library.dot_rows(data, kind, x_D))
    assert all(torch.equal(found[0], other) for other in found)
    assert found[0].isfinite().all() and found[0].any()
