"""Lists and clears the cache of `hotsplit run`: only our own files that are not in use."""

import fcntl
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal, get_args

from hotsplit.errors import HotsplitError
from hotsplit.run.cache_folder import ENTRY, LOCK, LOCKING, read_entry, try_lock
from hotsplit.run.cache_folder import FILE as SAID
from hotsplit.run.keys import STAGES
from hotsplit.run.rates import FILE as RATES
from hotsplit.system.cache_place import GRIDS_FILE, PREFETCH_FILE, ROWS_FILE

State = Literal["ready", "unfinished", "stale"]
NAME = re.compile(r"([a-z]+)-[0-9a-f]{24}")
PARTIAL = re.compile(r".+\.[0-9a-f]{8}\.(partial|old)")


@dataclass(frozen=True, kw_only=True)
class CachedArtifact:
    """A folder of the cache. `last_used` is in seconds since 1970; `source` is "" if unknown;
    `file`, which other commands take, is "" unless the artifact is ready."""

    name: str
    kind: str
    state: State
    num_bytes: int
    last_used: float
    source: str
    file: str
    is_in_use: bool


@dataclass(frozen=True, kw_only=True)
class Cleared:
    """The result of `clear`. `kept` has (name, reason) of artifacts that could not be removed."""

    removed: tuple[str, ...]
    num_bytes: int
    kept: tuple[tuple[str, str], ...]


def list_cache(cache: Path) -> tuple[CachedArtifact, ...]:
    """The artifacts, most recently used first; files that are not ours are not listed."""
    found = [_artifact_in(folder) for folder in _folders(cache)]
    return tuple(sorted(found, key=lambda s: s.last_used, reverse=True))


def clear(cache: Path, names: Sequence[str] = ()) -> Cleared:
    """Removes artifacts: all, or those with these names (of a folder, a kind, a source or a state).
    Removing all includes the rates and what was said. Raises HotsplitError for a name that matches
    nothing, unless it is a kind or a state."""
    artifacts = list_cache(cache)
    for name in names:
        is_class = name in STAGES or name in get_args(State)
        if not is_class and not any(_has_name(s, name) for s in artifacts):
            raise HotsplitError(
                f"{name!r}: nothing in {cache} has this name or comes from this source, so nothing"
                " was removed; hotsplit cache list shows all there is"
            )
    chosen = [s for s in artifacts if not names or any(_has_name(s, name) for name in names)]
    removed, kept, count = [], [], 0
    for each in chosen:
        why = _remove(cache / each.name)
        if why is None:
            removed.append(each.name)
            count += each.num_bytes
        else:
            kept.append((each.name, why))
    if not names:
        for file in (RATES, SAID, PREFETCH_FILE, ROWS_FILE, GRIDS_FILE):
            with suppress(OSError):
                (cache / file).unlink()
    return Cleared(removed=tuple(removed), num_bytes=count, kept=tuple(kept))


def _has_name(artifact: CachedArtifact, name: str) -> bool:
    return name in (artifact.name, artifact.kind, artifact.source, artifact.state) or (
        bool(artifact.source) and Path(artifact.source).name == name
    )


def _folders(cache: Path) -> Iterator[Path]:
    """The folders that `run` made: not links, named as it names them, with a lock or an entry."""
    try:
        inside = sorted(cache.iterdir())
    except FileNotFoundError:
        return
    except OSError as error:
        raise HotsplitError(f"{cache}: cannot be read: {error.strerror}") from error
    for folder in inside:
        if not NAME.fullmatch(folder.name) or folder.is_symlink() or not folder.is_dir():
            continue
        if (folder / LOCK).is_file() or read_entry(folder) is not None:
            yield folder


def _artifact_in(folder: Path) -> CachedArtifact:
    entry = read_entry(folder)
    kind = folder.name.rpartition("-")[0]
    if kind not in STAGES or (entry is not None and not entry.is_current):
        state: State = "stale"
    else:
        state = "ready" if entry is not None and entry.is_whole else "unfinished"
    sizes, times = [0], [0.0]
    for path in folder.rglob("*"):
        with suppress(OSError):
            stat = path.lstat()
            sizes.append(stat.st_size)
            times.append(stat.st_mtime)
    return CachedArtifact(
        name=folder.name,
        kind=kind,
        state=state,
        num_bytes=sum(sizes),
        last_used=max(times),
        source=entry.source if entry else "",
        file=STAGES[kind].file if state == "ready" else "",
        is_in_use=_is_in_use(folder),
    )


def _is_in_use(folder: Path) -> bool:
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return not try_lock(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> str | None:
    """Removes an artifact; returns why it could not, None if it is gone."""
    try:
        descriptor = os.open(folder / LOCK, LOCKING, 0o666)
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"cannot be removed: {error.strerror}"
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return "in use"
        except OSError:
            return "files cannot be locked here, so it may be in use; remove it by hand"
        return _remove_ours(folder)
    except OSError as error:
        return f"cannot be removed: {error.strerror}"
    finally:
        os.close(descriptor)


def _remove_ours(folder: Path) -> str | None:
    """Removes our files, the entry first: the rest is no artifact. Returns why any is left."""
    (folder / ENTRY).unlink(missing_ok=True)
    foreign = []
    for path in sorted(folder.rglob("*"), key=lambda p: len(p.parts), reverse=True):
        name = path.relative_to(folder).as_posix()
        if name == LOCK:
            continue
        if not _is_ours(folder, name):
            foreign.append(name)
        elif path.is_dir() and not path.is_symlink():
            with suppress(OSError):  # it contains files that are not ours
                path.rmdir()
        else:
            path.unlink(missing_ok=True)
    if foreign:
        return f"{foreign[0]!r} in it is not ours; the rest was removed"
    (folder / LOCK).unlink()
    folder.rmdir()
    return None


def _is_ours(folder: Path, name: str) -> bool:
    """True if the folder's stage, or of an unknown kind any stage, writes files of that name."""
    stage = STAGES.get(folder.name.rpartition("-")[0])
    stages = [stage] if stage else STAGES.values()
    patterns = [pattern for each in stages for pattern in (each.file, *each.more_files)]
    plain = name.rpartition(".")[0].rpartition(".")[0] if PARTIAL.fullmatch(name) else name
    return plain == ENTRY or any(fnmatch(plain, pattern) for pattern in patterns)
