"""A plan that loads takes every text: on a hollow CUDA device with all that torch and cuBLAS take
from memory, random plans of models of 0.1 to 70 B take prompts of the whole context
and generations within their budgets."""

import os
import threading

import pytest
import torch
from fake_cuda import library
from fake_cuda.hollow import hollow_cuda, hollow_model
from fake_cuda.libraries import workspace_bytes
from models import shape_only
from plan_memory import (
    CARD_BYTES,
    SHAPES,
    Case,
    loaded,
    peak_and_limit,
    random_case,
    sizes_of,
    solved,
    take_texts,
)

from hotsplit import Engine
from hotsplit.errors import HotsplitError
from hotsplit.runtime import gpu_setup
from hotsplit.runtime.device.pools import PoolBytes
from hotsplit.runtime.kernels.cpu import library as cpu_kernels
from hotsplit.runtime.step.decoder import Decoder
from hotsplit.system.log_lines import lines_on_stderr

pytestmark = [
    pytest.mark.skipif(not library.can_be_built(), reason="needs a C++ compiler, and Linux"),
    pytest.mark.skipif(not cpu_kernels.is_available(), reason="the C++ kernels are not built"),
]
MIB = 1 << 20
# `HOTSPLIT_PLANS=300 pytest tests/test_plan_memory.py` tries so many.
NUM_PLANS = int(os.environ.get("HOTSPLIT_PLANS", "24"))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTSPLIT_CACHE", str(tmp_path / "cache"))


def check(case: Case) -> None:
    with loaded(case) as engine:
        tokens = engine._live.most_tokens
        take_texts(engine, case.plan)
        assert engine._live.most_tokens == tokens, "a pass did not fit, and was repeated"
        if engine.memories:
            peak, limit = peak_and_limit(engine, case.plan)
            assert peak <= limit, (peak, limit)


@pytest.mark.parametrize("seed", range(NUM_PLANS))
def test_a_random_plan_takes_all_texts_within_its_budget(seed):
    check(random_case(seed))


@pytest.mark.parametrize("share", [0.45, 0.6, 0.8])
def test_plans_of_a_model_of_few_wide_layers_take_prompts(share):
    """2 % of its bytes hold no pass of 128 tokens, and one of 64 has tensors of exactly 1 MiB."""
    shape = next(each for each in SHAPES if each[:2] == (4096, 11008))
    model = hollow_model(shape_only(sizes_of(shape, 8, 1024), kind="f16"))
    whole = sum(entry.num_bytes for entry in model.tensors.values())
    plan = solved(model, "dense", 0.0, budget_bytes=int(share * whole))
    check(Case(model=model, plan=plan))


def smollm2():
    """A model of SmolLM2's shape, and its plan in 90 MiB."""
    model = hollow_model(shape_only(sizes_of(SHAPES[0], 30, 512), kind="q8_0"))
    return model, solved(model, "dense", 0.0, budget_bytes=90 * MIB)


def multiply_in_threads() -> None:
    """In two threads at a time: torch's products take a workspace for each, and keep it."""
    both = threading.Barrier(2)

    def multiply() -> None:
        square = torch.zeros(64, 64, device="cuda")
        both.wait()
        square @ square
        both.wait()

    threads = [threading.Thread(target=multiply) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_what_earlier_engines_of_the_process_took_is_free_again():
    """What `run` does: an engine on the card, products in other threads, then a plan in 90 MiB."""
    model, plan = smollm2()
    assert workspace_bytes() == 4 * MIB + 8 * (16 << 10)  # set when the package was imported
    with hollow_cuda(CARD_BYTES) as cuda:
        multiply_in_threads()
        assert torch.cuda.memory_reserved() == 20 * MIB + 2 * MIB
        with Engine.of(model, device="cuda", is_resident=False) as engine:
            engine.sequence().extend(list(range(50)))
        assert torch.cuda.memory_reserved() == 0
        cuda.allocators[0].peak_reserved = 0
        with Engine.of(model, plan, device="cuda", is_resident=False) as engine:
            take_texts(engine, plan)
            peak, limit = peak_and_limit(engine, plan)
            assert peak <= limit == 128 * MIB


def test_an_error_says_what_the_process_held_before():
    model, plan = smollm2()
    with hollow_cuda(CARD_BYTES):
        held = torch.empty(54 * MIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(
            HotsplitError, match="54.00 MiB are held by this process's earlier work"
        ):
            Engine.of(model, plan, device="cuda", is_resident=False)
        del held


def wide(share):
    """A case of one wide layer in a share of its bytes."""
    shape = next(each for each in SHAPES if each[:2] == (4096, 11008))
    model = hollow_model(shape_only(sizes_of(shape, 1, 512), kind="f16"))
    return Case(model=model, plan=solved(model, "dense", share))


@lines_on_stderr()
def test_a_pass_that_no_longer_fits_is_repeated_in_halves(capsys):
    with loaded(wide(1.0)) as engine:
        tokens, text = engine._live.most_tokens, engine.sequence()
        (memory,) = engine.memories.values()
        torch.cuda.empty_cache()
        taken = torch.empty(memory.room_bytes - 24 * MIB, dtype=torch.uint8, device="cuda")
        text.extend(list(range(200)))
        assert 1 <= engine._live.most_tokens < tokens >= 64
        del taken
        shorter = engine._live.most_tokens
        lines = capsys.readouterr().err.splitlines()
        assert lines and all("is short for a pass of" in line for line in lines)
        text.extend(list(range(200)))
        assert engine._live.most_tokens == shorter and not capsys.readouterr().err


@lines_on_stderr()
def test_a_bound_that_is_too_low_is_found_at_load_and_kept(monkeypatch, capsys):
    case = wide(0.9)
    monkeypatch.setattr(gpu_setup, "reserved_bytes", lambda p, piece_bytes=0: 0)
    monkeypatch.setattr(gpu_setup, "pass_pools", lambda p: PoolBytes())
    monkeypatch.setattr(gpu_setup, "temporaries", lambda p, piece_bytes: PoolBytes())
    found, forward, passes = [], Decoder.forward, []

    def counted(decoder, ids_T, start, sequence=0):
        passes.append(len(ids_T))
        return forward(decoder, ids_T, start, sequence)

    monkeypatch.setattr(Decoder, "forward", counted)
    for _ in range(2):
        passes.clear()
        with loaded(case) as engine:
            found.append((engine._live.most_tokens, tuple(passes)))
            take_texts(engine, case.plan)
            assert engine._live.most_tokens == found[-1][0]
    (tokens, tried), (again, none) = found
    assert tokens == again < tried[0] == 2 * tried[1] and not none, found
    assert "is short for a pass of" in capsys.readouterr().err
