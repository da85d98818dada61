"""Reads and writes OUTPUT.resume: the position of a run, from which the same command can continue.

Specified in docs/formats.md."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import load, save

from hotsplit.errors import HotsplitError, about
from hotsplit.files.declared import Count, read_declared
from hotsplit.files.safetensors_file import load_arrays, save_arrays

if TYPE_CHECKING:
    from hotsplit.profile.corpus.processes import Ranks

FORMAT, VERSION = "hotsplit.resume", 1
SAVE_EVERY_S = 60.0
Settings = dict[str, str | int | float | bool | None]


@dataclass(frozen=True, kw_only=True)
class Position:
    """How far a run has come: `done` windows of phase `phase`, with the `arrays` of all parts."""

    phase: int = 0
    done: int = 0
    arrays: dict[str, np.ndarray] = field(default_factory=dict)

    def of_part(self, part: str) -> dict[str, np.ndarray]:
        """The arrays of one part of the run, by their names in that part; {} if it has none."""
        prefix = part + "/"
        return {k.removeprefix(prefix): a for k, a in self.arrays.items() if k.startswith(prefix)}

    def digest(self) -> str:
        """Digest of the position and every array, since a damaged file would give wrong counts."""
        found = hashlib.blake2b(f"{self.phase} {self.done}".encode())
        for name in sorted(self.arrays):
            array = np.ascontiguousarray(self.arrays[name])
            found.update(f"\n{name} {array.dtype} {array.shape}\n".encode())
            found.update(array.data if array.size else b"")
        return found.hexdigest()

    def to_bytes(self) -> bytes:
        place = np.array([self.phase, self.done], np.int64)
        return save({"place": place, **{"/" + name: a for name, a in self.arrays.items()}})

    @classmethod
    def from_bytes(cls, data: bytes) -> "Position":
        arrays = load(data)
        phase, done = (int(value) for value in arrays.pop("place"))
        return cls(phase=phase, done=done, arrays={k[1:]: a for k, a in arrays.items()})


@dataclass(frozen=True, kw_only=True)
class _ResumeHeader:
    """The metadata of the file."""

    settings: dict[str, Any]
    phase: Count
    done: Count
    digest: str


def resume_path(output: Path) -> Path:
    return output.with_name(output.name + ".resume")


def save_position(path: Path, settings: Settings, position: Position) -> None:
    metadata = {
        "settings": settings,
        "phase": position.phase,
        "done": position.done,
        "digest": position.digest(),
    }
    save_arrays(path, FORMAT, VERSION, metadata, position.arrays)


def load_position(path: Path, settings: Settings, ranks: "Ranks", *, force: bool) -> Position:
    """The position of a run, in every process; the first one reads the file. That of the beginning
    if there is no file or, with `force`, none that fits. Without `force`, raises HotsplitError for
    a damaged file, and for one of another run: with another model, corpus, seed or other
    settings."""
    found = ranks.first_only(lambda: _load(path, settings, force)) or Position()
    if ranks.size == 1:
        return found
    return Position.from_bytes(ranks.spread_bytes(found.to_bytes() if ranks.is_first else None))


def _load(path: Path, settings: Settings, force: bool) -> Position | None:
    if not path.exists():
        return None
    try:
        metadata, arrays = load_arrays(path, FORMAT, VERSION)
        with about(path):
            header = read_declared(_ResumeHeader, metadata)
        if header.settings.keys() != settings.keys():
            raise HotsplitError(f"{path}: was written by another version of this program")
        for key, value in settings.items():
            if (begun := header.settings[key]) != value:
                raise HotsplitError(
                    f"{path}: was begun with {key} {_short(begun)}, this run has {_short(value)}"
                )
        position = Position(phase=header.phase, done=header.done, arrays=arrays)
        if position.digest() != header.digest:
            raise HotsplitError(f"{path}: is damaged (its contents are not what was saved)")
    except HotsplitError as error:
        if force:
            return None
        raise HotsplitError(f"{error}; delete it, or start over with --force") from error
    return position


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
