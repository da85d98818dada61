"""The cache folder of `hotsplit run`: one folder per artifact, named by its key.

    CACHE/model-0123456789abcdef01234567/   entry.json, lock, and the artifact's files
    CACHE/rates.json                        see hotsplit.run.rates
    CACHE/said.json                         which choices were said before
    CACHE/prefetch-distance.json            see hotsplit.runtime.kernels.prefetch_distance

An artifact exists once its entry.json does, which is written last; before that, its folder may hold
the state from which an interrupted stage resumes. Users of an artifact hold its lock shared; to
make or remove it takes the exclusive lock, so that concurrent runs make nothing twice and nothing
in use is removed. `stages` makes the keys, from the identities in `keys`."""

import fcntl
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from hotsplit.errors import HotsplitError
from hotsplit.files.atomic import NO_ROOM, partial_file
from hotsplit.run.keys import STAGES, digest
from hotsplit.system.cache_place import VARIABLE, cache_folder, unwritable

FORMAT, VERSION = "hotsplit.cache-entry", 1
ENTRY, LOCK = "entry.json", "lock"
# Does not follow a symbolic link, and does not block on a named pipe.
LOCKING = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
_DAMAGED = (
    OSError,
    ArithmeticError,
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    RecursionError,
)
Say = Callable[[str], None]
# Makes an artifact in a folder; the returned mapping is stored in the entry as facts.
Make = Callable[[Path], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An existing artifact. `seconds` is the time to make it, `facts` the result of its stage."""

    folder: Path
    kind: str
    version: tuple[int, ...]  # of this layout and of the stage that made it
    source: str
    seconds: float
    sizes: Mapping[str, int]  # of its files, by name within the folder
    facts: Mapping[str, Any]

    @property
    def file(self) -> Path:
        """The file that other commands take."""
        return self.folder / STAGES[self.kind].file

    @property
    def is_current(self) -> bool:
        return self.kind in STAGES and self.version == current_version(self.kind)

    @property
    def is_whole(self) -> bool:
        """True if its files have their sizes and the facts that its stage needs are there."""
        facts = STAGES[self.kind].facts if self.kind in STAGES else ()
        found = [(self.facts.get(name), least) for name, least in facts]
        return all(_size(self.folder / name) == size for name, size in self.sizes.items()) and all(
            isinstance(fact, int | float) and least <= fact < float("inf") for fact, least in found
        )


def current_version(kind: str) -> tuple[int, ...]:
    return VERSION, *STAGES[kind].version


def read_entry(folder: Path) -> Entry | None:
    """The entry in a folder, of any version; None if there is none or it is damaged."""
    try:
        if not (folder / ENTRY).is_file():  # reading a named pipe would block
            return None
        values = json.loads((folder / ENTRY).read_text(encoding="utf-8"))
        if values["format"] != FORMAT:
            return None
        return Entry(
            folder=folder,
            kind=str(values["kind"]),
            version=tuple(map(int, values["version"])),
            source=str(values["source"]),
            seconds=float(values["seconds"]),
            sizes={str(name): int(size) for name, size in values["sizes"].items()},
            facts=dict(values["facts"]),
        )
    except _DAMAGED:
        return None


@dataclass
class RunCache:
    """The open cache. It holds the locks of the artifacts that it hands out until it is closed."""

    folder: Path
    say: Say = lambda line: None
    _held: dict[Path, int] = field(default_factory=dict)
    _read: dict[Path, int] = field(default_factory=dict)  # files accepted, with their times
    _refused: set[Path] = field(default_factory=set)

    @classmethod
    def open(cls, say: Say = lambda line: None) -> "RunCache":
        """Opens the cache. Raises HotsplitError if its folder is not writable."""
        folder = cache_folder()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=folder).close()
        except OSError as error:
            raise unwritable(folder, error) from error
        return cls(folder, say)

    def __enter__(self) -> "RunCache":
        return self

    def __exit__(self, *error: object) -> None:
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()

    def place(self, kind: str, key: Mapping[str, Any]) -> Path:
        """The folder of an artifact, which need not exist. Each version of a stage has its own
        folders, so that another version's artifacts are never used."""
        return self.folder / f"{kind}-{digest([kind, current_version(kind), key])}"

    def find(self, kind: str, key: Mapping[str, Any]) -> Entry | None:
        """An artifact if it exists, without locking it. One that its reader refuses counts as
        missing, and a line says so."""
        found = read_entry(self.place(kind, key))
        if found is None or not (found.is_current and found.is_whole and self._can_be_read(found)):
            return None
        return found

    def _can_be_read(self, entry: Entry) -> bool:
        stage = STAGES[entry.kind]
        if stage.load is None:
            return True
        path = entry.file
        try:
            changed = path.stat().st_mtime_ns
            if self._read.get(path) != changed:
                stage.load(path)
                self._read[path] = changed
        except (HotsplitError, OSError) as error:
            if path not in self._refused:
                self._refused.add(path)
                self.say(f"{stage.what} in the cache must be made again: {error}")
            return False
        return True

    def obtain(self, kind: str, key: Mapping[str, Any], source: str, make: Make) -> Entry:
        """The artifact, made if it does not exist, and locked until the cache is closed. Waits if
        another run is making it. Exceptions of `make` pass through."""
        folder = self.place(kind, key)
        if folder in self._held:
            if (found := self.find(kind, key)) is not None:
                return found
            self._release(folder)  # damaged meanwhile; making it again takes the exclusive lock
        while True:
            self._lock(folder, fcntl.LOCK_SH)
            if (found := self.find(kind, key)) is not None:
                with suppress(OSError):
                    os.utime(folder / ENTRY)  # the time of last use
                return found
            self._release(folder)
            self._lock(folder, fcntl.LOCK_EX)
            try:
                if self.find(kind, key) is None:
                    self._make(kind, folder, source, make)
            except BaseException:
                with suppress(OSError):  # a stage that left nothing to resume from
                    if [path.name for path in folder.iterdir()] == [LOCK]:
                        (folder / LOCK).unlink()
                        folder.rmdir()
                raise
            finally:
                self._release(folder)

    def _make(self, kind: str, folder: Path, source: str, make: Make) -> None:
        began = time.perf_counter()
        with suppress(FileNotFoundError):
            (folder / ENTRY).unlink()  # until it is made again, there is no artifact
        try:
            facts = make(folder)
        except OSError as error:
            if error.errno in NO_ROOM and error.filename is None:
                raise unwritable(folder, error) from error
            raise
        stage = STAGES[kind]
        if stage.load is not None:
            stage.load(folder / stage.file)  # no entry for a file that its reader refuses
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        sizes = {
            path.relative_to(folder).as_posix(): path.stat().st_size
            for path in files
            if path.name not in (ENTRY, LOCK) and not path.name.endswith(".partial")
        }
        content = {
            "format": FORMAT,
            "version": current_version(kind),
            "kind": kind,
            "source": source,
            "seconds": time.perf_counter() - began,
            "sizes": sizes,
            "facts": dict(facts),
        }
        with partial_file(folder / ENTRY) as partial:
            partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def _lock(self, folder: Path, how: int) -> None:
        is_told = False
        while True:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(folder / LOCK, LOCKING, 0o666)
            except FileNotFoundError:  # another run is removing it
                continue
            except OSError as error:
                raise HotsplitError(
                    f"{folder}: cannot be written: {error.strerror}; {VARIABLE} names another"
                    " folder"
                ) from error
            try:
                if not try_lock(descriptor, how):
                    if not is_told:
                        what = STAGES[folder.name.rpartition("-")[0]].what
                        self.say(f"another run is at work on {what}; waiting for it")
                        is_told = True
                    fcntl.flock(descriptor, how)
                if _is_same(descriptor, folder / LOCK):
                    self._held[folder] = descriptor
                    return
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def _release(self, folder: Path) -> None:
        os.close(self._held.pop(folder))


def try_lock(descriptor: int, how: int) -> bool:
    """Tries to lock a file; false if a conflicting lock is held, as a rule by another process. True
    also where the file system has no locks: two runs may then do the same work, but each writes its
    files whole."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _is_same(descriptor: int, path: Path) -> bool:
    """True if `path` still names the open file."""
    try:
        there = path.stat()
    except OSError:
        return False
    ours = os.fstat(descriptor)
    return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except (OSError, ValueError):  # a name that no file can have
        return None


FILE = "said.json"
MOST = 1000


def is_new(folder: Path, source: str, lines: Sequence[str]) -> bool:
    """True if these lines were not said of this source before; from now on they were. A file that
    cannot be read counts as empty, and one that cannot be written is left."""
    name, found = digest([source, list(lines)]), list[str]()
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads((folder / FILE).read_text(encoding="utf-8"))
        found = (
            [each for each in content if isinstance(each, str)] if isinstance(content, list) else []
        )
    if name in found:
        return False
    with suppress(OSError), partial_file(folder / FILE) as partial:
        partial.write_text(json.dumps([*found, name][-MOST:]) + "\n", encoding="utf-8")
    return True
