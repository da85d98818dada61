"""Damaged inputs are refused in one line or read like intact ones. Well-formed inputs with a wrong
value are refused in one line, and so are pairs of files that visibly do not belong together. See
fuzz.py, fuzz_readers, fuzz_odd, fuzz_meaning and fuzz_pairs; fuzz_long.py runs for hours."""

import argparse
import dataclasses
import json
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fuzz
import fuzz_long
import fuzz_meaning
import pytest
from fuzz import FOUND, all_kinds, outcome_of, run_cases, wrong_outcomes
from fuzz_damage import another_value, mutated, spots_of
from fuzz_guide import Known, load, save
from fuzz_inputs import make_inputs
from fuzz_lines import Lines, all_lines
from fuzz_long import print_counts, run_batch
from fuzz_meaning import MEANINGS, Meaning, misread
from fuzz_odd import ODDS
from fuzz_pairs import DRAWN, PAIRS, Drawn, cases_of, drawn, must_refuse
from fuzz_readers import KINDS, TARGETS

from hotsplit.errors import HotsplitError

# Number of cases by kind, for two processes that take about equally long. MANY has the kinds of
# which most cases must be refused, FEW the others. fuzz_long.py runs further cases, for hours.
MANY = (
    {"safetensors": 102, "gguf": 102, "ours": 75, "index": 50, "profile": 50, "plan": 30},
    {"bin": 110, "stock": 75, "pt": 75, "config": 60, "values": 60, "machine": 50},
)
FEW = (
    {
        "tokenizer": 20,
        "tokens": 25,
        "special": 12,
        "generation": 10,
        "template": 6,
        "vocab": 10,
        "found": len(FOUND),
        "merges": 10,
        "sentencepiece": 4,
        "theirs": 30,
        "powerinfer": 30,
        "run": 50,
        "falcon": 10,
        "opt": 10,
        "phi": 12,
        "qwen": 10,
        "gemma": 6,
        "falcon-weights": 12,
        "opt-weights": 8,
        "phi-weights": 8,
        "falcon-gguf": 12,
        "opt-gguf": 24,
        "qwen-gguf": 10,
        "gemma-gguf": 6,
        "bin-index": 10,
        "yarn": 14,
        "llama3": 10,
        "yarn-gguf": 10,
        "scores": 10,
        "unigram": 10,
    },
    {
        "imatrix": 12,
        "imatrix-dat": 12,
        "merge": 40,
        "figures": 30,
        "prompt": 40,
        "resume": 40,
        "conversation": 20,
        "gbnf": 30,
        "schema": 30,
        "regex": 30,
        "lark": 30,
        "text": 30,
        "jsonl": 30,
        "parquet": 30,
        "comparison": 15,
        "told": 15,
        "templates": 10,
        "folder": 10,
        "shown": 10,
        "shown-theirs": 10,
        "shown-predictors": 12,
        "gpuidx": 10,
        "model-split": 10,
        "export": 12,
        "entry": 10,
        "rates": 10,
        "rules": 15,
        "messages": 3,
        "prompts": 10,
    },
)
# Kinds of which no case has to be refused: a tokenizer that transformers rejects becomes a note,
# inspect shows why convert would refuse a folder, and damaged files of a cache count as missing.
TOLERANT = ("sentencepiece", "folder", "entry", "rates")


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


def test_odd_content_is_refused_or_harmless(inputs, tmp_path):
    outcomes = outcomes_of(inputs, tmp_path, (dict.fromkeys(ODDS, 14),))
    assert not wrong_outcomes(outcomes)
    for kind in ODDS:
        found = [text for case, text in outcomes.items() if case[0] == kind]
        assert found.count("refused") > len(found) / 4, kind


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


def test_files_that_do_not_belong_together_are_refused(inputs, tmp_path):
    outcomes = outcomes_of(
        inputs, tmp_path, ({kind: len(cases_of(pair)) for kind, pair in PAIRS.items()},)
    )
    for kind, pair in PAIRS.items():
        for number, (name, forged) in enumerate(cases_of(pair)):
            wanted = "refused" if must_refuse(pair, name, forged) else "done"
            assert outcomes[kind, number] == wanted, (kind, name, forged)


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


def test_the_readers_of_a_cache_reject_entries_that_are_dropped_and_rates_that_are_lost(
    inputs, tmp_path, monkeypatch
):
    def case_of(kind: str) -> fuzz.Case:
        target = KINDS[kind].target
        folder = Path(shutil.copytree(inputs / kind, tmp_path / kind))
        (tmp_path / f"{kind} output").mkdir()
        output = tmp_path / f"{kind} output" / "out.gguf"
        return fuzz.Case(number=0, path=folder / target, inputs=inputs, output=output)

    monkeypatch.setattr("hotsplit.run.housekeeping._folders", lambda cache: iter(()))
    with pytest.raises(AssertionError, match="could not be cleared"):
        KINDS["entry"].read(case_of("entry"))
    case = case_of("rates")
    monkeypatch.setattr(
        "hotsplit.run.rates.Rates.note",
        lambda rates, name, rate: case.path.write_text(json.dumps({rates.machine: {name: rate}})),
    )
    with pytest.raises(AssertionError):
        KINDS["rates"].read(case)


def test_undamaged_inputs_are_accepted(inputs, tmp_path, monkeypatch):
    """A case is refused only because of its damage."""
    monkeypatch.setattr(fuzz, "mutated", lambda raw, spots, rng: raw)
    monkeypatch.setattr(fuzz, "another_value", lambda raw, rng: raw)
    for kind in KINDS:
        case = lambda kind=kind: fuzz.read_damaged(inputs, kind, 1, tmp_path)  # noqa: E731
        assert outcome_of(case, tmp_path) == "done", kind


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


def test_counts_are_printed_by_kind(capsys):
    one, other = ("x.py", 1), ("x.py", 2)
    counts = {
        "a": Known(
            cases=4,
            refused=3,
            wrong=1,
            last_new=2,
            seeds=[(1,), (1, 2)],
            seconds=60,
            lines={one, other},
            cpu_seconds=30,
        ),
        "b": Known(cases=2, done=2, seconds=120, lines={one}, cpu_seconds=90),
    }
    print_counts(counts)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[1:] == [
        ["a", "4", "3", "0", "1", "2", "2", "2", "1", "0"],
        ["b", "2", "0", "2", "0", "1", "0", "0", "2", "2"],
        ["all", "6", "3", "2", "1", "2", "2", "2", "3", "2"],
    ]
    assert len(all_kinds()) == len(KINDS) + len(ODDS) + len(MEANINGS) + len(PAIRS)


# ---- long runs ----------------------------------------------------------------------------------


def asked(keep: Path, **changes: object) -> argparse.Namespace:
    return argparse.Namespace(**{"batch": 40, "keep": keep, "start": 0, "minutes": 0.0} | changes)


def test_a_case_that_reaches_new_lines_is_damaged_further(inputs, tmp_path):
    """Only lines of the readers' code count; another run continues from what this one found."""
    shutil.copytree(inputs, tmp_path / "inputs")
    known = Known()
    for start in (0, 40):
        assert run_batch("machine", range(start, start + 40), asked(tmp_path), tmp_path, known) == 0
    assert known.cases == 80 == known.refused + known.done and known.wrong == 0
    assert 0 < known.cpu_seconds < 2 * known.seconds + 1
    assert 0 < known.last_new <= 80 and len(known.seeds) > 1
    reached = {name for name, _ in known.lines}
    assert "src/hotsplit/artifacts/machine_file.py" in reached and known.lines < all_lines()
    save(tmp_path / "again.json", {"machine": known})
    assert load(tmp_path / "again.json") == {"machine": known}
    chains = [known.chain("machine", number) for number in range(100)]
    assert chains == [known.chain("machine", number) for number in range(100)]
    assert 40 < sum(bool(chain) for chain in chains) < 80
    content = [fuzz.damaged(inputs, "machine", 3, (number,)) for number in range(10, 20)]
    assert len({*content, fuzz.damaged(inputs, "machine", 3)}) > 5


def test_only_new_lines_are_reported():
    from hotsplit.files import json_file

    name = "src/hotsplit/files/json_file.py"
    with Lines(set()) as lines, pytest.raises(HotsplitError):
        json_file.read_text(Path("/dev/null/none"), "x")
    first = lines.take()
    assert first and {file for file, _ in first} == {name} and not lines.take()
    with Lines(first) as lines, pytest.raises(HotsplitError):
        json_file.read_text(Path("/dev/null/none"), "x")
    assert not lines.take()
    assert first < all_lines()


def test_an_overdue_case_is_tried_once_more(inputs, tmp_path, monkeypatch):
    """A case may be late once because the machine is busy; one that is late twice is wrong."""
    tries = []

    def run(inputs, work, cases, *more):
        tries.append(cases)
        (kind, numbers), late = next(iter(cases.items())), f"{fuzz_long.OVERDUE}: "
        is_late = len(tries) == 1 or numbers == range(3, 4)
        return {(kind, n): late if n in (2, 3) and is_late else "refused" for n in numbers}

    monkeypatch.setattr(fuzz_long, "run_cases", run)
    known = Known()
    shutil.copytree(inputs / "machine", tmp_path / "inputs" / "machine")
    assert run_batch("machine", range(5), asked(tmp_path), tmp_path, known) == 1
    assert [cases["machine"] for cases in tries] == [range(5), range(2, 3), range(3, 4)]
    assert known.wrong == 1 and known.refused == 4


@pytest.mark.parametrize("kind", PAIRS)
def test_drawn_pairs_are_of_all_sorts(kind):
    cases = [drawn(kind, number) for number in range(100, 400)]
    assert cases == [drawn(kind, number) for number in range(100, 400)]
    for name in DRAWN:
        assert {name in case.differs for case in cases} == {True, False}
    assert {case.forged for case in cases} == {True, False}
    twin = Drawn(differs=frozenset(), sizes={}, seed=0, forged=False)
    assert not twin.must_be_refused(PAIRS[kind])
    for change in (
        *({"differs": frozenset({n})} for n in PAIRS[kind].sees),
        *([{"seed": 1}] if PAIRS[kind].has_id else []),
    ):
        assert dataclasses.replace(twin, **change).must_be_refused(PAIRS[kind])


def test_drawn_pairs_have_the_right_end(inputs, tmp_path):
    outcomes = outcomes_of(inputs, tmp_path, (dict.fromkeys(PAIRS, range(100, 108)),))
    assert not wrong_outcomes(outcomes)
    assert {*outcomes.values()} == {"refused", "done"}
