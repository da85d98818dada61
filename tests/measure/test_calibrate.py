"""What calibrate measures, its warnings, and the file it writes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_cuda import library as fake_library
from fake_cuda.torch_cuda import fake_cuda
from models import make_machine

from hotsplit.artifacts.data_sheets import load_machine
from hotsplit.artifacts.machine_file import CpuCosts, Drive, DriveReads, Figure, Machine
from hotsplit.errors import HotsplitError
from hotsplit.measure.calibrate import calibrate as calibrating
from hotsplit.measure.calibrate import cpu_bandwidth, cpu_costs
from hotsplit.measure.calibrate import gpu as calibrate_gpu
from hotsplit.measure.calibrate.calibrate import CalibrateConfig, busy_words, calibrate, report
from hotsplit.measure.calibrate.cpu_bandwidth import thread_counts
from hotsplit.measure.calibrate.cpu_costs import _row_probes, _tenths
from hotsplit.measure.calibrate.step_costs import Shape
from hotsplit.measure.timing import interleave
from hotsplit.measure.timing.interleave import MAX_ROUNDS, MIN_ROUNDS, Probe, run_rounds, take_turns
from hotsplit.model.weight_types import NAMES
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.kernels.tiled import TILED_KIND
from hotsplit.runtime.weights.matrix import Matrix

RTX = Path("rtx-4060-8gb")  # by its data sheet


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """(machine, messages, reported timings), measured on little memory in the fewest rounds."""
    lines, timings = [], []
    path = tmp_path_factory.mktemp("calibrate") / "m.json"
    config = CalibrateConfig(output=path, gpu_from=RTX)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_bandwidth, "MAX_BUFFER_BYTES", 32 << 20)
        patch.setattr(cpu_bandwidth, "CPU_LIMIT_S", 0.0)
        patch.setattr(calibrating, "COSTS_LIMIT_S", 0.0)
        patch.setattr(cpu_costs, "STEPS", 4)
        machine = calibrate(config, lines.append, timings.append)
    assert Machine.load(path) == machine
    return machine, lines, timings


def test_every_figure_has_a_consistent_spread(measured):
    machine, lines, timings = measured
    assert len(timings) >= MIN_ROUNDS
    cores = thread_counts(machine.num_threads)
    assert list(machine.cpu_bandwidth_gb_per_s) == list(machine.cpu_sum_gb_per_s) == cores
    for name, figure in machine.figures.items():
        if name.startswith("cpu"):
            assert figure.rounds >= MIN_ROUNDS
            low, median, high = figure.quartiles
            if name in machine.cpu_costs.figures:
                assert 0 < low <= median <= high < 2000
                continue
            assert 0.2 < low <= median <= high <= figure.best < 2000
    assert sum(line.startswith("CPU, ") for line in lines) == len(cores)


def test_a_gpu_is_borrowed_only_where_there_is_none(measured, tmp_path, monkeypatch):
    machine, lines, _ = measured
    if torch.cuda.is_available():
        assert machine.gpus[0].source == "measured"
        return
    assert machine.gpus == load_machine(RTX).gpus
    assert "data sheet, not measured" in lines[0]
    monkeypatch.setattr(calibrating, "measure_cpu", lambda *a: ({1: Figure(best=1.0)}, {}))
    monkeypatch.setattr(calibrating, "measure_costs", lambda *sizes: machine.cpu_costs)
    bare = calibrate(CalibrateConfig(output=tmp_path / "n.json"))
    assert bare.gpus == ()
    with pytest.raises(HotsplitError, match="has no GPU; give"):
        calibrate(CalibrateConfig(output=tmp_path / "o.json", gpu_from=tmp_path / "n.json"))
    real = make_machine()
    gpu = replace(real.gpus[0], source="measured")
    replace(real, gpus=(gpu,)).save(tmp_path / "real.json")
    lent = calibrate(CalibrateConfig(output=tmp_path / "p.json", gpu_from=tmp_path / "real.json"))
    assert lent.gpus[0].source == "measured on synthetic CPU"


def test_all_rows_are_timed_in_the_form_that_models_have(monkeypatch):
    """Whatever the size of the buffer: rows that do not fill tiles take up to three times as
    long."""
    if not library.prefers_tiles():
        pytest.skip("no matrix is tiled here")
    seen = []
    for name in ("dot", "product"):
        monkeypatch.setattr(Matrix, name, lambda self, x: seen.append(self.kind))
    for kind in NAMES:
        for num_bytes in (1 << 20, 3 << 18):
            whole, in_a_pass, _ = _row_probes(kind, num_bytes)
            whole.seconds(), in_a_pass.seconds()
            assert 0.9 * num_bytes < whole.num_bytes == in_a_pass.num_bytes <= num_bytes
    assert seen == [TILED_KIND.get(kind, kind) for kind in NAMES for _ in range(4)]


def test_thread_counts():
    assert thread_counts(1) == [1]
    assert thread_counts(6) == [1, 2, 3, 4, 5, 6]
    assert thread_counts(24) == [1, 2, 4, 8, 12, 16, 24]
    assert thread_counts(64) == [1, 2, 4, 8, 16, 32, 64]


# ---- rounds and figures --------------------------------------------------------------------------


@pytest.mark.parametrize("count", [10, 19, 3413])
def test_tenths_are_disjoint_and_equal(count):
    """One number of bytes stands for all of them."""
    tenths = _tenths(count)
    assert [len(ids) for ids in tenths] == [count // 10] * 10
    assert len(set(torch.cat(tenths).tolist())) == count // 10 * 10
    assert all((ids.diff() > 0).all() and ids.max() < count for ids in tenths)


def test_turns_alternate_and_the_first_round_warms_up():
    order: list[str] = []

    def turn_of(name: str):
        def turn(number: int) -> str:
            order.append(f"{name}{number}")
            return order[-1]

        return turn

    turns = {name: turn_of(name) for name in "abc"}
    assert take_turns(turns, 2) == {name: [f"{name}1", f"{name}2"] for name in "abc"}
    assert order == ["a0", "b0", "c0", "c1", "b1", "a1", "a2", "b2", "c2"]
    order.clear()
    assert take_turns(turns, 9, alternates=False, is_over=lambda n: n > 1)["b"] == ["b1"]
    assert order == ["a0", "b0", "c0", "a1", "b1", "c1"]


def test_rounds_are_interleaved_and_the_first_is_not_counted():
    order: list[str] = []
    seconds = {"a": iter([9.0, *range(1, 99)]), "b": iter([9.0] + [2.0] * 99)}

    def probe(name: str, num_bytes: int | None) -> Probe:
        def run() -> float:
            order.append(name)
            return next(seconds[name])

        return Probe(name=name, seconds=run, num_bytes=num_bytes)

    found = run_rounds([probe("a", None), probe("b", 4 * 10**9)], 1e9)
    assert order == ["a", "b"] * (MAX_ROUNDS + 1)
    assert found["a"] == Figure(best=1.0, quartiles=(4.5, 8.0, 11.5), rounds=15)
    assert found["b"] == Figure(best=2.0, quartiles=(2.0, 2.0, 2.0), rounds=15)


def test_rounds_end_with_the_time_but_not_before_the_fewest():
    now = iter(range(100))
    probe = Probe(name="a", seconds=lambda: 1.0)
    assert run_rounds([probe], 0.0, clock=lambda: next(now))["a"].rounds == MIN_ROUNDS
    now = iter(range(100))
    assert run_rounds([probe], 3.5, clock=lambda: next(now))["a"].rounds == MIN_ROUNDS + 3


def test_figures_whose_rounds_differ_widely_are_doubtful():
    steady = Figure.of_rounds([10, 10.1, 10.2, 10.1, 10], is_rate=True)
    torn = Figure.of_rounds([10, 5, 9, 4, 6], is_rate=True)
    assert not steady.is_doubtful
    assert torn.is_doubtful
    assert not Figure(best=3.0).is_doubtful
    machine = replace(make_machine(), cpu_bandwidth_gb_per_s={1: steady, 2: torn})
    notes = [line for line in report(machine) if line.startswith("note")]
    assert len(notes) == 1
    assert "cpu with 2 threads (10 at best" in notes[0]
    assert "another process may be using the memory" in notes[0] and "-v" not in notes[0]
    machine = replace(machine, cpu_bandwidth_gb_per_s=dict.fromkeys(range(1, 30), torn))
    (note,) = [line for line in report(machine) if line.startswith("note")]
    assert (
        note.startswith(f"note: 29 of {len(machine.figures)} figures")
        and "inspect lists all" in note
    )
    assert busy_words(machine, 0.0) == f"29 of {len(machine.figures)} figures differ between rounds"


def test_a_load_before_the_start_is_told_by_itself():
    count, machine = calibrating.processors().in_machine, make_machine()
    assert not busy_words(machine, None) and not busy_words(machine, count / 2)
    words = f"{9.0 * count:.1f} processes on {count} processors before the start"
    assert busy_words(machine, 9.0 * count) == words
    notes = [line for line in report(machine, 9.0 * count) if line.startswith("note")]
    assert len(notes) == 1 and notes[0].startswith(f"note: {words}: another process may be")
    assert not any(line.startswith("note") for line in report(machine, 0.0))


# ---- the file ------------------------------------------------------------------------------------


def test_the_exact_text_of_a_small_file(tmp_path):
    costs = CpuCosts(
        all_rows_gb_per_s={"f16": Figure(best=3.0)},
        chosen_rows_gb_per_s={},
        kv_gb_per_s=Figure(best=2.0),
        layer_s={"exact": Figure(best=0.5)},
        token_s=Figure(best=0.25),
        logit_s=Figure(best=0.125),
    )
    machine = replace(
        make_machine(num_gpus=0),
        cpu_sum_gb_per_s={},
        cpu_costs=costs,
        cpu_bandwidth_gb_per_s={2: Figure(best=20.0, quartiles=(17.5, 18.0, 19.0), rounds=7)},
    )
    reads = DriveReads(
        size_bytes=4096, depth=4, is_random=True, gb_per_s=Figure(best=2.5), cpu_s_per_gb=0.5
    )
    drive = Drive(name="sda", identity="0f", kind="solid state", source="measured", reads=(reads,))
    machine = replace(machine, drives=(drive,))
    machine.save(tmp_path / "m")
    assert json.loads((tmp_path / "m").read_text()) == {
        "format": "hotsplit.machine",
        "version": 1,
        "cpu_name": "synthetic CPU",
        "num_threads": 2,
        "memory_bytes": 64 << 30,
        "free_bytes": 64 << 30,
        "cpu_bandwidth_gb_per_s": {
            "2": {"best": 20.0, "quartiles": [17.5, 18.0, 19.0], "rounds": 7}
        },
        "cpu_sum_gb_per_s": {},
        "gpus": [],
        "drives": [
            {
                "name": "sda",
                "identity": "0f",
                "kind": "solid state",
                "source": "measured",
                "reads": [
                    {
                        "size_bytes": 4096,
                        "depth": 4,
                        "is_random": True,
                        "gb_per_s": {"best": 2.5, "quartiles": None, "rounds": 0},
                        "cpu_s_per_gb": 0.5,
                    }
                ],
            }
        ],
        "versions": {},
        "cpu_costs": {
            "all_rows_gb_per_s": {"f16": {"best": 3.0, "quartiles": None, "rounds": 0}},
            "chosen_rows_gb_per_s": {},
            "kv_gb_per_s": {"best": 2.0, "quartiles": None, "rounds": 0},
            "layer_s": {"exact": {"best": 0.5, "quartiles": None, "rounds": 0}},
            "token_s": {"best": 0.25, "quartiles": None, "rounds": 0},
            "logit_s": {"best": 0.125, "quartiles": None, "rounds": 0},
            "pass_rows_gb_per_s": {},
        },
    }
    assert Machine.load(tmp_path / "m") == machine
    assert machine.best_cpu_bandwidth_gb_per_s == 20.0


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda c: c.update(version=3), "version 3, this program reads 1"),
        (lambda c: c.update(format="x"), "format 'x'"),
        (lambda c: c.pop("cpu_sum_gb_per_s"), "'cpu_sum_gb_per_s' is missing"),
        (lambda c: c["gpus"][0]["launch_s"].update(best=0), "launch_s.best is 0, wanted at least"),
        (lambda c: c["gpus"][0]["launch_s"].update(quartiles=[3, 2, 1], rounds=3), "ascending"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line_that_says_calibrate_again(tmp_path, change, message):
    make_machine().save(tmp_path / "m")
    content = json.loads((tmp_path / "m").read_text())
    change(content)
    (tmp_path / "m").write_text(json.dumps(content))
    with pytest.raises(HotsplitError, match=message) as caught:
        Machine.load(tmp_path / "m")
    assert "run hotsplit calibrate again" in str(caught.value)


# ---- a GPU ---------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_figures_of_a_gpu_are_plausible():
    costs = make_machine().costs
    gpu = calibrate_gpu.measure_gpu(0, 20.0, costs, 64 << 30)
    assert 50 < gpu.bandwidth_gb_per_s.best < 20_000
    assert 0.5 < gpu.host_to_device_pageable_gb_per_s.best < 1000
    assert gpu.host_to_device_gb_per_s.best < gpu.bandwidth_gb_per_s.best
    assert 1e-7 < gpu.launch_s.best < 1e-4
    assert 1e-7 < gpu.copy_latency_s.best < 1e-3
    assert gpu.launch_s.median <= gpu.kernel_s.median < 1e-4
    assert 1e-6 < gpu.hand_over_s.median < 1e-3 and 1e-6 < gpu.cpu_run_s.median < 1e-3
    assert gpu.chosen_rows_gb_per_s.median < gpu.bandwidth_gb_per_s.best


@pytest.mark.skipif(not fake_library.can_be_built(), reason="needs a C++ compiler, and Linux")
def test_a_rehearsal_of_the_gpu_measurements_without_one(monkeypatch):
    """Runs the whole measurement; its figures are meaningless."""
    # Both sides are on the CPU, so a bandwidth is not needed to fit the rest.
    small = Shape(num_layers=4, hidden_size=64, num_neurons=128, vocab_size=100, head_dim=32)
    monkeypatch.setattr(calibrate_gpu.step_costs, "NARROW", small)
    monkeypatch.setattr(calibrate_gpu.step_costs, "SMALLER", replace(small, hidden_size=128))
    monkeypatch.setattr(calibrate_gpu.step_costs, "STEPS", 1)
    monkeypatch.setattr(calibrate_gpu, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(interleave, "MAX_ROUNDS", 2)
    timings: list[float] = []
    with fake_cuda():
        gpu = calibrate_gpu.measure_gpu(0, 0.1, make_machine().costs, 1 << 30, timings.append)
    assert gpu.source == "measured"
    assert len(gpu.figures) == 10
    assert all(figure.rounds >= 2 for figure in gpu.figures.values())
    assert len(timings) == (5 + 2 * 6 + 1) * (2 + 1) - 3
