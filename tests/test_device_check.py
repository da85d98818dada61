"""The check of a GPU: each part failed on purpose on a fake one leaves a working generation and one
line, is remembered, and is not tried again."""

import dataclasses
import fcntl
import json
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from failing_parts import (
    CPU,
    KEY,
    DeafStream,
    HalfDeafStream,
    failing,
    fake_parts,
    forgetful,
    halved,
    idle,
    nothing,
    raising,
    with_kernel,
)
from models import make_model, make_shape
from reference import rel_error
from test_runtime import IDS, make_split

from sparkinfer import Engine
from sparkinfer.device_checks import DIED, FOLDER, CheckBook, Verdict, read_checks, stored_checks
from sparkinfer.runtime.check import device_check
from sparkinfer.runtime.check import parts as device_parts
from sparkinfer.runtime.check.kernels import difference
from sparkinfer.runtime.check.launches import NAMES, launches_of
from sparkinfer.runtime.device import pinned
from sparkinfer.runtime.kernels.cpu import library
from sparkinfer.runtime.kernels.gpu.kernels import reference_kernels
from sparkinfer.runtime.kernels.gpu.torch_kernels import torch_kernels
from sparkinfer.runtime.model.loader import Placement
from sparkinfer.runtime.step.hybrid_step import HybridStep
from sparkinfer.runtime.step.native_step import NativeStep
from sparkinfer.runtime.step.plain_backend import plain_backend
from sparkinfer.runtime.weights import gpu_products

pytestmark = pytest.mark.skipif(not library.is_available(), reason="the C++ kernels are not built")
F, L = 96, 2
HOT = [np.arange(0, F, 2), np.arange(F)]


@pytest.fixture(autouse=True)
def clean(tmp_path, monkeypatch):
    """A cache of the test's own; what a check finds for the process is forgotten."""
    monkeypatch.setenv("SPARKINFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(gpu_products, "_replaced", set())
    monkeypatch.setattr(gpu_products, "_in_f32_only", set())
    monkeypatch.setattr(pinned, "_refused", [])


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """(a model with predictors, a plan that divides it, the logits it should give)."""
    folder = tmp_path_factory.mktemp("planned")
    shape = make_shape(num_layers=L, num_neurons=F)
    model = make_model(shape=shape, kind="f16", predictor_rank=8)
    model = dataclasses.replace(model, path=folder / "m.gguf")
    model.save(model.path)
    make_split(model, HOT).save(folder / "s.gguf")
    with Engine.load(model.path, mode="predicted", device="cpu") as engine:
        want = stepped(engine)
    return model.path, folder / "s.gguf", want


def stepped(engine, ids=IDS[:4]):
    return torch.stack([engine._step(token, at).clone() for at, token in enumerate(ids)])


class Loaded:
    """A load with these parts: its lines, its step, and whether it generates what it should."""

    def __init__(self, planned, monkeypatch, capsys, parts, **options):
        path, split, want = planned
        given = iter([parts, None])  # where the device was lost, the CPU has none
        monkeypatch.setattr(device_parts, "parts_of", lambda device: next(given))
        capsys.readouterr()
        with Engine.load(path, split=split, mode="predicted", device="cpu", **options) as engine:
            self.lines = capsys.readouterr().err.splitlines()
            self.step = engine._live.native
            self.error = rel_error(stepped(engine), want)


@pytest.fixture
def load(planned, monkeypatch, capsys):
    return lambda parts, **options: Loaded(planned, monkeypatch, capsys, parts, **options)


def test_a_device_on_which_all_works_is_checked_once_and_says_nothing(load):
    calls = []
    parts = fake_parts(use=lambda: calls.append("use"), multiply=lambda dtype: calls.append(dtype))
    found = load(parts)
    assert found.lines == [] and found.error < 1e-4 and isinstance(found.step, HybridStep)
    assert calls == ["use", torch.float16]
    (checks,) = stored_checks()
    assert checks.key == KEY and checks.started is None
    assert all(verdict.is_fine for verdict in checks.verdicts.values())
    names = {name.split()[0] for name in checks.verdicts}
    assert names == {"device", "pinned", "memory", "kernel", "products", "host", "step", "graph"}
    kernels = {name.split()[1] for name in checks.verdicts if name.startswith("kernel ")}
    assert kernels == set(NAMES) - {"embed"}  # the embedding is on the host
    again = load(fake_parts(use=failing(), pin=failing(), multiply=failing(), limit=failing(),
                            kernels=with_kernel("down", halved)))  # fmt: skip
    assert again.lines == []  # nothing of it was tried


FAILURES = {
    "device": (fake_parts(use=failing()), "everything runs on the CPU"),
    "pinned memory": (fake_parts(pin=failing()), "layer by layer"),
    "memory limit": (fake_parts(limit=failing()), "planned with, but not enforced"),
    "products float16": (fake_parts(multiply=failing()), "multiplied in f32"),
    "host function": (fake_parts(stream=DeafStream), "layer by layer"),
    "step": (fake_parts(stream=HalfDeafStream), "layer by layer"),
    "graph": (fake_parts(prepare=forgetful), "submitted kernel by kernel"),
    "graph that raises": (fake_parts(prepare=failing()), "submitted kernel by kernel"),
}
for kernel in (
    "dot",
    "add_norm",
    "rotate_append",
    "attend",
    "predict",
    "gate_up",
    "down",
    "unpack",
):
    for wrong in (idle, halved, raising):
        FAILURES[f"kernel {kernel} {wrong.__name__}"] = (
            fake_parts(kernels=with_kernel(kernel, wrong)), "torch computes it",
        )  # fmt: skip
QUICK = ("dot idle", "attend raising", "down halved", "predict halved", "unpack halved")
TRIED = [n for n in FAILURES if not n.startswith("kernel") or n.removeprefix("kernel ") in QUICK]


def check_fallback(load, name):
    parts, fallback = FAILURES[name]
    for _ in range(2):  # the second load finds it in the cache
        found = load(parts)
        (line,) = found.lines
        assert fallback in line and "sparkinfer doctor" in line, line
        assert found.error < 1e-3
        parts = fake_parts()  # in which nothing fails any more
        gpu_products._replaced.clear()
    kept = {name: verdict for each in stored_checks() for name, verdict in each.verdicts.items()}
    failed = [part for part, verdict in kept.items() if not verdict.is_fine]
    assert failed and all(part.split()[:2][0] == name.split()[0] for part in failed), failed
    return found, failed


@pytest.mark.parametrize("name", TRIED)
def test_a_part_that_fails_leaves_a_generation_and_one_line(load, name):
    found, failed = check_fallback(load, name)
    kind = {"device": NativeStep, "pinned memory": str, "host function": str, "step": str}
    assert isinstance(found.step, kind.get(name, HybridStep))
    if name.startswith("kernel"):
        assert {part.split()[1] for part in failed} == {name.split()[1]}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAILURES if name not in TRIED])
def test_every_kernel_that_fails_in_every_way(load, name):
    check_fallback(load, name)


def test_torch_computes_a_kernel_that_failed_and_no_other(load, monkeypatch):
    used, plain = [], torch_kernels()
    noting = {
        name: lambda *a, _name=name, **o: (used.append(_name), getattr(plain, _name)(*a, **o))
        for name in NAMES
    }
    parts = fake_parts(kernels=with_kernel("predict", halved),
                       plain_kernels=dataclasses.replace(plain, **noting))  # fmt: skip
    load(parts)
    used.clear()
    load(parts)
    assert set(used) == {"predict"}
    assert gpu_products._replaced == {"predict"}


def test_without_triton_torch_computes_all(load):
    def missing():
        raise ImportError("the GPU kernels need Triton, found none: pip install triton")

    found = load(fake_parts(kernels=missing))
    (line,) = found.lines
    assert "pip install triton: torch computes them" in line
    assert isinstance(found.step, HybridStep) and found.error < 1e-4
    gpu_products._kernels.cache_clear()
    assert gpu_products.kernels() is not None  # although Triton was never imported
    assert stored_checks()[0].verdicts.keys() & {f"kernel {name}" for name in NAMES} == set()


def test_one_reason_for_many_kernels_is_one_line(load):
    def without_compiler():
        return dataclasses.replace(reference_kernels(), **{name: raising(None) for name in NAMES})

    found = load(fake_parts(kernels=without_compiler))
    (line,) = found.lines
    assert "the kernels add_norm, attend, dot, down" in line and "no such instruction: " in line
    assert "and much more" not in line and found.error < 1e-4


def test_without_a_graph_none_is_checked(load):
    found = load(fake_parts(prepare=failing()), graph=False)
    assert found.lines == []
    assert not [name for name in stored_checks()[0].verdicts if name.startswith("graph")]


# ---- time limits, lost devices, ended processes -------------------------------------------------


def test_a_part_that_takes_too_long_has_failed(load, monkeypatch):
    monkeypatch.setattr(device_check, "PART_S", 0.2)
    release = threading.Event()
    found = load(fake_parts(multiply=lambda dtype: release.wait(20)))
    release.set()
    (line,) = found.lines
    assert "takes longer than 0.2 s" in line and found.error < 1e-4


def test_a_device_that_no_longer_answers_is_left(load):
    uses = []

    def use():
        uses.append(1)
        if len(uses) > 1:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    broken = fake_parts(use=use, kernels=with_kernel("attend", raising))
    found = load(broken)
    (line,) = found.lines
    assert "no such instruction, and the device no longer answers" in line
    assert isinstance(found.step, NativeStep) and found.error < 1e-4
    uses.clear()
    found = load(broken)  # which goes around that kernel
    (line,) = found.lines
    assert "torch computes it" in line and isinstance(found.step, HybridStep)


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from failing_parts import fake_parts, with_kernel
from sparkinfer import Engine
from sparkinfer.runtime.check import parts
def deadly(kernel):
    return lambda *a, **o: os.kill(os.getpid(), signal.SIGKILL)
parts.parts_of = lambda device: fake_parts(kernels=with_kernel("gate_up", deadly))
Engine.load(sys.argv[2], split=sys.argv[3], device="cpu")
"""


def test_a_process_that_ends_in_a_check_leaves_a_mark(planned, load):
    here = os.path.dirname(__file__)
    done = subprocess.run([sys.executable, "-c", KILLED, here, planned[0], planned[1]], check=False)
    assert done.returncode == -9
    (checks,) = stored_checks()
    assert checks.started is not None and checks.started.startswith("kernel gate_up")
    found = load(fake_parts())
    (line,) = found.lines
    assert checks.started in line and DIED in line and found.error < 1e-4
    assert stored_checks()[0].started is None


def test_an_interrupted_check_leaves_no_mark(load):
    def interrupt():
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_check, "outcome", lambda run, limit: interrupt())
        with pytest.raises(KeyboardInterrupt):
            load(fake_parts())
    assert stored_checks()[0].started is None and not stored_checks()[0].verdicts


def test_no_memory_for_a_check_says_nothing_about_the_part(load):
    parts = fake_parts(kernels=with_kernel("down", lambda kernel: failing("CUDA out of memory")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_check.DeviceCheck, "backend", lambda self, *a, **o: "not now")
        found = load(parts)
    assert any(
        "no memory is left to check it: it is used unchecked" in line for line in found.lines
    )
    assert not [name for name in stored_checks()[0].verdicts if name.startswith("kernel down")]


# ---- the file -----------------------------------------------------------------------------------


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


def test_another_version_of_anything_is_another_file(tmp_path):
    with CheckBook(KEY) as book:
        book.finish(Verdict(part="device", why="", seconds=1.0))
    for name in ("index", "device", "capability", "memory_bytes", "driver", "torch", "triton",
                 "package"):  # fmt: skip
        other = 7 if name in ("index", "memory_bytes") else "x"
        with CheckBook(dataclasses.replace(KEY, **{name: other})) as book:
            assert book.known("device") is None


def test_a_cache_that_cannot_be_written_is_said_and_the_check_goes_on(load, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPARKINFER_CACHE", str(tmp_path / "file"))
    found = load(fake_parts())
    assert found.error < 1e-4 and isinstance(found.step, HybridStep)
    assert {line.partition(": ")[2] for line in found.lines} == {
        "the cache folder cannot be written (Not a directory): the GPU is checked at every load"
    }


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


def launches(planned_model, hot, **options):
    path = planned_model.path
    with Engine.load(path, device="cpu", **options) as engine:
        weights = engine._live.weights
        split = make_split(planned_model, hot)
        placement = Placement.of_split(split, (CPU,))
        split.save(path.with_name("s.gguf"))
    with Engine.load(path, split=path.with_name("s.gguf"), device="cpu") as engine:
        weights = engine._live.weights
        return launches_of(weights, placement, 0, plain_backend(reference_kernels()).take)


def make(tmp_path, **options):
    model = make_model(**options)
    model = dataclasses.replace(model, path=tmp_path / "m.gguf")
    model.save(model.path)
    return model


@pytest.mark.parametrize("kind", ["f16", "q4_0"])
def test_the_number_of_variants_does_not_grow_with_layers(tmp_path, kind):
    found = []
    for num_layers in (2, 5):
        shape = make_shape(num_layers=num_layers, num_neurons=F)
        model = make(tmp_path, shape=shape, kind=kind, predictor_rank=8)
        hot = [np.arange(40)] * num_layers
        found.append({each.variant for each in launches(model, hot)})
    assert found[0] == found[1]
    assert len(found[0]) <= 13, sorted(found[0])


def test_torchs_kernels_are_the_reference_in_pieces(tmp_path, monkeypatch):
    from sparkinfer.runtime.check.kernels import check_launch
    from sparkinfer.runtime.kernels.gpu import torch_kernels as module

    monkeypatch.setattr(module, "ROWS", 32)
    for options in ({"kind": "q4_0", "predictor_rank": 8}, {"activation": "silu"}):
        shape = make_shape(num_layers=L, num_neurons=F)
        model = make(tmp_path, shape=shape, **options)
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
