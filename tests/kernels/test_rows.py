"""Several rows in one native step: each gets the bits that it gets alone, for any number of rows
and threads, at every level; and nothing depends on a clock."""

import dataclasses
import os
import shutil
import subprocess
import sys
from itertools import product

import numpy as np
import pytest
import torch
from forked import run_python
from models import make_model, make_sizes, sparse_model
from paths import ROOT
from test_runtime import make_split

from hotsplit import Engine
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.ops.structs import MAX_ROWS
from hotsplit.runtime.step.batch import Row, rows_of

KINDS = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_k", "q5_k", "q6_k")
LEVELS = library.usable_levels()
MODES = ("dense", "exact", "predicted")
CONTEXT = 300
# Not multiples of a group of neurons, a tile of rows, or four blocks.
SHAPE = make_sizes(width=96, num_neurons=200, num_heads=6, vocab_size=90, context_length=CONTEXT)
SUPER_SHAPE = make_sizes(width=256, num_neurons=200, vocab_size=90, context_length=CONTEXT)
IDS = np.random.default_rng(0).integers(0, 90, CONTEXT).tolist()


def one_by_one(engine: Engine, ids) -> torch.Tensor:
    return torch.stack([engine._step(token, position) for position, token in enumerate(ids)])


def model_of(tmp_path, kind: str, activation: str = "relu", **options):
    shape = SUPER_SHAPE if kind.endswith("_k") else SHAPE
    model = sparse_model(
        sizes=shape,
        kind=kind,
        activation=activation,
        predictor_rank=16,
        predictor_density=0.3,
        threshold=0.02,
        **options,
    )
    model = dataclasses.replace(model, path=tmp_path / "m.gguf")
    model.save(model.path)
    return model


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_at_once_equal_single_steps(tmp_path, kind, mode, level):
    library.set_level(level)
    model = model_of(tmp_path, kind, "fatrelu")
    with Engine.load(model.path, mode=mode, is_resident=kind != "q6_k") as engine:
        library.set_threads(1)
        want = one_by_one(engine, IDS[:33])
        for num_rows in (2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33):
            library.set_threads(1 + num_rows % 3)
            assert torch.equal(engine.logits(IDS[:num_rows]), want[:num_rows]), num_rows


@pytest.mark.parametrize(
    "kind, width, num_neurons",
    [
        *product(("f32", "f16", "bf16"), (112,), (2600,)),
        *product(("q8_0", "q4_0"), (160, 256), (2600,)),
        *product(("f16", "q8_0"), (160,), (4200,)),
    ],
)
def test_rows_at_once_equal_single_steps_in_windows_of_many_neurons(
    tmp_path, kind, width, num_neurons
):
    """Some 15 % of the neurons fire, so sums of several rows list them, window by window: chunks
    of 2,600 neurons are one window of three groups, those of 4,200 have four groups and a second
    window. Of the columns, as many as fill whole tiles are copied, and the rest is added row after
    row."""
    shape = make_sizes(
        width=width,
        num_neurons=num_neurons,
        num_heads=6,
        head_width=16,
        vocab_size=90,
        context_length=CONTEXT,
    )
    model = make_model(sizes=shape, kind=kind, activation="fatrelu")
    model = dataclasses.replace(model, threshold_L=(1.0,) * 2, path=tmp_path / "m.gguf")
    model.save(model.path)
    ids = IDS[:90]
    shares: list[float] = []
    for level in LEVELS:
        library.set_level(level)
        with Engine.load(model.path, mode="exact") as engine:
            with engine.observe(
                lambda name, layer, gate: shares.append(float((gate > 1.0).float().mean())),
                lambda name, layer: name == "ffn_gate",
            ):
                engine.logits(ids)
            assert min(shares) > 0.1 and max(shares) < 0.3, shares
            library.set_threads(1)
            want = one_by_one(engine, ids)
            for num_rows in (5, 33, 90):
                library.set_threads(1 + num_rows % 3)
                assert torch.equal(engine.logits(ids[:num_rows]), want[:num_rows]), level


@pytest.mark.parametrize("activation", ["relu", "drelu", "silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("is_resident", [False, True])
def test_every_activation_in_memory_and_in_the_file(tmp_path, activation, is_resident):
    for kind in ("f16", "q8_0"):
        model = model_of(tmp_path, kind, activation)
        for mode in MODES if model.predictor else ("dense", "exact"):
            with Engine.load(model.path, mode=mode, is_resident=is_resident) as engine:
                want = one_by_one(engine, IDS[:19])
                assert torch.equal(engine.logits(IDS[:19]), want)


@pytest.mark.parametrize("mode", MODES)
def test_rows_at_once_equal_single_steps_in_divided_layers(tmp_path, mode):
    model = model_of(tmp_path, "q8_0")
    random = np.random.default_rng(1)
    hot = [random.permutation(200)[:70], [5]]
    make_split(model, hot, context_length=CONTEXT).save(tmp_path / "s.gguf")
    for is_resident in (True, False):
        with Engine.load(
            model.path, split=tmp_path / "s.gguf", mode=mode, is_resident=is_resident
        ) as engine:
            assert torch.equal(engine.logits(IDS[:21]), one_by_one(engine, IDS[:21]))


@pytest.mark.parametrize("kind", ["f32", "q8_0", "q4_0"])
@pytest.mark.parametrize("mode", MODES)
def test_passes_of_any_length_and_after_a_prompt(tmp_path, kind, mode):
    """A prompt of several passes, and rows that begin in the middle of the cache."""
    model = model_of(tmp_path, kind)
    with Engine.load(model.path, mode=mode) as engine:
        want = one_by_one(engine, IDS)
        assert len(IDS) > 2 * MAX_ROWS
        assert torch.equal(engine.logits(IDS), want)
        native = engine._live.native
        for start, count in ((1, 2), (250, 20), (255, 3), (CONTEXT - 32, 32)):
            engine.hidden(IDS[: start + 1])
            got = native.run_rows(rows_of(IDS[start : start + count], start, "all"))
            assert torch.equal(got, want[start : start + count])


def test_only_wanted_rows_have_logits(tmp_path):
    model = model_of(tmp_path, "f32")
    with Engine.load(model.path, mode="exact") as engine:
        want = engine.logits(IDS[:9])
        wanted = [t in (1, 4, 8) for t in range(9)]
        rows = [
            Row(token=token, position=t, has_logits=has)
            for t, (token, has) in enumerate(zip(IDS, wanted, strict=False))
        ]
        got = engine._live.native.run_rows(rows)
        assert torch.equal(got, want[[1, 4, 8]])
        assert torch.equal(engine._prefill(torch.tensor(IDS[:9])), want[-1])


# Makes clock_gettime jump, for C++ and Python alike.
CLOCK = r"""
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t id, struct timespec* t) {
    static _Atomic unsigned calls;
    long status = syscall(SYS_clock_gettime, id, t);
    t->tv_sec += (calls++ * 2654435761u >> 20) % 7;
    return (int)status;
}
"""
PROGRAM = """
import hashlib, sys, time
from hotsplit import Engine
spans = [time.perf_counter() for _ in range(50)]
print("jumps" if max(b - a for a, b in zip(spans, spans[1:])) > 0.5 else "runs")
for model in sys.argv[1:]:
  for mode in ("dense", "exact", "predicted"):
    with Engine.load(model, mode=mode) as engine:
        print(hashlib.sha256(engine.logits(list(range(70))).numpy().tobytes()).hexdigest())
"""


@pytest.mark.skipif(
    shutil.which("gcc") is None or not sys.platform.startswith("linux"), reason="needs gcc on Linux"
)
def test_no_choice_depends_on_a_clock(tmp_path):
    source = tmp_path / "clock.c"
    source.write_text(CLOCK)
    shim = tmp_path / "clock.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", shim, source], check=True)
    models = [str(model_of(tmp_path, kind).path) for kind in ("f16", "q8_0")]
    calm = run_python(PROGRAM, *models).stdout.split()
    jumping = subprocess.run(
        [sys.executable, "-c", PROGRAM, *models],
        env={**os.environ, "LD_PRELOAD": str(shim)},
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    ).stdout.split()
    assert (calm[0], jumping[0]) == ("runs", "jumps")
    assert calm[1:] == jumping[1:] and len(calm) == 7
    assert len(set(calm[1:4])) >= 2 and len(set(calm[4:])) >= 2
