"""The thread pool: each value of a job is computed once, and its results do not depend on the
number of threads, on processors, or on when threads run."""

import os
import platform
import shutil
import subprocess

import pytest
import torch
from cpp_compiler import KERNELS, ROOT, compiled
from models import make_model, make_sizes
from test_native_step import IDS, decoded

from hotsplit import Engine
from hotsplit.runtime.kernels.cpu import library

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
