"""`make gpu-day` as far as it runs without a GPU: the programs of its parts replaced by small ones
that end, fail, crash, hang or are interrupted, and each real one at toy scale."""

import json
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest
from models import make_sizes
from paths import ROOT

BENCHMARKS, GPU_TESTS = str(ROOT / "benchmarks"), str(ROOT / "tests" / "gpu")
sys.path[:0] = [BENCHMARKS, GPU_TESTS]

import gpu  # noqa: E402
import gpu_day  # noqa: E402
import gpu_experts  # noqa: E402
import gpu_handover  # noqa: E402
import gpu_prompts  # noqa: E402
import gpu_sections  # noqa: E402
import gpu_trained  # noqa: E402
from gpu_sections import Sections, SectionTable  # noqa: E402
from handover import exchange_forms, round_trips  # noqa: E402

import run as gpu_run  # noqa: E402

del sys.path[:2]

TABLE = SectionTable(title="speed", columns=("what", "ms"), rows=[["a", "1"]])
TOY = make_sizes(
    num_layers=2,
    width=256,
    num_neurons=512,
    num_heads=4,
    num_kv_heads=4,
    vocab_size=384,
    context_length=1024,
)

# ---- sections ------------------------------------------------------------------------------

STUB = """
    import os, sys, time
    from pathlib import Path
    sys.path.insert(0, {benchmarks!r})
    from gpu_sections import Sections, SectionTable, page_of
    sections = Sections(Path(sys.argv[1]), "stub", float(sys.argv[2]))
    def measured(name):
        with open({trace!r}, "a") as file:
            print(name, file=file)
        return [SectionTable(title=name, columns=("what", "ms"), rows=[[name, "1"]])]
    def crash():
        measured("crash")
        os.abort()
    def fail():
        raise ValueError("no\\nsuch thing")
    sections.run("first", lambda: measured("first"))
    sections.run("bad", {bad})
    sections.run("last", lambda: measured("last"))
    print(page_of(sections.content, ["first", "bad", "last"]))
"""


def stub(tmp_path, bad):
    """(path of a program with three sections, of the file that lists what it measured)."""
    trace = tmp_path / "trace"
    trace.touch()
    program = tmp_path / "stub.py"
    program.write_text(
        textwrap.dedent(STUB).format(benchmarks=BENCHMARKS, trace=str(trace), bad=bad)
    )
    return program, trace


def part(tmp_path, name, program, most_s=30.0):
    result = tmp_path / "day" / name / "results.json"
    command = (sys.executable, str(program), str(result), "100")
    return gpu_day.DayPart(name=name, command=command, most_s=most_s, result=result)


def day_of(tmp_path, *parts, seconds=100.0):
    day = gpu_day.Day(tmp_path / "day", list(parts), seconds)
    day.run({part.name for part in parts}, set())
    return day


def test_sections_with_a_result_are_not_repeated(tmp_path):
    counts = []
    for _ in range(2):
        sections = Sections(tmp_path / "r.json", "x", 100)
        sections.run("a", lambda: (counts.append(1), [TABLE])[1])
        assert sections.is_fine(["a"]) and not sections.is_fine(["a", "b"])
    assert counts == [1]
    page = gpu_sections.page_of(sections.content, ["a", "b"])
    assert "speed\n  what  ms\n  a      1" in page and "b: not measured: no time left" in page


@pytest.mark.parametrize(
    "bad, tries, words",
    [
        ("fail", 0, "ValueError: no"),
        ("crash", gpu_sections.MOST_TRIES, f"began {gpu_sections.MOST_TRIES} times"),
        ("lambda: time.sleep(60), most_s=0.3", 0, "no end after 0 s"),
    ],
    ids=["fails", "crashes", "hangs"],
)
def test_the_others_are_measured_where_a_section(tmp_path, monkeypatch, bad, tries, words):
    monkeypatch.setattr(gpu_day, "LEAST_SECONDS", 1.0)
    program, trace = stub(tmp_path, bad)
    day = day_of(tmp_path, part(tmp_path, "p", program))
    assert trace.read_text().split() == ["first", *["crash"] * tries, "last"]
    found = json.loads((tmp_path / "day" / "gpu-day.json").read_text())["parts"]["p"]
    assert "tables" in found["result"]["sections"]["last"]
    assert f"bad: FAILED: {words}" in day.page() and "last   1" in day.page()


# ---- parts ---------------------------------------------------------------------------------


def script(tmp_path, name, text):
    path = tmp_path / f"{name}.py"
    path.write_text(text)
    return part(tmp_path, name, path)


def test_a_part_that_hangs_is_ended_with_what_it_started(tmp_path):
    child = tmp_path / "child"
    text = (
        f"import subprocess, time\nprint('begun', flush=True)\nopen({str(child)!r}, 'w')"
        ".write(str(subprocess.Popen(['sleep', '600']).pid))\ntime.sleep(600)"
    )
    for number, most_s in enumerate((1.5, 10.0, 60.0)):  # a busy machine starts it late
        folder = tmp_path / str(number)
        folder.mkdir()
        hangs = replace(script(folder, "hangs", text), most_s=most_s)
        day = day_of(folder, hangs, script(folder, "next", "print('fine')"))
        if child.exists():
            break
    parts = day.content["parts"]
    assert parts["hangs"]["state"] == "out of time" and parts["hangs"]["text"] == "begun\n"
    assert parts["next"]["state"] == "ok" and "== next: ok" in day.page()
    status = Path(f"/proc/{child.read_text()}/status")
    assert not status.exists() or "State:\tZ" in status.read_text()


def test_a_part_that_fails_says_why_and_is_not_repeated(tmp_path):
    fails = script(tmp_path, "fails", "raise SystemExit('no card')")
    for _ in range(2):
        day = day_of(tmp_path, fails)
        assert "== fails: FAILED" in day.page() and "no card" in day.page()
    assert day.content["parts"]["fails"]["errors"].count("no card") == 1
    day.run({"fails"}, {"fails"})
    assert day.content["parts"]["fails"]["errors"].count("no card") == 2


def test_a_part_that_the_day_has_no_time_for_goes_on_in_a_second_call(tmp_path, monkeypatch):
    """The first call ends within its second section, which the second call repeats."""
    monkeypatch.setattr(gpu_day, "LEAST_SECONDS", 0.5)
    again = tmp_path / "again"
    wait = f"lambda: Path({str(again)!r}).exists() or time.sleep(600), most_s=900"
    for number, seconds in enumerate((1.5, 10.0, 60.0)):  # a busy machine starts it late
        folder = tmp_path / str(number)
        folder.mkdir()
        program, trace = stub(folder, wait)
        one = part(folder, "p", program)
        later = script(folder, "later", "print('later')")
        day = day_of(folder, one, later, seconds=gpu_day.END_SECONDS + seconds)
        if trace.read_text():
            break
    assert day.content["parts"]["p"]["state"] == "cut off"
    assert "first   1" in day.page() and "left for a second call: p, later" in day.page()
    again.touch()
    day = day_of(folder, one, later)
    assert [day.content["parts"][name]["state"] for name in ("p", "later")] == ["ok", "ok"]
    assert trace.read_text().split() == ["first", "last"] and "left for" not in day.page()


MAIN = """
    import sys
    sys.path.insert(0, {benchmarks!r})
    import gpu_day
    from pathlib import Path
    def parts_of(folder, models, rival):
        def part(name, text):
            return gpu_day.DayPart(name=name, command=(sys.executable, "-c", text), most_s=90.0,
                                result=folder / name / "r.json")
        return [part("one", "print(1)"), part("two", "import time; time.sleep(60)")]
    gpu_day.parts_of = parts_of
    sys.exit(gpu_day.main())
"""


def test_an_interrupted_day_prints_its_page_and_keeps_its_results(tmp_path):
    program = tmp_path / "main.py"
    program.write_text(textwrap.dedent(MAIN).format(benchmarks=BENCHMARKS))
    output = tmp_path / "copy.json"
    command = [sys.executable, program, tmp_path / "day", "--output", output]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stderr is not None
    for line in running.stderr:
        if line.startswith("gpu-day: two: at most"):
            break
    time.sleep(0.2)
    running.send_signal(signal.SIGTERM)
    page, _ = running.communicate(timeout=30)
    assert running.returncode == 1 and "== one: ok" in page and "== two: cut off" in page
    assert json.loads(output.read_text())["parts"]["one"]["text"] == "1\n"
    assert json.loads(page.splitlines()[-1]) == {"benchmark": "gpu-day", "json": str(output)}
    refused = subprocess.run([*command, "--only", "three"], capture_output=True, text=True)
    assert refused.returncode == 1 and "no part three; there are one, two" in refused.stderr


def test_every_part_is_a_command_that_its_program_accepts(tmp_path):
    lines = {
        "gpu_handover.py": gpu_handover.parser,
        "run.py": gpu_run.command_line,
        "gpu_trained.py": gpu_trained.command_line,
        "gpu.py": gpu.command_line,
        "gpu_experts.py": gpu_experts.command_line,
        "gpu_prompts.py": gpu_prompts.command_line,
    }
    for rival in (None, tmp_path):
        for each in gpu_day.parts_of(tmp_path, tmp_path, rival):
            words = [word.format(seconds="10", minutes="0.5") for word in each.command]
            asked = lines[Path(words[1]).name]().parse_args(words[2:])
            is_bench = getattr(asked, "folder", None)
            place = is_bench or (asked.output if asked.output.suffix == "" else asked.output.parent)
            assert place == each.result.parent, each.name
            assert getattr(asked, "rival", rival) == rival
    first, rest = (
        {job.name for job in gpu_run.chosen(gpu_run.jobs_of("cuda"), only, without)}
        for only, without in ((gpu_day.TESTS, None), (None, gpu_day.TESTS))
    )
    assert first | rest == {job.name for job in gpu_run.jobs_of("cuda")} and not first & rest
    assert {"test_memory", "test_step-0"} <= first


def test_tests_that_ended_are_not_repeated(tmp_path):
    jobs = [gpu_run.Job(name=name, arguments=[]) for name in ("a", "b", "c")]
    states = dict(zip("abc", ("ok", "out of time", "FAILED"), strict=True))
    for job in jobs:
        job.state, job.counts = states[job.name], {"passed": 3}
    gpu_run.Runner(jobs, tmp_path, 0, 1).save()
    again = [gpu_run.Job(name=name, arguments=["x"]) for name in ("a", "b", "c", "d")]
    gpu_run.resume(again, tmp_path)
    assert [job.state for job in again] == ["ok", "waiting", "FAILED", "waiting"]
    assert again[0].counts == {"passed": 3} and again[0].arguments == ["x"]


# ---- the real programs ---------------------------------------------------------------------


@pytest.fixture
def unhurried(monkeypatch):
    """A section may take any time; on a busy machine, one that took too long would end pytest."""
    monkeypatch.setattr(gpu_sections.Sections, "seconds_left", 1e6)
    monkeypatch.setattr(gpu_sections.Sections, "_give_up", lambda *_: None)


@pytest.fixture
def small(monkeypatch):
    for module in (exchange_forms, round_trips):
        monkeypatch.setattr(module, "LAYERS", 3)


def test_the_handover_benchmark_runs_on_a_thread(tmp_path, monkeypatch, capsys, small, unhurried):
    path = tmp_path / "r.json"
    monkeypatch.setattr(sys, "argv", ["x", "--fake", "--output", str(path)])
    assert gpu_handover.main() == 0
    sections = json.loads(path.read_text())["sections"]
    assert list(sections) == list(gpu_handover.FAKED)
    (table,) = sections["handover"]["tables"]
    assert [row[0] for row in table["rows"]][-2:] == [exchange_forms.MEMOPS, "a layer without"]
    assert not [cell for row in table["rows"] for cell in row if "not served" in cell]
    assert exchange_forms.MEMOPS in capsys.readouterr().out


def test_a_hand_over_whose_flag_never_comes_is_reported(monkeypatch, small):
    """And ends, on both sides: the server releases all flags."""
    fake = gpu_handover.FakeGpu()
    buffers = exchange_forms.Buffers(fake)
    known = round_trips.HandoverBench(
        gpu=fake, host=gpu_handover.Host(), buffers=buffers, cores=1, is_small=True
    ).forms()
    assert known.added_us(exchange_forms.MEMOPS, 1, 0.0, 1) is not None
    monkeypatch.setattr(exchange_forms, "LIMIT_NS", 20_000_000)
    monkeypatch.setattr(fake, "write", lambda address, value: None)
    assert known.added_us(exchange_forms.MEMOPS, 1, 0.0, 1) is None
    assert buffers.done[:: exchange_forms.LINE].tolist() == [1] * 3


def test_prompts_are_timed_by_type(tmp_path, monkeypatch, capsys, unhurried):
    monkeypatch.setattr(gpu_prompts, "KINDS", ("q4_k",))
    path = tmp_path / "r.json"
    monkeypatch.setattr(sys, "argv", ["x", "--smoke", "--output", str(path)])
    assert gpu_prompts.main() == 0
    (row,) = json.loads(path.read_text())["sections"]["q4_k"]["tables"][0]["rows"]
    assert row[0] == "q4_k" and float(row[1]) > 0 and row[2] == "no rival"
    rows = json.loads(path.read_text())["sections"]["attention"]["tables"][0]["rows"]
    assert len(rows) == 3 and all(float(row[3]) > 0 and float(row[4]) > 0 for row in rows)
    (row,) = json.loads(path.read_text())["sections"]["overlap"]["tables"][0]["rows"]
    assert float(row[1]) > 0 and float(row[2]) > 0 and row[3] == "True"
    (row,) = json.loads(path.read_text())["sections"]["launches, a 7B shape"]["tables"][0]["rows"]
    assert row[0] == "16" and 0 < float(row[1]) <= float(row[2]) and row[4] == "True"
    assert not list(tmp_path.rglob("*.gguf"))


def test_a_model_is_run_as_a_user_types_it(tmp_path, monkeypatch):
    """The stand-in on the CPU alone, without what `run` prepares for a GPU."""
    model = gpu_trained.stand_in(tmp_path, TOY)
    assert gpu_trained.stand_in(tmp_path, TOY) == model
    cpu, card, *plans = gpu_trained.cases_of(model)
    assert (cpu.vram_bytes, card.vram_bytes, len(plans)) == (0, None, 3)
    (table,) = gpu_trained.measure(cpu, "cpu", tmp_path / "cache", 4)
    (row,) = table.rows
    assert float(row[1]) > 0 and row[3] == "-" and row[-1] == "-"
    nothing = gpu_trained.TrainedCase(model=tmp_path / "no.gguf", name="x", vram_bytes=0)
    with pytest.raises(gpu_trained.CommandError, match=r"no\.gguf: x: .*no such"):
        gpu_trained.run(nothing, "cpu", tmp_path / "cache", 4)
