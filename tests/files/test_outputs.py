"""Outputs never replace an input, nor other files without --force, and failed runs leave nothing
behind."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import random_dejavu, random_llama
from models import make_machine, make_model, make_profile, make_sizes

from hotsplit.cli import main
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.errors import HotsplitError
from hotsplit.files import renaming
from hotsplit.files.atomic import partial_file, partial_folder, remove_stale
from hotsplit.files.outputs import check_output, check_output_folder, check_outputs
from hotsplit.files.safetensors_file import save_arrays
from hotsplit.files.steady import reading


@pytest.fixture(scope="module")
def silu(tmp_path_factory) -> Path:
    return random_llama(tmp_path_factory.mktemp("hf") / "hf", hidden_act="silu")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# Files of a checkpoint: those that exist, and those that would be read if they did.
NAMES = (
    "model.safetensors config.json tokenizer.json tokenizer_config.json"
    " model.safetensors.index.json pytorch_model.bin chat_template.jinja"
)


@pytest.mark.parametrize("name", NAMES.split())
def test_an_output_is_never_a_file_of_the_checkpoint(silu, tmp_path, name):
    before = contents(silu)
    with pytest.raises(HotsplitError, match="is read by|lies among the files"):
        convert(ConvertConfig(source=silu, output=silu / name, force=True))
    link = tmp_path / "link.gguf"
    if (silu / name).exists():
        link.symlink_to(silu / name)
        with pytest.raises(HotsplitError, match="is read by this command"):
            convert(ConvertConfig(source=silu, output=link, force=True))
    assert contents(silu) == before


def test_an_output_is_never_a_file_of_the_predictors(silu, tmp_path):
    folder, model = random_dejavu(tmp_path / "p"), tmp_path / "m.gguf"
    convert(ConvertConfig(source=silu, output=model))
    before = contents(tmp_path)
    for output, extra in (
        (folder / "model_1.pt", {"predictors": folder}),
        (folder / "config.json", {"predictors": folder}),  # would be read if it were there
        (model, {"predictors": folder}),
    ):
        with pytest.raises(HotsplitError, match="is read by|lies among the files"):
            convert(ConvertConfig(source=model, output=output, force=True, **extra))
    assert contents(tmp_path) == before
    convert(ConvertConfig(source=silu, output=silu / "m.gguf", force=True))
    convert(ConvertConfig(source=silu, output=silu / "m.gguf", force=True))
    (silu / "m.gguf").unlink()


@pytest.mark.parametrize("end", [".probe", ".partial", ".tmp"])
def test_user_files_with_names_like_ours_are_kept(silu, tmp_path, end):
    mine = tmp_path / f"o.gguf{end}"
    mine.write_text("precious")
    convert(ConvertConfig(source=silu, output=tmp_path / "o.gguf"))
    assert mine.read_text() == "precious"
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["o.gguf", mine.name])


def test_two_runs_with_one_output_do_not_interfere(tmp_path):
    path = tmp_path / "x"
    with partial_file(path) as one, partial_file(path) as other:
        one.write_text("one")
        other.write_text("other")
        assert one.exists()
    assert path.read_text() == "one" and [p.name for p in tmp_path.iterdir()] == ["x"]
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


KILLED = """
import os, sys
from pathlib import Path
from hotsplit.files.atomic import {0}
with {0}(Path(sys.argv[1])) as partial:
    (partial / "a" if partial.is_dir() else partial).write_text("half")
    os._exit(9)
"""


@pytest.mark.parametrize("make", [partial_file, partial_folder])
def test_the_next_run_removes_what_a_killed_run_left(tmp_path, make):
    """The lock of the killed run is gone, unlike that of what is still being written."""
    code = KILLED.format(make.__name__)
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "x")], check=False)
    (stale,) = tmp_path.iterdir()
    assert stale.name.startswith("x.") and stale.suffix == ".partial"
    other = tmp_path / "x.0123456.partial"  # not a name of ours
    other.write_text("mine")
    if stale.is_dir():
        check_output_folder(tmp_path / "x", force=False, is_ours=lambda name: True)
    with make(tmp_path / "x") as partial:
        assert not stale.exists()
        (partial / "a" if partial.is_dir() else partial).write_text("whole")
        remove_stale(tmp_path / "x")  # as another run does
        assert partial.exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x", other.name]


def test_a_partial_file_that_another_run_removed_as_stale_is_created_again(tmp_path, monkeypatch):
    real, taken = fcntl.flock, []

    def flock(descriptor, how):
        if not taken:
            taken.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
            Path(taken[0]).unlink()
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with partial_file(tmp_path / "x") as partial:
        assert str(partial) != taken[0]
        partial.write_text("whole")
    assert (tmp_path / "x").read_text() == "whole"


def test_without_file_locks_partial_files_are_written_but_never_removed(tmp_path, monkeypatch):
    def flock(descriptor, how):
        raise OSError("no locks on this file system")

    monkeypatch.setattr(fcntl, "flock", flock)
    (tmp_path / "x.01234567.partial").write_text("of a run that may live")
    with partial_file(tmp_path / "x") as partial:
        partial.write_text("whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x", "x.01234567.partial"]


def test_a_refused_conversion_leaves_no_folders(silu, tmp_path):
    output = tmp_path / "no" / "such" / "m.gguf"
    check_output(output, force=False)
    with pytest.raises(HotsplitError, match="no such folder"):
        convert(ConvertConfig(source=tmp_path / "none", output=output))

    def refuse(written):
        raise HotsplitError("the comparison failed")

    with pytest.raises(HotsplitError, match="the comparison failed"):
        convert(ConvertConfig(source=silu, output=output), verify=refuse)
    for make in (partial_file, partial_folder):
        with pytest.raises(KeyboardInterrupt), make(output):
            raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
    convert(ConvertConfig(source=silu, output=output))
    assert output.is_file()


# ---- folders --------------------------------------------------------------------------------


def fill(folder: Path, text: str) -> None:
    with partial_folder(folder) as partial:
        (partial / "a").write_text(text)
        (partial / "b").mkdir()
        (partial / "b" / "c").write_text(text)


def test_a_folder_is_replaced_by_one_exchange_of_names_or_by_two_renames(tmp_path, monkeypatch):
    """The folder exists at every moment if the system can exchange names."""
    fill(tmp_path / "x", "old")
    (tmp_path / "other").mkdir()
    if renaming._exchange(tmp_path / "x", tmp_path / "other"):
        renaming._exchange(tmp_path / "x", tmp_path / "other")
        (tmp_path / "other").rmdir()
        with monkeypatch.context() as patched:
            for name in ("replace", "rename"):
                patched.setattr(Path, name, lambda *names: pytest.fail("renamed"))
            fill(tmp_path / "x", "new")
        assert (tmp_path / "x" / "b" / "c").read_text() == "new"
        assert [path.name for path in tmp_path.iterdir()] == ["x"]
    monkeypatch.setattr(renaming, "_exchange", lambda one, other: False)
    fill(tmp_path / "x", "again")
    assert (tmp_path / "x" / "b" / "c").read_text() == "again"


def test_a_folder_that_was_set_aside_gets_its_name_back(tmp_path, monkeypatch):
    """A run that cannot exchange names was killed between its two renames, or its second rename
    fails."""
    fill(tmp_path / "x", "old")
    (tmp_path / "x").rename(tmp_path / "x.01234567.old")
    remove_stale(tmp_path / "x")
    assert (tmp_path / "x" / "a").read_text() == "old"
    monkeypatch.setattr(renaming, "_exchange", lambda one, other: False)
    real = Path.replace

    def replace(self, target):
        if self.suffix == ".partial":
            raise OSError(errno.EIO, "Input/output error")
        return real(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(OSError, match="Input/output"):
        fill(tmp_path / "x", "new")
    assert (tmp_path / "x" / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_the_same_arrays_give_the_same_bytes_in_every_process(tmp_path):
    """The safetensors package orders the metadata differently from call to call."""
    code = (
        "import sys, numpy as np; from pathlib import Path\n"
        "from hotsplit.files.safetensors_file import save_arrays\n"
        "arrays = {'b': np.arange(3, dtype=np.float32), 'a': np.ones((2, 2), np.int64),"
        " 'c': np.zeros((2, 0), np.uint8), 'd': np.array(1.5)}\n"
        "meta = {k: k * 3 for k in 'zyxwvu'}\n"
        "for name in sys.argv[1:]: save_arrays(Path(name), 'test', 1, meta, arrays)"
    )
    for names in (("1", "2"), ("3",)):
        paths = [str(tmp_path / name) for name in names]
        subprocess.run([sys.executable, "-c", code, *paths], check=True)
    found = contents(tmp_path)
    assert len(found) == 3 and len(set(found.values())) == 1
    from safetensors.numpy import load_file, save

    arrays = load_file(tmp_path / "1")
    assert (arrays["b"] == [0, 1, 2]).all() and arrays["d"] == 1.5 and arrays["c"].shape == (2, 0)
    whole = save(arrays, {"format": "test"})  # by the package itself: the data are the same
    start = 8 + int.from_bytes(whole[:8], "little")
    mine = (tmp_path / "1").read_bytes()
    assert mine[8 + int.from_bytes(mine[:8], "little") :] == whole[start:]


def test_a_safetensors_file_stays_locked_while_it_is_written(tmp_path, monkeypatch):
    import numpy as np

    real, seen = os.fsync, []

    def fsync(descriptor):
        remove_stale(tmp_path / "x")  # as another run does
        seen.append(sorted(path.suffix for path in tmp_path.iterdir()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    save_arrays(tmp_path / "x", "test", 1, {}, {"a": np.zeros(3)})
    assert seen[0] == [".partial"] and (tmp_path / "x").exists()


# ---- inputs that change -----------------------------------------------------------------------


def test_no_output_is_written_from_an_input_that_changed(tmp_path):
    source, folder = tmp_path / "in", tmp_path / "hf"
    source.write_text("before")
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for touch in (
        lambda: os.truncate(source, 3),
        lambda: source.write_text("behind"),
        source.unlink,
        lambda: (folder / "config.json").write_text("[]"),
    ):
        source.write_text("before")
        for make in (partial_file, partial_folder):
            with (
                pytest.raises(HotsplitError, match="was changed while it was read"),
                reading(source, folder),
                make(tmp_path / "out"),
            ):
                touch()
            source.write_text("before")
            (folder / "config.json").write_text("{}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "in"]
    with reading(source, None, tmp_path / "none"), partial_file(tmp_path / "out") as partial:
        partial.write_text("made")
    assert (tmp_path / "out").read_text() == "made"


def test_outputs_may_lie_among_the_texts_that_are_read(tmp_path):
    (tmp_path / "d").mkdir()
    for name in ("t.txt", "p.json", "d/old.json"):
        (tmp_path / name).write_text("of an earlier run")
    with reading(tmp_path):
        with partial_folder(tmp_path / "d") as folder:
            (folder / "new.json").write_text("new")
        for name in ("p.json", "q.json"):
            with partial_file(tmp_path / name) as partial:
                partial.write_text("new")


# ---- all inputs and all outputs at once ---------------------------------------------------------


def test_two_outputs_are_never_one_file(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "x")
    with pytest.raises(HotsplitError, match="written twice"):
        check_outputs([tmp_path / "x", tmp_path / "link"], force=True)
    with pytest.raises(HotsplitError, match="is written by this command"):
        check_outputs([tmp_path / "f" / "x"], force=True, output_folders=[tmp_path / "f"])
    with pytest.raises(HotsplitError, match="is written by this command"):
        check_outputs([], force=True, output_folders=[tmp_path / "f", tmp_path / "f" / "g"])
    for nested in (["x", "x/y"], ["x/y/z", "x"]):
        with pytest.raises(HotsplitError, match="cannot be a file and the folder of"):
            check_outputs([tmp_path / name for name in nested], force=True)
    check_outputs([tmp_path / "x", tmp_path / "y"], force=True, output_folders=[tmp_path / "z"])


@pytest.mark.parametrize("force", [False, True])
def test_an_output_that_another_run_wrote_meanwhile_is_replaced_only_with_force(
    tmp_path, capsys, force
):
    """Both start before the file exists; the other run finishes first. --force replaces it."""
    from hotsplit.files import gguf_file

    make_model().save(tmp_path / "m.gguf")
    output, written = tmp_path / "out.gguf", []

    def meanwhile(entry, original=gguf_file._pieces):
        if not written:
            output.write_bytes(b"another run's")
            written.append(True)
        return original(entry)

    words = ["convert", str(tmp_path / "m.gguf"), "-o", str(output), "--outtype", "f16"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_file, "_pieces", meanwhile)
        code = main([*words, *(["--force"] if force else [])])
    assert written
    if force:
        assert code == 0 and output.read_bytes()[:4] == b"GGUF"
        return
    assert code == 1 and output.read_bytes() == b"another run's"
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.endswith("was written by another run meanwhile; give another name or --force")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf", "out.gguf"]


def test_only_regular_files_are_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "nowhere").symlink_to(tmp_path / "none")
    (tmp_path / "device").symlink_to("/dev/full")
    for name in ("pipe", "nowhere", "device"):
        with pytest.raises(HotsplitError, match="is not a file to replace"):
            check_outputs([tmp_path / name], force=True)
    (tmp_path / "file").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    check_outputs([tmp_path / "link"], force=True)


@pytest.fixture
def stage_files(tmp_path) -> Path:
    """A model, its profile, a machine, and a text."""
    model = make_model(sizes=make_sizes(vocab_size=50))
    model.save(tmp_path / "m.gguf")
    make_profile(model).save(tmp_path / "p.safetensors")
    make_machine().save(tmp_path / "machine.json")
    (tmp_path / "t.txt").write_text("text " * 100)
    return tmp_path


def test_a_heat_map_never_replaces_an_input(stage_files, capsys):
    """Nor do files that a command names itself, such as reports and predictors."""
    here, before = stage_files, contents(stage_files)
    m, p, t = here / "m.gguf", here / "p.safetensors", here / "t.txt"
    solve = ["solve", m, "--profile", p, "--machine", here / "machine.json", "--force"]
    profile = ["profile", m, "--force", "--corpus"]
    (here / "x.png").symlink_to(m)
    (here / "x.report.json").symlink_to(t)
    (here / "y.resume").hardlink_to(m)
    (here / "predictors.safetensors").hardlink_to(t)
    for arguments in (
        [*solve, "-vb", "14MiB", "-o", here / "s.gguf", "--heat-map", m],
        [*solve, "--sweep", "1MiB:2MiB", "-o", m],
        [*profile, t, "-o", here / "x"],
        [*profile, t, "-o", here / "y"],
        [*profile, t, "-o", here / "z", "--train-predictors", here],
        [*profile, here, "-o", t],  # one of the texts in a folder
    ):
        assert main([str(argument) for argument in arguments]) == 1
        error = capsys.readouterr().err
        assert "is read by this command" in error or "is written twice" in error, error
    after = contents(stage_files)
    assert {name: after[name] for name in before} == before


def test_an_export_never_replaces_its_profile(stage_files, capsys):
    folder = stage_files / "activation"
    folder.mkdir()
    (stage_files / "p.safetensors").rename(folder / "activation_0.pt")
    export = ["export", "--format", "powerinfer-activations", "--force", "-o", str(folder)]
    assert main([*export, str(folder / "activation_0.pt")]) == 1
    assert "is read by this command" in capsys.readouterr().err
    assert (folder / "activation_0.pt").exists()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc")
def test_a_path_where_no_file_can_be_created_is_refused_at_once():
    for make in (partial_file, partial_folder):
        with pytest.raises(HotsplitError, match="cannot be written"), make(Path("/proc/x")):
            pass
    with pytest.raises(HotsplitError, match="cannot be written"):
        check_output(Path("/proc/none/x"), force=False)


def test_a_partial_folder_that_another_run_removed_as_stale_is_created_again(tmp_path, monkeypatch):
    real, taken = Path.mkdir, []

    def mkdir(self, *args, **options):
        real(self, *args, **options)
        if self.suffix == ".partial" and not taken:
            taken.append(self)
            self.rmdir()

    monkeypatch.setattr(Path, "mkdir", mkdir)
    fill(tmp_path / "x", "whole")
    assert taken and (tmp_path / "x" / "a").read_text() == "whole"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
