"""What a plan of a mixture says in words: which experts are on the GPU, why others are not, and
what more memory or a faster link would bring; in `solve`, `inspect` and `report`."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from models import take_workspace
from test_llamacpp_options import inputs_of
from test_solver_experts import save
from test_solver_files import check_layers

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.profile_file import Profile
from hotsplit.artifacts.split_file import Split
from hotsplit.cli import main
from hotsplit.errors import HotsplitError
from hotsplit.solver import expert_notes, multi_gpu
from hotsplit.solver.expert_notes import edges, more_line, placed_line, why_line
from hotsplit.solver.optimise import find_plan
from hotsplit.solver.problem import of_counts
from hotsplit.system.sizes import parse_bytes


def planned(share: float, *, inputs=None, **options):
    inputs = inputs_of(share, **options) if inputs is None else inputs
    pipeline = inputs.pipeline()
    answer = find_plan(pipeline, time_limit_s=5)
    assert answer is not None
    return inputs, pipeline, answer


def with_one_home(*placement):
    return multi_gpu.with_one_home(of_counts(*placement))


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_the_line_counts_what_is_there_and_says_that_the_budget_is_full(share):
    inputs, pipeline, answer = planned(share)
    placement = answer.placement
    line = placed_line(inputs, answer.plan, pipeline.model)
    number = int(placement.num_hot_L.sum())
    assert 0 < number < 24 and f"{number} of 24 experts" in line
    assert "attention and router of all 3 layers, the output head" in line
    ids, chosen = inputs.profile.routing_LTK, 0
    for layer, hot_F in enumerate(placement.hot_LF):
        chosen += np.isin(ids[layer], pipeline.model.order_LF[layer][hot_F]).sum()
    assert f"{chosen / ids.size:.0%} of the experts that a token's routers choose are there" in line
    why = why_line(pipeline, answer.plan, [5], answer.objective_s)
    assert why is not None and why.startswith(f"{24 - number} experts are on the CPU because the")
    assert re.search(
        r"budget is full: 5 B are left, and (the next expert takes|\d experts .* take) ", why
    )
    assert "% faster" in why
    assert "no faster plan was found: 1.00 GiB are left" in why_line(
        pipeline, answer.plan, [1 << 30], answer.objective_s
    )
    for edge in edges(pipeline, placement).values():
        assert 0 <= edge.most_cold <= 1 and 0 <= edge.least_hot <= 1


def test_more_memory_brings_what_its_own_plan_says(monkeypatch):
    inputs, pipeline, answer = planned(0.25)
    monkeypatch.setattr(expert_notes, "MORE_BYTES", 60_000)
    more = replace(inputs, budgets=(inputs.budgets[0] + 60_000,))
    _, _, larger = planned(0.25, inputs=more)
    number = larger.placement.num_hot_L.sum()
    assert more_line(pipeline, answer, time_limit_s=5) == (
        f"58.59 KiB more of GPU memory would bring {1 / larger.objective_s:,.1f} tokens/s instead"
        f" of {1 / answer.objective_s:,.1f} ({answer.objective_s / larger.objective_s - 1:+.1%}),"
        f" with {number} of 24 experts on the GPU"
    )
    monkeypatch.setattr(expert_notes, "MORE_BYTES", 1)
    assert "less than 1% faster" in more_line(pipeline, answer, time_limit_s=5)


def test_of_several_gpus_the_full_ones_are_named():
    """Each has consecutive layers; the second has room left."""
    inputs = inputs_of(0.5)
    inputs = replace(
        inputs,
        budgets=(1 << 20, 1 << 20),
        machine=replace(inputs.machine, gpus=inputs.machine.gpus * 2),
    )
    pipeline = inputs.pipeline()
    placement = of_counts(pipeline.model, np.array([4, 8, 8]), np.ones(3, bool), True)
    plan = multi_gpu.PipelinePlacement(placement=placement, home_I=np.array([0, 1, 1, 1]))
    seconds = multi_gpu.plan_seconds(pipeline, plan)
    why = why_line(pipeline, plan, [5, 1 << 20], seconds)
    assert why.startswith(
        "4 experts are on the CPU because GPU 0, which has their layers, is full: 5 B are left"
    )
    placement = of_counts(pipeline.model, np.array([4, 8, 4]), np.ones(3, bool), True)
    why = why_line(pipeline, replace(plan, placement=placement), [5, 6], seconds)
    assert "GPU 0 and GPU 1, which have their layers, are full: 5 B and 6 B are left" in why


def test_layers_without_experts_are_named():
    inputs, pipeline, answer = planned(1.0, num_dense=2)
    line = placed_line(inputs, answer.plan, pipeline.model)
    assert "of all 3 layers, the neurons of all 2 layers without experts, the output head" in line
    cold = with_one_home(pipeline.model, np.array([0, 8, 8]), np.ones(3, bool), True)
    line = placed_line(inputs, cold, pipeline.model)
    assert "the neurons of 1 of 2 layers without experts, the output head, all 8 experts" in line
    assert line.endswith("; the CPU has the neurons of 1 of 2 layers without experts")


def test_an_expert_that_would_not_pay_is_explained():
    """On this machine a GPU reads as slowly as the CPU, and an expert less on the CPU saves
    nothing."""
    _, pipeline, answer = planned(0.5, gpu_gb_per_s=1.0, cpu_gb_per_s=50.0)
    plan = with_one_home(pipeline.model, np.array([4, 4, 4]), np.ones(3, bool), True)
    why = why_line(pipeline, plan, [1 << 20], answer.objective_s)
    assert why is not None and "would not make a token faster" in why


def test_where_everything_fits_there_is_nothing_to_explain():
    inputs, pipeline, answer = planned(1.0)
    assert answer.placement.hot_LF.all()
    assert why_line(pipeline, answer.plan, [0], answer.objective_s) is None
    assert more_line(pipeline, answer, time_limit_s=5) is None
    line = placed_line(inputs, answer.plan, pipeline.model)
    assert line.endswith("the output head, all 24 experts")
    none = with_one_home(pipeline.model, np.zeros(3, int), np.ones(3, bool), True)
    assert placed_line(inputs, none, pipeline.model).endswith("all experts are on the CPU")


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A plan whose temporaries are those of the tests."""
    import hotsplit.report.speeds as speeds
    import hotsplit.runtime.step.workspace as workspace

    monkeypatch.setattr(workspace, "workspace_bytes", take_workspace)
    monkeypatch.setattr(speeds, "workspace_bytes", take_workspace)
    inputs = inputs_of(0.5)
    save(tmp_path, inputs.model, inputs.profile, inputs.machine)
    files = f"{tmp_path}/m.gguf --profile {tmp_path}/p --machine {tmp_path}/c"
    line = f"solve {files} -vb {inputs.budgets[0]}B -o {tmp_path}/s.gguf"
    return tmp_path, line.split()


def test_solve_and_inspect_say_experts_and_what_more_would_bring(files, capsys, monkeypatch):
    folder, words = files
    picture = str(folder / "map.png")
    assert main([*words, "--explain", "--heat-map", picture]) == 0
    shown = capsys.readouterr().err
    split = Split.load(folder / "s.gguf")
    assert split.num_experts == 8 and split.units == "experts"
    assert "note: on the GPU: attention and router of all 3 layers" in shown and "experts" in shown
    (size,) = re.findall(
        r"note: (.*) more of GPU memory would bring [\d,.]+ tokens/s instead", shown
    )
    (whole,) = re.findall(r"everything fits from (.*) on", shown)
    assert parse_bytes(size) == pytest.approx(parse_bytes(whole) - split.budgets[0], rel=0.01)
    assert "With hand-overs between GPU and CPU in half the time, a plan would reach" in shown
    assert "neurons" not in shown.replace("matrices of neurons", "")
    check_layers(shown, split, 8)
    routing_LTK = Profile.load(folder / "p").routing_LTK
    shares = [np.isin(*of_layer).mean() for of_layer in zip(routing_LTK, split.hot, strict=True)]
    divided = [share for share, ids in zip(shares, split.hot, strict=True) if 0 < len(ids) < 8]
    assert len(divided) == 2 and f"from which {np.mean(divided):.0%} of the choices come" in shown
    capsys.readouterr()
    assert main(["inspect", str(folder / "s.gguf"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_hot_L"] == [len(ids) for ids in split.hot]


def test_a_report_has_the_plan_of_experts(files, capsys):
    folder, words = files
    assert main(words) == 0
    page = folder / "r.html"
    files = f"--profile {folder}/p --machine {folder}/c --split {folder}/s.gguf"
    assert main(f"report {folder}/m.gguf {files} -o {page}".split()) == 0
    text = page.read_text()
    assert "The experts that GPUs hold" in text and "experts on the GPU" in text
    assert "of its choices" in text and "neurons on the GPU" not in text


def test_a_plan_of_another_number_of_experts_is_refused(files, capsys):
    folder, words = files
    assert main(words) == 0
    model = ModelFile.load(folder / "m.gguf")
    split = replace(Split.load(folder / "s.gguf"), num_experts=9)
    with pytest.raises(HotsplitError, match="places 9 experts of a layer, .* has 8"):
        split.check_against(model, folder / "s.gguf")
