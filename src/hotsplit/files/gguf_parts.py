"""The parts of a GGUF in several files, as llama-gguf-split and gguf's writer make them.

GgufPart 1 has the keys of the model, the others only those of the division; each has some of the
tensors. The parts lie in one folder, and are found by the name of part 1:
NAME-00001-of-00003.gguf."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING

from hotsplit.errors import HotsplitError
from hotsplit.files.typed import shown

if TYPE_CHECKING:
    from hotsplit.files.gguf_file import GgufFile

# As gguf spells them, whose import takes too long for a module that every command imports.
SPLIT_KEYS = NUMBER, COUNT, NUM_TENSORS = "split.no", "split.count", "split.tensors.count"
NAME_FORMAT = "{:s}-{:05d}-of-{:05d}.gguf"
_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
MOST_NAMED = 5  # of the missing parts
# Pieces of a file that was cut anywhere, because a hub took none of more than 50 GB.
_PIECE = re.compile(r"(.*\.gguf)(\.part\d+of\d+|[.-](?:split|part)-?[a-z]+)")


@dataclass(frozen=True, kw_only=True)
class GgufPart:
    """What a file says about the division: `number` counts from 1."""

    number: int
    count: int
    num_tensors: int | None  # of all parts together

    @classmethod
    def of(cls, path: Path, keys: Mapping[str, object]) -> "GgufPart | None":
        """None for a whole file. Raises HotsplitError for impossible numbers."""
        numbers: dict[str, int] = {}
        for name in SPLIT_KEYS:
            value = keys.get(name, 0)
            if not isinstance(value, Integral) or isinstance(value, bool) or value < 0:
                raise HotsplitError(
                    f"{path}: {name} is {shown(value)}, wanted a number of parts or tensors;"
                    " download the file again"
                )
            numbers[name] = int(value)
        number, count = numbers[NUMBER] + 1, numbers[COUNT]
        if count <= 1:
            return None
        if number > count:
            raise HotsplitError(
                f"{path}: says that it is part {number} of {count}; download the file again"
            )
        return cls(number=number, count=count, num_tensors=numbers[NUM_TENSORS] or None)

    def name(self, stem: str, number: int) -> str:
        return NAME_FORMAT.format(stem, number, self.count)


def part_paths(path: Path) -> list[Path]:
    """`path` and, if it is named as part 1 of several, the others that exist. Opens no file."""
    found = _NAME.fullmatch(path.name)
    if found is None or int(found[2]) != 1:
        return [path]
    others = (
        path.with_name(NAME_FORMAT.format(found[1], number, int(found[3])))
        for number in range(2, int(found[3]) + 1)
    )
    return [path, *(other for other in others if other.is_file())]


def num_bytes_of(path: Path) -> int:
    """The bytes of all files of a model."""
    return sum(part.stat().st_size for part in part_paths(path))


def other_parts(path: Path, part: GgufPart) -> list[Path]:
    """The paths of parts 2 and up of the model whose part 1 is `path`. Raises HotsplitError for a
    later part, a name by which the others cannot be found, and missing parts."""
    found = _NAME.fullmatch(path.name)
    if found is None or int(found[3]) != part.count:
        raise HotsplitError(
            f"{path}: is part {part.number} of {part.count} of a model, and the others are found by"
            f" its name, which must end in {part.name('', part.number)}; give the files their names"
            " again"
        )
    _check_place(path, part, int(found[2]))
    if part.number != 1:
        raise HotsplitError(
            f"{path}: is part {part.number} of {part.count} of a model; give part 1,"
            f" {path.with_name(part.name(found[1], 1))}"
        )
    names = [part.name(found[1], number) for number in range(2, part.count + 1)]
    missing = [name for name in names if not path.with_name(name).is_file()]
    if missing:
        more = f" and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
        raise HotsplitError(
            f"{path}: {len(missing)} of its {part.count} parts are missing:"
            f" {', '.join(missing[:MOST_NAMED])}{more}; download them into {path.parent}"
        )
    return [path.with_name(name) for name in names]


def check_parts(files: Mapping[Path, "GgufFile"]) -> None:
    """Raises HotsplitError unless the files are all the parts of one model in order."""
    first, *_ = files
    wanted = GgufPart.of(first, files[first].keys)
    assert wanted is not None
    holders: dict[str, Path] = {}
    for number, (path, file) in enumerate(files.items(), start=1):
        part = GgufPart.of(path, file.keys)
        if part is None:
            raise HotsplitError(f"{path}: is a whole file, wanted part {number} of {first}")
        if (why := _difference(part, wanted, file.keys, files[first].keys)) is not None:
            raise HotsplitError(
                f"{path}: is a part of another model than {first}: {why}; download it again"
            )
        _check_place(path, part, number)
        for name in file.tensors:
            if (holder := holders.setdefault(name, path)) != path:
                raise HotsplitError(
                    f"{path}: holds {shown(name)}, which {holder} holds too: they are not parts of"
                    " one model; download both again"
                )
    if wanted.num_tensors not in (None, len(holders)):
        raise HotsplitError(
            f"{first}: its {wanted.count} parts have {len(holders)} tensors together, wanted"
            f" {wanted.num_tensors}; download all of them again"
        )


def _check_place(path: Path, part: GgufPart, number: int) -> None:
    if part.number != number:
        raise HotsplitError(
            f"{path}: is named as part {number} of {part.count}, but says that it is part"
            f" {part.number}; give the parts their own names, or download them again"
        )


def _difference(
    part: GgufPart, wanted: GgufPart, keys: Mapping[str, object], first: Mapping[str, object]
) -> str | None:
    """Why a part is not of the model of part 1; None if nothing says so."""
    if part.count != wanted.count:
        return f"of {part.count} parts instead of {wanted.count}"
    if part.num_tensors != wanted.num_tensors:
        return f"of {part.num_tensors} tensors instead of {wanted.num_tensors}"
    other = next((k for k, v in keys.items() if k != NUMBER and k in first and first[k] != v), None)
    return (
        None
        if other is None
        else f"{other} is {shown(keys[other])} instead of {shown(first[other])}"
    )


def raw_cut_of(path: Path) -> str | None:
    """What to do with a piece of a GGUF cut anywhere, known by its name; None for another."""
    match = _PIECE.fullmatch(path.name)
    if match is None:
        return None
    whole, pieces = match[1], re.sub(r"\d+(?=of)|[a-z]$", "*", match[2])
    return (
        f"is by its name one piece of {whole}, which was cut anywhere; join its pieces in order, as"
        f" cat {whole}{pieces} > {whole} does"
    )
