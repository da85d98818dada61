"""Commands point to the files that `run` has made from a model; the commands that they print
work."""

import shlex
import shutil

import pytest

from hotsplit.cli import main
from hotsplit.run import stages
from hotsplit.run.cached_files import CachedFiles, cached_files_for

pytest_plugins = ("run_fixtures",)
pytestmark = pytest.mark.usefixtures("cache")


def run(model, *words):
    assert main(["run", str(model), "-p", "the", "-n", "1", "--no-verify", *map(str, words)]) == 0


def commands_in(text: str) -> list[list[str]]:
    """The commands of this program at the ends of lines."""
    lines = [line for line in text.splitlines() if ": hotsplit " in line]
    return [shlex.split(line.rpartition(": hotsplit ")[2]) for line in lines]


def test_a_source_that_cannot_be_loaded_has_its_copy_named(silu, capsys, tmp_path):
    """The source is a checkpoint folder, which `report` does not take. Before `run` it has no
    copy."""
    words = ["report", str(silu), "-o", "r.html"]
    assert main(words) == 1
    assert "run has a converted copy" not in capsys.readouterr().err
    run(silu)
    capsys.readouterr()
    assert main(words) == 1
    (found,) = commands_in(capsys.readouterr().err)
    assert found[0] == "report" and found[1].endswith("model.gguf")
    assert cached_files_for(silu) == CachedFiles(model=cached_files_for(silu).model)
    assert main(["bench", found[1], "-p", "8", "-n", "2", "-r", "1", "-t", "1"]) == 0
    assert "run " not in capsys.readouterr().err.replace("run in", "")


def test_a_changed_source_has_no_copy(relu, tmp_path, capsys):
    own = tmp_path / "own"
    shutil.copytree(relu, own)
    run(own)
    assert cached_files_for(own).model is not None
    weights = own / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert cached_files_for(own).model is None and cached_files_for(tmp_path / "none").model is None


def test_a_damaged_copy_is_not_named_and_is_made_again(silu, capsys):
    run(silu, "--outtype", "f16")
    copy = cached_files_for(silu).model
    whole = copy.read_bytes()
    copy.write_bytes(b"DAMAGED!" + whole[8:])
    assert cached_files_for(silu) == CachedFiles()
    run(silu, "--outtype", "q8_0")
    assert cached_files_for(silu).model not in (None, copy)  # another copy, which can be loaded
    capsys.readouterr()
    run(silu, "--outtype", "f16")
    lines = capsys.readouterr().err.splitlines()
    (line,) = [line for line in lines if "in the cache must be made again" in line]
    assert line.startswith("the converted model in the cache") and str(copy) in line
    assert any(line.startswith("stage 1 of 1: convert") for line in lines)
    assert copy.read_bytes() == whole


def test_a_damaged_profile_is_made_again(relu, text, cache, capsys):
    words = ["--mode", "predicted", "--tokens", 1408, "--corpus", text]
    run(relu, *words)
    (profile,) = cache.glob(f"profile-*/{stages.PROFILE}")
    whole = profile.read_bytes()
    profile.write_bytes(b"\xff" * 8 + whole[8:])
    full = cached_files_for(relu).model
    full.write_bytes(b"DAMAGED!" + full.read_bytes()[8:])
    capsys.readouterr()
    run(relu, *words)
    said = capsys.readouterr().err
    for what in ("the profile and the predictors", "the model with its predictors"):
        assert said.count(f"{what} in the cache must be made again: ") == 1
    assert profile.read_bytes() == whole and cached_files_for(relu).model == full


def test_bench_names_the_files_that_run_uses(relu, text, tmp_path, capsys):
    model = tmp_path / "m.gguf"
    assert main(["convert", str(relu), "-o", str(model), "--no-verify"]) == 0
    run(model, "--mode", "predicted", "--tokens", 1408, "--corpus", text)
    capsys.readouterr()
    words = ["-p", "8", "-n", "2", "-r", "1", "-t", "1"]
    assert main(["bench", str(model), *words]) == 0
    (found,) = commands_in(capsys.readouterr().err)
    assert main([*found, *words]) == 0
    assert not commands_in(capsys.readouterr().err)


def test_the_list_says_which_file_other_commands_take(silu, cache, capsys):
    run(silu)
    capsys.readouterr()
    assert main(["cache", "list"]) == 0
    shown = capsys.readouterr()
    what, file = shown.out.splitlines()[1].split()[:2]
    assert (cache / what / file).is_file()
    assert shown.err.endswith(f"by its path: {cache}/WHAT/FILE\n")
    assert main(["cache", "clear"]) == 0
    capsys.readouterr()
    assert main(["cache", "list"]) == 0
    assert "WHAT/FILE" not in capsys.readouterr().err
