"""One tensor of a checkpoint, whatever kind of file it is in."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SourceTensor:
    """`read` gives the weights as they are stored, a view of the mapped file where it can.

    `same_as` names another tensor of the file that is these very bytes (tied weights, pickled),
    None where there is none; of several such names all but the last in order of name have it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it: "F32", "BF16"
    read: Callable[[], Tensor]
    same_as: str | None = None
