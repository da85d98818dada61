"""`hotsplit report`: one page about a model's files that needs no network, fits a phone, says what
is missing, and shows what the files hold."""

import contextlib
import dataclasses
import io
import json
import os
import re
import shutil
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib.colors import to_hex
from models import byte_level_keys, make_machine, make_model, make_profile, make_sizes

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.profile_file import Profile
from hotsplit.artifacts.split_file import Split
from hotsplit.cli import main
from hotsplit.errors import HotsplitError
from hotsplit.measure.evaluate.quality import load_eval
from hotsplit.profile.report import load_predictor_report
from hotsplit.report import svg
from hotsplit.report.artifacts import Artifacts, load_artifacts
from hotsplit.report.make_report import report
from hotsplit.report.plots import firing_curves, plot_map
from hotsplit.report.report_config import MAX_BYTES, ReportConfig
from hotsplit.report.speeds import Speeds, speeds_of
from hotsplit.solver.explain import device_of_ranks
from hotsplit.solver.solve import SolveConfig, solve
from hotsplit.solver.verify import plan_seconds

pytest_plugins = ("page_fixtures",)

HOSTILE = "<script>alert(1)</script>"
SLOW = {"launch_s": 1e-9, "hand_over_s": 1e-9, "copy_latency_s": 1e-9, "cpu_gb_per_s": 0.01}
SECTIONS = ("speed", "placement", "bytes", "firings", "predictors", "quality", "machine")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The artifacts of a pipeline: model, profile with predictors, machine, two plans."""
    here = tmp_path_factory.mktemp("report")
    keys, vocab_size = byte_level_keys()
    keys |= {"general.name": f"tiny {HOSTILE} & co"}
    shape = make_sizes(vocab_size=vocab_size, context_length=64)
    model = make_model(sizes=shape, extra_keys=keys)
    dataclasses.replace(model, path=here / "base.gguf").save(here / "base.gguf")
    words = np.random.default_rng(0).choice(["the ", "fox ", "jumps ", "over\n", "dogs "], 3000)
    (here / "t.txt").write_text("".join(words))
    machine = make_machine(**SLOW)
    gpu = dataclasses.replace(
        machine.gpus[0], name="<b>GPU</b>", memory_bytes=4 << 20, free_bytes=4 << 20
    )
    dataclasses.replace(machine, gpus=(gpu,), cpu_name=f'"{HOSTILE}').save(here / "machine.json")
    run(
        f"profile {here}/base.gguf --corpus {here}/t.txt -o {here}/p.safetensors --tokens 1500"
        f" --train-predictors {here}/pred --predictor-rank 8"
    )
    run(f"convert {here}/base.gguf -o {here}/model.gguf --predictors {here}/pred --no-verify")
    for name, budget in (("plan", 2500 << 10), ("other", 2400 << 10)):
        solve(
            SolveConfig(
                model=here / "model.gguf",
                profile=here / "p.safetensors",
                machine=here / "machine.json",
                vram_budget_bytes=budget,
                mode="exact",
                context_length=32,
                output=here / f"{name}.gguf",
            ),
            lambda *given: 2300 << 10,
        )
    return here


def run(line: str) -> None:
    assert main(line.split()) == 0


@pytest.fixture(scope="module")
def compared(folder):
    """The JSON that eval prints, in a file."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        run(f"eval {folder}/model.gguf --corpus {folder}/t.txt --tokens 700 --mode exact --json")
    (folder / "eval.json").write_text(said.getvalue())
    return folder / "eval.json"


def config_of(folder, output, **changes) -> ReportConfig:
    config = ReportConfig(
        model=folder / "model.gguf",
        profile=folder / "p.safetensors",
        split=folder / "plan.gguf",
        machine=folder / "machine.json",
        predictors=folder / "pred",
        evals=(folder / "eval.json",),
        output=output,
    )
    return dataclasses.replace(config, **changes)


def test_a_file_name_that_is_not_utf8_is_shown_escaped(folder, tmp_path):
    odd = tmp_path / os.fsdecode(b"odd \xff.gguf")
    shutil.copy(folder / "base.gguf", odd)
    output = tmp_path / "page.html"
    report(ReportConfig(model=odd, output=output))
    assert "odd \\udcff.gguf" in output.read_bytes().decode()


@pytest.fixture(scope="module")
def page(folder, compared):
    summary = report(config_of(folder, folder / "report.html"))
    assert summary.sections == SECTIONS and not summary.missing and summary.num_plots == 7
    assert summary.num_bytes == (folder / "report.html").stat().st_size < MAX_BYTES
    return folder / "report.html"


class Seen(HTMLParser):
    """The elements, ids, addresses and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.ids, self.addresses, self.words = list[str](), list[str](), [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            self.ids += [value] * (name == "id")
            self.addresses += [value] * (name in ("src", "href", "xlink:href", "action", "data"))

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def test_hostile_names_are_shown_as_text(page):
    text = page.read_text()
    seen = Seen(text)
    assert "script" not in seen.tags and "b" not in seen.tags
    assert f"tiny {HOSTILE} & co" in seen.text  # the model's name
    assert "<b>GPU</b>" in seen.text and f'"{HOSTILE}' in seen.text
    assert len(set(seen.ids)) == len(seen.ids)
    local = [a for a in seen.addresses if not a.startswith("#")]
    assert local == ["data:,"], "something would be fetched"
    assert not re.search(r"@import|url\((?!#)", text)


def test_the_numbers_are_those_of_the_files(folder, page):
    text = Seen(page.read_text()).text
    split, found = Split.load(folder / "plan.gguf"), load_eval(folder / "eval.json")
    profile = Profile.load(folder / "p.safetensors")
    assert f"{found.perplexity_increase:+.2%}" in text
    assert f"{1 / split.objective_s:,.0f} tokens a second predicted" in text
    assert f"{profile.density_L.mean():.1%} fire for a token" in text
    model_id = profile.model_id
    quality_L = load_predictor_report(folder / "p.report.json", model_id)
    raw = json.loads((folder / "p.report.json").read_text())["quality_L"]
    assert [dataclasses.asdict(q.chosen) for q in quality_L] == [q["chosen"] for q in raw]
    assert f"recall is {np.mean([q.chosen.recall for q in quality_L]):.1%}" in text


def with_the_solvers_speeds(folder, tmp_path, **options) -> tuple[Artifacts, Speeds]:
    """Makes a plan; returns the files of its page and the speeds on it, which must be those that
    the solver returned."""
    config = config_of(folder, tmp_path / "r.html", evals=(), split=tmp_path / "plan.gguf")
    solved = solve(
        SolveConfig(
            model=config.model,
            profile=config.profile,
            machine=config.machine,
            mode="exact",
            vram_budget_bytes=2500 << 10,
            output=config.split,
            **options,
        ),
        lambda *given: 2300 << 10,
    )
    found = load_artifacts(config)
    speeds = speeds_of(config, found)
    for name in ("cpu_only_s", "layer_split_s", "limit_s", "fits_from_bytes"):
        assert getattr(speeds.advice, name) == pytest.approx(getattr(solved.advice, name))
    return found, speeds


def test_the_speeds_beside_the_plan_are_those_of_the_solver(folder, tmp_path):
    """The report computes from the plan's file the speeds that the solver returned."""
    found, speeds = with_the_solvers_speeds(folder, tmp_path, context_length=32)
    points = speeds.curve.points
    seconds = [point.objective_s for point in points]
    assert points[0].budget_bytes == 0 and points[-1].budget_bytes <= 4 << 20
    assert seconds[0] == pytest.approx(speeds.curve.cpu_only_s) and seconds[-1] < 0.1 * seconds[0]
    assert all(b <= a * (1 + 1e-9) for a, b in zip(seconds, seconds[1:], strict=False))
    split = found.split
    near = [p.objective_s for p in points if p.budget_bytes >= split.vram_budget_bytes]
    assert near[0] <= split.objective_s * 1.01
    assert split.objective_s == pytest.approx(
        plan_seconds(split, model=found.model, profile=found.profile, machine=found.machine)
    )


def test_the_firing_curves_match_the_counts(folder):
    profile = Profile.load(folder / "p.safetensors")
    for row_N, count_F in zip(firing_curves(profile), profile.active_count_LF, strict=True):
        assert row_N[0] == 0.0 and row_N[-1] == pytest.approx(1.0)
        first = np.sort(count_F)[::-1][: len(count_F) // 2]
        assert row_N[50] == pytest.approx(first.sum() / count_F.sum())


def test_the_speeds_of_a_plan_with_keys_in_main_memory(folder, tmp_path):
    offload = {"context_length": 64, "kv_offload": "block=16,sinks=0,window=16,top=16"}
    found, _ = with_the_solvers_speeds(folder, tmp_path, **offload)
    drawn = plot_map(found.split, found.profile)
    assert "in main memory" in drawn.caption


def test_the_map_shows_the_plan(folder):
    """The area in each device's colour is that of the columns that the plan gives it."""
    split, profile = Split.load(folder / "plan.gguf"), Profile.load(folder / "p.safetensors")
    drawn = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hotsplit.report.svg.plot_of", lambda name, figure, **k: drawn.append(figure))
        plot_map(split, profile)
    device_LR = device_of_ranks(split, profile)
    patches = drawn[0].axes[1].patches
    cpu, gpu = map(to_hex, (svg.CPU, svg.GPUS[0]))
    area = {cpu: 0.0, gpu: 0.0}
    for outline in patches:
        boxes = outline.get_path().vertices.reshape(-1, 5, 2)
        area[to_hex(outline.get_facecolor())] += np.ptp(boxes[:, :, 0], axis=1).sum()
    for device, colour in ((0, cpu), (1, gpu)):
        wanted = 100 * (device_LR == device).mean(axis=1).sum()
        assert area[colour] == pytest.approx(wanted) and 0 < wanted < 200


def test_the_same_files_give_the_same_bytes_and_another_plan_other_plots(folder, page, tmp_path):
    report(config_of(folder, tmp_path / "again.html"))
    assert (tmp_path / "again.html").read_bytes() == page.read_bytes()
    other = report(config_of(folder, tmp_path / "other.html", split=folder / "other.gguf"))
    assert other.num_plots == 7
    ours, theirs = page.read_text(), (tmp_path / "other.html").read_text()
    for name in ("bytes", "curve", "map"):
        mark = f'aria-labelledby="{name}-alt"'
        assert ours[ours.index(mark) :][:20_000] != theirs[theirs.index(mark) :][:20_000], name


def test_a_missing_file_is_named_with_the_command_that_makes_it(folder, tmp_path, capsys):
    line = f"report {folder}/model.gguf -o {tmp_path}/r.html"
    run(f"{line} --json")
    found = json.loads(capsys.readouterr().out)
    assert found["missing"] == ["speed", "placement", "bytes", "firings", "machine"]
    assert found["num_plots"] == 1  # the model's own record of quality
    text = Seen((tmp_path / "r.html").read_text()).text
    for command in (
        "profile model.gguf --corpus",
        "solve model.gguf --profile",
        "calibrate -o",
        "eval model.gguf --corpus",
    ):
        assert f"hotsplit {command}" in text, command
    run(f"{line} --force")
    said = capsys.readouterr().err
    assert "machine (give --profile, --machine, --split; the page says which command" in said
    run(f"{line} --force --profile {folder}/p.safetensors")
    assert "(give --machine, --split; the page" in capsys.readouterr().err
    assert main(line.split()) == 1
    assert "exists already" in capsys.readouterr().err
    run(f"{line} --force --profile {folder}/p.safetensors --machine {folder}/machine.json")
    assert "best plan" in (tmp_path / "r.html").read_text()  # the curve needs no plan


def test_a_model_without_a_plan_still_gets_a_page(folder, tmp_path):
    """With a machine without a GPU, and with a machine file that lacks the CPU."""
    make_machine(num_gpus=0).save(tmp_path / "cpu.json")
    dataclasses.replace(make_machine(), cpu_costs=None).save(tmp_path / "card.json")
    for name, line in (("cpu", "has no GPU"), ("card", "describes only a GPU")):
        config = config_of(
            folder,
            tmp_path / f"{name}.html",
            split=None,
            evals=(),
            machine=tmp_path / f"{name}.json",
        )
        report(config)
        text = Seen((tmp_path / f"{name}.html").read_text()).text
        assert line in text and str(tmp_path) not in text


def test_files_of_another_model_are_refused_in_one_line(folder, compared, tmp_path, capsys):
    other = make_model(seed=1)
    make_profile(other).save(tmp_path / "p.safetensors")
    found = json.loads(compared.read_text())
    make_machine(cpu_gb_per_s=9).save(tmp_path / "machine.json")
    evals = (
        (found | {"model_id": "0" * 64}, "give files of one model"),
        (found | {"version": 3}, "version 3; wanted .* of version 1"),
        (found | {"kl_mean": "much"}, "kl_mean is 'much'"),
        (found | {"perplexity_increase": 1e300}, "perplexity_increase is 1e\\+300, wanted at most"),
        (found | {"more": 1}, "'more' is unknown"),
        ({"mode": "exact"}, "wanted a comparison"),
    )
    for number, (content, _) in enumerate(evals):
        (tmp_path / f"{number}.json").write_text(json.dumps(content))
    for change, match in (
        *(({"evals": (tmp_path / f"{n}.json",)}, match) for n, (_, match) in enumerate(evals)),
        ({"profile": tmp_path / "p.safetensors"}, "give files of one model"),
        ({"machine": tmp_path / "machine.json"}, "was made from another machine file"),
        ({"machine": tmp_path / "machine.json", "profile": None}, "another machine file"),
        ({"output": compared, "force": True}, "is read by this command"),
        ({"output": folder / "p.report.json", "force": True}, "is read by this command"),
    ):
        output = change.pop("output", tmp_path / "r.html")
        with pytest.raises(HotsplitError, match=match):
            report(config_of(folder, output, **change))
    assert not (tmp_path / "r.html").exists()


def test_a_damaged_report_is_refused(folder, tmp_path):
    content = json.loads((folder / "p.report.json").read_text())
    model_id = ModelFile.load(folder / "model.gguf").model_id
    for damage in (
        lambda c: c.update(model_id="1" * 64),
        lambda c: c.pop("quality_L"),
        lambda c: c["quality_L"][0]["chosen"].update(recall=1.5),
        lambda c: c["quality_L"][0]["candidates"].append(3),
        lambda c: c["quality_L"][1].pop("start"),
    ):
        damaged = json.loads(json.dumps(content))
        damage(damaged)
        (tmp_path / "x.json").write_text(json.dumps(damaged))
        with pytest.raises(HotsplitError, match="profile again"):
            load_predictor_report(tmp_path / "x.json", model_id)


def test_the_page_in_a_browser(page, browser):
    """On a screen and on a phone, every plot is visible, nothing is wider than the screen, nothing
    is fetched, and no error is thrown."""
    plots = "[...document.querySelectorAll('figure svg')].map(s => s.getBoundingClientRect())"
    for width, is_phone in ((375, True), (1200, False)):
        browser.resize(width, 800, is_phone=is_phone)
        browser.open(page.as_uri())
        boxes = browser.run(f"{plots}.map(b => [b.width, b.height, b.left, b.right])")
        assert len(boxes) == 7
        for box in boxes:
            assert box[0] > 250 and box[1] > 80 and box[2] >= 0 and box[3] <= width, box
        assert browser.run("document.documentElement.scrollWidth") == width
    fetched = browser.run("performance.getEntriesByType('resource').map(e => e.name)")
    assert not [name for name in fetched if not name.startswith("data:")]
    assert browser.run("document.querySelectorAll('script').length") == 0
    # Text is not drawn as outlines, and colours follow the page's colour scheme.
    assert browser.run("document.querySelector('#bytes svg text').textContent.length") > 0
    fill = "getComputedStyle(document.querySelector('#bytes figure path[style*=blue]')).fill"
    light = browser.run(fill)
    browser.prefer(prefers_color_scheme="dark")
    assert browser.run(fill) != light
    assert not browser.said
