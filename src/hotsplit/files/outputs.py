"""Checks a command's outputs before its work starts, so that nobody waits an hour for an error.

No input, no other output and, without `force`, no existing file is overwritten. Writing itself is
in hotsplit.files.atomic."""

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from hotsplit.errors import HotsplitError, writing
from hotsplit.files.atomic import MODEL_SUFFIX, try_to_create
from hotsplit.files.gguf_parts import part_paths


def check_output(
    path: Path, *, force: bool, inputs: Iterable[Path] = (), folders: Iterable[Path] = ()
) -> None:
    """Does what `check_outputs` does, for a single output."""
    check_outputs([path], force=force, inputs=inputs, folders=folders)


def check_outputs(
    paths: Sequence[Path],
    *,
    force: bool,
    inputs: Iterable[Path] = (),
    folders: Iterable[Path] = (),
    output_folders: Sequence[Path] = (),
) -> None:
    """Raises HotsplitError for outputs that are also an input or another output, under any name;
    that exist already (unless `force`); or that cannot be written.

    In `folders` all files except .gguf ones are inputs, and a new file could become one, so an
    output there must end in .gguf. A link to a file is itself replaced, not the file; devices,
    pipes and dangling links are refused. `output_folders` are replaced as a whole, so no input and
    no other output may be inside them; they may exist, and whether they can be written is not
    checked. The check leaves nothing behind."""
    folders = list(folders)
    inside = [file for folder in folders if folder.is_dir() for file in folder.iterdir()]
    inputs = [*inputs, *(f for f in inside if f.suffix != MODEL_SUFFIX and f.is_file())]
    check_apart([*paths, *output_folders], inputs)
    for path in paths:
        is_in = any(_is_same(path.parent, folder) for folder in folders)
        if is_in and path.suffix != MODEL_SUFFIX:
            raise HotsplitError(
                f"{path}: lies among the files that this command reads; give another folder, or a"
                f" name that ends in {MODEL_SUFFIX}"
            )
        for other in paths:
            if Path(os.path.realpath(path)) in Path(os.path.realpath(other)).parents:
                raise HotsplitError(
                    f"{path}: cannot be a file and the folder of {other}, which this command writes"
                    " too; give another name"
                )
    for folder in output_folders:
        others = [other for other in output_folders if other is not folder]
        _check_holds_none(folder, [*inputs, *folders], "read")
        _check_holds_none(folder, [*paths, *others], "written")
    for path in paths:
        with writing(path):
            if path.is_dir():
                raise HotsplitError(f"{path}: is a folder; give the name of a file")
            if path.exists() and not force:
                raise HotsplitError(f"{path}: exists already; give another name or --force")
            if os.path.lexists(path) and not path.is_file():
                raise HotsplitError(f"{path}: is not a file to replace; give another name")
            there = next(folder for folder in path.parents if folder.exists())
            (there / path.name).is_dir()  # raises if the name is too long
            try_to_create(there / path.name)


def check_apart(outputs: Sequence[Path], inputs: Sequence[Path]) -> None:
    """Raises HotsplitError for outputs that are an input, a part of one, or another output."""
    inputs = [part for path in inputs for part in part_paths(path)]
    for number, path in enumerate(outputs):
        with writing(path):  # a name that is too long, a folder that may not be entered
            if any(_is_same(path, other) for other in inputs):
                raise HotsplitError(
                    f"{path}: is read by this command; give the output another name"
                )
            for other in outputs[:number]:
                if _is_same(path, other):
                    raise HotsplitError(
                        f"{path}: is written twice by this command, also as {other}; give each"
                        " output a name of its own"
                    )


def check_output_folder(
    path: Path,
    *,
    force: bool,
    is_ours: Callable[[str], bool],
    inputs: Iterable[Path] = (),
    outputs: Sequence[Path] = (),
) -> None:
    """Raises HotsplitError for an output that is not a folder, for one that is not empty (unless
    `force`), and for one with files that this command reads or has not written, or where it writes
    other `outputs`, since replacing it would delete them."""
    check_outputs(outputs, force=force, inputs=inputs, output_folders=[path])
    with writing(path):
        if path.name in ("", "..") or path.is_symlink() or (path.exists() and not path.is_dir()):
            raise HotsplitError(f"{path}: cannot be replaced by a folder; give another name")
        found = sorted(entry.name for entry in path.iterdir()) if path.exists() else []
    foreign = [name for name in found if not is_ours(name)]
    if foreign:
        raise HotsplitError(
            f"{path}: holds {foreign[0]!r}, which this command has not written; give a new folder"
        )
    if found and not force:
        raise HotsplitError(f"{path}: holds files already; give another name or --force")


def _check_holds_none(folder: Path, paths: Iterable[Path], verb: str) -> None:
    place = Path(os.path.realpath(folder))
    for path in paths:
        if place in (real := Path(os.path.realpath(path))).parents or place == real:
            raise HotsplitError(
                f"{folder}: holds {path}, which is {verb} by this command; give another folder"
            )


def _is_same(path: Path, other: Path) -> bool:
    """True for the same file, through links and for hard links as well."""
    # Path.exists raises PermissionError under a folder that may not be entered.
    if os.path.exists(path) and os.path.exists(other):  # noqa: PTH110
        return path.samefile(other)
    return os.path.realpath(path) == os.path.realpath(other)
