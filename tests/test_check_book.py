"""The file that keeps the results of GPU checks, the launches that are checked, and the measure by
which their results are compared."""

import dataclasses
import fcntl
import json
import os
import threading
import time

import numpy as np
import pytest
import torch
from failing_parts import CPU, KEY, nothing
from models import family_model, make_model, make_sizes
from test_runtime import make_split

from hotsplit import Engine
from hotsplit.artifacts.device_checks import FOLDER, CheckBook, Verdict, read_checks, stored_checks
from hotsplit.runtime.check.kernels import Wrong, check_launch, difference
from hotsplit.runtime.check.launches import launches_of
from hotsplit.runtime.check.step_check import captured
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.kernels.gpu import torch_kernels as module
from hotsplit.runtime.kernels.gpu.kernels import reference_kernels
from hotsplit.runtime.kernels.gpu.torch_kernels import torch_kernels
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.step.plain_backend import plain_backend

needs_kernels = pytest.mark.skipif(
    not library.is_available(), reason="the C++ kernels are not built"
)
F, L = 96, 2
HOT = [np.arange(0, F, 2), np.arange(F)]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTSPLIT_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("damage", ["", "{", "[1]", "null", '{"format": 1}', "other format",
                                    "other key", "wrong type", "two lines", b"\xff"])  # fmt: skip
def test_a_damaged_or_foreign_file_is_ignored_and_rewritten(tmp_path, damage):
    with CheckBook(KEY) as book:
        book.finish(Verdict(part="device", why="bad", seconds=1.0))
    path = tmp_path / "cache" / FOLDER / f"{KEY.digest}.json"
    values = json.loads(path.read_text())
    if damage == "other format":
        values["version"] += 1
    elif damage == "other key":
        values["key"]["driver"] = "other"
    elif damage == "wrong type":
        values["verdicts"][0]["seconds"] = "1"
    elif damage == "two lines":
        values["verdicts"][0]["why"] = "a\nb"
    else:
        values = None
    text = damage if values is None else json.dumps(values)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert read_checks(path) is None and stored_checks() == []
    with CheckBook(KEY) as book:
        assert book.known("device") is None
        book.finish(Verdict(part="device", why="", seconds=1.0))
    checks = read_checks(path)
    assert checks is not None and checks.verdicts["device"].is_fine


def test_another_version_of_any_part_uses_another_file(tmp_path):
    with CheckBook(KEY) as book:
        book.finish(Verdict(part="device", why="", seconds=1.0))
    for name in ("index", "device", "capability", "memory_bytes", "driver", "torch", "triton",
                 "package"):  # fmt: skip
        other = 7 if name in ("index", "memory_bytes") else "x"
        with CheckBook(dataclasses.replace(KEY, **{name: other})) as book:
            assert book.known("device") is None


def test_two_processes_do_not_check_at_once():
    said = []
    with CheckBook(KEY) as book:
        lock = os.open(book._path.with_suffix(".lock"), os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    threading.Timer(0.2, lambda: fcntl.flock(lock, fcntl.LOCK_UN)).start()
    began = time.monotonic()
    with CheckBook(KEY, said.append):
        assert time.monotonic() - began > 0.1
    os.close(lock)
    assert said == ["another process is checking this GPU; waiting for it"]


# ---- kernels by torch, launches, bounds ---------------------------------------------------------


def launches(planned_model, hot):
    path = planned_model.path
    split = make_split(planned_model, hot)
    placement = Placement.of_split(split, (CPU,))
    split.save(path.with_name("s.gguf"))
    # Weights that are not resident keep the layout of the file, as on a GPU.
    options = {"split": path.with_name("s.gguf"), "is_resident": False}
    with Engine.load(path, device="cpu", **options) as engine:
        weights = engine._live.weights
        return launches_of(weights, placement, plain_backend(reference_kernels()).take)


def make(tmp_path, **options):
    model = make_model(**options)
    model = dataclasses.replace(model, path=tmp_path / "m.gguf")
    model.save(model.path)
    return model


@needs_kernels
@pytest.mark.parametrize("kind", ["f16", "q4_0"])
def test_the_number_of_variants_does_not_grow_with_layers(tmp_path, kind):
    found = []
    for num_layers in (2, 5):
        shape = make_sizes(num_layers=num_layers, num_neurons=F)
        model = make(tmp_path, sizes=shape, kind=kind, predictor_rank=8)
        hot = [np.arange(40)] * num_layers
        found.append({each.variant for each in launches(model, hot)})
    assert found[0] == found[1]
    assert len(found[0]) <= 30, sorted(found[0])  # half of them of prompts


@needs_kernels
def test_a_scaled_embedding_is_a_variant(tmp_path):
    found = []
    for family in ("llama", "sandwich with biases"):
        model = family_model(family, path=tmp_path / f"{family}.gguf")
        tensors = {name: e for name, e in model.tensors.items() if name != "output.weight"}
        model = dataclasses.replace(model, tensors=tensors)
        model.save(model.path)
        (embed,) = (each for each in launches(model, [np.arange(F)] * 2) if each.kernel == "embed")
        found.append(embed.variant)
    assert found[1] == f"{found[0]} scale"


@needs_kernels
def test_torchs_kernels_equal_the_reference_computed_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ROWS", 32)
    for options in ({"kind": "q4_0", "predictor_rank": 8}, {"activation": "silu"}):
        shape = make_sizes(num_layers=L, num_neurons=F)
        model = make(tmp_path, sizes=shape, **options)
        for launch in launches(model, HOT):
            check_launch(launch, torch_kernels(), reference_kernels(), nothing)


@pytest.mark.parametrize("wrong", [torch.zeros_like, lambda t: 0.999 * t, lambda t: t.flip(0),
                                   lambda t: t.index_fill(0, torch.tensor(3), torch.nan)])  # fmt: skip
def test_the_measure_rejects_wrong_results(wrong):
    right = torch.linspace(-3, 5, 100)
    assert not difference(right, right, 1e-4) and not difference(right * (1 + 5e-5), right, 1e-4)
    assert difference(wrong(right), right, 1e-4)
    bits = torch.arange(100, dtype=torch.int32)
    assert not difference(bits ^ (bits == 5), bits, 1e-4)
    assert difference(bits ^ 1, bits, 1e-4)


class Fixed:
    """A step that gives these logits, one row for each position."""

    def __init__(self, logits_TV):
        self.logits_TV = torch.tensor(logits_TV)

    def run(self, token, at):
        return self.logits_TV[at]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1.0])
def test_a_captured_step_that_differs_in_one_logit_is_rejected(value):
    """Also one with NaN where the submitted step has 0, or the largest float where that has inf."""
    right = Fixed([[0.0, 2.0, torch.nan], [torch.finfo(torch.float32).max, 1.0, -torch.inf]])
    captured({"submitted": right, "captured": right}.get, "submitted", "captured")
    for at in (0, 1):
        wrong = Fixed(right.logits_TV.tolist())
        wrong.logits_TV[at, 0] = value
        for steps in ((wrong, right), (right, wrong)):
            with pytest.raises(Wrong, match="^1 of 6 logits differ"):
                captured(dict(enumerate(steps)).get, 0, 1)
