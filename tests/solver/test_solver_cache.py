"""Plans with a neuron cache: bytes of both memories, refusals, advice, what `verify` rejects."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from models import (
    load_solver_files,
    make_machine,
    make_model,
    make_profile,
    make_sizes,
    save_solver_files,
    solver_files,
)
from test_cache_plan import a_cache
from test_neuron_cache_hybrid import Cached, weights_of

from hotsplit import Engine
from hotsplit.artifacts.profile_file import Profile
from hotsplit.artifacts.split_file import Split
from hotsplit.cli import main
from hotsplit.costs.cache_bytes import CacheSize, bytes_in_staging, staging_bytes
from hotsplit.errors import HotsplitError
from hotsplit.options.neuron_cache_options import CacheOptions
from hotsplit.runtime.kernels.gpu.kernels import reference_kernels
from hotsplit.runtime.model.loader import load_weights
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.neuron_cache.neuron_rows import RowTable
from hotsplit.runtime.neuron_cache.policy import CachePolicy
from hotsplit.runtime.ops.neurons.feed_forward import Traffic
from hotsplit.runtime.step import hybrid_builder, workspace
from hotsplit.runtime.step.backend import plain_backend
from hotsplit.runtime.weights.resident import Residence
from hotsplit.solver import with_cache
from hotsplit.solver.solve import SolveConfig, solve
from hotsplit.solver.sweep import sweep
from hotsplit.solver.verify import verify

WORKSPACE = 100 << 10


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return save_solver_files(tmp_path_factory.mktemp("cache"))


def config(files, output, **changes) -> SolveConfig:
    values = solver_files(files) | {
        "vram_budget_bytes": WORKSPACE + (110 << 10),
        "mode": "exact",
        "output": output,
        "neuron_cache": CacheOptions(most_rows=3),
        "force": True,
    }
    return SolveConfig(**values | changes)


def solved(files, output, **changes):
    return solve(config(files, output, **changes), lambda *given: WORKSPACE)


# A neuron is 3 rows of 64 values in f16. Staging holds 3 swaps: each takes a neuron's rows, 6
# copies of 4 int64 and 3 numbers of 32 bits.
NEURON, STAGING = 3 * 128, 3 * (3 * 128 + 6 * 32 + 3 * 4)
WORDS = 3 * 3  # of 32 bits, for 96 neurons in each of 3 layers
SCORES_AND_SLOTS = 3 * 96 * (4 + 4 + 4 + 4)
CANDIDATES = 3 * 3 * 24


@pytest.mark.parametrize("mode", ["exact", "predicted"])
def test_the_bytes_of_both_memories_are_exact(files, tmp_path, mode):
    report = solved(files, tmp_path / "plan", mode=mode)
    split = Split.load(tmp_path / "plan")
    num_hot = [len(ids) for ids in split.hot if 0 < len(ids) < 96]
    assert num_hot
    packed = 4 * WORDS + 4 * 96 * len(num_hot) if mode == "exact" else 0
    assert split.gpu_bytes["neuron_cache"] == STAGING + packed == report.gpu_bytes["neuron_cache"]
    bits = 4 * WORDS * (2 + 32 + (3 if mode == "exact" else 2))
    copies = sum(num_hot) * (NEURON + 8)
    want = copies + STAGING + SCORES_AND_SLOTS + CANDIDATES + bits
    assert split.cpu_bytes["neuron_cache"] == want
    most = 4 * 96 * (3 - len(num_hot))  # kept free for the tables of layers that are not cached
    unused = split.vram_budget_bytes - sum(split.gpu_bytes.values())
    assert 0 <= unused < most + NEURON + 8
    note = next(line for line in report.notes if line.startswith("the neuron cache of"))
    assert f"of {len(num_hot)} layers" in note and "up to 3 swaps a token" in note
    plain = solved(files, tmp_path / "plain", mode=mode, neuron_cache=None)
    assert f"without it the plan is for {plain.tokens_per_s:,.1f} tokens/s" in note
    assert plain.objective_s <= report.objective_s and plain.gpu_bytes["neuron_cache"] == 0
    assert Split.load(tmp_path / "plain").cache is None


def test_a_plan_begins_with_the_profiles_frequencies(files, tmp_path):
    solved(files, tmp_path / "plan")
    cache, profile = Split.load(tmp_path / "plan").cache, Profile.load(files / "p")
    assert cache.most_rows == 3
    assert (cache.frequency_LF == profile.frequency_LF.astype(np.float32)).all()


def test_wrong_times_and_frequencies_are_rejected(files, tmp_path):
    solved(files, tmp_path / "plan")
    split, known = Split.load(tmp_path / "plan"), load_solver_files(files)
    verify(split, **known)
    times, frequency = split.cache.costs, split.cache.frequency
    waits = int(np.argmax(times.cold_row_s_L))
    assert times.cold_row_s_L[waits] > 0
    wrong = [
        {"costs": replace(times, rest_s=times.rest_s * 1.001)},
        {"costs": replace(times, cold_row_s_L=times.cold_row_s_L / 2)},
        {"costs": replace(times, cold_s_L=np.zeros_like(times.cold_s_L), hot_s_L=times.cold_s_L)},
        {"frequency": tuple(0.5 * row_F for row_F in frequency)},
        {"frequency": frequency[::-1]},
        {"frequency": tuple(np.zeros_like(row_F) for row_F in frequency)},
    ]
    for change in wrong:
        with pytest.raises(HotsplitError, match="the plan is wrong"):
            verify(replace(split, cache=replace(split.cache, **change)), **known)


def test_the_fastest_of_the_modes_with_a_cache(files, tmp_path):
    report = solved(files, tmp_path / "plan", mode=None)
    assert report.mode != "dense" and Split.load(tmp_path / "plan").cache is not None
    assert ("dense", "reads every neuron") in [(o.name, o.why_not) for o in report.alternatives]
    silu = make_model(sizes=make_sizes(num_layers=3), kind="f16", activation="silu")
    silu.save(tmp_path / "silu.gguf")
    make_profile(silu).save(tmp_path / "p")
    with pytest.raises(HotsplitError, match="no mode but dense costs at most"):
        solved(
            files,
            tmp_path / "none",
            model=tmp_path / "silu.gguf",
            profile=tmp_path / "p",
            mode=None,
        )
    assert not (tmp_path / "none").exists()


REFUSED = [
    ("-vb 200KiB --neuron-cache margin=0.5", 1, "margin=0.5: a plan stores only most_rows"),
    (
        "-vb 200KiB --neuron-cache most_rows=0",
        1,
        "most_rows is 0, wanted a whole number from 1 to 65536",
    ),
    ("-vb 200KiB --neuron-cache most_rows=x", 1, "most_rows is 'x', wanted a whole number"),
    ("-vb 200KiB --neuron-cache nan", 1, "'nan' in 'nan'; wanted on or NAME=VALUE"),
    ("-vb 200KiB --neuron-cache on --mode dense", 1, "reads every neuron; wanted exact or"),
    ("-vb 0 --neuron-cache on", 1, "its slots are in the GPU's memory"),
    ("-vb 200KiB -vb 200KiB --neuron-cache on", 1, "2 GPUs; it is planned for one"),
    ("--sweep 1MiB:2MiB --neuron-cache on", 2, "leave it out here"),
    ("--check --neuron-cache on", 2, "leave it out here"),
]


@pytest.mark.parametrize("options, code, words", REFUSED)
def test_requests_that_no_plan_meets_give_one_line(files, tmp_path, capsys, options, code, words):
    named = ["--profile", files / "p", "--machine", files / "c", "-o", tmp_path / "plan"]
    arguments = [str(part) for part in ("solve", files / "m.gguf", *named)]
    assert main([*arguments, *options.split(" ")]) == code
    *usage, line = capsys.readouterr().err.strip().splitlines()
    assert words in line and (code == 2 or not usage)
    assert not (tmp_path / "plan").exists()


def test_a_plan_in_which_no_layer_is_divided_is_refused(files, tmp_path):
    """With a round trip of a second everything is on the GPU."""
    make_machine(cpu_gb_per_s=0.005, gpu_gb_per_s=0.5, hand_over_s=1.0).save(tmp_path / "c")
    with pytest.raises(HotsplitError, match="divides no layer's neurons"):
        solved(files, tmp_path / "plan", vram_budget_bytes=1 << 30, machine=tmp_path / "c")
    assert not (tmp_path / "plan").exists()


def test_a_plan_is_explained_inspected_and_checked(files, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(workspace, "workspace_bytes", lambda *given: WORKSPACE)
    named = ["--profile", files / "p", "--machine", files / "c", "-o", tmp_path / "plan"]
    arguments = [str(part) for part in ("solve", files / "m.gguf", *named)]
    options = "-vb 210KiB --mode exact --neuron-cache most_rows=3 --explain --json"
    assert main([*arguments, *options.split(" ")]) == 0
    report = json.loads(capsys.readouterr().out)
    (items,) = report["explanation"]["items_of_gpus"]
    assert items["neuron_cache"] == report["gpu_bytes"]["neuron_cache"] > 0
    assert main(["inspect", str(tmp_path / "plan"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["cache"]
    cache = Split.load(tmp_path / "plan").cache
    assert found["most_rows"] == 3 and found["rest_s"] == cache.costs.rest_s
    assert found["cold_row_s_L"] == cache.costs.cold_row_s_L.tolist()
    assert np.allclose(found["read_L"], cache.frequency_LF.mean(axis=1))
    assert main([*arguments, "--check"]) == 0
    with pytest.raises(HotsplitError, match="a curve over budgets has no neuron cache"):
        sweep(
            config(files, tmp_path / "curve"),
            first=1,
            last=2,
            num_budgets=2,
            workspace=lambda *given: WORKSPACE,
        )


def test_advice_where_there_is_room(files, tmp_path, monkeypatch):
    words = "there is room for a neuron cache"

    def is_advised(**changes) -> bool:
        report = solved(files, tmp_path / "plan", neuron_cache=None, **changes)
        return any(line.startswith(words) for line in report.notes)

    assert not is_advised()  # staging for 256 neurons takes more bytes than all hot ones
    monkeypatch.setattr(with_cache, "SMALL_SHARE", 1e9)
    assert is_advised()
    held = sum(Split.load(tmp_path / "plan").cpu_bytes.values())
    assert not is_advised(host_budget_bytes=held + STAGING)
    assert not is_advised(vram_budget_bytes=1 << 30)  # everything fits
    assert not is_advised(vram_budget_bytes=0)
    assert not is_advised(mode="dense")


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_staging_is_what_the_runtime_allocates(kind):
    model = make_model(kind=kind)
    with Engine.of(model, mode="exact", device="cpu") as engine:
        blocks = [layer.ffn.blocks[0] for layer in engine.layers]
        table = RowTable.of([block.tensors for block in blocks])
        for most_rows in (1, 3, 256):
            num_parts = table.size_LM.shape[1]
            # By hand: 4 int64 per copy of a part or a number, the rows, and 3 numbers.
            want = most_rows * (8 * 4 * (num_parts + 3) + table.neuron_bytes + 4 * 3)
            assert bytes_in_staging(table.neuron_bytes, num_parts, most_rows) == want
            assert staging_bytes(model, most_rows) == want


def test_most_gpu_bytes_is_the_maximum_over_placements():
    model = make_model()
    for packs_bits in (False, True):
        size = CacheSize(most_rows=5, packs_bits=packs_bits)
        found = [size.gpu_bytes(model, hot) for hot in ([0, 96], [1, 96], [1, 95])]
        assert found == sorted(found) and found[-1] == size.most_gpu_bytes(model)
        assert (len(set(found)) == 3) == packs_bits


def counting(taken: list[int]):
    """A backend with the CPU in both roles; appends the bytes of each buffer of the GPU role."""

    def take_of(device):
        def take(shape, dtype):
            found = torch.zeros(shape, dtype=dtype)
            taken.append(found.nbytes)
            return found

        return take

    return replace(plain_backend(reference_kernels()), take=take_of)


@pytest.mark.parametrize("mode", ["exact", "predicted"])
@pytest.mark.parametrize("plan", ["random", "every kind of layer"])
def test_a_step_takes_the_gpu_bytes_that_are_planned(tmp_path, plan, mode):
    with_cache, without = [], []
    cached = Cached.of(tmp_path, plan, mode, counting(with_cache))
    placement = Placement.of_split(cached.split, (torch.device("cpu"),))
    weights = weights_of(cached.model, cached.split, mode, None)
    hybrid_builder.build(weights, placement, Traffic(), counting(without))
    size = CacheSize(most_rows=cached.cache.most_rows, packs_bits=mode == "exact")
    num_hot = [len(ids) for ids in cached.split.hot]
    assert sum(with_cache) - sum(without) == size.gpu_bytes(cached.model, num_hot)


@pytest.mark.parametrize("mode", ["exact", "predicted"])
def test_the_runtime_takes_the_main_memory_that_is_planned(tmp_path, mode):
    """Compares the bytes of the copied rows and of the policy's and the step's tables with the
    plan."""
    cached = Cached.of(tmp_path, "every kind of layer", mode)
    model, split, residency = cached.model, cached.split, cached.cache.residency
    held = []
    for resident_LN in (cached_ids(split.hot), None):
        residence = Residence()
        placement = Placement.of_split(split, (torch.device("cpu"),))
        load_weights(
            model, placement, mode, 32, notice=print, residence=residence, resident_LN=resident_LN
        )
        held.append(residence.num_bytes)
    policy = CachePolicy(
        cached_ids(split.hot),
        np.zeros((4, 96), np.float32),
        a_cache(4).costs,
        CacheOptions(most_rows=12),
    )
    step = cached.step.neuron_cache
    bits = [step._bits_LW, step._bits_1LW, *([step._of_gpu_LW] if mode == "exact" else [])]
    carrier = cached.cache.slots.carrier
    arrays = [array for array in policy._kept if isinstance(array, np.ndarray)]
    tables = [*arrays, residency.id, residency.slot_LF, *bits, carrier._host_B]
    size = CacheSize(most_rows=12, packs_bits=mode == "exact")
    want = size.host_bytes(model, [len(ids) for ids in split.hot], split.dense_on_gpu)
    assert held[0] - held[1] + sum(table.nbytes for table in tables) == want


def cached_ids(hot):
    """Each layer's neurons in slots: its hot ones if it also has cold ones, else none."""
    return [ids if 0 < len(ids) < 96 else ids[:0] for ids in hot]
