"""Outputs: never a file that is read, never one of the user's, and nothing left behind."""

import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from checkpoints import random_dejavu, random_llama
from models import make_profile

from sparkinfer.convert.convert import convert
from sparkinfer.convert.options import ConvertConfig
from sparkinfer.errors import SparkinferError
from sparkinfer.files import check_output, partial_file, partial_folder
from sparkinfer.model_file import ModelFile


@pytest.fixture(scope="module")
def silu(tmp_path_factory) -> Path:
    return random_llama(tmp_path_factory.mktemp("hf") / "hf", hidden_act="silu")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# Files of a checkpoint: those that are there, and those that would be read if they were.
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json",
                                  "tokenizer_config.json", "model.safetensors.index.json",
                                  "pytorch_model.bin", "chat_template.jinja"])  # fmt: skip
def test_an_output_is_never_a_file_of_the_checkpoint(silu, tmp_path, name):
    before = contents(silu)
    with pytest.raises(SparkinferError, match="is read by|lies among the files"):
        convert(ConvertConfig(source=silu, output=silu / name, force=True))
    link = tmp_path / "link.gguf"
    if (silu / name).exists():
        link.symlink_to(silu / name)
        with pytest.raises(SparkinferError, match="is read by this command"):
            convert(ConvertConfig(source=silu, output=link, force=True))
    assert contents(silu) == before


def test_nor_one_of_the_predictors_or_the_profile(silu, tmp_path):
    folder, model = random_dejavu(tmp_path / "p"), tmp_path / "m.gguf"
    convert(ConvertConfig(source=silu, output=model))
    profile = tmp_path / "profile.safetensors"
    make_profile(ModelFile.load(model)).save(profile)
    before = contents(tmp_path)
    for output, extra in (
        (folder / "model_1.pt", {"predictors": folder}),
        (folder / "config.json", {"predictors": folder}),  # would be read if it were there
        (profile, {"thresholds": profile}),
        (model, {"predictors": folder}),
    ):
        with pytest.raises(SparkinferError, match="is read by|lies among the files"):
            convert(ConvertConfig(source=model, output=output, force=True, **extra))
    assert contents(tmp_path) == before
    convert(ConvertConfig(source=silu, output=silu / "m.gguf", force=True))
    convert(ConvertConfig(source=silu, output=silu / "m.gguf", force=True))
    (silu / "m.gguf").unlink()


@pytest.mark.parametrize("end", [".probe", ".partial", ".tmp"])
def test_files_of_the_user_with_names_like_ours_stay(silu, tmp_path, end):
    mine = tmp_path / f"o.gguf{end}"
    mine.write_text("precious")
    convert(ConvertConfig(source=silu, output=tmp_path / "o.gguf"))
    assert mine.read_text() == "precious"
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["o.gguf", mine.name])


def test_two_runs_with_one_output_do_not_meet(tmp_path):
    path = tmp_path / "x"
    with partial_file(path) as one, partial_file(path) as other:
        one.write_text("one")
        other.write_text("other")
        assert one.exists()
    assert path.read_text() == "one" and [p.name for p in tmp_path.iterdir()] == ["x"]


def test_what_a_killed_run_left_goes_with_the_next(tmp_path):
    """Its lock went with it; a file that is still being written is locked."""
    code = (
        "import os, sys; from pathlib import Path; from sparkinfer.files import partial_file\n"
        "with partial_file(Path(sys.argv[1])) as p: p.write_text('half'); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "x")], check=False)
    (stale,) = tmp_path.iterdir()
    assert stale.name.startswith("x.") and stale.suffix == ".partial"
    other = tmp_path / "x.0123456.partial"  # not a name of ours
    other.write_text("mine")
    with partial_file(tmp_path / "x") as partial:
        assert not stale.exists()
        partial.write_text("whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x", other.name]


def test_a_file_is_made_anew_where_another_run_took_it_for_stale(tmp_path, monkeypatch):
    real, taken = fcntl.flock, []

    def flock(descriptor, how):
        if not taken:
            taken.append(os.readlink(f"/proc/self/fd/{descriptor}"))
            os.unlink(taken[0])
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with partial_file(tmp_path / "x") as partial:
        assert str(partial) != taken[0]
        partial.write_text("whole")
    assert (tmp_path / "x").read_text() == "whole"


def test_where_files_cannot_be_locked_they_are_written_and_never_removed(tmp_path, monkeypatch):
    def flock(descriptor, how):
        raise OSError("no locks on this file system")

    monkeypatch.setattr(fcntl, "flock", flock)
    (tmp_path / "x.01234567.partial").write_text("of a run that may live")
    with partial_file(tmp_path / "x") as partial:
        partial.write_text("whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x", "x.01234567.partial"]


def test_a_new_file_has_the_permissions_of_any(tmp_path):
    (tmp_path / "plain").touch()
    with partial_file(tmp_path / "x"):
        pass
    assert (tmp_path / "x").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_refused_conversion_leaves_no_folders(silu, tmp_path):
    output = tmp_path / "no" / "such" / "m.gguf"
    check_output(output, force=False)
    with pytest.raises(SparkinferError, match="no such folder"):
        convert(ConvertConfig(source=tmp_path / "none", output=output))

    def refuse(written):
        raise SparkinferError("the comparison failed")

    with pytest.raises(SparkinferError, match="the comparison failed"):
        convert(ConvertConfig(source=silu, output=output), verify=refuse)
    for make in (partial_file, partial_folder):
        with pytest.raises(KeyboardInterrupt), make(output):
            raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
    convert(ConvertConfig(source=silu, output=output))
    assert output.is_file()


def test_two_conversions_to_one_output_both_end_well(silu, tmp_path):
    def run(outtype):
        try:
            config = ConvertConfig(
                source=silu, output=tmp_path / "m.gguf", outtype=outtype, force=True
            )
            convert(config)
        except Exception as error:  # noqa: BLE001  # told to the test
            errors.append(error)

    errors: list[Exception] = []
    threads = [threading.Thread(target=run, args=(t,)) for t in ("f32", "f16", "q8_0")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and [p.name for p in tmp_path.iterdir()] == ["m.gguf"]
    ModelFile.load(tmp_path / "m.gguf")
