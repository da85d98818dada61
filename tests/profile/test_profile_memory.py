"""A model larger than the memory that a profile takes: weights stay in the mapped file."""

import dataclasses
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from checkpoints import save_tokenizer
from models import make_model, make_sizes, shape_only

from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import TensorEntry, array_entry
from hotsplit.profile.predictors import predictor_options
from hotsplit.profile.predictors.predictor_options import PredictorChoices

WORDS = ["the ", "quick ", "brown ", "fox ", "def ", "add(a, ", "b):\n", "return ", "jumps "]
CAP_BYTES = (
    100 << 20
)  # of anonymous memory, besides what the program takes before the profile starts
CHILD = """
import sys
from pathlib import Path
import hotsplit.profile.predictors.train
from hotsplit import Engine
from hotsplit.profile.collect import profile
from hotsplit.profile.profile_config import ProfileConfig

folder, copies = Path(sys.argv[1]), sys.argv[2] == "copies"
print("ready", flush=True)
sys.stdin.readline()
if copies:
    Engine.load(folder / "big.gguf", mode="dense", device="cpu", is_resident=True).logits([1, 2])
else:
    profile(ProfileConfig(model=folder / "big.gguf", corpora=(folder / "text.txt",),
                          output=folder / "p", force=True, device="cpu", max_tokens=600))
"""


@pytest.fixture(scope="module")
def big_folder(tmp_path_factory):
    """A model file of 417 MiB in f16: 16 layers of 26 MiB. The rows of a matrix are
    overlapping slices of the same random values."""
    made = tmp_path_factory.mktemp("big")
    shape = make_sizes(
        num_layers=16,
        width=1024,
        num_neurons=3072,
        num_heads=8,
        num_kv_heads=8,
        vocab_size=320,
        context_length=512,
    )
    model = shape_only(shape)
    generator = np.random.default_rng(0)

    def filled(entry: TensorEntry) -> TensorEntry:
        if len(entry.shape) == 1:
            return array_entry(np.ones(entry.shape), "f32")
        rows = generator.standard_normal(entry.shape[-1] + 997) / entry.shape[-1] ** 0.5
        rows = rows.astype(np.float16)

        def read(start: int, stop: int) -> np.ndarray:
            at = (np.arange(start, stop) * 31 % 997)[:, None] + np.arange(entry.shape[-1])
            return rows[at]

        return TensorEntry(shape=entry.shape, kind="f16", read_rows=read)

    save_tokenizer(made, 320)
    dataclasses.replace(
        model,
        tensors={name: filled(entry) for name, entry in model.tensors.items()},
        extra_keys={
            "tokenizer.huggingface.json": (made / "tokenizer.json").read_text(),
            "tokenizer.ggml.bos_token_id": np.uint32(0),
        },
    ).save(made / "big.gguf")
    order = np.random.default_rng(0).integers(0, len(WORDS), 3000)
    (made / "text.txt").write_text("".join(WORDS[i] for i in order))
    assert (made / "big.gguf").stat().st_size > 4 * CAP_BYTES
    return made


def anonymous_bytes(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in text.splitlines())
    return 1024 * int(
        fields.get("RssAnon", "0").split()[0]
    )  # it is gone when the process has ended


def peak_over_start(folder: Path, what: str) -> int:
    """Peak anonymous bytes, minus those before the work."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder), what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdin and child.stdout and child.stderr
    assert child.stdout.readline() == "ready\n"
    start, peak = anonymous_bytes(child.pid), 0
    child.stdin.write("go\n")
    child.stdin.flush()
    while child.poll() is None:
        peak = max(peak, anonymous_bytes(child.pid))
        time.sleep(0.002)
    assert child.returncode == 0, child.stderr.read()
    return peak - start


needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="not Linux")


@needs_proc
def test_a_model_of_four_times_the_memory_is_profiled_from_its_file(big_folder):
    assert peak_over_start(big_folder, "profile") < CAP_BYTES


@needs_proc
def test_the_measure_of_the_peak_sees_copied_weights(big_folder):
    assert peak_over_start(big_folder, "copies") > 3 * CAP_BYTES


def test_trainers_that_do_not_fit_are_refused(monkeypatch):
    model = make_model(sizes=make_sizes(num_layers=8, width=512, num_neurons=2048))
    lasting, passing = predictor_options.trainer_bytes(512, 2048, PredictorChoices.of(64, model))
    assert lasting > 8 * 2048 * 512  # the gate and its map, in f32
    for more in (8, -8):
        free = round((8 * lasting + passing + more) / predictor_options.FREE_SHARE)
        monkeypatch.setattr(predictor_options, "free_memory_bytes", lambda free=free: free)
        if more > 0:
            predictor_options.check_memory(64, model)
            continue
        with pytest.raises(HotsplitError, match="predictors of 8 layers takes .* are free"):
            predictor_options.check_memory(64, model)
