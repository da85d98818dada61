"""The check of a GPU, here a fake one. If a part fails during a load, generation still works, one
line reports the failure, and the part is not tried again."""

import _thread
import dataclasses
import re
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from failing_parts import (
    KEY,
    DeafStream,
    Forgotten,
    HalfDeafStream,
    failing,
    fake_parts,
    forgetful,
    forgetting,
    halved,
    halved_if_overlapping,
    idle,
    raising,
    with_kernel,
)
from fake_cuda import library as fake_library
from fake_cuda.torch_cuda import fake_cuda
from forked import run_python
from models import make_model, make_sizes
from reference import rel_error
from test_runtime import IDS, make_split

from hotsplit import Engine
from hotsplit.artifacts.device_checks import DIED, CheckBook, stored_checks
from hotsplit.doctor import gpu as doctor
from hotsplit.errors import HotsplitError
from hotsplit.runtime.check import device_check
from hotsplit.runtime.check import parts as device_parts
from hotsplit.runtime.check.launches import NAMES, PROMPTS
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.kernels.gpu.kernels import reference_kernels
from hotsplit.runtime.kernels.gpu.torch_kernels import torch_kernels
from hotsplit.runtime.step.hybrid_step import HybridStep
from hotsplit.runtime.step.native_step import NativeStep
from hotsplit.runtime.step.sequences import Part
from hotsplit.runtime.weights import gpu_products
from hotsplit.system.log_lines import lines_on_stderr

pytestmark = [
    pytest.mark.skipif(not library.is_available(), reason="the C++ kernels are not built"),
    pytest.mark.usefixtures("nothing_checked"),
]
F, L = 96, 2
HOT = [np.arange(0, F, 2), np.arange(F)]


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """(a model with predictors, a plan that divides it, the expected logits)."""
    folder = tmp_path_factory.mktemp("planned")
    shape = make_sizes(num_layers=L, num_neurons=F)
    model = make_model(sizes=shape, kind="f16", predictor_rank=8)
    model = dataclasses.replace(model, path=folder / "m.gguf")
    model.save(model.path)
    make_split(model, HOT).save(folder / "s.gguf")
    make_split(model, HOT, num_sequences=3).save(folder / "three.gguf")
    with Engine.load(model.path, mode="predicted", device="cpu") as engine:
        want = stepped(engine)
    return model.path, folder / "s.gguf", want


def stepped(engine, ids=IDS[:4]):
    return torch.stack([engine._step(token, at).clone() for at, token in enumerate(ids)])


class Loaded:
    """Loads with these parts; keeps the lines on stderr, the native step, and the logits' error."""

    def __init__(self, planned, monkeypatch, capsys, parts, **options):
        path, split, want = planned
        given = iter([parts, None])  # after a lost device, the load goes on without one
        monkeypatch.setattr(device_parts, "parts_of", lambda device: next(given))
        capsys.readouterr()
        with (
            lines_on_stderr(),
            Engine.load(path, split=split, mode="predicted", device="cpu", **options) as engine,
        ):
            self.lines = capsys.readouterr().err.splitlines()
            self.step = engine._live.native
            self.error = rel_error(stepped(engine), want)


@pytest.fixture
def load(planned, monkeypatch, capsys):
    return lambda parts, **options: Loaded(planned, monkeypatch, capsys, parts, **options)


def test_a_device_that_works_is_checked_once_and_prints_nothing(load):
    calls = []
    parts = fake_parts(use=lambda: calls.append("use"), multiply=lambda dtype: calls.append(dtype))
    found = load(parts)
    assert found.lines == [] and found.error < 1e-4 and isinstance(found.step, HybridStep)
    assert calls == ["use", torch.float16]
    (checks,) = stored_checks()
    assert checks.key == KEY and checks.started is None
    assert all(verdict.is_fine for verdict in checks.verdicts.values())
    names = {name.split()[0] for name in checks.verdicts}
    assert names == {
        "device", "pinned", "memory", "kernel", "products", "host", "doorbell", "step", "graph",
    }  # fmt: skip
    kernels = {name.split()[1] for name in checks.verdicts if name.startswith("kernel ")}
    assert kernels == set(NAMES) - ELSEWHERE
    again = load(fake_parts(use=failing(), pin=failing(), multiply=failing(), limit=failing(),
                            kernels=with_kernel("down", halved)))  # fmt: skip
    assert again.lines == []  # nothing was tried again


def slower_each_time():
    """A stand-in for the time of a step."""
    found = iter([2e-3, 3e-3])
    return lambda step: next(found)


# The embedding is on the host, no matrix is in blocks (test_gpu_products.py checks these), and the model
# has no experts (test_fake_experts.py).
ELSEWHERE = {
    "embed", "multiply", "multiply_down", "choose_experts", "expert_gate_up", "expert_down",
    "convolve", "delta_rule", "gate_norm",
}  # fmt: skip
FAILURES = {
    "device": (fake_parts(use=failing()), "everything runs on the CPU"),
    "pinned memory": (fake_parts(pin=failing()), "layer by layer"),
    "memory limit": (fake_parts(limit=failing()), "used for planning, but not enforced"),
    "products float16": (fake_parts(multiply=failing()), "multiplied in f32"),
    "host function": (fake_parts(stream=DeafStream), "layer by layer"),
    "doorbell": (fake_parts(doorbell_stream=DeafStream), "the driver calls the CPU"),
    "doorbell that is slower": (
        fake_parts(hand_over_s=lambda backends: [3e-5, 2e-5]),
        "takes 30.0 us, a host function 20.0",
    ),
    "doorbell only in a graph": (
        fake_parts(doorbell_stream=Forgotten, prepare=forgetting),
        "in a graph: sent 1, wanted 2",
    ),
    "step": (fake_parts(stream=HalfDeafStream), "layer by layer"),
    "graph": (fake_parts(prepare=forgetful), "submitted kernel by kernel"),
    "overlapping launches that are slower": (
        fake_parts(can_overlap=True, seconds_of=slower_each_time()),
        "a token takes 3.000 ms, without it 2.000",
    ),
    "overlapping launches": (
        fake_parts(kernels=with_kernel("dot", halved_if_overlapping), can_overlap=True),
        "a kernel begins when the last one has ended",
    ),
    "graph that raises": (fake_parts(prepare=failing()), "submitted kernel by kernel"),
}
for kernel in (name for name in NAMES if name not in ELSEWHERE):
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
        assert fallback in line and "hotsplit doctor" in line, line
        assert found.error < 1e-3
        parts = fake_parts(can_overlap=parts.can_overlap)  # now nothing fails
        gpu_products._replaced.clear()
    kept = {name: verdict for each in stored_checks() for name, verdict in each.verdicts.items()}
    failed = [part for part, verdict in kept.items() if not verdict.is_fine]
    first = {"host function": {"host", "doorbell"}}.get(name, {name.split()[0]})
    assert failed and {part.split()[0] for part in failed} == first, failed
    findings = doctor.checks(stored_checks(), has_gpu=True, unfinished=None)
    first, _, rest = name.partition(" ")
    named = re.compile(rf"kernels? {rest.split()[0]}\b" if first == "kernel" else first)
    assert any(named.match(each.text) for each in findings if each.state != "ok"), findings
    return found, failed


@pytest.mark.parametrize("name", TRIED)
def test_generation_works_and_one_line_is_printed_when_a_part_fails(load, name):
    found, failed = check_fallback(load, name)
    kind = {"device": NativeStep, "pinned memory": str, "host function": str, "step": str}
    assert isinstance(found.step, kind.get(name, HybridStep))
    if name.startswith("kernel"):
        assert {part.split()[1] for part in failed} == {name.split()[1]}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAILURES if name not in TRIED])
def test_generation_works_when_a_kernel_fails_in_any_way(load, name):
    check_fallback(load, name)


def test_torch_computes_only_the_kernel_that_failed(load, monkeypatch):
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


def test_without_triton_torch_computes_everything(load):
    def missing():
        raise ImportError("the GPU kernels need Triton, found none: pip install triton")

    found = load(fake_parts(kernels=missing))
    (line,) = found.lines
    assert "pip install triton: torch computes them" in line
    assert isinstance(found.step, HybridStep) and found.error < 1e-4
    gpu_products._kernels.cache_clear()
    assert gpu_products.kernels() is not None  # it does not need Triton
    assert stored_checks()[0].verdicts.keys() & {f"kernel {name}" for name in NAMES} == set()


def test_kernels_that_fail_for_one_reason_share_a_line(load):
    def without_compiler():
        return dataclasses.replace(reference_kernels(), **{name: raising(None) for name in NAMES})

    found = load(fake_parts(kernels=without_compiler))
    (line,) = found.lines
    assert (
        "the kernels add_norm, attend, attend_tokens, dot, down" in line
        and "no such instruction: " in line
    )
    assert "and much more" not in line and found.error < 1e-4


def test_without_a_graph_no_graph_is_checked(load):
    found = load(fake_parts(prepare=failing()), graph=False)
    assert found.lines == []
    assert not [name for name in stored_checks()[0].verdicts if name.startswith("graph")]


# ---- time limits, lost devices, ended processes -------------------------------------------------


def test_a_part_that_takes_too_long_fails(load, monkeypatch):
    monkeypatch.setattr(device_check, "PART_S", 0.2)
    release = threading.Event()
    found = load(fake_parts(multiply=lambda dtype: release.wait(20)))
    release.set()
    (line,) = found.lines
    assert "takes longer than 0.2 s" in line and found.error < 1e-4


def test_a_device_that_no_longer_answers_is_not_used(load):
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
    found = load(broken)  # this load avoids that kernel
    (line,) = found.lines
    assert "torch computes it" in line and isinstance(found.step, HybridStep)


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from failing_parts import fake_parts, with_kernel
from hotsplit import Engine
from hotsplit.runtime.check import parts
def deadly(kernel):
    return lambda *a, **o: os.kill(os.getpid(), signal.SIGKILL)
parts.parts_of = lambda device: fake_parts(kernels=with_kernel("gate_up", deadly))
Engine.load(sys.argv[2], split=sys.argv[3], device="cpu")
"""


def test_the_next_load_reports_a_check_that_ended_its_process(planned, load):
    here = Path(__file__).parent
    done = run_python(KILLED, here, planned[0], planned[1])
    assert done.returncode == -9
    (checks,) = stored_checks()
    assert checks.started is not None and checks.started.startswith("kernel gate_up")
    found = load(fake_parts())
    (line,) = found.lines
    assert checks.started in line and DIED in line and found.error < 1e-4
    assert stored_checks()[0].started is None


def test_an_interrupted_check_records_nothing(load):
    def interrupt():
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_check, "outcome", lambda run, limit, **options: interrupt())
        with pytest.raises(KeyboardInterrupt):
            load(fake_parts())
    assert stored_checks()[0].started is None and not stored_checks()[0].verdicts


def test_a_check_without_memory_has_no_result(load):
    parts = fake_parts(kernels=with_kernel("down", lambda kernel: failing("CUDA out of memory")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_check.DeviceCheck, "backend", lambda self, *a, **o: "not now")
        found = load(parts)
    assert any(
        "no memory is left to check it: it is used unchecked" in line for line in found.lines
    )
    assert not [name for name in stored_checks()[0].verdicts if name.startswith("kernel down")]


def test_an_error_is_reported_in_one_line():
    def fail(text):
        raise RuntimeError(text)

    said = {
        "CUDA error: an illegal memory access\nmore": "RuntimeError: CUDA error: an illegal memory access",
        "at 4:12:\n    x = y\n        ^\ny is not defined": "RuntimeError: y is not defined",
        "": "RuntimeError: no message",
        "two\x1bthree": "RuntimeError: two?three",
    }
    for text, line in said.items():
        assert device_check.outcome(lambda text=text: fail(text), 5.0) == line


# ---- steps of several rows, at their first use ---------------------------------------------------


class Texts:
    """Lets an engine with these parts compute a few tokens of some texts, and then a step of
    several rows; keeps the lines on stderr, the most rows that a step may have, and the error of
    all logits."""

    def __init__(self, planned, monkeypatch, capsys, parts, num_texts=3, num_rows=5):
        path, _, _ = planned
        split = path.with_name("three.gguf" if num_texts > 1 else "s.gguf")
        monkeypatch.setattr(device_parts, "parts_of", lambda device: parts)
        capsys.readouterr()
        with (
            lines_on_stderr(),
            Engine.load(path, split=split, mode="predicted", device="cpu") as engine,
        ):
            texts = [engine.sequence() for _ in range(num_texts)]
            got = [text.extend([token], "all") for text in texts for token in IDS[:3]]
            counts = [num_rows - num_texts + 1, *[1] * (num_texts - 1)]
            counts = [count for count in counts if count]
            got += engine.run(
                Part(sequence=text, tokens=IDS[3 : 3 + count], wanted="all")
                for text, count in zip(texts, counts, strict=True)
            )
            self.max_rows = engine._live.native.max_rows
            self.lines = capsys.readouterr().err.splitlines()
        with Engine.load(path, mode="predicted", device="cpu", num_sequences=3) as engine:
            texts = [engine.sequence() for _ in range(num_texts)]
            want = [text.extend([token], "all") for text in texts for token in IDS[:3]]
            want += [
                text.extend(IDS[3 : 3 + count], "all")
                for text, count in zip(texts, counts, strict=True)
            ]
        self.error = rel_error(torch.cat(got), torch.cat(want))


@pytest.fixture
def texts(planned, monkeypatch, capsys):
    return lambda parts, **options: Texts(planned, monkeypatch, capsys, parts, **options)


def many(wrong):
    """Makes a kernel wrong for more than two rows of a step; those of prompts round queries."""

    def changed(kernel):
        def run(*arguments, **options):
            vector = next(
                each for each in (*arguments, *options.values()) if isinstance(each, torch.Tensor)
            )
            is_prompt = options.get("query_THW") is not None
            is_many = vector.dim() > 1 and len(vector) > 2 and not is_prompt
            (wrong(kernel) if is_many else kernel)(*arguments, **options)

        return run

    return changed


@pytest.mark.parametrize("num_texts", [1, 3])
def test_steps_of_several_rows_are_checked_at_their_first_use(texts, num_texts):
    """The check uses the engine's own KV cache, and does not change its texts."""
    found = texts(fake_parts(), num_texts=num_texts)
    assert found.lines == [] and found.error < 1e-4 and found.max_rows > 8
    kept = stored_checks()[0].verdicts
    steps = [name for name in kept if name.startswith("steps of ")]
    assert [name.rpartition(" ")[0] for name in steps] == ["steps of 8 rows"]
    kernels = {name.split()[1] for name in kept if name.endswith(" 8 rows")}
    assert kernels == set(NAMES) - ELSEWHERE - {*PROMPTS}
    assert not [name for name in kept if name.endswith((" 2 rows", " 4 rows"))]
    again = texts(fake_parts(kernels=with_kernel("attend", many(halved))), num_texts=num_texts)
    assert again.lines == [] and again.error > 1e-3  # nothing was tried again


@pytest.mark.parametrize(
    ("kernel", "wrong"), [("attend", halved), ("rotate_append", idle), ("down", raising)]
)
def test_a_kernel_that_fails_for_several_rows_takes_fewer(texts, kernel, wrong):
    parts = fake_parts(kernels=with_kernel(kernel, many(wrong)))
    for _ in range(2):
        found = texts(parts)
        assert len(found.lines) == 2 and found.max_rows == 2, found.lines  # of 8 and of 4 rows
        assert f"steps of 8 rows fail on this GPU ({kernel}: " in found.lines[0]
        assert "hotsplit doctor" in found.lines[1] and found.error < 1e-4
        parts = fake_parts(
            can_overlap=parts.can_overlap
        )  # now nothing fails, and nothing is tried again
    findings = doctor.checks(stored_checks(), has_gpu=True, unfinished=None)
    assert any(kernel in each.text for each in findings if each.state != "ok"), findings


def test_a_step_of_several_rows_that_ended_its_process_is_not_tried_again(texts):
    texts(fake_parts())
    (part,) = [name for name in stored_checks()[0].verdicts if name.startswith("steps of 8 rows ")]
    with CheckBook(KEY) as book:
        book.start(part)
    found = texts(fake_parts())
    (line,) = found.lines
    assert DIED in line and found.max_rows == 4 and found.error < 1e-4
    findings = doctor.checks(stored_checks(), has_gpu=True, unfinished=None)
    assert any(each.text.startswith("steps of 8 rows: ") for each in findings), findings


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_device_lost_by_a_step_of_several_rows_is_one_line(texts, monkeypatch, is_slow):
    uses, release = [], threading.Event()

    def use():
        uses.append(1)
        if len(uses) > 1:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def slow(kernel):
        return lambda *arguments, **options: release.wait(20)

    if is_slow:
        monkeypatch.setattr(device_check, "PART_S", 1.0)
    parts = fake_parts(kernels=with_kernel("down", many(slow if is_slow else raising)), use=use)
    with pytest.raises(HotsplitError, match="start again, and steps will have fewer rows"):
        texts(parts)
    release.set()
    assert texts(fake_parts()).max_rows == 4


def test_an_interrupt_waits_for_a_part_that_shares_memory_with_a_step():
    ended = threading.Event()

    def run():
        _thread.interrupt_main()
        time.sleep(0.3)
        ended.set()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            device_check.outcome(run, 5.0, is_waited_for=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.is_set()


# ---- on the fake CUDA runtime -------------------------------------------------------------------


def silent(*arguments: object) -> None:
    """Does nothing."""


BROKEN = {
    "doorbell": ("hotsplit.runtime.device.cuda_runtime._DRIVER", "libc.so.6"),
    "host function": ("hotsplit.runtime.device.cuda_runtime.CudaRuntime.host_function", silent),
    "graph": ("hotsplit.runtime.step.cuda_backend._captured", failing()),
    "memory limit": ("torch.cuda.set_per_process_memory_fraction", silent),
    "products float16": ("hotsplit.runtime.check.parts.DeviceParts.multiply", failing()),
}


@pytest.mark.slow
@pytest.mark.skipif(not fake_library.can_be_built(), reason="needs a C++ compiler, and Linux")
@pytest.mark.parametrize("part", [None, *BROKEN])
@lines_on_stderr()
def test_on_the_fake_runtime_a_broken_part_takes_its_fallback(planned, capsys, part):
    """Streams, graphs, pinned memory and limits as on a GPU; the kernels are the reference's."""
    path, split, want = planned
    with fake_cuda(), pytest.MonkeyPatch.context() as patch:
        if part is not None:
            patch.setattr(*BROKEN[part])
        with Engine.load(path, split=split, mode="predicted", device="cuda") as engine:
            assert rel_error(stepped(engine), want) < 1e-3
            is_step = isinstance(engine._live.native, HybridStep)
    lines = [line for line in capsys.readouterr().err.splitlines() if "doctor" in line]
    # Without host functions, there are still doorbells.
    assert len(lines) == (part not in (None, "host function")) and is_step
    (checks,) = [each for each in stored_checks() if each.key.device == "fake CUDA device"]
    failed = [verdict.part for verdict in checks.verdicts.values() if not verdict.is_fine]
    assert [name.split()[0] for name in failed] == ([part.split()[0]] if part else [])


def test_the_check_goes_on_and_reports_a_cache_that_cannot_be_written(load, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOTSPLIT_CACHE", str(tmp_path / "file"))
    found = load(fake_parts())
    assert found.error < 1e-4 and isinstance(found.step, HybridStep)
    assert {line.partition(": ")[2] for line in found.lines} == {
        "the cache folder cannot be written (Not a directory), so the GPU is checked at every load"
    }
