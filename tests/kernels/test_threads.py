"""The number of threads: cores, affinity and quotas, and the refusal of impossible counts. The
thread pool: each value of a job is computed once, and its results do not depend on the number of
threads, on processors, or on when threads run."""

import os
import platform
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from control_group_files import TWO_PROCESSORS, write_groups
from cpp_compiler import KERNELS, ROOT, compiled
from forked import run_python
from models import make_machine, make_model, make_sizes
from test_native_step import IDS, decoded

from hotsplit import Engine
from hotsplit.doctor import machine_findings as doctor
from hotsplit.errors import HotsplitError
from hotsplit.files import pipeline
from hotsplit.measure.calibrate import calibrate as calibrating
from hotsplit.measure.calibrate import cpu_bandwidth
from hotsplit.runtime.kernels import threads
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.kernels.threads import use_threads
from hotsplit.system import control_groups
from hotsplit.system.processors import (
    environment_as_found,
    limit_libraries,
    processor_name,
    processors,
)


@pytest.fixture
def many_cores(tmp_path, monkeypatch):
    """32 processors that are 16 cores, all of them allowed; returns the root of the system's
    files."""
    for cpu in range(32):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 16},{cpu % 16 + 16}\n")
    monkeypatch.setattr(control_groups, "ROOT", tmp_path)
    monkeypatch.setattr(os, "cpu_count", lambda: 32)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(32)))
    return tmp_path


def test_two_threads_of_a_core_count_once(many_cores, monkeypatch):
    assert (processors().usable, processors().threads) == (32, 16)
    for allowed, want in (({0, 1, 16, 17}, 2), ({0, 16}, 1), ({0, 1}, 2), ({16, 40}, 2)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, allowed=allowed: allowed)
        assert (processors().usable, processors().threads) == (len(allowed), want)


def test_affinity_is_honoured():
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from hotsplit.runtime.kernels.threads import use_threads; print(use_threads(None))"
    )
    assert run_python(code).stdout.strip() == "1"


@pytest.mark.parametrize("groups", TWO_PROCESSORS.values(), ids=TWO_PROCESSORS)
def test_a_quota_of_two_processors_counts_everywhere(many_cores, monkeypatch, groups):
    write_groups(many_cores, *groups)
    assert use_threads(None) == torch.get_num_threads() == library.num_threads() == 2
    assert pipeline.num_threads() == 2
    monkeypatch.setattr(cpu_bandwidth, "buffer_bytes", lambda: 8 << 20)
    monkeypatch.setattr(cpu_bandwidth, "CPU_LIMIT_S", 0.0)
    for figures in cpu_bandwidth.measure_cpu():
        assert list(figures) == [1, 2]
    done = {"is_built": True, "level": "avx2", "usable": ["avx2"], "faulty": None, "forced": None}
    first, *_ = doctor.processor(SimpleNamespace(done=done))
    assert "2 of 32 threads allowed, by a CPU quota of 2" in first.text
    assert first.text.endswith("; 2 are used")


@pytest.mark.parametrize(
    ("content", "quota", "usable"),
    [
        ("150000 100000", 1.5, 1),
        ("50000 100000", 0.5, 1),
        ("6400000 100000", 64.0, 32),
        ("1750000 100000", 17.5, 17),
        ("max 100000", None, 32),
        ("max", None, 32),
        ("", None, 32),
        ("100000 0", None, 32),
    ],
)
def test_a_quota_leaves_whole_processors(many_cores, content, quota, usable):
    write_groups(many_cores, "0::/\n", {"cpu.max": content})
    assert (processors().quota, processors().usable) == (quota, usable)
    assert processors().threads == min(16, usable)


def test_a_group_of_version_1_without_a_quota_has_minus_one(many_cores):
    write_groups(
        many_cores,
        "5:cpu,cpuacct:/\n",
        {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
    )
    assert processors().quota is None


QUOTA_OF_ONE = """
import pathlib, sys
from hotsplit.system import control_groups
control_groups.ROOT = pathlib.Path(sys.argv[1])
import torch
torch.set_num_threads(2)
from hotsplit.runtime.kernels.cpu import library
print(library.num_threads(), torch.get_num_threads())
"""


def test_a_program_that_names_no_count_stays_within_the_quota(tmp_path):
    write_groups(tmp_path, "0::/\n", {"cpu.max": "100000 100000"})
    assert run_python(QUOTA_OF_ONE, tmp_path).stdout == "1 1\n"


COMMAND = """
import os, pathlib, sys
from hotsplit.cli import main
from hotsplit.system import control_groups

class Numpy:  # BLAS reads the variable at its import
    def find_spec(name, path=None, target=None):
        if name in ("numpy", "torch"):
            print(name, os.environ.get("OMP_NUM_THREADS"), file=sys.stderr)

sys.meta_path.insert(0, Numpy)
control_groups.ROOT = pathlib.Path(sys.argv[1])
sys.argv[1:] = ["generate", "--help"]
main()
import numpy, torch
"""


def test_a_command_limits_torch_before_it_is_imported(tmp_path):
    write_groups(tmp_path, "0::/\n", {"cpu.max": "100000 100000"})
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, tmp_path], env=environment, capture_output=True, text=True
    )
    assert done.stderr.splitlines() == ["numpy 1", "torch 1"]


def test_a_limit_that_the_user_gave_to_torch_is_kept(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    limit_libraries()
    assert os.environ["OMP_NUM_THREADS"] == "5" == environment_as_found()["OMP_NUM_THREADS"]


@pytest.mark.parametrize(
    ("content", "name"),
    [
        ("processor\t: 0\nmodel name\t: Some  CPU @ 2 GHz \n", "Some CPU @ 2 GHz"),
        ("Hardware : X\nModel\t\t: Raspberry Pi 5\n", "Raspberry Pi 5"),
    ],
)
def test_a_processor_has_one_name(tmp_path, monkeypatch, content, name):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(content)
    monkeypatch.setattr(control_groups, "ROOT", tmp_path)
    assert processor_name() == name


def test_a_core_is_left_to_the_gpu_unless_the_user_names_a_number(many_cores, monkeypatch):
    in_use = [16]
    monkeypatch.setattr(threads, "_named", None)
    monkeypatch.setattr(library, "num_threads", lambda: in_use[-1])
    monkeypatch.setattr(library, "set_threads", in_use.append)
    for beside_gpu, want in ((True, 15), (True, 15), (False, 16)):
        threads.use_default_threads(beside_gpu=beside_gpu)
        assert in_use[-1] == want
    in_use.append(4)  # set by the program that uses the library
    threads.use_default_threads(beside_gpu=True)
    assert in_use[-1] == 4
    assert use_threads(16) == 16
    threads.use_default_threads(beside_gpu=True)
    assert in_use[-1] == 16
    use_threads(None)
    threads.use_default_threads(beside_gpu=True)
    assert in_use[-1] == 15
    for allowed, want in (({0, 1, 2}, 2), ({0, 1}, 2), ({0}, 1)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, allowed=allowed: allowed)
        assert processors().threads_beside_gpu == want


def test_costs_beside_a_gpu_are_measured_with_the_threads_of_the_runtime(
    many_cores, monkeypatch, tmp_path
):
    machine, seen = make_machine(), []

    def measured(*arguments):
        seen.append(library.num_threads())
        return machine.cpu_costs

    figures = machine.cpu_bandwidth_gb_per_s, machine.cpu_sum_gb_per_s
    monkeypatch.setattr(threads, "_named", None)
    monkeypatch.setattr(calibrating, "measure_cpu", lambda *arguments: figures)
    monkeypatch.setattr(calibrating, "measure_costs", measured)
    machine.save(tmp_path / "gpu.json")
    library.set_threads(16)
    for source in (tmp_path / "gpu.json", None):
        config = calibrating.CalibrateConfig(
            output=tmp_path / "m.json", gpu_from=source, force=True
        )
        calibrating.calibrate(config)
    assert seen == [15, 16]


@pytest.mark.parametrize("count", [0, -2, 1025])
def test_an_impossible_count_is_refused(count):
    with pytest.raises(HotsplitError, match=f"--threads is {count}, wanted 1 to 1024"):
        use_threads(count)


needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None or platform.system() != "Linux", reason="needs g++ on Linux"
)
# The faults that are planted into the pool.
FAULTS = {
    "a thread inside is not waited for": (
        "i < num_threads_; ++i) wait_for",
        "i < 1; ++i) wait_for",
    ),
    "two threads take one piece": (
        "if (!longest->compare_exchange_weak(\n                    word, ",
        "if (word = 0; !longest->exchange(\n                    ",
    ),
}


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pool")
    return compiled(
        ROOT / "tests/kernels/suspended_threads.cpp", folder / "driver.o", f"-I{KERNELS}"
    )


def run_suspended(driver, folder, source, milliseconds, processors):
    """Runs jobs for so long with each number of threads, of which each is suspended now and
    then."""
    pool = compiled(source, folder / "pool.o", f"-I{KERNELS}")
    program = folder / "program"
    subprocess.run(["g++", driver, pool, "-pthread", "-o", program], check=True)
    return [
        subprocess.run(
            [program, str(milliseconds), str(count)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        for count in processors
    ]


@needs_compiler
def test_jobs_are_whole_while_threads_are_suspended_at_random(driver, tmp_path):
    """With threads that spin, and with threads that outnumber the processors and sleep."""
    source = KERNELS / "thread_pool.cpp"
    for milliseconds in (80, 1000, 10_000):  # a busy machine takes longer
        found = run_suspended(driver, tmp_path, source, milliseconds, processors=(64, 1))
        assert all(done.returncode == 0 for done in found), found
        numbers = [int(done.stdout.split()[at]) for done in found for at in (0, 2)]
        if min(numbers) > 100:
            return
    raise AssertionError(f"few jobs and suspensions: {numbers}")


@needs_compiler
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_pool_is_noticed(driver, tmp_path, fault):
    right, wrong = FAULTS[fault]
    text = (KERNELS / "thread_pool.cpp").read_text()
    assert text.count(right) == 1
    (tmp_path / "wrong.cpp").write_text(text.replace(right, wrong))
    for milliseconds in (1000, 10_000):
        (done,) = run_suspended(driver, tmp_path, tmp_path / "wrong.cpp", milliseconds, (64,))
        if done.returncode:
            break
    assert done.returncode == 1 and "computed" in done.stdout, done


def test_a_step_has_the_same_bits_with_any_number_of_threads(tmp_path):
    """Most of them outnumber the processors. Then the same on one processor."""
    sizes = make_sizes(width=256, num_neurons=1056, num_heads=8, vocab_size=500)
    model = make_model(sizes=sizes, kind="q8_0")
    model.save(tmp_path / "m.gguf")
    with Engine.load(tmp_path / "m.gguf", mode="exact") as engine:
        library.set_threads(1)
        want = decoded(engine, IDS)
        for count in range(2, 17):
            library.set_threads(count)
            assert torch.equal(decoded(engine, IDS), want), count
        allowed = os.sched_getaffinity(0)
        try:
            os.sched_setaffinity(0, {min(allowed)})  # of this thread, and of those that it starts
            for count in (2, 5, 16):
                library.set_threads(count)
                assert torch.equal(decoded(engine, IDS), want), count
        finally:
            os.sched_setaffinity(0, allowed)
