"""One tensor of a checkpoint, from any kind of file."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SourceTensor:
    """`read` returns the stored weights, a view of the mapped file if possible.

    `same_as` names another tensor of the file with these very bytes (tied weights, pickled), None
    if there is none; among several such names all but the last in name order have it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it: "F32", "BF16"
    read: Callable[[], Tensor]
    same_as: str | None = None
