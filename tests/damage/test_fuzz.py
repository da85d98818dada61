"""Damaged inputs are refused in one line or read like intact ones; well-formed inputs with a wrong
value are refused in one line. See fuzz.py, fuzz_readers and fuzz_meaning; fuzz_long.py
runs for hours."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fuzz
import fuzz_meaning
import pytest
from fuzz import FOUND, outcome_of, run_cases, wrong_outcomes
from fuzz_damage import another_value, mutated, spots_of
from fuzz_inputs import make_inputs
from fuzz_meaning import MEANINGS, Meaning, misread
from fuzz_readers import KINDS, TARGETS


def _counts(table: str) -> dict[str, int]:
    """Numbers of cases by kind, from lines such as 30: text jsonl."""
    rows = (line.split(":") for line in table.strip().splitlines())
    return {kind: int(number) for number, kinds in rows for kind in kinds.split()}


# Number of cases by kind, for two processes that take about equally long. MANY has the kinds of
# which most cases must be refused, FEW the others. fuzz_long.py runs further cases, for hours.
MANY = (
    _counts(
        """
        102: safetensors gguf
         75: ours
         50: index profile
         30: plan
        """
    ),
    _counts(
        """
        110: bin
         75: stock pt
         60: config values
         50: machine
        """
    ),
)
FEW = (
    _counts(
        """
         50: run
         30: theirs powerinfer
         25: tokens
         20: tokenizer
         14: yarn
         24: falcon-gguf
         12: special phi
         10: generation vocab merges falcon opt qwen bin-index llama3
         10: yarn-gguf scores unigram
          6: template gemma gemma-gguf
          4: sentencepiece
        """
    ),
    _counts(
        """
         40: merge prompt resume
         30: figures gbnf schema regex lark text jsonl parquet
         20: conversation
         15: rules
         12: imatrix imatrix-dat shown-predictors export
         10: templates folder shown shown-theirs gpuidx model-split prompts
          3: messages
        """
    ),
)
FEW[0]["found"] = len(FOUND)
# No case of these has to be refused: a tokenizer that transformers rejects becomes a note, and
# inspect shows why convert would refuse a folder.
TOLERANT = ("sentencepiece", "folder")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz") / "inputs"
    make_inputs(folder)
    return folder


def outcomes_of(
    inputs: Path, tmp_path: Path, parts: tuple[dict[str, int] | dict[str, range], ...]
) -> fuzz.Outcomes:
    """The outcomes of the first n cases of each kind, or of those in a range; a process for each
    of `parts`."""

    def run(number: int) -> fuzz.Outcomes:
        return run_cases(inputs, tmp_path / str(number), cases[number], limit_s=20)

    cases = [
        {kind: range(n) if isinstance(n, int) else n for kind, n in part.items()} for part in parts
    ]
    with ThreadPoolExecutor() as pool:
        found = [case for part in pool.map(run, range(len(parts))) for case in part.items()]
    outcomes = dict(found)
    assert outcomes.keys() == {(k, i) for part in cases for k, ns in part.items() for i in ns}
    return outcomes


def test_damaged_inputs_are_refused_or_harmless(inputs, tmp_path):
    outcomes = outcomes_of(inputs, tmp_path, tuple(a | b for a, b in zip(MANY, FEW, strict=True)))
    assert not wrong_outcomes(outcomes)
    # Most damage must be noticed, and some must be harmless: otherwise the cases test little.
    for kind in {kind for part in MANY for kind in part}:
        found = [text for case, text in outcomes.items() if case[0] == kind]
        assert found.count("refused") > len(found) / 2 and "done" in found, kind
    for kind in {kind for part in FEW for kind in part} - {"found"}:
        found = {text for case, text in outcomes.items() if case[0] == kind}
        assert "done" in found and (kind in TOLERANT or "refused" in found), kind


def test_every_kind_is_tested(inputs):
    assert {kind for part in (*MANY, *FEW) for kind in part} == {*KINDS, "found"}
    assert FOUND, "there are no cases that were found before"
    assert all((inputs / kind / target).is_file() for kind, target in TARGETS.items())


def test_wrong_content_is_refused(inputs, tmp_path):
    counts = {kind: 2 * len(meaning.changes) for kind, meaning in MEANINGS.items()}
    outcomes = outcomes_of(inputs, tmp_path, (counts,))
    assert not {case: text for case, text in outcomes.items() if text != "refused"}


@pytest.mark.parametrize("kind", MEANINGS)
def test_only_the_change_makes_content_wrong(inputs, tmp_path, monkeypatch, kind):
    """Content written again without a change is accepted by the same reader, and the harness
    reports that as wrong."""
    meaning = MEANINGS[kind]
    same = Meaning(kind=meaning.kind, changes={"none": lambda *content: None}, seal=meaning.seal)
    monkeypatch.setitem(fuzz_meaning.MEANINGS, kind, same)
    outcome = outcome_of(lambda: misread(inputs, kind, 0, tmp_path), tmp_path)
    assert outcome == "done where it must be refused: none"
    assert wrong_outcomes({(kind, 0): outcome})


def test_the_harness_catches_wrong_outcomes(tmp_path):
    words = {
        "crash": "died (-11)",
        "hang": "died (-14)",
        "allocation": "MemoryError",
        "traceback": "ValueError at ",
        "leftover": "left ['out.gguf.partial']",
        "lines": "refused in no line",
        "length": "refused in no line",
        "surrogate": "refused in no line",
        "accepted": "done where it must be refused",
    }
    outcomes = run_cases(tmp_path, tmp_path / "work", dict.fromkeys(words, range(1, 4)), limit_s=1)
    assert outcomes.keys() == {(kind, number) for kind in words for number in range(1, 4)}
    wrong = wrong_outcomes(outcomes)
    assert wrong.keys() == {(kind, 2) for kind in words}
    assert all(words[kind] in text for (kind, _), text in wrong.items()), wrong


@pytest.mark.parametrize("kind", TARGETS)
def test_a_case_is_the_same_every_time_and_unlike_others(inputs, kind):
    path = inputs / kind / TARGETS[kind]
    raw, spots = path.read_bytes(), spots_of(path)
    is_values = KINDS[kind].is_values

    def made(seed: int) -> bytes:
        rng = random.Random(seed)
        return another_value(raw, rng) if is_values else mutated(raw, spots, rng)

    cases = [[made(seed) for seed in range(50)] for _ in range(2)]
    assert cases[0] == cases[1]
    assert len({*cases[0]} - {raw}) > 30


def test_a_found_case_with_another_outcome_is_reported(inputs, tmp_path, monkeypatch):
    whole = tmp_path / "machine" / "whole.refused"
    whole.parent.mkdir()
    whole.write_bytes((inputs / "machine" / TARGETS["machine"]).read_bytes())
    again = whole.with_suffix(".done")
    again.write_bytes(whole.read_bytes())
    monkeypatch.setattr(fuzz, "FOUND", [whole, again])
    outcomes = [fuzz.replay(inputs, "found", number, tmp_path) for number in range(2)]
    assert outcomes == ["done where it must be refused: whole.refused", "done"]
