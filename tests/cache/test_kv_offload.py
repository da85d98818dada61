"""Keys and values in main memory under a plan: the GPU projects, the CPU attends.

Both roles are on the CPU, or the device is a fake one that checks every CUDA call."""

import dataclasses
from contextlib import contextmanager

import pytest
import torch
from fake_cuda import library as fake_library
from fake_cuda.torch_cuda import fake_cuda
from hybrid_plans import PLANS, SOME, F, make, planned, stepped
from models import make_sizes
from reference import rel_error
from test_hybrid_step import hybrid, steps
from test_native_step import BOUNDS

from hotsplit import Engine
from hotsplit.errors import HotsplitError
from hotsplit.options.key_selection import KeySelection
from hotsplit.runtime.generate.prompt_cache import restore_prompt, save_prompt
from hotsplit.runtime.kernels.gpu.kernels import reference_kernels
from hotsplit.runtime.step.backend import plain_backend

CONTEXT = 160
IDS = torch.randint(50, (CONTEXT,), generator=torch.Generator().manual_seed(5)).tolist()
EVERYTHING = KeySelection(window=CONTEXT // 32 * 32 + 32)
SOME_KEYS = KeySelection(block=16, sinks=16, window=16, top=32, candidates=2)
ON_THE_CPU = {"mode": "predicted", "device": "cpu", "context_length": CONTEXT}


def offloaded(tmp_path, plan, rule=SOME_KEYS, num_sequences=1, **options):
    """A saved model, and its plan with the cache in main memory."""
    shape = make_sizes(num_layers=4, num_neurons=F, context_length=CONTEXT)
    model = make(tmp_path, sizes=shape, **options)
    model.save(model.path)
    return model, planned(
        tmp_path, model, plan, context_length=CONTEXT, num_sequences=num_sequences, kv_offload=rule
    )


# ---- steps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS)
def test_with_every_key_a_step_is_that_without_offload(tmp_path, plan):
    """In every division, up to rounding: the two sides sum attention in different orders."""
    model, split = offloaded(tmp_path, plan, EVERYTHING)
    ids = IDS[:8]
    with Engine.load(model.path, split=tmp_path / "s.gguf", **ON_THE_CPU) as engine:
        moved = steps(hybrid(engine, split, plain_backend(reference_kernels())), ids)
        want = stepped(engine, ids)
    there = planned(tmp_path, model, plan, context_length=CONTEXT)
    with Engine.load(model.path, split=tmp_path / "s.gguf", **ON_THE_CPU) as engine:
        stayed = steps(hybrid(engine, there, plain_backend(reference_kernels())), ids)
    assert rel_error(moved, stayed) < BOUNDS["f32"]
    assert rel_error(moved, want) < BOUNDS["f32"]


@pytest.mark.parametrize("plan", ["all on the GPU", "every kind of layer"])
@pytest.mark.parametrize("kind", ["f32", "f16"])
def test_a_long_text_reads_the_keys_that_the_cpu_alone_would(tmp_path, plan, kind):
    """Fewer than one row in twenty differ by more than rounding: those where two keys are nearly
    equally good."""
    model, split = offloaded(tmp_path, plan, kind=kind)
    ids, options = IDS[:110], ON_THE_CPU | {"mode": "exact"}
    with Engine.load(model.path, kv_offload=str(SOME_KEYS), **options) as engine:
        want = stepped(engine, ids)
    with Engine.load(model.path, **options) as engine:
        full = stepped(engine, ids)
    with Engine.load(model.path, split=tmp_path / "s.gguf", **options) as engine:
        got = steps(hybrid(engine, split, plain_backend(reference_kernels())), ids)
    bound = 10 * BOUNDS[kind] * want.abs().amax()
    entire = 16 + 16 + 32
    assert ((got - want).abs().amax(dim=1) > bound).float().mean() < 0.05
    assert ((got - full).abs().amax(dim=1) > bound)[entire + 16 :].float().mean() > 0.9


# ---- engines on a fake device --------------------------------------------------------------------

on_device = pytest.mark.skipif(
    not fake_library.can_be_built(), reason="needs a C++ compiler, and Linux"
)


def check_the_runtime():
    assert not fake_library.text("violations")
    assert not fake_library.load().fakeNumUndeclared()


@contextmanager
def on_fake_cuda(tmp_path, **options):
    """(an engine with the plan on a fake device, the device)."""
    with (
        fake_cuda(num_devices=2) as cuda,
        Engine.load(
            tmp_path / "m.gguf", split=tmp_path / "s.gguf", device="cuda", **options
        ) as engine,
    ):
        yield engine, cuda


@on_device
@pytest.mark.parametrize("plan", ["every kind of layer", "two GPUs, layers on the CPU"])
def test_an_engine_on_a_device_gives_the_cpus_logits(tmp_path, plan):
    model, split = offloaded(tmp_path, plan)
    ids = IDS[:100]
    with Engine.load(model.path, kv_offload=str(SOME_KEYS), **ON_THE_CPU) as engine:
        want, prompt = stepped(engine, ids[:6]), engine.logits(ids)
    with on_fake_cuda(tmp_path) as (engine, cuda):
        assert cuda.num_graphs >= 1
        assert not engine.bytes_by_role["gpu"]["kv_cache"]
        for layer in engine.layers:
            assert layer.attention.cache.device.type == "cpu"
        got, read = stepped(engine, ids[:6]), engine.logits(ids)
    check_the_runtime()
    assert rel_error(got, want) < BOUNDS["f32"]
    differs = (read - prompt).abs().amax(dim=1) > 1e-4 * prompt.abs().max()
    assert differs.float().mean() < 0.05


@on_device
def test_texts_fork_roll_back_and_come_from_files_on_a_device(tmp_path):
    """Each continues with the logits of a text that was read at once."""
    model, split = offloaded(tmp_path, "random", num_sequences=3)
    with on_fake_cuda(tmp_path, num_sequences=3) as (engine, _):
        with engine.sequence() as text:
            text.extend(IDS[:90], "none")
            save_prompt(text, tmp_path / "state", engine.prompt_key())
            with text.fork() as other:
                other.rollback(77)
                other.extend([7, 8], "none")
                branch = other.extend([9])
                trunk = text.extend([IDS[90]])
            text.rollback(90)
            again = text.extend([IDS[90]])
        with engine.sequence() as text:
            restore_prompt(text, tmp_path / "state", engine.prompt_key())
            restored = text.extend([IDS[90]])
        with engine.sequence() as text:
            text.extend([*IDS[:77], 7, 8], "none")
            alone = text.extend([9])
    check_the_runtime()
    with (
        Engine.load(model.path, split=tmp_path / "s.gguf", device="cpu") as engine,
        engine.sequence() as text,
        pytest.raises(HotsplitError, match="another plan or on another device: .*, this is"),
    ):
        restore_prompt(text, tmp_path / "state", engine.prompt_key())
    assert torch.equal(trunk, again) and torch.equal(trunk, restored)
    assert rel_error(branch, alone) < 10 * BOUNDS["f32"]


@on_device
def test_a_text_that_ends_in_a_step_leaves_others_as_they_are(tmp_path):
    """A step is interrupted between submitting and finishing; the other text's next logits are as
    before."""
    model, split = offloaded(tmp_path, "random", num_sequences=2)
    with on_fake_cuda(tmp_path, num_sequences=2) as (engine, _):
        step = engine._live.native
        with engine.sequence() as text, engine.sequence() as other:
            text.extend(IDS[:80], "none")
            other.extend(IDS[:70], "none")
            want = text.extend([IDS[80]])
            text.rollback(80)
            watched = step._watched

            @contextmanager
            def interrupted(segments):
                with watched(segments):
                    yield
                    raise KeyboardInterrupt

            object.__setattr__(step, "_watched", interrupted)
            with pytest.raises(KeyboardInterrupt):
                other.extend([5])
            object.__setattr__(step, "_watched", watched)
            other.close()
            assert torch.equal(text.extend([IDS[80]]), want)
    check_the_runtime()


# ---- bytes ---------------------------------------------------------------------------------------


@on_device
@pytest.mark.parametrize("num_sequences", [1, 2])
def test_the_announced_bytes_are_those_allocated(tmp_path, num_sequences):
    """The cache with its tables takes no bytes on the device, only main memory."""
    model, split = offloaded(tmp_path, "mixed", num_sequences=num_sequences)
    with on_fake_cuda(tmp_path, num_sequences=num_sequences) as (engine, _):
        (memory,) = engine.memories.values()
        assert "kv_cache" not in memory.taken and not split.gpu_bytes["kv_cache"]
        caches = [layer.attention.cache for layer in engine.layers]
        kept = [(c.key_BKPX, c.value_BKPX, *c.tables.tensors) for c in caches]
        taken = sum(tensor.nbytes for tensors in kept for tensor in tensors)
        assert split.cpu_bytes["kv_cache"] == taken
        assert memory.taken["attention"] == split.gpu_bytes["attention"]


# ---- refusals ------------------------------------------------------------------------------------


def test_another_rule_than_the_plans_is_refused(tmp_path):
    model, _ = offloaded(tmp_path, "random")
    path = tmp_path / "s.gguf"
    with Engine.load(model.path, split=path, kv_offload=str(SOME_KEYS), **ON_THE_CPU) as engine:
        assert engine.layers[0].attention.cache.types.selection == SOME_KEYS
    for options, words in (
        ({"kv_offload": "on"}, r"asked for, but the plan is for block=16,.*; leave it out"),
        ({"cache_type_k": "q8_0"}, "a cache in q8_0 asked for, but a plan budgets it in f32"),
    ):
        with pytest.raises(HotsplitError, match=words):
            Engine.load(model.path, split=path, **ON_THE_CPU, **options)
    planned(tmp_path, model, "random", context_length=CONTEXT)
    with pytest.raises(HotsplitError, match="run hotsplit solve with --kv-offload"):
        Engine.load(model.path, split=path, kv_offload="on", **ON_THE_CPU)


@on_device
def test_a_device_without_a_plan_needs_one(tmp_path):
    model, _ = offloaded(tmp_path, "random")
    with fake_cuda():
        with pytest.raises(HotsplitError, match="hotsplit solve with --kv-offload, or use --cpu"):
            Engine.load(model.path, device="cuda", kv_offload="on")
        with Engine.load(
            model.path, device="cuda", cpu_ffn=True, kv_offload=str(SOME_KEYS)
        ) as engine:
            items = engine.bytes_by_role
            assert items["cpu"]["kv_cache"] and not items["gpu"]["kv_cache"]
            got = stepped(engine, IDS[:4])
    with Engine.load(model.path, kv_offload=str(SOME_KEYS), **ON_THE_CPU) as engine:
        assert rel_error(got, stepped(engine, IDS[:4])) < BOUNDS["f32"]


def test_a_plans_rule_is_read_back_and_checked(tmp_path):
    from hotsplit.artifacts.split_file import Split

    model, split = offloaded(tmp_path, "random")
    assert Split.load(tmp_path / "s.gguf").kv_offload == SOME_KEYS
    wrong = dataclasses.replace(split, kv_offload=KeySelection(window=4096))
    wrong.save(tmp_path / "w.gguf")
    with pytest.raises(HotsplitError, match="kv_cache of .* bytes on the CPU, but the plan says"):
        Engine.load(model.path, split=tmp_path / "w.gguf", **ON_THE_CPU)
    assert len(SOME) < F
