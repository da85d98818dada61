"""Whole steps that are handed over by flags on the fake CUDA runtime: the bits of steps that are
launched kernel by kernel, and one line where a GPU or the server stops."""

import time
from ctypes import CFUNCTYPE, c_int, c_void_p, cast
from types import SimpleNamespace

import pytest
import torch
from fake_cuda import library as fake
from fake_cuda.torch_cuda import fake_cuda
from hybrid_plans import made
from models import make_sizes
from test_runtime import IDS

from hotsplit import Engine
from hotsplit.runtime.device import cuda_runtime
from hotsplit.runtime.device.cuda_runtime import DeviceLost, StreamMemory
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.ops.neurons.feed_forward import Traffic
from hotsplit.runtime.step import backend, hybrid_builder
from hotsplit.runtime.step.backend import cuda_backend
from hotsplit.runtime.step.batch import Row

pytestmark = [pytest.mark.skipif(not fake.can_be_built(), reason="needs a C++ compiler, and Linux")]
QUERY = CFUNCTYPE(c_int, c_void_p)
NOT_READY, FAILED = 600, 719
PLANS = ["mixed", "attention on the CPU", "every kind of layer", "two GPUs, layers on the CPU"]


def small(tmp_path, plan):
    """A small model with a plan of hybrid_plans, and devices."""
    model, split = made(tmp_path, plan, sizes=make_sizes(num_layers=4, width=32, num_neurons=96))
    devices = tuple(torch.device("cuda", number) for number in range(len(split.budgets)))
    placement = Placement.of_split(split, devices)
    return SimpleNamespace(path=model.path, split=tmp_path / "s.gguf", placement=placement)


def logits_of(step, num_rows: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """(those of single tokens, those of the same tokens as rows of one step)."""
    single = torch.stack([step.run(token, n).clone() for n, token in enumerate(IDS[:num_rows])])
    rows = [Row(token=IDS[n], position=n, sequence=0, has_logits=True) for n in range(num_rows)]
    return single, step.run_rows(rows).clone()


@pytest.mark.parametrize("plan", PLANS)
def test_doorbells_give_the_bits_of_plain_launches(tmp_path, monkeypatch, plan):
    monkeypatch.setattr(backend, "POLL_S", 0.0)
    case = small(tmp_path, plan)
    with (
        fake_cuda(num_devices=2),
        Engine.load(case.path, split=case.split, mode="predicted", device="cuda") as engine,
    ):
        step = engine._live.native
        at_load = fake.text("log").count("write flag")
        got = [logits_of(step)]
        for seed in range(2):
            fake.load().fakeSeed(seed)
            got.append(logits_of(step))
        before = fake.text("log").count("write flag")
        assert before > at_load
        other = hybrid_builder.build(
            engine._live.weights,
            case.placement,
            Traffic(),
            cuda_backend(has_graph=True),
            max_rows=4,
        )
        want = logits_of(other)
        assert fake.text("log").count("write flag") == before
        assert all(torch.equal(*pair) for each in got for pair in zip(each, want, strict=True))
        assert not fake.text("violations")


def lost_line(engine) -> str:
    """The error of a step; further steps end with the same one at once."""
    found = []
    for _ in range(2):
        with pytest.raises(DeviceLost) as error:
            engine._step(IDS[0], 0)
        found.append(str(error.value))
    assert found[0] == found[1] and "\n" not in found[0]
    engine._live.native.lost = ""
    return found[0]


def test_a_gpu_or_a_server_that_stops_ends_in_one_line_within_the_timeout(tmp_path, monkeypatch):
    monkeypatch.setattr(backend, "POLL_S", 0.0)
    case = small(tmp_path, "random")
    advice = "; start again, or use the CPU alone (--device cpu)"
    answers: list[int] = []  # the last one is the driver's, if there is one
    query = QUERY(lambda stream: answers[-1] if answers else fake.load().cuStreamQuery(stream))
    address = cast(query, c_void_p).value
    monkeypatch.setattr(StreamMemory, "query", property(lambda memory: address))
    with fake_cuda():
        engine = Engine.load(case.path, split=case.split, mode="predicted", device="cuda")
        engine._step(IDS[0], 0)
        monkeypatch.setattr(backend, "TIMEOUT_S", 0.1)
        with monkeypatch.context() as patch:  # a server that returns early
            patch.setattr(library, "serve", lambda structs, start, stop, serving: (1, NOT_READY))
            assert lost_line(engine) == (
                "cuda:0: hand-over 2 of 4 to the CPU: the GPU did not get there within 0.1 s"
                + advice
            )
        torch.cuda.synchronize()  # the stream has been released
        for answer, why in (
            (NOT_READY, "did not get there within 0.1 s"),
            (FAILED, "failed (CUDA error 719)"),
        ):
            answers.append(answer)  # and nothing runs meanwhile
            began = time.perf_counter()
            assert (
                lost_line(engine) == f"cuda:0: hand-over 1 of 4 to the CPU: the GPU {why}{advice}"
            )
            assert time.perf_counter() - began < 60
            torch.cuda.synchronize()
        engine.close()


def test_without_stream_memory_operations_kernels_are_launched_plainly(
    tmp_path, monkeypatch, caplog
):
    caplog.set_level("INFO")
    case = small(tmp_path, "one neuron")
    with fake_cuda() as cuda:
        monkeypatch.setattr(cuda_runtime, "_DRIVER", "libc.so.6")  # which lacks them
        with Engine.load(case.path, split=case.split, mode="predicted", device="cuda") as engine:
            logits_of(engine._live.native)
            assert not cuda.graphs
        assert not {"write flag", "wait for flag", "host function"} & set(fake.text("log"))
        assert not fake.text("violations")
    lines = [each.getMessage() for each in caplog.records]
    assert sum("this driver has no stream memory operations" in line for line in lines) == 1
