"""Costs of steps of several rows, measured once and kept in the cache folder."""

import json
import time

import pytest
from test_speculation import model_path, text_of

from hotsplit import Engine
from hotsplit.commands.options.speculation_options import speculating
from hotsplit.options.generation_options import SpeculationOptions
from hotsplit.run.housekeeping import clear
from hotsplit.runtime.generate import row_ratios
from hotsplit.runtime.generate.row_ratios import MEASURED, MOST_SECONDS, ROWS, measured, ratios_here
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.step.sequences import Sequences
from hotsplit.system.cache_place import ROWS_FILE


def ratios_of(engine):
    return ratios_here(engine._sequences, engine.model, engine.mode)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    folder = tmp_path / "cache"
    monkeypatch.setenv("HOTSPLIT_CACHE", str(folder))
    return folder


@pytest.fixture
def clock(monkeypatch):
    """A step of r rows takes 1 + 0.25 (r - 1) times `step_s` seconds, and those of the second round
    take longer. Returns the numbers of rows of all steps, and what has `step_s`."""
    now, rows, run = [0.0], [], Sequences.run

    def timed(self, parts):
        (part,) = parts
        rows.append(len(part.tokens))
        slow = 1.0 + 0.5 * (len(rows) > 1 + len(ROWS))
        now[0] += slow * timed.step_s * (1 + 0.25 * (len(part.tokens) - 1))
        return run(self, parts)

    timed.step_s = 1e-3
    monkeypatch.setattr(Sequences, "run", timed)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return rows, timed


def test_ratios_are_measured_a_few_times_and_kept(cache, clock, tmp_path, monkeypatch):
    rows, _ = clock
    want = {n: pytest.approx(1 + 0.25 * (n - 1)) for n in sorted(ROWS)}
    with Engine.load(model_path(tmp_path, "q8_0")) as engine:
        for number in range(1, MEASURED + 3):
            assert ratios_of(engine) == want
            assert len(rows) == min(number, MEASURED) * (1 + 2 * len(ROWS))
        assert sorted(set(rows)) == sorted(ROWS)
        monkeypatch.setattr(library, "num_threads", lambda: 77)
        rows.clear()
        assert ratios_of(engine) == want and len(rows) == 13
        assert len(json.loads((cache / ROWS_FILE).read_text())) == 2
    with Engine.load(model_path(tmp_path, "q4_0", "other")) as other:
        ratios_of(other)
        assert len(json.loads((cache / ROWS_FILE).read_text())) == 3
    clear(cache, ())
    assert not (cache / ROWS_FILE).exists()


def test_the_median_of_all_measurements_counts(cache, tmp_path, monkeypatch):
    found = iter(({1: 1.0, 4: 3.0}, {1: 1.0, 4: 1.5, 2: 1.25}, {1: 1.0, 4: 1.25}))
    monkeypatch.setattr(row_ratios, "measured", lambda *_: next(found))
    with Engine.load(model_path(tmp_path, "q8_0")) as engine:
        got = [ratios_of(engine) for _ in range(3)]
    assert got == [{1: 1.0, 4: 3.0}, {1: 1.0, 2: 1.25, 4: 2.25}, {1: 1.0, 2: 1.25, 4: 1.5}]


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"%s": 3}', '{"%s": {"1": 1.0, "2": 1.0}}', '{"%s": [{"2": 1.0}]}']
    + ['{"%s": [{"1": 1.0, "2": -1.0}]}', '{"%s": [{"1": 1.0, "2": 1e9}]}']
    + ['{"%s": [{"1": 1.0, "x": 1.0}]}', '{"%s": [{"1": 1.0, "2": 1}]}'],
)
def test_damaged_files_are_measured_again(cache, clock, tmp_path, content):
    with Engine.load(model_path(tmp_path, "q8_0")) as engine:
        want = ratios_of(engine)
        (key,) = json.loads((cache / ROWS_FILE).read_text())
        (cache / ROWS_FILE).write_text(content.replace("%s", key))
        assert ratios_of(engine) == pytest.approx(want) and len(clock[0]) == 26
        assert len(json.loads((cache / ROWS_FILE).read_text())[key]) == 1


def test_a_slow_model_is_measured_for_two_seconds(cache, clock, tmp_path):
    rows, timed = clock
    with Engine.load(model_path(tmp_path, "q8_0")) as engine:
        for step_s, count in ((0.6, 3), (MOST_SECONDS + 1, 1)):
            timed.step_s = step_s
            rows.clear()
            with engine.sequence() as text:
                found = measured(engine._sequences, text)
            assert len(rows) == count
            assert found == ({1: 1.0, 4: pytest.approx(1.75)} if count > 1 else {1: 1.0})
        for number in range(1, MEASURED + 2):  # not for ever
            assert ratios_of(engine) is None
            assert len(rows) == 1 + min(number, MEASURED)


def test_no_text_is_closed_for_it(cache, tmp_path):
    with Engine.load(model_path(tmp_path, "q8_0")) as engine:
        with engine.sequence():
            assert ratios_of(engine) is None and not (cache / ROWS_FILE).exists()
        assert ratios_of(engine) is not None


def test_a_text_is_the_same_after_it(cache, tmp_path):
    with Engine.load(model_path(tmp_path, "q8_0"), mode="predicted") as engine:
        want, traffic = text_of(engine, 60), engine.last_run.ffn_bytes
        with speculating(engine, SpeculationOptions(type="ngram", most=1)) as drafts:
            assert row_ratios.kept_values(ROWS_FILE)
            assert text_of(engine, 60, drafts) == want
            assert engine.last_run.ffn_bytes <= 2 * traffic  # of the text alone
