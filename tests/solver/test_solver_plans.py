"""What `solve` writes for one GPU and for two, what `verify` rejects, and what is refused."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from brute_force import HIGHS, SLOW, whole_plan
from models import (
    WORKSPACE,
    load_solver_files,
    make_machine,
    make_model,
    make_profile,
    make_sizes,
    save_solver_files,
    solver_files,
    take_workspace,
)

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.split_file import Split
from hotsplit.costs import part_bytes
from hotsplit.errors import HotsplitError
from hotsplit.solver.solve import SolveConfig, check, solve
from hotsplit.solver.verify import verify

NUM_NEURONS = 40  # per layer
CONTEXT = 32  # the model's


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with predictors, and a machine of two GPUs whose CPU is slow enough that every block
    is worth its place, even with a layer's round trip."""
    shape = make_sizes(num_layers=3, num_neurons=NUM_NEURONS)
    model = make_model(sizes=shape, kind="f16", predictor_rank=8, predictor_density=0.3)
    machine = make_machine(**SLOW, num_gpus=2)
    return save_solver_files(tmp_path_factory.mktemp("solver"), model, c=machine)


def config_of(folder: Path, output: Path, *budgets: int, **changes) -> SolveConfig:
    values = solver_files(folder) | {"output": output, "vram_budget_bytes": budgets}
    return SolveConfig(**values | changes)


def room(folder: Path, share: float) -> int:
    """A budget for the workspace and a share of everything else."""
    whole = whole_plan(ModelFile.load(folder / "m.gguf"), CONTEXT)
    return WORKSPACE + int(share * sum(whole.values()))


def planned(folder: Path, path: Path, *shares: float) -> Split:
    solve(config_of(folder, path, *(room(folder, share) for share in shares)), take_workspace)
    return Split.load(path)


def test_every_budget_from_nothing_to_everything(folder, tmp_path):
    model = ModelFile.load(folder / "m.gguf")
    most = sum(whole_plan(model, CONTEXT, workspace=WORKSPACE).values())
    limits = [0, *np.linspace(WORKSPACE + 40_000, most, 12).astype(int).tolist(), 2 * most]
    before = np.inf
    for number, limit in enumerate(limits):
        output = tmp_path / f"{number}.split.gguf"
        report = solve(config_of(folder, output, limit, mode="predicted"), take_workspace)
        split = Split.load(output)
        split.check_against(model, output)
        (gpu,), cpu = part_bytes.plan_bytes(
            model,
            context_length=CONTEXT,
            num_hot=[len(ids) for ids in split.hot],
            dense_on_gpu=split.dense_on_gpu,
            head_on_gpu=split.head_on_gpu,
            workspace=WORKSPACE,
        )
        assert (gpu, cpu) == (split.gpu_bytes, split.cpu_bytes)
        assert (gpu, cpu) == (report.gpu_bytes, report.cpu_bytes)
        assert sum(gpu.values()) <= limit
        assert split.bound_s <= split.objective_s <= before * (1 + HIGHS)
        before = split.objective_s
        assert report.objective_s == split.objective_s
        assert report.num_hot == sum(map(len, split.hot))
        assert report.fits_entirely == (limit >= most)
        assert json.loads(json.dumps(asdict(report)))["output"] == str(output)
    assert report.hot_traffic_share == pytest.approx(1)
    assert any("fits entirely" in note for note in report.notes)
    assert report.num_hot == report.num_neurons and all(split.dense_on_gpu) and split.head_on_gpu
    nothing = Split.load(tmp_path / "0.split.gguf")
    assert nothing.status == "cpu_only" and nothing.gap < 1e-9
    assert not nothing.head_on_gpu and not any(nothing.dense_on_gpu)
    assert sum(nothing.gpu_bytes.values()) == 0


def test_plan_is_deterministic_and_hottest_first(folder, tmp_path):
    first, again = (planned(folder, tmp_path / name, 0.75) for name in "ab")
    counts_LF = make_profile(ModelFile.load(folder / "m.gguf")).active_count_LF
    assert any(0 < len(ids) < NUM_NEURONS for ids in first.hot)
    for ids, same, count_F in zip(first.hot, again.hot, counts_LF, strict=True):
        np.testing.assert_array_equal(ids, same)
        assert ids.tolist() == sorted(ids.tolist(), key=lambda j: (-count_F[j], j))


def test_a_plan_for_two_gpus_is_written_and_checked(folder, tmp_path):
    limits = room(folder, 0.4), room(folder, 0.3)
    report = solve(config_of(folder, tmp_path / "plan", *limits), take_workspace)
    split = check(config_of(folder, tmp_path / "plan", *limits))
    assert split == replace(split, home=tuple(sorted(split.home))) and set(split.home) == {0, 1}
    used = [sum(items.values()) for items in report.bytes_of_gpus]
    assert all(0.9 * limit < n <= limit for n, limit in zip(used, limits, strict=True))
    assert report.gap < 1e-3 and report.advice.cpu_only_s > report.objective_s


def corruptions(split: Split):
    """(what is wrong, the wrong plan) for each."""
    layer = next(i for i, ids in enumerate(split.hot) if 1 < len(ids) < NUM_NEURONS)
    ids = split.hot[layer]

    def with_ids(new):
        return replace(split, hot=(*split.hot[:layer], new, *split.hot[layer + 1 :]))

    coldest = np.setdiff1d(np.arange(NUM_NEURONS, dtype=np.int32), ids)[-1:]
    unknown = np.array([NUM_NEURONS], np.int32)
    fewer = split.gpu_bytes | {"neurons": split.gpu_bytes["neurons"] - 1}
    yield "another neuron", with_ids(np.concatenate([coldest, ids[1:]]))
    yield "one neuron fewer", with_ids(ids[:-1])
    yield "order", with_ids(ids[::-1].copy())
    yield "an unknown neuron", with_ids(np.concatenate([ids[:-1], unknown]))
    yield "bytes", replace(split, gpu_bytes=fewer)
    yield "cpu bytes", replace(split, cpu_bytes=split.cpu_bytes | {"head": 1})
    half = {"objective_s": split.objective_s / 2, "bound_s": split.bound_s / 2}
    yield "half the time", replace(split, **half)
    yield "a millionth more time", replace(split, objective_s=split.objective_s * (1 + 1e-6))
    yield "bound", replace(split, bound_s=split.objective_s * 1.01)
    yield "budget", replace(split, vram_budget_bytes=sum(split.gpu_bytes.values()) - 1)
    yield "dense block", replace(split, dense_on_gpu=tuple(not d for d in split.dense_on_gpu))
    yield "head", replace(split, head_on_gpu=not split.head_on_gpu)
    yield "mode", replace(split, mode="exact")
    yield "context", replace(split, context_length=split.context_length - 1)
    yield "model", replace(split, model_id="0" * 64)


def corruptions_of_two(split: Split):
    first, second = split.gpu_budget_bytes
    yield "falling homes", replace(split, home=split.home[::-1])
    yield "one GPU for all", replace(split, home=(0,) * len(split.home))
    yield "too few homes", replace(split, home=split.home[1:])
    yield "a third GPU", replace(split, home=(*split.home[:-1], 2))
    yield "budgets exchanged", replace(split, gpu_budget_bytes=(second, first))
    yield "budgets that do not add up", replace(split, gpu_budget_bytes=(first, second + 1))
    host = sum(split.cpu_bytes.values()) - 1
    yield "main memory", replace(split, host_budget_bytes=host)
    yield "workspace", replace(split, cpu_bytes=split.cpu_bytes | {"workspace": 1})


@pytest.mark.parametrize(
    "shares, wrong_plans", [((0.75,), corruptions), ((0.4, 0.3), corruptions_of_two)]
)
def test_verify_refuses_every_wrong_plan(folder, tmp_path, shares, wrong_plans):
    split, files = planned(folder, tmp_path / "plan", *shares), load_solver_files(folder)
    verify(split, **files)
    for what, wrong in wrong_plans(split):
        with pytest.raises(HotsplitError):
            verify(wrong, **files)
            pytest.fail(f"accepted a plan with a mistake: {what}")
    slower = make_machine(cpu_gb_per_s=0.006, gpu_gb_per_s=0.5, num_gpus=2)
    with pytest.raises(HotsplitError, match="s a token"):
        verify(split, **(files | {"machine": slower}))
    if len(shares) == 1:
        slow_launch = make_machine(**SLOW, hand_over_s=10.0)
        with pytest.raises(HotsplitError, match="hot neurons, which save"):
            verify(split, **(files | {"machine": slow_launch}))


def test_changed_files_invalidate_a_plan(tmp_path):
    model = make_model(sizes=make_sizes(num_layers=3), kind="f16", predictor_rank=8)
    save_solver_files(tmp_path, model, c=make_machine(**SLOW))
    config = config_of(tmp_path, tmp_path / "plan", room(tmp_path, 0.5))
    solve(config, take_workspace)
    check(config)
    changes = {
        "p": (make_profile(model, np.full((3, 96), 0.25)), "another profile"),
        "c": (make_machine(cpu_gb_per_s=1.0), "another machine file"),
        "m.gguf": (make_model(sizes=make_sizes(num_layers=3), seed=5), "made for model"),
    }
    for name, (other, words) in changes.items():
        before = (tmp_path / name).read_bytes()
        other.save(tmp_path / name)
        with pytest.raises(HotsplitError, match=words):
            check(config)
        (tmp_path / name).write_bytes(before)
    check(config)


def refusals(folder: Path, tmp_path: Path):
    """(changes to a good request, words of the refusal) for each."""
    model = ModelFile.load(folder / "m.gguf")
    other = make_model(spec=model.bare_spec, seed=1)
    make_profile(other).save(tmp_path / "other.safetensors")
    smaller = replace(make_profile(make_model(sizes=make_sizes())), model_id=model.model_id)
    smaller.save(tmp_path / "smaller.safetensors")
    make_machine(num_gpus=0).save(tmp_path / "no-gpu.json")
    other.save(tmp_path / "no-predictors.gguf")
    bare = {"model": tmp_path / "no-predictors.gguf", "profile": tmp_path / "other.safetensors"}
    yield {"profile": tmp_path / "other.safetensors"}, "made from model"
    yield {"profile": tmp_path / "smaller.safetensors"}, "layers and neurons"
    yield {"machine": tmp_path / "no-gpu.json"}, "--gpu-from FILE"
    yield bare | {"mode": "predicted"}, "no predictors"


def test_refusals_leave_no_file(folder, tmp_path):
    output = tmp_path / "out" / "plan.split.gguf"
    for changes, words in refusals(folder, tmp_path):
        with pytest.raises(HotsplitError, match=words):
            solve(config_of(folder, output, room(folder, 0.75), **changes), take_workspace)
        assert not output.parent.exists()
    output.parent.mkdir()
    output.write_text("mine")
    with pytest.raises(HotsplitError, match="exists already"):
        solve(config_of(folder, output, 0), take_workspace)
    assert output.read_text() == "mine"
    solve(config_of(folder, output, 0, force=True), take_workspace)
    assert [path.name for path in output.parent.glob("*")] == [output.name]


@pytest.mark.parametrize(
    "changes",
    [
        {"vram_budget_bytes": -1},
        {"mode": "sparse"},
        {"time_limit_s": 0.0},
        {"output": Path("m.gguf")},
    ],
)
def test_config_is_checked(changes):
    good = solver_files(Path()) | {"output": Path("o"), "vram_budget_bytes": 0}
    SolveConfig(**good)
    with pytest.raises(HotsplitError):
        SolveConfig(**(good | changes))


def test_notes_say_what_the_figures_leave_open(tmp_path):
    model = make_model(predictor_rank=8)
    save_solver_files(tmp_path, model, c=make_machine(num_gpus=2, memory_bytes=1 << 20))
    replace(make_profile(model), threshold_L=(0.5, 0.5)).save(tmp_path / "p")
    report = solve(config_of(tmp_path, tmp_path / "plan", 1 << 30), take_workspace)
    for words in ("2 GPUs", "not measured here", "above the", "unknown", "other activation"):
        assert any(words in note for note in report.notes), words
    assert report.mode == "predicted"
    save_solver_files(tmp_path, model, c=make_machine(**SLOW))
    exact = {"mode": "exact", "force": True}
    report = solve(config_of(tmp_path, tmp_path / "plan", 0, **exact), take_workspace)
    words = ("not measured here", "helps on this machine (by 1 % or more); everything fits from")
    assert report.mode == "exact" and len(report.notes) == len(words)
    assert all(word in note for word, note in zip(words, report.notes, strict=True))


def test_without_a_gpu_there_is_a_plan_for_the_cpu(folder, tmp_path):
    make_machine(num_gpus=0).save(tmp_path / "c")
    machine = {"machine": tmp_path / "c", "force": True}
    report = solve(config_of(folder, tmp_path / "plan", 0, **machine), take_workspace)
    assert report.status == "cpu_only" and not sum(report.gpu_bytes.values())
    check(config_of(folder, tmp_path / "plan", 0, **machine))
    for budgets, words in (((room(folder, 0.5),), "no GPU"), ((0, 0), "for 2 budgets")):
        with pytest.raises(HotsplitError, match=words):
            solve(config_of(folder, tmp_path / "plan", *budgets, **machine), take_workspace)
