"""The texts that a model is profiled on: the user's, or by default the one in the package."""

import hashlib
import lzma
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hotsplit.files.atomic import partial_file
from hotsplit.run.cache_folder import Cache
from hotsplit.run.keys import STAGES, identity_of_texts

PACKED = Path(__file__).with_name("corpus") / "default.txt.xz"


def identity(corpora: Sequence[Path]) -> str:
    if corpora:
        return identity_of_texts(corpora)
    return hashlib.sha256(PACKED.read_bytes()).hexdigest()[:24]


def files(corpora: Sequence[Path], cache: Cache) -> tuple[Path, ...]:
    """Paths of the texts; the package's own is unpacked into the cache."""
    if corpora:
        return tuple(corpora)
    entry = cache.obtain("corpus", {"text": identity(())}, "the package", _unpack)
    return (entry.file,)


def _unpack(folder: Path) -> Mapping[str, Any]:
    with partial_file(folder / STAGES["corpus"].file) as partial:
        partial.write_bytes(lzma.decompress(PACKED.read_bytes()))
    return {}
