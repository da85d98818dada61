"""The folders of `sparsify`: the lock on the work folder, and which files a run removes."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from sparsify_runs import make_inputs, tiny_config

from hotsplit.cli import main
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.errors import HotsplitError
from hotsplit.files.atomic import locked_folder
from hotsplit.sparsify.config import SparsifyConfig
from hotsplit.sparsify.plan import check_outputs, finish
from hotsplit.sparsify.run import sparsify


@pytest.fixture
def config(tmp_path) -> SparsifyConfig:
    return tiny_config(make_inputs(tmp_path), tmp_path)


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_only_files_of_the_run_are_removed_from_its_work_folder(config, tmp_path):
    """The model is a file, so its checkpoint is made in the work folder."""
    file, work = tmp_path / "m.gguf", config.work_folder
    convert(ConvertConfig(source=config.model, output=file, outtype="f32"))
    config = replace(config, model=file, save_checkpoint=None, shares=(0.5, 0.6), tokens=256)
    sparsify(config)
    made = {"state.safetensors", "dense/model.safetensors", "trained-60/config.json"}
    assert made < files_in(work)
    mine = {"notes.txt", "dense/mine.txt", "trained-60/mine.md", "trained.txt", "more/config.json"}
    for name in mine:
        (work / name).parent.mkdir(exist_ok=True)
        (work / name).write_text("mine")
    (work / "state.safetensors.0123abcd.partial").write_text("of a killed run")
    finish(config)
    assert files_in(work) == mine and not (work / "trained-50").exists()
    for name in mine:
        (work / name).unlink()
    for folder in [path for path in work.iterdir() if path.name == "more"]:
        folder.rmdir()
    finish(config)
    assert not work.exists()


@pytest.mark.parametrize("mask", [0o077, 0o027, 0o002, 0o022])
def test_outputs_have_the_rights_of_any_new_file(config, tmp_path, mask):
    (tmp_path / "out").mkdir()
    before = os.umask(mask)
    try:
        out = tmp_path / "out"
        sparsify(replace(config, output=out / "m.gguf", save_checkpoint=out / "kept", tokens=256))
    finally:
        os.umask(before)
    made = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert {"model.safetensors", "config.json", "state.safetensors"} <= {path.name for path in made}
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in made} == {
        path.name: oct(0o666 & ~mask) for path in made
    }


def test_two_runs_with_one_output_keep_apart(config, capsys):
    words = ["sparsify", str(config.model), "--corpus", str(config.corpora[0]), "-o",
             str(config.output)]  # fmt: skip
    with locked_folder(config.work_folder):
        assert main(words) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"hotsplit: {config.work_folder}: another run is at work in this folder; wait until it"
        " ends, or give the output another name"
    )
    assert not config.output.exists() and not config.work_folder.exists()
    config.work_folder.write_text("a file")
    assert main(words) == 1
    assert "cannot be written" in capsys.readouterr().err
    assert config.work_folder.read_text() == "a file"


def test_a_place_where_no_folder_can_be_made_is_refused(config, capsys):
    words = ["sparsify", str(config.model), "--corpus", str(config.corpora[0])]
    assert main([*words, "-o", "/proc/out.gguf"]) == 1
    assert "/proc/out.gguf.sparsify: cannot be written: No such file" in capsys.readouterr().err


def test_a_folder_that_its_last_holder_removes_is_made_again(tmp_path):
    path = tmp_path / "missing" / "work"
    for _ in range(2):
        with locked_folder(path):
            with pytest.raises(HotsplitError, match="another run"), locked_folder(path):
                pass
            assert path.is_dir()  # the refused one has not removed it
        assert not path.exists()
    with pytest.raises(HotsplitError, match="refused"), locked_folder(path):
        (path / "state").write_text("")
        raise HotsplitError("refused")
    assert (path / "state").exists()
    with locked_folder(path):
        pass


def test_the_licence_of_a_model_does_not_stop_a_run_that_starts_over(config):
    folder = config.checkpoint_of(0.6)
    folder.mkdir()
    for place in (config.model, folder):
        (place / "LICENSE").write_text("free")
    check_outputs(replace(config, force=True))


@pytest.mark.parametrize("name", ["mine", "notes.md", "notes.txt", "results.json", "x.safetensors"])
def test_starting_over_deletes_no_file_that_the_command_does_not_write(config, name):
    """The folder of the trained checkpoint is replaced as a whole."""
    folder = config.checkpoint_of(0.6)
    folder.mkdir()
    (folder / name).write_text("mine")
    line = f"holds '{name}', which this command has not written"
    with pytest.raises(HotsplitError, match=line):
        check_outputs(replace(config, force=True))


def test_files_that_come_into_the_checkpoints_folder_during_training_are_kept(config):
    """The folder is replaced as a whole."""
    config = replace(config, tokens=256)
    folder = config.checkpoint_of(0.6)
    outside = config.output.with_name("outside.txt")
    outside.write_text("outside")

    def put(count: float) -> None:
        if not folder.exists():
            (folder / "sub").mkdir(parents=True)
            (folder / "sub" / "notes.md").write_text("mine")
            (folder / "link").symlink_to(outside)
            (folder / "model.safetensors").write_text("an older run's")

    sparsify(config, on_tokens=put)
    assert (folder / "sub" / "notes.md").read_text() == "mine"
    assert (folder / "link").readlink() == outside
    assert "config.json" in files_in(folder)
    assert (folder / "model.safetensors").stat().st_size > 1000


def test_a_run_may_start_over_on_what_it_wrote(config, tmp_path):
    """A run on a checkpoint, then one on a model file, whose checkpoint has other file names."""
    config = replace(config, tokens=256)
    sparsify(config)
    check_outputs(replace(config, force=True))
    file = tmp_path / "m.gguf"
    convert(ConvertConfig(source=config.model, output=file, outtype="f32"))
    of_file = replace(
        config, model=file, output=tmp_path / "b.gguf", save_checkpoint=tmp_path / "b"
    )
    sparsify(of_file)
    finish(of_file)
    assert not of_file.work_folder.exists()
    check_outputs(replace(of_file, force=True))


def test_a_run_that_was_killed_before_it_saved_its_state_can_be_repeated(config):
    """The killed run left a trained checkpoint in its work folder, but no saved state."""
    config = replace(config, save_checkpoint=None)
    folder = config.checkpoint_of(0.6)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    check_outputs(config)
    (folder / "notes.md").write_text("mine")
    with pytest.raises(HotsplitError, match="which this command has not written"):
        check_outputs(config)


def test_a_run_from_python_takes_the_lock_too(config):
    with (
        locked_folder(config.work_folder),
        pytest.raises(HotsplitError, match="another run is at work in this folder"),
    ):
        sparsify(config)
    assert not config.checkpoint_of(0.6).exists()
