"""Values measured on this machine, in files of the cache folder. A file is a JSON object that maps
what a value holds for to the value.

Only speed depends on them: a file that cannot be read counts as empty, and what cannot be written
is measured again by the next process."""

import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hotsplit.errors import HotsplitError
from hotsplit.files.atomic import partial_file
from hotsplit.system.cache_place import cache_folder

log = logging.getLogger(__name__)
MOST_FILE_BYTES = 1 << 20
MOST_WAIT_S = 5.0  # for a process that adds a value, which takes milliseconds
_MOST_VALUES = 256  # in a file; the oldest go first


def kept_values(name: str) -> dict[str, object]:
    """The values of a file; empty if there is no usable one."""
    try:
        path = cache_folder() / name
        if not path.is_file() or path.stat().st_size > MOST_FILE_BYTES:
            return {}
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, HotsplitError):
        return {}
    return content if isinstance(content, dict) else {}


def keep_value(name: str, key: str, value: object) -> None:
    """Adds a value to a file, if the cache folder can be written. Values that other processes add
    at the same time are kept, too."""
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with _alone_in(folder):
            others = {k: v for k, v in kept_values(name).items() if k != key}
            content = dict([*others.items(), (key, value)][-_MOST_VALUES:])
            with partial_file(folder / name) as partial:
                partial.write_text(json.dumps(content, indent=1) + "\n")
    except (OSError, HotsplitError) as error:
        log.debug(f"{error}: each process measures {name} again")


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Waits until no other process adds a value. Raises BlockingIOError after MOST_WAIT_S. Where
    the file system has no locks, one of two values may be lost, and is measured again."""
    descriptor, deadline = os.open(folder, os.O_RDONLY), time.monotonic() + MOST_WAIT_S
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
            except OSError:
                break
        yield
    finally:
        os.close(descriptor)


def processor() -> str:
    """Vendor, family, model and name, as Linux reports them."""
    wanted = ("vendor_id", "cpu family", "model", "model name")
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return "unknown"
    values = dict(line.split(":", 1) for line in lines if ":" in line)
    found = {name.strip(): value.strip() for name, value in values.items()}
    return " ".join(found.get(name, "") for name in wanted)
