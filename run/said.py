"""Which choices `run` has said before: digests in the cache's said.json, the newest last."""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hotsplit.files.atomic import partial_file
from hotsplit.run.keys import digest

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
