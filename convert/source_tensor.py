"""One tensor of a checkpoint, from any kind of file."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SourceTensor:
    """`read` returns the stored weights, a view of the mapped file if possible.

    `same_as` is set for tied weights in a pickle: of several names of the same values, all but the
    alphabetically last refer to the last. Otherwise it is None."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it: "F32", "BF16"
    read: Callable[[], Tensor]
    same_as: str | None = None
