"""The trial of a plan: what it times, what explains a missed prediction, and the warning on a plan
that is given by hand. `test_run.py` has what `run` does with it."""

from dataclasses import replace

import numpy as np
import pytest
from fake_cuda import library
from fake_cuda.torch_cuda import fake_cuda
from hybrid_plans import ALL, SOME, made, make
from models import (
    byte_level_keys,
    make_inputs,
    make_machine,
    make_model,
    make_profile,
    make_sizes,
    power_law_frequencies,
)
from test_runtime import make_split

from hotsplit import Engine
from hotsplit.artifacts.trial_file import Trial
from hotsplit.cli import main
from hotsplit.commands.options.slow_plans import slow_plan_line
from hotsplit.doctor import machine_findings as machine
from hotsplit.errors import HotsplitError
from hotsplit.run.keys import digest
from hotsplit.run.rates import Rates, cpu_alone_name, machine_key
from hotsplit.run.trial import MOST_SCALE, PlanTimes, Prediction, measure, scales_of, tried
from hotsplit.runtime.kernels import threads
from hotsplit.solver.mode_choice import find
from hotsplit.solver.multi_gpu import plan_seconds
from hotsplit.solver.prediction import check_whole_host, cpu_alone_seconds, parts_of, placement_of
from hotsplit.solver.scales import Scales, scaled
from hotsplit.solver.solve import split_of

TIMES = PlanTimes(token_s=3.0, prompt_s=1.0)
PREDICTION = Prediction(
    token_s=2.9, parts_s={"cpu": 2.0, "hand_over": 0.4, "gpu": 0.5}, cpu_alone_s=1.0
)


# ---- what is timed ------------------------------------------------------------------------------


@pytest.mark.parametrize("context_length", [8, 32])
def test_steps_and_a_prompt_are_timed_and_leave_no_trace(tmp_path, context_length):
    model = make(tmp_path)
    with Engine.of(model, mode="exact", device="cpu", context_length=context_length) as engine:
        want = engine._step(3, 0).clone()
        found = measure(engine)
        assert 0 < found.token_s < 1 and 0 < found.prompt_s < 10
        assert engine._step(3, 0).equal(want)


def test_the_cpu_alone_wins_by_more_than_a_twentieth_and_others_are_tried_only_if_missed():
    def again(scales):
        raise AssertionError("not missed")

    for cpu_s, runs in ((2.86, "the plan"), (2.85, "the CPU alone"), (9.0, "the plan")):
        times = {"the plan": TIMES, "the CPU alone": PlanTimes(token_s=cpu_s, prompt_s=1.0)}
        found = tried(PREDICTION, times.__getitem__, again, tries_all=False)
        assert found.runs == runs and found.measured_s.keys() == times.keys()
        assert "the plan takes 3e+03 ms a token (predicted 2.9e+03 ms), the CPU alone" in found.line


@pytest.mark.parametrize(
    ("experts_s", "layers_s", "cpu_s", "runs"),
    [
        (2.9, 2.8, 9.0, "whole layers"),
        (2.5, 2.8, 9.0, "experts on the CPU"),
        (3.1, 3.2, 9.0, "the plan"),
        (2.5, 2.8, 2.3, "the CPU alone"),
    ],
)
def test_the_fastest_of_all_that_is_tried_runs(experts_s, layers_s, cpu_s, runs):
    prediction = replace(PREDICTION, obvious_s={"experts on the CPU": 4.0, "whole layers": 5.0})
    times = {
        "the plan": 3.0,
        "experts on the CPU": experts_s,
        "whole layers": layers_s,
        "the CPU alone": cpu_s,
    }

    def by(name):
        return PlanTimes(token_s=times[name], prompt_s=1.0)

    found = tried(prediction, by, lambda scales: 1.0, tries_all=True)
    assert (found.runs, found.measured_s) == (runs, times)
    assert f"all experts on the CPU {1e3 * experts_s:.3g} ms (predicted 4e+03 ms)" in found.line
    assert f"the CPU alone {1e3 * cpu_s:.3g} ms (predicted 1e+03 ms)" in found.line
    assert found.line.endswith("runs instead") == (runs in prediction.obvious_s)


@pytest.mark.parametrize(
    ("failing", "runs", "words"),
    [
        ({"whole layers"}, "the plan", "the plan takes 3e+03 ms a token"),
        ({"the CPU alone"}, "the plan", "the CPU alone is left out (no room)"),
        ({"the plan"}, "whole layers", "the CPU alone takes 9e+03 ms a token"),
        ({"the plan", "whole layers"}, "the CPU alone", "everything runs on the CPU"),
    ],
)
def test_what_cannot_be_loaded_is_left_out_with_its_reason(tmp_path, failing, runs, words):
    prediction = replace(PREDICTION, obvious_s={"whole layers": 5.0})
    times = {"the plan": 3.0, "whole layers": 3.2, "the CPU alone": 9.0}

    def by(name):
        if name in failing:
            raise HotsplitError("no room") if name != "whole layers" else MemoryError
        return PlanTimes(token_s=times[name], prompt_s=1.0)

    found = tried(prediction, by, lambda scales: 1.0, tries_all=True)
    assert found.runs == runs and found.measured_s.keys() == times.keys() - failing
    assert words in found.line and found.left_out.keys() == failing
    found.save(tmp_path / "t.json")
    assert Trial.load(tmp_path / "t.json") == found


def test_without_anything_that_can_be_loaded_the_reason_is_said():
    def by(name):
        raise HotsplitError(f"no room for {name}")

    with pytest.raises(HotsplitError, match="nothing that was tried .*: no room for the plan"):
        tried(PREDICTION, by, lambda scales: 1.0, tries_all=False)


def test_the_cpu_alone_is_tried_only_if_main_memory_holds_the_model(solved):
    inputs, _ = solved
    whole = inputs.pipeline().model.placeable_bytes + inputs.always_on_host
    check_whole_host(replace(inputs, host_budget=whole))
    with pytest.raises(HotsplitError, match="it takes .*; there are .* of main memory"):
        check_whole_host(replace(inputs, host_budget=whole - 1))


def test_another_number_of_threads_is_another_machine(monkeypatch):
    monkeypatch.setattr(threads, "_named", None)
    keys = []
    for count in (1, 3, 1, None):
        threads.use_threads(count)
        keys.append(digest(machine_key()))
    assert keys[0] == keys[2] != keys[1]
    for beside_gpu in (True, False):  # a load or a calibration chooses the default for its device
        threads.use_default_threads(beside_gpu=beside_gpu)
        assert digest(machine_key()) == keys[3]


def test_the_record_is_read_back_and_others_are_refused(tmp_path):
    trial = Trial(
        runs="whole layers",
        prompt_s=0.1,
        parts_s=PREDICTION.parts_s,
        predicted_s={"the plan": 1e-3, "whole layers": 4e-3, "the CPU alone": 5e-3},
        measured_s={"the plan": 3e-3, "whole layers": 2e-3, "the CPU alone": 9e-3},
        scales={"cpu": 2.0, "hand_over": 6.0, "gpu": 1.0},
        left_out={"experts on the CPU": "too large"},
    )
    assert "all experts on the CPU is left out (too large): whole layers runs" in trial.line
    assert trial.parts_line.startswith(
        "3 times what was predicted: the CPU 2e+03 ms (measured 2 times"
    )
    path = tmp_path / "trial.json"
    trial.save(path)
    assert Trial.load(path) == trial and "whole layers 2 ms (predicted 4 ms)" in trial.line
    for old, new in (
        ('"runs": "whole', '"runs": "hole'),
        ('"the plan": 0.003', '"the plan": null'),
        ('"version": 1', '"version": 2'),
        ('"hand_over": 6.0', '"hand": 6.0'),
        ('"measured_s"', '"cpu"'),
        ('"the CPU alone": 0.009', '"no": 1'),
        ('"runs": "whole layers"', '"runs": "experts on the CPU"'),
    ):
        path.write_text(path.read_text().replace(old, new))
        with pytest.raises(HotsplitError):
            Trial.load(path)
        trial.save(path)


def test_doctor_shows_predictions_that_were_missed(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTSPLIT_CACHE", str(tmp_path))
    assert machine.trials() == []
    for number, plan_s in enumerate((1.2e-3, 3e-3)):
        (tmp_path / f"trial-{number}").mkdir()
        scales = {"cpu": 2.0, "hand_over": 6.0, "gpu": 1.0}
        Trial(
            runs="the plan",
            predicted_s={"the plan": 1e-3, "the CPU alone": 8e-3},
            measured_s={"the plan": plan_s, "the CPU alone": 9e-3},
            prompt_s=0.1,
            left_out={},
            parts_s=PREDICTION.parts_s,
            scales=scales,
        ).save(tmp_path / f"trial-{number}/trial.json")
    (tmp_path / "trial-2").mkdir()
    (tmp_path / "trial-2" / "trial.json").write_text("{}")
    fine, missed = machine.trials()
    assert (fine.state, missed.state) == ("ok", "note")
    assert "3 times what was predicted" in missed.text and "hand-overs 400 ms" in missed.text


# ---- what explains it ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def solved():
    """(inputs, plan) with divided layers, runs on the CPU, and neurons on both sides."""
    sizes = make_sizes(num_layers=4, width=256, num_neurons=1024, vocab_size=512)
    model = make_model(sizes=sizes, kind="f16")
    figures = make_machine(
        hand_over_s=2e-6, cpu_run_s=3e-6, use_s=4e-6, launch_s=1e-7, layer_s=1e-6, cpu_gb_per_s=20.0
    )
    profile = make_profile(model, power_law_frequencies(4, 1024))
    inputs = make_inputs(model, profile, figures, 3 << 20, workspace=1000)
    found = find(inputs, time_limit_s=5)
    # Without its files' hashes, which `split_of` reads.
    import hotsplit.solver.solve as solving

    before = solving.sha256_of
    solving.sha256_of = lambda path: "unknown"
    try:
        return inputs, split_of(found, solve_s=0.0)
    finally:
        solving.sha256_of = before


def test_parts_are_those_of_the_plan_and_sum_to_its_seconds(solved):
    inputs, split = solved
    parts = parts_of(split, inputs)
    assert sum(parts.values()) == pytest.approx(split.objective_s)
    assert min(parts.values()) > 0
    whole = replace(
        split,
        hot=(np.arange(1024, dtype=np.int32),) * 4,
        dense_on_gpu=(True,) * 4,
        head_on_gpu=True,
    )
    assert parts_of(whole, inputs)["hand_over"] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("cpu", "hand_over"), [(1.0, 8.0), (2.5, 1.0), (2.0, 20.0), (0.5, 30.0)])
def test_planted_slowness_is_found_and_laid_to_what_is_slow(solved, cpu, hand_over):
    """The plan's seconds on a machine whose CPU or hand-overs are slower by these factors lead to
    them; all layers of this plan wait for the CPU."""
    inputs, split = solved
    slow = replace(inputs, machine=scaled(inputs.machine, Scales(cpu=cpu, hand_over=hand_over)))
    placement = placement_of(split, inputs)
    plan_s = plan_seconds(slow.pipeline(), placement)
    first = PlanTimes(token_s=plan_s, prompt_s=1.0)
    prediction = Prediction(
        token_s=split.objective_s,
        parts_s=parts_of(split, inputs),
        cpu_alone_s=cpu_alone_seconds(inputs),
    )
    found = scales_of(prediction, first, cpu_alone_seconds(slow))
    assert found.cpu == pytest.approx(cpu, rel=1e-6) and found.gpu == 1.0
    hand_over_s = parts_of(split, inputs)["hand_over"]
    assert abs(found.hand_over - hand_over) * hand_over_s < 0.02 * plan_s
    again = replace(inputs, machine=scaled(inputs.machine, found))
    assert plan_seconds(again.pipeline(), placement) == pytest.approx(plan_s, rel=0.02)


def test_without_hand_overs_the_gpu_is_slow_and_factors_are_bounded():
    without = replace(PREDICTION, parts_s={"hand_over": 0.0, "cpu": 0.0, "gpu": 1.0})
    assert scales_of(without, TIMES, 1.0) == Scales(gpu=3.0)
    short = replace(PREDICTION, parts_s={"hand_over": 1e-9, "cpu": 0.5, "gpu": 0.5})
    assert scales_of(short, TIMES, 1.0) == Scales(hand_over=MOST_SCALE)
    assert scales_of(short, replace(TIMES, token_s=0.1), 1e-9).cpu == 1 / MOST_SCALE


# ---- given by hand ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token_s", "cpu_s", "words"),
    [
        (1.29, None, None),
        (1.29, 1.24, None),
        (1.29, 1.22, "on the CPU alone (--device cpu without --split)"),
        (1.31, None, "let hotsplit run try other plans"),
        (1.31, 1.5, "let hotsplit run try other plans"),
    ],
)
def test_a_plan_by_hand_is_warned_of(tmp_path, token_s, cpu_s, words):
    made(tmp_path, "random")  # predicts 1 s
    line = slow_plan_line(tmp_path / "s.gguf", token_s, cpu_s)
    assert (line is None) == (words is None)
    assert line is None or (words in line and "predicted 1e+03 ms" in line and "\n" not in line)


@pytest.mark.skipif(not library.can_be_built(), reason="needs a C++ compiler, and Linux")
def test_generate_warns_of_a_slow_plan_and_runs_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOTSPLIT_CACHE", str(tmp_path / "cache"))
    keys, vocab_size = byte_level_keys()
    sizes = make_sizes(num_layers=2, num_neurons=96, vocab_size=vocab_size)
    model = replace(make_model(sizes=sizes, extra_keys=keys), path=tmp_path / "m.gguf")
    model.save(model.path)
    plan = make_split(model, [ALL, SOME], dense_on_gpu=[1, 1])
    line = f"generate {model.path} --split {tmp_path}/s.gguf -p the -n 2 --temperature 0"
    words = line.split()
    replace(plan, objective_s=1e3).save(tmp_path / "s.gguf")
    with fake_cuda():
        assert main(words) == 0
        assert "a token takes" not in capsys.readouterr().err
        # An earlier trial measured the CPU alone.
        known = Rates.load(tmp_path / "cache", digest(machine_key()))
        known.note(cpu_alone_name(model.model_id), 1e6)
        assert main(words) == 0
    shown = capsys.readouterr()
    assert shown.out.strip() and "on the CPU alone (--device cpu without --split)" in shown.err
