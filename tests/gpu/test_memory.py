"""A process's reserved memory on a GPU is within its budget, and a full card gives a one-line
error."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_runtime import make_split

pytestmark = pytest.mark.gpu
PROGRAM = Path(__file__).with_name("budget_program.py")
MIB = 1 << 20
# Takes all memory of the card except about argv[1] bytes, says so, and holds it until stdin closes.
HOG = """
import sys, torch
held, left = [], int(sys.argv[1])
while (free := torch.cuda.mem_get_info()[0]) > left + (4 << 20):
    held.append(torch.empty(min(free - left, 8 << 30), dtype=torch.uint8, device="cuda"))
print("full", flush=True)
sys.stdin.read()
"""


def run(model, split):
    """Runs the program; returns the JSON object that it printed."""
    done = subprocess.run(
        [sys.executable, PROGRAM, model.path, split], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def plan(tmp_path, model, hot, *, dense=True, more_bytes=0):
    split = make_split(model, hot, dense_on_gpu=dense, head_on_gpu=dense, context_length=256)
    split = dataclasses.replace(split, vram_budget_bytes=split.vram_budget_bytes + more_bytes)
    split.save(tmp_path / "s.gguf")
    return tmp_path / "s.gguf", split.vram_budget_bytes


@pytest.mark.parametrize("share", [0.5, 0.8, 1.0])
def test_a_process_keeps_to_its_budget(tmp_path, cuda, large_model, share):
    hot = [np.arange(int(share * 4096), dtype=np.int32)] * 6
    split, budget = plan(tmp_path, large_model, hot, more_bytes=64 * MIB)
    found = run(large_model, split)
    assert "error" not in found, found
    assert found["peak"] <= budget
    assert found["peak"] > budget - 128 * MIB  # the weights are there
    assert found["more_is_refused"]
    (report,) = found["reports"]
    assert report["peak_reserved"] == found["peak"]


def test_a_full_card_gives_one_line(tmp_path, cuda, large_model):
    hot = [np.arange(4096, dtype=np.int32)] * 6
    split, _ = plan(tmp_path, large_model, hot, more_bytes=64 * MIB)
    (report,) = run(large_model, split)["reports"]
    # Room for all that the program takes outside torch, but not for its weights (200 MB) too.
    left = report["outside"] + 16 * MIB
    hog = subprocess.Popen(
        [sys.executable, "-c", HOG, str(left)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert hog.stdout.readline() == "full\n"
        found = run(large_model, split)
    finally:
        hog.communicate(input="", timeout=60)
    assert "error" in found, found
    assert "\n" not in found["error"]
    assert all(word in found["error"] for word in ("cuda", "free", "--vram-budget"))
