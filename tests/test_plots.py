"""Plots of a profile show its counts and the candidates for its predictors."""

import numpy as np
import pytest
from click.testing import CliRunner
from matplotlib.figure import Figure
from models import make_model, make_profile
from test_profile_corpus import text_of

from hotsplit.artifacts.profile_file import Profile
from hotsplit.commands.all_commands import cli
from hotsplit.errors import HotsplitError
from hotsplit.profile.report import plots
from hotsplit.profile.report.report import load_predictor_report

PNG = b"\x89PNG\r\n\x1a\n"


def test_curves_match_the_counts():
    profile = make_profile(make_model())
    pyplot = plots.load_pyplot()
    bars = plots._density(pyplot, profile).axes[0].patches
    assert np.allclose([bar.get_height() for bar in bars], 100 * profile.density_L)
    lines = plots._firings(pyplot, profile).axes[0].lines
    assert len(lines) == len(profile.density_L)
    for counts_F, line in zip(profile.active_count_LF, lines, strict=True):
        x, y = line.get_data()
        for share in (10, 50, 100):
            first = np.sort(counts_F)[::-1][: int(share * len(counts_F) / 100)]
            at = np.interp(100 * len(first) / len(counts_F), x, y)
            assert at == pytest.approx(100 * first.sum() / counts_F.sum())
    assert (np.diff(lines[0].get_ydata(), 2) <= 1e-9).all()  # hottest first
    pyplot.close("all")


def test_a_picture_that_cannot_be_written_leaves_no_other(tmp_path, monkeypatch):
    make_profile(make_model()).save(tmp_path / "p")
    original = Figure.savefig

    def save(figure, path, **options):
        if "firings" in str(path):
            raise OSError(28, "No space left on device")
        original(figure, path, **options)

    monkeypatch.setattr(Figure, "savefig", save)
    monkeypatch.setattr(plots, "load_predictor_report", lambda *a: ())
    with pytest.raises(HotsplitError, match=r"firings.png: cannot be written \(No space"):
        plots.draw(tmp_path / "p", tmp_path / "plots")
    assert not list((tmp_path / "plots").iterdir())


def test_the_command_plots_its_profile(tmp_path, codec_model):
    (tmp_path / "t.txt").write_text(text_of(0, 12_000))
    words = ["profile", codec_model, "--corpus", tmp_path / "t.txt", "-o", tmp_path / "p",
             "--tokens", 4000, "--train-predictors", tmp_path / "pred", "--predictor-rank", 32,
             "--plots", tmp_path / "plots"]  # fmt: skip
    done = CliRunner().invoke(cli, list(map(str, words)), catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    names = {path.name for path in (tmp_path / "plots").iterdir()}
    assert names == {"density.png", "firings.png", "predictors.png"}
    assert all((tmp_path / "plots" / name).read_bytes().startswith(PNG) for name in names)
    assert "# Predictors" in (tmp_path / "p.report.md").read_text()
    _check_predictors(tmp_path)
    other = tmp_path / "other"
    make_profile(make_model()).save(other)
    (tmp_path / "p.report.json").rename(tmp_path / "other.report.json")
    with pytest.raises(HotsplitError, match="not the report of a profile of model"):
        plots.draw(other, tmp_path / "plots")
    assert Profile.load(tmp_path / "p").num_tokens == 4000


def _check_predictors(folder) -> None:
    """Checks that every candidate is plotted, that forms have different markers, that no line joins
    the points, and that each layer's chosen predictor is plotted at the point of a candidate."""
    loaded = Profile.load(folder / "p")
    quality_L = load_predictor_report(folder / "p.report.json", loaded.model_id)
    pyplot = plots.load_pyplot()
    axes = plots._predictors(pyplot, quality_L).axes[0]
    assert {line.get_linestyle() for line in axes.lines} == {"None"}
    points = {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axes.lines}
    marks = {line.get_label().split(",")[0]: line.get_marker() for line in axes.lines}
    assert len(set(marks.values())) == len(marks)
    chosen = [p for label, found in points.items() if "chosen" in label for p in found]
    others = [p for label, found in points.items() if "chosen" not in label for p in found]
    wanted = [
        (q.bytes_per_token / 1024, 100 * q.lost_norm)
        for layer in quality_L
        for q in layer.candidates
    ]
    assert sorted(others) == sorted(wanted)
    assert len(chosen) == len(quality_L) and set(chosen) <= set(others)
    pyplot.close("all")
