"""Damaged inputs end in one line, or in a model file that loads; see fuzz.py."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fuzz import TARGETS, make_inputs, mutated, outcome_of, run_cases, spots_of, wrong_outcomes

# Two processes of about the same length: 2,000 damaged weights and headers, 250 of JSON, 120
# configs of another meaning, 300 files that inspect and export read.
CASES = (
    {"safetensors": 450, "gguf": 450, "ours": 150, "index": 100, "profile": 100, "plan": 100},
    {"bin": 450, "stock": 250, "pt": 250, "config": 150, "values": 120, "machine": 100},
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz") / "inputs"
    make_inputs(folder)
    return folder


def test_damaged_inputs_are_refused_or_harmless(inputs, tmp_path):
    with ThreadPoolExecutor() as pool:
        parts = pool.map(lambda i: run_cases(inputs, tmp_path / str(i), CASES[i]), range(2))
    outcomes = {case: text for part in parts for case, text in part.items()}
    assert outcomes.keys() == {(k, i) for part in CASES for k, n in part.items() for i in range(n)}
    assert not wrong_outcomes(outcomes)
    for kind in TARGETS:
        found = [text for case, text in outcomes.items() if case[0] == kind]
        # Most damages are to be noticed, and some are to be harmless: else the cases test little.
        assert found.count("refused") > len(found) / 2 and "done" in found, kind


def test_the_harness_catches_wrong_outcomes(tmp_path):
    words = {
        "crash": "died (-11)", "hang": "died (-14)", "allocation": "MemoryError",
        "traceback": "ValueError at ", "leftover": "left ['out.gguf.partial']",
        "lines": "refused in no line",
    }  # fmt: skip
    outcomes = run_cases(tmp_path, tmp_path / "work", dict.fromkeys(words, 4), limit_s=1)
    assert outcomes.keys() == {(kind, number) for kind in words for number in range(4)}
    wrong = wrong_outcomes(outcomes)
    assert wrong.keys() == {(kind, 2) for kind in words}
    assert all(words[kind] in text for (kind, _), text in wrong.items()), wrong


def test_inputs_that_are_whole_are_done(inputs, tmp_path, monkeypatch):
    """Nothing but the damage is why a case is refused."""
    import fuzz

    monkeypatch.setattr(fuzz, "mutated", lambda raw, spots, rng: raw)
    monkeypatch.setattr(fuzz, "another_value", lambda raw, rng: raw)
    for kind in TARGETS:
        case = lambda kind=kind: fuzz.convert_damaged(inputs, kind, 1, tmp_path)  # noqa: E731
        assert outcome_of(case, tmp_path) == "done", kind


@pytest.mark.parametrize("kind", TARGETS)
def test_a_case_is_the_same_every_time_and_unlike_others(inputs, kind):
    import random

    path = inputs / kind / TARGETS[kind]
    raw, spots = path.read_bytes(), spots_of(path)
    made = [[mutated(raw, spots, random.Random(i)) for i in range(50)] for _ in range(2)]
    assert made[0] == made[1]
    assert len({*made[0]} - {raw}) > 30
