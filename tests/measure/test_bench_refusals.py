"""bench in comparison with another program, and what bench refuses."""

import json
import stat
import statistics
import sys
from pathlib import Path

import pytest
from bench_cases import config_of

from hotsplit.cli import main
from hotsplit.errors import HotsplitError
from hotsplit.measure.bench.bench import bench
from hotsplit.measure.bench.bench_tables import lines_of, to_json
from hotsplit.measure.bench.rival import located, program_of
from hotsplit.system import processors

pytest_plugins = ("bench_fixtures",)

# ---- llama.cpp ----------------------------------------------------------------------------------

FAKE_PYTHON = """#!{python}
import json, sys
if sys.argv[1] == "--version":
    print("Python 3.99"); sys.exit()
asked = json.loads(sys.argv[3])
{first}
for line in sys.stdin:
    do = json.loads(line)
    print(json.dumps({{"ns": 1000 * len(do["ids"])}} if do["do"] != "depth" else {{}}), flush=True)
"""
ABOUT = "print(json.dumps({'tool': 'fake', 'vocab_size': %d, 'model_n_params': 9}), flush=True)"
FAKE_BENCH = """#!{python}
import json, sys
if sys.argv[1] == "--version":
    sys.exit("error: invalid parameter")
if sys.argv[1] == "--help":
    print("usage: -p, --n-prompt <n>"); sys.exit()
asked = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert asked["-ngl"] == "0" and asked["-r"] == "1" and asked["-o"] == "json", asked
n = int(asked["-p"]) + int(asked["-n"])
{first}
print(json.dumps([{{"build_number": 77, "samples_ns": [1000 * n]}}]))
"""


def program(folder: Path, text: str, first: str = "") -> Path:
    path = folder / "program"
    path.write_text(text.format(python=sys.executable, first=first))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


THREADS_MAY_SPIN = "import os; assert 'OMP_WAIT_POLICY' not in os.environ; "


@pytest.mark.parametrize("text, first", [(FAKE_PYTHON, ABOUT % 300), (FAKE_BENCH, "")])
def test_bench_compares_itself_with_another_program(
    bench_files, tmp_path, small_buffer, monkeypatch, text, first
):
    """The other programs are fakes that answer as the real ones do, with 1 us per token. They have
    the user's environment, without what a command sets for torch."""
    monkeypatch.setattr(processors, "_set_by_us", set())
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    processors.let_threads_sleep()
    first = THREADS_MAY_SPIN + first
    config = config_of(
        bench_files / "dense.gguf",
        device="cpu",
        depths=(0, 3),
        repetitions=3,
        compare=program(tmp_path, text, first),
        compare_model=bench_files / "dense.gguf",
    )
    report = bench(config)
    for result in report.results:
        assert result.theirs.samples_ns == (1000 * result.test.length,) * 3
        assert result.ratios == tuple(
            theirs / ours
            for ours, theirs in zip(result.ours.samples_ns, result.theirs.samples_ns, strict=True)
        )
        assert result.ratio == statistics.median(result.ratios)
    content = to_json(report)
    assert content["compare"]["tool"] == report.rival.tool
    assert content["tests"][0]["llamacpp"]["samples_ts"] == pytest.approx([1e6] * 3)
    assert any("in rounds" in line for line in lines_of(report))
    if text is FAKE_PYTHON:
        assert any("two models" in note for note in report.notes)


@pytest.mark.parametrize(
    "text, first, words",
    [
        (
            FAKE_PYTHON,
            "print(json.dumps({'error': 'it has no llama_cpp (x)'})); sys.exit()",
            "it has no llama_cpp .*pip install",
        ),
        (
            FAKE_PYTHON,
            "print(json.dumps({'error': 'it cannot load the model', 'log': ['bad magic']}),"
            " flush=True)",
            r"cannot load the model .*\(bad magic\).*--compare-model",
        ),
        (FAKE_PYTHON, "sys.exit('ended')", r"ended unexpectedly \(code 1\): ended"),
        (FAKE_PYTHON, ABOUT % 299, "has 299 tokens in llama.cpp.*another model"),
        (FAKE_BENCH, "sys.exit('error: no such model')", "cannot measure tg1 .*no such model"),
        (FAKE_BENCH, "print('[]'); sys.exit()", "cannot measure"),
        (FAKE_BENCH, "print(json.dumps([{}])); sys.exit()", "reports no samples_ns"),
        ("#!{python}\nprint('hello')\n{first}", "", "neither a Python nor a llama-bench"),
    ],
)
def test_a_rival_that_cannot_be_used_is_refused(
    bench_files, tmp_path, small_buffer, text, first, words
):
    config = config_of(
        bench_files / "dense.gguf",
        device="cpu",
        compare=program(tmp_path, text, first),
        compare_model=bench_files / "dense.gguf",
    )
    with pytest.raises(HotsplitError, match=words):
        bench(config)


def test_a_program_is_found_by_its_name(tmp_path, monkeypatch):
    path = program(tmp_path, FAKE_BENCH)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert located(Path("program")) == located(path) == path
    assert program_of(Path("program")) == "llama-bench"
    assert located(Path("nothing")) == Path("nothing").absolute()


def test_a_python_without_llama_cpp_is_refused(bench_files, tmp_path):
    """The real worker, run by this interpreter."""
    config = config_of(
        bench_files / "dense.gguf",
        device="cpu",
        compare=Path(sys.executable),
        compare_model=bench_files / "dense.gguf",
    )
    with pytest.raises(HotsplitError, match=r"it has no llama_cpp \(No module named"):
        bench(config)


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        ("-p 0 -n 0", "nothing to measure"),
        ("-p -1", "-p is -1"),
        ("-p 4 -d -2", "-d is -2"),
        ("-n 99999999", "-n is 99999999"),
        ("-p 65", "pp65 takes 65 tokens, the model has a context of 64"),
        ("-n 4 -p 0 -d 61", "tg4 @ d61 takes 65 tokens"),
        ("-r 0", "-r is 0"),
        ("-p 4 -n 4 -t 0", "--threads is 0"),
        ("-p 4 -n 4 --max-loss nan", "max_loss is nan"),
        ("--seed -1", "seed is -1"),
        ("--compare-model x", "nothing to compare with"),
        ("-p 4 -n 4 --compare {0}/nothing", "no such file"),
        ("-p 4 -n 4 --compare {0}", "is not a program"),
        ("-p 4 -n 4 --compare {0}/dense.gguf", "is not a program"),
        ("-p 4 -n 4 --compare {python}", "cannot load the sparse layout"),
        ("-p 4 -n 4 --compare {python} --compare-model {0}/nothing", "no such file"),
        ("-p 4 -n 4 --split {0}/plan.gguf", "made for model"),
        ("-p 4 -n 4 --split {0}/dense.gguf", "not a split file"),
        ("-p 4 -n 4 --mode predicted", "has no predictors"),
        ("-p 4 -n 4 --device abacus", "device 'abacus'"),
    ],
)
def test_requests_that_cannot_be_measured_are_refused(bench_files, capsys, options, words):
    words_given = options.format(bench_files, python=sys.executable).split()
    assert main(["bench", str(bench_files / "dense.gguf"), *words_given]) == 1
    error = capsys.readouterr().err.strip().splitlines()
    assert words in error[-1], error


@pytest.mark.parametrize("options", ["-p nan", "-p 1,,2", "-n 1.5", "-r nan"])
def test_usage_errors_have_exit_code_2(bench_files, options):
    assert main(["bench", str(bench_files / "dense.gguf"), *options.split()]) == 2


def test_a_plan_whose_context_is_too_short_is_refused(bench_files, small_buffer):
    options = {"split": bench_files / "plan.gguf", "device": "cpu"}
    with pytest.raises(HotsplitError, match="the plan has a context of 32, the longest .* 40"):
        bench(config_of(bench_files / "predicted.gguf", prompt_lengths=(40,), **options))
    assert bench(config_of(bench_files / "predicted.gguf", prompt_lengths=(32,), **options)).results


def test_the_command(bench_files, capsys, small_buffer):
    given = ["bench", str(bench_files / "dense.gguf")]
    given += ["-p", "4,6", "-n", "2", "-r", "1", "--device", "cpu"]
    assert main([*given, "--json"]) == 0
    out = capsys.readouterr()
    assert [t["test"] for t in json.loads(out.out)["tests"]] == ["pp4", "pp6", "tg2"]
    assert main(given) == 0
    out = capsys.readouterr()
    assert not out.out and "tokens/s" in out.err and "output head" in out.err
