"""Keeps the results of checking GPUs in the user's cache folder.

    CACHE/device-checks/0123456789abcdef01234567.json   one file per key (DeviceKey)

A verdict is about one part, such as pinned memory, a kernel in one variant, or the graph of a
plan's step. Before a part is tried, its name is stored as `started`; the verdict removes it. A name that
is found while no process holds the file's lock was left by a process that died during the check, so
its part counts as failed. A damaged file, or one of another format, version or key, is ignored and
rewritten. The checks themselves are in hotsplit.runtime.check."""

import fcntl
import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self, TypeVar

from hotsplit.errors import HotsplitError
from hotsplit.files.atomic import partial_file
from hotsplit.system.cache_place import cache_folder

FORMAT, VERSION = "hotsplit.device-check", 1
FOLDER = "device-checks"
DIED = "the process ended during an earlier check of it"
MOST_BYTES = 4 << 20
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class DeviceKey:
    """The device and the software for which a file's verdicts are valid."""

    index: int  # the device's number in its process
    device: str  # its name
    capability: str  # e.g. "8.9"
    memory_bytes: int
    driver: str
    torch: str
    triton: str  # "" without Triton
    package: str  # this package's version

    @property
    def digest(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:24]


def installed_version(package: str) -> str:
    """The version of a package; "" if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of checking one part; `why` is "" if it is fine."""

    part: str
    why: str
    seconds: float

    @property
    def is_fine(self) -> bool:
        return not self.why


def name_of_part(part: str) -> str:
    """The name of a part without a plan's digest, with which names of steps and graphs end."""
    has_digest = part.startswith(
        ("step ", "steps ", "graph ", "graphs ", "passes ", "overlapping ")
    )
    return part.rpartition(" ")[0] if has_digest else part


R = TypeVar("R", DeviceKey, Verdict)


@dataclass(frozen=True, kw_only=True)
class Checks:
    """The content of one file."""

    key: DeviceKey
    started: str | None
    verdicts: dict[str, Verdict]


def read_checks(path: Path) -> Checks | None:
    """The content of a file; None for one that is missing, damaged or of another kind."""
    try:
        if not path.is_file() or path.stat().st_size > MOST_BYTES:
            return None
        values = json.loads(path.read_text(encoding="utf-8"))
        if (values["format"], values["version"]) != (FORMAT, VERSION):
            return None
        key = _record(DeviceKey, values["key"])
        found = [_record(Verdict, each) for each in values["verdicts"]]
        started = values["started"]
        if key.digest != path.stem or not isinstance(started, str | None):
            return None
        return Checks(key=key, started=started, verdicts={each.part: each for each in found})
    except (OSError, LookupError, ValueError, TypeError, AttributeError, RecursionError):
        return None


def _record(kind: type[R], values: dict[str, Any]) -> R:
    """A record of these values. Raises TypeError or ValueError for missing, unknown or mistyped
    ones, and for texts that are not printable."""
    made = kind(**values)
    for each in fields(kind):
        value = getattr(made, each.name)
        if type(value) is not each.type or (isinstance(value, str) and not value.isprintable()):
            raise ValueError(each.name)
    return made


def stored_checks() -> list[Checks]:
    """The content of every readable file, most recently written first."""
    try:
        paths = sorted((cache_folder() / FOLDER).glob("*.json"), key=_written_at, reverse=True)
    except (OSError, HotsplitError):
        return []
    return [checks for path in paths if (checks := read_checks(path)) is not None]


def _written_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # a link to nothing, or a file that was just removed
        return 0.0


def forget_checks(cache: Path | None = None) -> None:
    """Removes all results in a cache folder; None: the user's."""
    with suppress(HotsplitError):
        for path in ((cache or cache_folder()) / FOLDER).glob("*.json"):
            with suppress(OSError):
                path.unlink()


@dataclass(eq=False)
class CheckBook:
    """The results for one device, open for checks: within its `with` block it holds the file's
    lock.

    If the cache folder cannot be written, results are kept only in memory."""

    key: DeviceKey
    say: Say = lambda line: None
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    _path: Path | None = None
    _lock: int | None = None

    def __enter__(self) -> Self:
        try:
            folder = cache_folder() / FOLDER
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{self.key.digest}.json"
            self._lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o666)
            self._wait()
            self._path = path
        except (OSError, HotsplitError) as error:
            reason = getattr(error, "strerror", None) or error
            self.say(f"the cache folder cannot be written ({reason}), so the GPU is checked at every"
                     " load")  # fmt: skip
            return self
        found = read_checks(path)
        if found is not None:
            self.verdicts = dict(found.verdicts)
            if found.started is not None:
                self.finish(Verdict(part=found.started, why=DIED, seconds=0.0))
        return self

    def __exit__(self, *error: object) -> None:
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None

    def known(self, part: str) -> Verdict | None:
        return self.verdicts.get(part)

    def start(self, part: str) -> None:
        """Notes that a part is being checked, in case the check kills the process."""
        self._save(part)

    def finish(self, verdict: Verdict) -> None:
        self.verdicts[verdict.part] = verdict
        self._save(None)

    def give_up(self) -> None:
        """Withdraws `start` without a verdict."""
        self._save(None)

    def _wait(self) -> None:
        """Takes the lock; if files cannot be locked, two processes may check the same part."""
        assert self._lock is not None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.say("another process is checking this GPU; waiting for it")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError:
            pass

    def _save(self, started: str | None) -> None:
        if self._path is None:
            return
        content = {
            "format": FORMAT, "version": VERSION, "key": asdict(self.key), "started": started,
            "verdicts": [asdict(verdict) for verdict in self.verdicts.values()],
        }  # fmt: skip
        try:
            with partial_file(self._path) as partial:
                partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        except (OSError, HotsplitError) as error:
            self._path = None
            self.say(f"the results of the GPU check cannot be saved: {error}")
