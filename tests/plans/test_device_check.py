"""The check that ends a load with a GPU, on the fake CUDA runtime: a right device passes, and with
a wrong, a failing or a late one, the CPU runs and one line says why."""

import dataclasses
import threading

import numpy as np
import pytest
import torch
from fake_cuda import library as fake_library
from fake_cuda.kernels import launched
from fake_cuda.torch_cuda import fake_cuda
from models import make_model, make_sizes
from reference import rel_error
from test_runtime import IDS, make_split
from torch import Tensor

from hotsplit import Engine
from hotsplit.errors import HotsplitError
from hotsplit.runtime import device_check, loading
from hotsplit.runtime.device.device_memory import DeviceMemory
from hotsplit.runtime.device.streams import HostNode
from hotsplit.runtime.device_check import BOUND, DeviceFails, check_logits, within_time
from hotsplit.runtime.kernels.gpu import kernels as gpu_kernels
from hotsplit.runtime.kernels.gpu.kernels import reference_kernels
from hotsplit.runtime.step.hybrid_step import HybridStep
from hotsplit.runtime.step.native_step import NativeStep

pytestmark = pytest.mark.skipif(
    not fake_library.can_be_built(), reason="needs a C++ compiler, and Linux"
)
F, L = 96, 2
HOT = [np.arange(0, F, 2), np.arange(F)]


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """(a model with predictors, a plan that divides it, the expected logits)."""
    folder = tmp_path_factory.mktemp("planned")
    sizes = make_sizes(num_layers=L, num_neurons=F)
    model = make_model(sizes=sizes, kind="q8_0", predictor_rank=8)
    model = dataclasses.replace(model, path=folder / "m.gguf")
    model.save(model.path)
    make_split(model, HOT).save(folder / "s.gguf")
    with Engine.load(model.path, mode="predicted", device="cpu") as engine:
        want = stepped(engine)
    return model.path, folder / "s.gguf", want


def stepped(engine: Engine) -> Tensor:
    return torch.stack([engine._step(token, at).clone() for at, token in enumerate(IDS[:4])])


@pytest.fixture
def load(planned, caplog):
    """Loads by the plan, with checks; (the engine's kind of step, the lines of the load). The
    logits are those of the CPU in any case."""
    path, split, want = planned

    def loaded(kernels=None, change=lambda: None, after=lambda: None, **options):
        caplog.clear()
        made = None if kernels is None else launched(kernels)
        with fake_cuda(is_checked=True, kernels=made):
            change()
            with Engine.load(
                path, split=split, mode="predicted", device="cuda", **options
            ) as engine:
                assert rel_error(stepped(engine), want) < 1e-2
                kind = type(engine._live.native)
            after()
        lines = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
        own = [line for line in lines if "is enforced instead" not in line]  # of a small budget
        return kind, [line.removeprefix(f"{path}: ") for line in own]

    return loaded


def idle(kernel):
    return lambda *arguments, **options: None


def halved(kernel):
    """Halves the floats that the kernel writes, and shifts its integers right by 16 bits."""

    def run(*arguments, **options):
        tensors = [each for each in (*arguments, *options.values()) if isinstance(each, Tensor)]
        before = [each.clone() for each in tensors]
        kernel(*arguments, **options)
        for values, was in zip(tensors, before, strict=True):
            if values.is_floating_point() and not torch.equal(
                values.nan_to_num(), was.nan_to_num()
            ):
                values.mul_(0.5)
            elif values.dtype == torch.int32 and not torch.equal(values, was):
                values.bitwise_right_shift_(16)

    return run


def raising(kernel):
    def run(*arguments, **options):
        raise RuntimeError("no such instruction\nand much more")

    return run


def with_kernel(name, wrong):
    right = reference_kernels()
    return right.replaced(**{name: wrong(getattr(right, name))})


@pytest.mark.parametrize("graph", [True, False])
def test_a_device_that_is_right_is_used_and_prints_nothing(load, graph):
    kind, lines = load(graph=graph)
    assert kind is HybridStep and lines == []


STEPS = ("dot", "add_norm", "rotate_append", "attend", "predict", "gate_up", "down")
PROMPTS = ("multiply", "multiply_down", "attend_tokens", "round_tokens", "hidden_tokens")


@pytest.mark.parametrize("name", [*STEPS, *PROMPTS])
def test_a_wrong_kernel_is_found_and_the_cpu_runs(load, name):
    kind, (line,) = load(with_kernel(name, halved))
    assert kind is NativeStep
    assert line.startswith("cuda:0: the logits of a ") and " are off by " in line
    assert line.endswith(
        f" at most {BOUND:g} wanted: everything runs on the CPU; hotsplit doctor says more"
    )


@pytest.mark.parametrize(("wrong", "words"), [(idle, "are off by"), (raising, "no such instr")])
def test_a_kernel_that_does_nothing_or_raises_is_found(load, wrong, words):
    kind, (line,) = load(with_kernel("down", wrong))
    assert kind is NativeStep and words in line and "much more" not in line


def test_a_graph_that_does_nothing_is_found(load, monkeypatch):
    monkeypatch.setattr(
        "hotsplit.runtime.step.backend._captured", lambda stream, submit: lambda: None
    )
    kind, (line,) = load()
    assert kind is NativeStep and "the logits of a prompt are off by" in line


def test_host_functions_that_are_not_called_are_found(load, monkeypatch):
    monkeypatch.setattr(loading, "can_ring", lambda device: False)
    monkeypatch.setattr(HostNode, "run", lambda node: None)
    kind, (line,) = load()
    assert kind is NativeStep and "the logits of a prompt are off by" in line


def test_without_triton_the_cpu_runs(load, monkeypatch):
    def missing():
        raise ImportError("the GPU kernels need Triton, found none: pip install triton")

    kind, (line,) = load(change=lambda: monkeypatch.setattr(gpu_kernels, "triton_kernels", missing))
    assert kind is NativeStep and "found none: pip install triton: everything runs on" in line


def test_a_device_that_does_not_answer_is_bounded(load, monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(loading, "LIMIT_S", 0.5)
    monkeypatch.setattr(loading.LoadedModel, "_make_decoder", waiting(release))

    def end():  # the abandoned thread gives its memory back while there is a fake device
        release.set()
        for thread in threading.enumerate():
            if thread.name.endswith("(call)"):
                thread.join(20)

    kind, (line,) = load(after=end)
    assert kind is NativeStep
    assert line.startswith("cuda:0: a prompt and a step take longer than 0.5 s: everything runs")


def waiting(release):
    """Waits on a GPU; on the CPU the decoder is made."""
    make = loading.LoadedModel._make_decoder

    def run(loaded):
        if loaded.is_on_gpu:
            release.wait(20)
            raise RuntimeError("nobody waits for this")
        make(loaded)

    return run


def test_memory_that_is_short_is_not_a_fault_of_the_device(planned, monkeypatch):
    def short(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(DeviceMemory, "take_arena", short)
    with fake_cuda(is_checked=True), pytest.raises(HotsplitError, match="more memory wanted"):
        Engine.load(planned[0], split=planned[1], mode="predicted", device="cuda")


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros_like,
        lambda t: 0.85 * t,
        lambda t: t.flip(0),
        lambda t: t.index_fill(0, torch.tensor(3), torch.nan),
    ],
)
def test_the_comparison_rejects_wrong_logits(wrong):
    right = {"a prompt": torch.linspace(-3, 5, 100), "a step": torch.linspace(2, -1, 100)}
    near = {name: values * (1 + BOUND / 2) for name, values in right.items()}
    check_logits(near | {"a prompt again": right["a prompt"]}, right)
    for name in right:
        with pytest.raises(DeviceFails, match=f"the logits of {name} are off by"):
            check_logits(near | {name: wrong(right[name])}, right)


def test_what_runs_within_time_passes_on_its_errors():
    def fails():
        raise ValueError("x")

    assert within_time(lambda: 3, 5.0) == 3
    with pytest.raises(ValueError, match="x"):
        within_time(fails, 5.0)


def test_an_error_becomes_one_line():
    for text, line in {
        "CUDA error: an illegal memory access\nmore": "RuntimeError: CUDA error: an illegal memory"
        " access",
        "at 4:12:\n    x = y\n        ^\ny is not defined": "RuntimeError: y is not defined",
        "": "RuntimeError: no message",
        "two\x1bthree": "RuntimeError: two?three",
    }.items():
        with (
            pytest.raises(DeviceFails) as failed,
            device_check.failures_of_device(torch.device("cuda", 0)),
        ):
            raise RuntimeError(text)
        assert str(failed.value) == f"cuda:0: {line}"
