"""What a plan of a mixture says in words: which experts are on the GPU, why others are not, and what
more memory or a faster link would bring; in `solve`, `inspect` and `report`."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from models import take_workspace
from test_llamacpp_options import inputs_of
from test_solver_experts import save

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.profile_file import Profile
from hotsplit.artifacts.split_file import Split
from hotsplit.cli import main
from hotsplit.errors import HotsplitError
from hotsplit.solver.expert_notes import edges, placed_line, why_line
from hotsplit.solver.optimise import find_plan
from hotsplit.solver.problem import of_counts


def planned(share: float, **options):
    inputs = inputs_of(share, **options)
    pipeline = inputs.pipeline()
    answer = find_plan(pipeline, time_limit_s=5)
    assert answer is not None
    return inputs, pipeline, answer.placement


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_the_line_counts_what_is_there_and_says_that_the_budget_is_full(share):
    inputs, pipeline, placement = planned(share)
    line = placed_line(inputs, pipeline, placement)
    number = int(placement.num_hot_L.sum())
    assert 0 < number < 24 and f"{number} of 24 experts" in line
    assert "attention of 3 of 3 layers, the output head" in line
    ids, chosen = inputs.profile.routing_LTK, 0
    for layer, hot_F in enumerate(placement.hot_LF):
        chosen += np.isin(ids[layer], pipeline.model.order_LF[layer][hot_F]).sum()
    assert f"for {chosen / ids.size:.0%} of the choices in the profile" in line
    why = why_line(pipeline, placement, 5)
    assert why is not None
    assert re.search(r"the budget is full: the next (expert|\d experts .* pay,) would take", why)
    assert "5 B are left" in why
    for edge in edges(pipeline, placement).values():
        assert 0 <= edge.most_cold <= 1 and 0 <= edge.least_hot <= 1


def test_an_expert_that_would_not_pay_is_explained():
    """On this machine a GPU reads as slowly as the CPU, and an expert less on the CPU saves nothing."""
    inputs, pipeline, _ = planned(0.5, gpu_gb_per_s=1.0, cpu_gb_per_s=50.0)
    placement = of_counts(pipeline.model, np.array([4, 4, 4]), np.ones(3, bool), True)
    why = why_line(pipeline, placement, 1 << 20)
    assert why is not None and "would not make a token faster" in why


def test_where_everything_fits_there_is_nothing_to_explain():
    inputs, pipeline, placement = planned(1.0)
    assert placement.hot_LF.all() and why_line(pipeline, placement, 0) is None
    assert placed_line(inputs, pipeline, placement).endswith(
        "24 of 24 experts (8 of each layer's 8), for 100% of the choices in the profile"
    )
    none = of_counts(pipeline.model, np.zeros(3, int), np.ones(3, bool), True)
    assert placed_line(inputs, pipeline, none).endswith("all experts are on the CPU")


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A plan whose temporaries are those of the tests."""
    import hotsplit.report.speeds as speeds
    import hotsplit.runtime.step.workspace as workspace

    monkeypatch.setattr(workspace, "workspace_bytes", take_workspace)
    monkeypatch.setattr(speeds, "workspace_bytes", take_workspace)
    inputs = inputs_of(0.5)
    save(tmp_path, inputs.model, inputs.profile, inputs.machine)
    budget = str(inputs.budgets[0])
    words = ["solve", tmp_path / "m.gguf", "--profile", tmp_path / "p", "--machine", tmp_path / "c",
             "-vb", f"{budget}B", "-o", tmp_path / "s.gguf"]  # fmt: skip
    return tmp_path, [str(word) for word in words]


def test_solve_and_inspect_say_experts_and_what_more_would_bring(files, capsys, monkeypatch):
    folder, words = files
    picture = str(folder / "map.png")
    assert main([*words, "--explain", "--heat-map", picture]) == 0
    shown = capsys.readouterr().err
    split = Split.load(folder / "s.gguf")
    assert split.num_experts == 8 and split.units == "experts"
    assert "note: on the GPU: attention of 3 of 3 layers" in shown and "experts" in shown
    assert re.search(r"2.00 GiB more of GPU memory: [\d,.]+ tokens/s \(\+", shown)
    assert "hand-overs between GPU and CPU in half the time:" in shown
    assert "neurons" not in shown.replace("matrices of neurons", "")
    layer = 1
    ids = Profile.load(folder / "p").routing_LTK[layer]
    share = np.isin(ids, split.hot[layer]).mean()
    (line,) = [each for each in shown.splitlines() if re.match(rf"\s+{layer}\s+0 ", each)]
    assert f"{len(split.hot[layer])} of 8" in line and f"{share:.1%}" in line
    assert main(["inspect", str(folder / "s.gguf")]) == 0
    shown = capsys.readouterr().out
    assert "experts on GPUs" in shown and "hot neurons" not in shown
    assert main(["inspect", str(folder / "s.gguf"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_hot_L"] == [len(ids) for ids in split.hot]


def test_a_report_has_the_plan_of_experts(files, capsys):
    folder, words = files
    assert main(words) == 0
    page = folder / "r.html"
    given = [
        "--profile",
        folder / "p",
        "--machine",
        folder / "c",
        "--split",
        folder / "s.gguf",
        "-o",
        page,
    ]
    assert main(["report", str(folder / "m.gguf"), *map(str, given)]) == 0
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
