"""A pointer of Git LFS or git-annex in the place of a file is named, with the command that gets the
file, whatever was wanted."""

import shutil
from pathlib import Path

import pytest
from checkpoints import random_llama

from hotsplit.cli import main
from hotsplit.errors import HotsplitError
from hotsplit.files.atomic import POINTER_BYTES, require_file

OID = "4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393"
LFS = f"version https://git-lfs.github.com/spec/v1\noid sha256:{OID}\nsize 12345\n"
IS_LFS = ("is a Git LFS pointer to a file of 12,345 bytes", "git lfs pull")
POINTERS = {
    "lfs": (LFS, *IS_LFS),
    "extended": (LFS.replace("oid", f"ext-0-foo sha256:{OID}\noid"), *IS_LFS),
    "older": (LFS.replace("git-lfs.github.com", "hawser.github.com"), *IS_LFS),
    "annex": (
        f"/annex/objects/SHA256E-s12345--{OID}.gguf\n",
        "is a git-annex pointer to a file of 12,345 bytes",
        "git annex get",
    ),
}


def refusal(capsys, *words: object) -> str:
    assert main([str(word) for word in words]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return err


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return random_llama(tmp_path_factory.mktemp("pointers") / "hf")


@pytest.mark.parametrize("text, what, command", POINTERS.values(), ids=POINTERS)
def test_a_model_file_that_is_a_pointer(text, what, command, tmp_path, capsys):
    path = tmp_path / "m.gguf"
    path.write_text(text)
    for words in (
        ["generate", path, "-p", "a"],
        ["inspect", path],
        ["run", path, "-p", "a"],
        ["convert", path, "-o", tmp_path / "out.gguf"],
    ):
        line = refusal(capsys, *words)
        assert f"{path}: {what}" in line and command in line
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "pytorch_model.bin",
        "config.json",
        "tokenizer.json",
        "tokenizer.model",
        "generation_config.json",
        "tokenizer_config.json",
    ],
)
def test_a_file_of_a_checkpoint_that_is_a_pointer(checkpoint, tmp_path, capsys, name):
    text, what, command = POINTERS["lfs"]
    folder = Path(shutil.copytree(checkpoint, tmp_path / "hf"))
    if name == "pytorch_model.bin":
        (folder / "model.safetensors").unlink()
    if name == "tokenizer.model":
        (folder / "tokenizer.json").unlink()
    (folder / name).write_text(text)
    line = refusal(capsys, "convert", folder, "-o", tmp_path / "out.gguf")
    assert f"{folder / name}: {what}" in line and command in line
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("name", ["text.txt", "text.jsonl", "text.parquet"])
@pytest.mark.parametrize("is_in_folder", [False, True])
def test_a_corpus_that_is_a_pointer(checkpoint, tmp_path, capsys, name, is_in_folder):
    text, what, command = POINTERS["annex"]
    main(["convert", str(checkpoint), "-o", str(tmp_path / "m.gguf")])
    capsys.readouterr()
    corpus = tmp_path / "texts" / name
    corpus.parent.mkdir()
    corpus.write_text(text)
    given = corpus.parent if is_in_folder else corpus
    line = refusal(
        capsys, "profile", tmp_path / "m.gguf", "--corpus", given, "-o", tmp_path / "p.safetensors"
    )
    assert f"{corpus}: {what}" in line and command in line


@pytest.mark.parametrize(
    "text",
    [
        LFS + "x" * POINTER_BYTES,  # a text about pointers
        f"see: {LFS}",
        LFS.replace("size 12345\n", ""),
        "version https://example.com/spec/v1\n",
        "/annex/objects/x and more\n",
        "",
    ],
)
def test_other_files_are_no_pointers(tmp_path, text):
    path = tmp_path / "a.txt"
    path.write_text(text)
    require_file(path, "text")


def test_a_file_that_cannot_be_opened_is_left_to_its_reader(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text(LFS)
    with pytest.raises(HotsplitError, match="Git LFS"):
        require_file(path, "text")

    def fail(*arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", fail)
    require_file(path, "text")
