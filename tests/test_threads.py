"""The number of threads, and the refusal of impossible counts."""

import os

import pytest
import torch
from forked import run_python

from hotsplit.errors import HotsplitError
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.kernels.threads import physical_cores, use_threads


def test_two_threads_of_a_core_count_once(tmp_path, monkeypatch):
    siblings = {0: "0,4", 1: "1,5", 4: "0,4", 5: "1,5"}
    for cpu, text in siblings.items():
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(text + "\n")
    for allowed, want in (({0, 1, 4, 5}, 2), ({0, 4}, 1), ({0, 1}, 2), ({4, 7}, 2)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, allowed=allowed: allowed)
        assert physical_cores(tmp_path) == want


def test_affinity_is_honoured():
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from hotsplit.runtime.kernels.threads import use_threads; print(use_threads(None))"
    )
    assert run_python(code).stdout.strip() == "1"


def test_torch_uses_the_same_number(restore_library):
    for count in (1, 3):
        assert use_threads(count) == count == torch.get_num_threads() == library.num_threads()


@pytest.mark.parametrize("count", [0, -2, 1025])
def test_an_impossible_count_is_refused(count):
    with pytest.raises(HotsplitError, match=f"--threads is {count}, wanted 1 to 1024"):
        use_threads(count)
