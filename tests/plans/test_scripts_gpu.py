"""The scripts for machines with a CUDA device, as far as they run without one."""

import json
import subprocess
import sys
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from models import make_machine, make_model, make_sizes
from paths import ROOT

from hotsplit import Engine

sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests" / "gpu")]  # tests/gpu is not a package

import gpu  # noqa: E402
import gpu_cases  # noqa: E402
import gpu_ready  # noqa: E402
import gpu_rival  # noqa: E402
import test_sanitizer  # noqa: E402
import test_step  # noqa: E402
import worker_process  # noqa: E402
from gpu_model import Planted, write_planted  # noqa: E402
from worker_process import Process, ProcessError  # noqa: E402

import run as gpu_run  # noqa: E402

del sys.path[:2]

CPU = torch.device("cpu")
TOY = make_sizes(
    num_layers=3,
    width=256,
    num_neurons=1024,
    num_heads=8,
    num_kv_heads=4,
    vocab_size=384,
    context_length=64,
)


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """(model file, profile) of a toy model."""
    folder = tmp_path_factory.mktemp("planted")
    return write_planted(Planted(sizes=TOY, rank=64, device=CPU), folder / "m.gguf")


def test_the_computed_profile_matches_counted_firings(planted):
    model, profile = planted
    ids = np.random.default_rng(0).integers(3, 384, 64)
    fired = {layer: torch.zeros(1024) for layer in range(3)}
    with Engine.load(model.path, mode="dense", device="cpu") as engine:

        def count(name, layer, gate_TF):
            if name == "ffn_gate":
                fired[layer] += (gate_TF > 0).float().mean(dim=0)

        with engine.observe(count):
            engine.hidden(ids)
    for layer in range(3):
        counted, computed = fired[layer].numpy(), profile.frequency_LF[layer]
        assert abs(counted.mean() - computed.mean()) < 0.1 * computed.mean()
        assert np.corrcoef(counted, computed)[0, 1] > 0.9
        assert np.corrcoef(counted, profile.frequency_LF[layer][::-1])[0, 1] < 0.3


def test_planted_predictors_name_what_fires(planted):
    model, _ = planted
    ids = np.random.default_rng(1).integers(3, 384, 64)
    found = []
    for mode in ("dense", "predicted"):
        with Engine.load(model.path, mode=mode, device="cpu") as engine:
            found.append(engine.logits(ids))
            read = engine.traffic.total
    dense, predicted = found
    assert (dense.argmax(dim=1) == predicted.argmax(dim=1)).float().mean() > 0.95
    assert 0.1 < np.mean(model.predictor.density_L) < 0.3
    assert read < 0.5 * sum(e.num_bytes for n, e in model.tensors.items() if "ffn" in n) * len(ids)


def test_the_limit_of_a_dense_step_counts_all_bytes_except_the_embedding():
    model = make_model(sizes=make_sizes(width=256, num_neurons=1024), kind="f16")
    read = sum(entry.num_bytes for name, entry in model.tensors.items() if "token_embd" not in name)
    read += 2 * 32 // 2 * 2 * 2 * 128  # K and V, half of 32 positions, 2 layers, f16, 2 heads of 64
    found = gpu.dense_limit_seconds(model, make_machine(gpu_gb_per_s=500), 32)
    assert found == pytest.approx(read / 500e9)


LOG = """\
load_tensors: offloading 20 repeating layers to GPU
load_tensors:        CUDA0 model buffer size =  3577.50 MiB
load_tensors:   CPU_Mapped model buffer size =  9000.25 MiB
llama_kv_cache:      CUDA0 KV buffer size =   160.00 MiB
llama_context:      CUDA0 compute buffer size =    70.50 MiB
llama_context:  CUDA_Host compute buffer size =    12.01 MiB
"""


def test_the_rivals_memory_is_that_of_its_gpus():
    assert gpu_rival.gpu_bytes(LOG.splitlines()) == (3577.5 + 160 + 70.5) * (1 << 20)


@pytest.mark.parametrize("budget, wanted", [(0, None), (560, 4), (1000, 8), (10**6, 33)])
def test_the_rival_gets_as_many_layers_as_fit(monkeypatch, tmp_path, budget, wanted):
    """A layer has 100 bytes in the file; loaded, it takes 115, and the rest of the model 60."""
    loads = []

    class Closed:
        def close(self):
            pass

    def loaded(rival, count, log, *, moves_experts):
        loads.append(count)
        return gpu_rival.GpuRival(process=Closed(), num_layers=count, gpu_bytes=60 + 115 * count)

    monkeypatch.setattr(gpu_rival, "_loaded", loaded)
    rival = gpu_rival.RivalModel(
        folder=tmp_path, model=tmp_path, context_length=8, num_layers=32, layer_bytes=100
    )
    if wanted is None:
        with pytest.raises(ProcessError, match="no number of layers"):
            gpu_rival.best_rival(rival, budget, tmp_path)
    else:
        assert gpu_rival.best_rival(rival, budget, tmp_path).num_layers == wanted
    assert len(loads) <= gpu_rival.MOST_LOADS


@pytest.mark.parametrize("fails", [False, True])
def test_the_rival_that_fits_best_stays_open_and_no_other(monkeypatch, tmp_path, fails):
    """There are 1,000 bytes: 4 layers take 500, 6 would take 1,600 and 3 take 900, or loading 3
    fails."""
    needed, is_open = {4: 500, 6: 1600, 3: 900}, dict[int, bool]()

    class Loaded:
        def __init__(self, count):
            self.count = count
            is_open[count] = True

        def close(self):
            is_open[self.count] = False

    def loaded(rival, count, log, *, moves_experts):
        if fails and count == 3:
            raise ProcessError("llama.cpp: no memory")
        return gpu_rival.GpuRival(process=Loaded(count), num_layers=count, gpu_bytes=needed[count])

    monkeypatch.setattr(gpu_rival, "_loaded", loaded)
    rival = gpu_rival.RivalModel(
        folder=tmp_path, model=tmp_path, context_length=8, num_layers=32, layer_bytes=240
    )
    if fails:
        with pytest.raises(ProcessError, match="no memory"):
            gpu_rival.best_rival(rival, 1000, tmp_path)
        assert is_open == {4: False, 6: False}
    else:
        assert gpu_rival.best_rival(rival, 1000, tmp_path).num_layers == 4
        assert is_open == {4: True, 6: False, 3: False}


def test_the_error_of_a_program_that_dies_quotes_its_last_words(tmp_path):
    text = "import sys; print('{}', flush=True); input(); sys.exit('no memory left')"
    process = Process.of((sys.executable, "-c", text), "worker", tmp_path / "log")
    assert process.about == {}
    with pytest.raises(ProcessError, match="worker: ended with 1: no memory left"):
        process.ask("load")
    process.close()
    with pytest.raises(ProcessError, match="has already ended"):
        process.ask("load")


def test_a_program_that_hangs_is_ended(monkeypatch, tmp_path):
    monkeypatch.setattr(worker_process, "ANSWER_SECONDS", 1.0)
    text = "import time; print('{}', flush=True); time.sleep(100)"
    process = Process.of((sys.executable, "-c", text), "worker", tmp_path / "log")
    with pytest.raises(ProcessError, match="worker: no answer in 1 s"):
        process.ask("decode")
    process.close()


def test_a_rival_that_dies_loses_only_its_own_figures(tmp_path):
    """Two cases share the rival, as the modes of one budget do."""
    ours = """
import json, sys
print(json.dumps({"threads": 1}), flush=True)
for line in sys.stdin:
    print(json.dumps({"seconds": 0.5, "ffn_bytes": 8, "devices": []}), flush=True)
"""
    dying = "print('{}', flush=True); input(); raise SystemExit('killed')"
    theirs = Process.of((sys.executable, "-c", dying), "llama.cpp", tmp_path / "theirs")
    rival = gpu_rival.GpuRival(process=theirs, num_layers=1, gpu_bytes=1)
    cases = [
        gpu_cases.BudgetCase(
            name=name,
            mode="dense",
            budget_bytes=1,
            limit_s=0.1,
            predicted_s=None,
            plan={},
            process=Process.of((sys.executable, "-c", ours), name, tmp_path / name),
            rival=rival,
        )
        for name in ("one", "two")
    ]
    amount = gpu_cases.Amount(prompt=4, steps=2, vocab_size=9, rounds=2)
    gpu_cases.measure(cases, amount, float("inf"))
    gpu_cases.close(cases)
    for case in cases:
        found = gpu_cases.row(case, amount)
        assert found["decode_samples_s"] == [0.25, 0.25] and found["prefill_tokens_per_s"] == 8
        assert found["error"] is None and "llama.cpp" in found["rival_error"]
        assert "times_rival" not in found and found["share_of_limit"] == pytest.approx(0.4)


def test_a_missing_requirement_is_named_in_one_line():
    asked = {"needs_kernels": True, "needs_device": False}
    assert gpu_ready.reason(["numpy", "gguf"], **asked) is None
    assert "no nothing_like_it" in gpu_ready.reason(["nothing_like_it"], **asked)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("program", [gpu_ready, gpu_run])
def test_without_a_device_nothing_runs(monkeypatch, program):
    monkeypatch.setattr(sys, "argv", ["program"])
    with pytest.raises(SystemExit, match="no CUDA device") as found:
        program.main()
    assert len(str(found.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("gpu_setup.sh", ["no-such-python", "wheels", "site"], "no no-such-python here"),
        ("gpu_rival.sh", [sys.executable, "nowhere", "out"], "no llama.cpp in nowhere"),
    ],
)
def test_a_script_refuses_in_one_line(tmp_path, script, arguments, message):
    done = subprocess.run(
        [ROOT / "benchmarks" / script, *arguments], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 1 and message in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not list(tmp_path.iterdir())


def test_the_smoke_run_succeeds(tmp_path, monkeypatch, capsys):
    machine = tmp_path / "machine.json"
    make_machine(cpu_gb_per_s=5, launch_s=1e-9, hand_over_s=1e-9, copy_latency_s=1e-9).save(machine)
    arguments = [tmp_path / "out", "--smoke", "--rounds", "2", "--machine", machine]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *(str(each) for each in arguments)])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # of the processes that it starts
    assert gpu.main() == 0
    out = capsys.readouterr().out
    found = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert [row["mode"] for row in found["rows"]] == ["predicted", "dense"]
    for row in found["rows"]:
        assert row["error"] is None, row["error"]
        assert row["decode_tokens_per_s"] > 0 and row["prefill_tokens_per_s"] > 0
    assert "toy 60% predicted" in out and "no rival" in out
    assert json.loads(out.splitlines()[-1])["benchmark"] == "gpu"
    assert not list((tmp_path / "out").rglob("*.gguf"))


GOOD_AND_BAD = """
import time, pytest
def test_good(): pass
def test_bad(): assert 1 == 2
@pytest.mark.skip(reason="not today")
def test_skipped(): pass
"""


def run_jobs(tmp_path, text, seconds):
    path = tmp_path / "test_some.py"
    path.write_text(text)
    job = gpu_run.Job(name="test_some", arguments=[str(path), "--rootdir", str(tmp_path)])
    gpu_run.Runner([job], tmp_path / "out", seconds, 2).run()
    return job, json.loads((tmp_path / "out" / "test-gpu.json").read_text())


def test_the_runner_counts_and_shows_failures(tmp_path):
    job, saved = run_jobs(tmp_path, GOOD_AND_BAD, 60)
    assert job.state == "FAILED" and not job.is_fine
    assert saved["jobs"][0]["counts"] == {"passed": 1, "failed": 1, "skipped": 1}
    assert "assert 1 == 2" in gpu_run.table([job])


def test_a_run_that_is_cut_off_keeps_what_it_found(tmp_path):
    slow = GOOD_AND_BAD + "def test_slow(): time.sleep(1000)\n"
    for seconds in (3, 30, 120):  # a busy machine takes longer to begin
        job, saved = run_jobs(tmp_path, slow, seconds)
        if saved["jobs"][0]["counts"]:
            break
    assert job.state == "out of time" and not job.is_fine
    assert saved["jobs"][0]["counts"]["passed"] == 1


def test_a_slow_job_is_ended_with_all_the_processes_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_run, "SLOW_SHARE", 0.1)
    child = tmp_path / "child"
    texts = {
        "test_sanitizer": "import subprocess, time\ndef test_slow():\n"
        f"    with open({str(child)!r}, 'w') as file:\n"
        "        print(subprocess.Popen(['sleep', '300']).pid, file=file)\n"
        "    time.sleep(300)\n",
        "test_memory": GOOD_AND_BAD.replace("1 == 2", "1 == 1"),
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    for seconds in (30, 300):  # a busy machine takes longer to begin
        paths = {name: str(tmp_path / f"{name}.py") for name in texts}
        slow, alone = jobs = [
            gpu_run.Job(name=name, arguments=[path, "--rootdir", str(tmp_path)])
            for name, path in paths.items()
        ]
        gpu_run.Runner(jobs, tmp_path / "out", seconds, 2).run()
        if child.exists() and alone.state == "ok":
            break
    assert slow.state == "out of time" and slow.is_fine and alone.state == "ok" and alone.is_fine
    assert not is_running(int(child.read_text()))


def is_running(pid):
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def test_skipping_everything_is_not_passing(tmp_path):
    job, _ = run_jobs(tmp_path, "import pytest\npytest.skip('no', allow_module_level=True)\n", 60)
    assert not job.is_fine


COLLECT = """
import sys, pytest
sys.exit(pytest.main(["-q", "--collect-only", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


def test_no_part_of_a_file_is_without_tests_and_the_sanitizers_exist():
    of_parts = {Path(job.arguments[-1]) for job in gpu_run.jobs_of("cuda")}
    of_parts = [path for path in sorted(of_parts) if path.stem in gpu_run.PARTS]
    assert len(of_parts) == len(gpu_run.PARTS)
    files = {ROOT / name.split("::")[0] for name in test_sanitizer.TESTS}
    done = forked.run_python(COLLECT, *{*of_parts, *files}, cwd=ROOT, server="command")
    found = [line for line in done.stdout.splitlines() if "::" in line]
    assert {*test_sanitizer.TESTS} <= {*found}
    for path in of_parts:
        names = [name.split("::")[1] for name in found if f"/{path.name}::" in name]
        parts = gpu_run.PARTS[path.stem]
        assert not empty_parts(names, parts), path.name
        assert empty_parts(names, (*parts, "no_such_test")) == ["no_such_test"]


def empty_parts(names, parts):
    """Parts that no test's name belongs to, and "the rest" if it is empty."""
    words = {part: part.split(" or ") for part in parts}
    empty = [p for p in parts if not any(word in name for word in words[p] for name in names)]
    every = [word for part in parts for word in words[part]]
    is_all = all(any(word in name for word in every) for name in names)
    return [*empty, *(["the rest"] if is_all else [])]


def test_the_tests_for_a_device_work_on_the_cpu(tmp_path):
    """Runs some of them; `pytest tests/gpu --device cpu` runs all."""
    some = tmp_path / "some"
    some.mkdir()
    for kind, plan, mode in (("f16", "mixed", "predicted"), ("q6_k", "random", "dense")):
        test_step.test_every_division_gives_what_the_cpu_gives(some, "cpu", kind, plan, mode)
    test_step.test_the_bounds_reject_neurons_left_out(some, "cpu")
    test_step.test_steps_repeat_to_the_bit(some, "cpu", "mixed")
