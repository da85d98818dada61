"""A GPU's memory as hotsplit manages it, on a fake CUDA device: a slab, a budget enforced on
torch's allocator, prompts with streamed cold weights, and tests of gpu/test_step.py, which are for
real devices."""

import dataclasses
import sys

import numpy as np
import pytest
import torch
from fake_cuda import library
from fake_cuda.torch_cuda import fake_cuda
from models import make_model, make_sizes
from paths import TESTS
from reference import rel_error
from test_fake_step import checked_cuda
from test_runtime import make_split

from hotsplit import Engine
from hotsplit.errors import HotsplitError
from hotsplit.runtime import gpu_setup
from hotsplit.runtime.device.device_memory import SMALL_BYTES, DeviceMemory, out_of_memory_as_error
from hotsplit.runtime.device.streams import CudaStream
from hotsplit.runtime.kernels.cpu import library as cpu_kernels
from hotsplit.runtime.kernels.stored import rows_together
from hotsplit.runtime.prefill.cold_stream import LEAST_TOKENS
from hotsplit.runtime.step.hybrid_step import GPU_SPIN_TIME

sys.path.insert(0, str(TESTS / "gpu"))  # not a package

import test_step  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not library.can_be_built(), reason="needs a C++ compiler, and Linux")
]
GPU = torch.device("cuda", 0)
MIB = 1 << 20


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTSPLIT_CACHE", str(tmp_path / "cache"))


def test_a_budget_is_enforced_to_the_byte():
    budget = 160 * MIB + 12345
    with checked_cuda():
        memory = DeviceMemory.of(GPU, 40 * MIB, budget)
        memory.take_arena(30 * MIB + 1)
        assert memory.report().slab == 40 * MIB
        assert memory.report().reserved == 40 * MIB + 32 * MIB
        room = memory.room_bytes
        assert room == budget - 40 * MIB - 32 * MIB - SMALL_BYTES
        held = torch.empty(room // (2 * MIB) * 2 * MIB, dtype=torch.uint8, device=GPU)
        with (
            pytest.raises(HotsplitError, match="cuda:0: 64.00 MiB wanted, .* of a budget of 160"),
            out_of_memory_as_error(GPU, 64 * MIB),
        ):
            torch.empty(64 * MIB, dtype=torch.uint8, device=GPU)
        with pytest.raises(HotsplitError, match="cuda:0: 64.00 MiB wanted"):
            memory.take_arena(64 * MIB)
        assert memory.report().peak_reserved <= budget
        del held
        memory.close()
        torch.empty(200 * MIB, dtype=torch.uint8, device=GPU)  # closing removes the limit


def test_a_card_that_is_too_small_is_refused_in_one_line():
    with (
        fake_cuda(total_bytes=256 * MIB),
        pytest.raises(HotsplitError, match="cuda:0: 300.00 MiB wanted, 256.00 MiB of 256"),
    ):
        DeviceMemory.of(GPU, 300 * MIB)


@pytest.mark.parametrize("mode", ["exact", "dense"])
def test_cold_weights_stream_to_the_device(tmp_path, monkeypatch, mode):
    """Pinned weights are copied directly. In mode dense they are in tiles and groups, which the
    device unpacks. test_fake_mixtures has those of a mapped file, through two buffers."""
    shape = make_sizes(num_layers=2, width=256, num_neurons=1024, context_length=64)
    model = make_model(sizes=shape, kind="q8_0", predictor_rank=8)
    model = dataclasses.replace(model, path=tmp_path / "m.gguf")
    model.save(model.path)
    hot = np.arange(0, 1024, 4 if mode == "dense" else 3)
    split = make_split(model, [hot] * 2, context_length=64)
    split = dataclasses.replace(split, vram_budget_bytes=split.vram_budget_bytes + 160 * MIB)
    split.save(tmp_path / "s.gguf")
    ids = np.random.default_rng(0).integers(0, 50, 40).tolist()
    with Engine.load(model.path, mode=mode, device="cpu", context_length=64) as engine:
        want = engine.logits(ids)
    streams, was = {}, gpu_setup.cold_streams

    def cold_streams(*given):
        found = was(*given)
        streams.update(found)
        return found

    monkeypatch.setattr(gpu_setup, "cold_streams", cold_streams)
    with (
        fake_cuda(seed=3),
        Engine.load(model.path, split=tmp_path / "s.gguf", mode=mode, device="cuda") as engine,
    ):
        assert list(streams) == [0, 1], "no cold weights are streamed"
        assert streams[0].staging is None
        passes = engine._live.native.passes
        assert passes.least_streamed == LEAST_TOKENS
        together = max(rows_together(m.kind) for m in engine.layers[0].ffn.blocks[1].matrices)
        assert together == (64 if mode == "dense" else 16) or (
            not cpu_kernels.prefers_tiles() and together == 1
        )
        found, copies = [], []
        for least_tokens in (1, 1, 1 << 30):
            passes.least_streamed = least_tokens
            before = len(library.text("log"))
            found.append(engine.logits(ids))
            copies.append(library.text("log")[before:].count("copy"))
        streams.clear()  # closing unpins what nothing refers to
        del passes
    assert not library.text("violations")
    assert copies[0] > copies[2], copies  # nothing is streamed the last time
    assert all(rel_error(logits, want) < 4 * torch.finfo(torch.float16).eps for logits in found)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize("case", ["opt", "phi4-mini", "llama-biases"])
def test_a_graph_of_layers_from_the_tests_for_real_devices(tmp_path, case):
    """OPT's learned positions are in the type of the weights; biases are stacked with q, k and
    v."""
    with checked_cuda():
        test_step.test_every_graph_of_layers(tmp_path, "cuda", case, "q8_0")


@pytest.mark.parametrize("hot", ["some", "all"])
def test_who_waits_for_a_step_sleeps_if_the_cpu_has_a_part_of_it(tmp_path, monkeypatch, hot):
    """Also sets how long the CPU's idle threads wait for their part of the next layer."""
    slept, spins = [], []
    finish = CudaStream.finish

    def finishing(stream, *, sleeps=False):
        slept.append(sleeps)
        finish(stream, sleeps=sleeps)

    monkeypatch.setattr(CudaStream, "finish", finishing)
    monkeypatch.setattr(cpu_kernels, "set_spin_time", lambda us=50: spins.append(us))
    model = make_model(sizes=make_sizes(num_layers=2, num_neurons=64), kind="f16")
    model = dataclasses.replace(model, path=tmp_path / "m.gguf")
    model.save(model.path)
    neurons = np.arange(64)
    make_split(model, [neurons[:9] if hot == "some" else neurons] * 2).save(tmp_path / "s.gguf")
    with (
        fake_cuda(seed=1),
        Engine.load(model.path, split=tmp_path / "s.gguf", mode="exact", device="cuda") as engine,
    ):
        slept.clear()
        spins.clear()
        engine._step(3, 0)
        assert slept == [hot == "some"]
        assert spins == ([GPU_SPIN_TIME] if hot == "some" else [])
    assert spins[-1:] == [50]
