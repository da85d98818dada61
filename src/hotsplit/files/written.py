"""The output of a conversion, and how to read it back with the source's names and in its layout.

Here, so that `convert`, which makes it, and `profile`, which checks it, stay apart."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A tensor of the source, as it is in the written file: f32, in the source's orientation.
    `rows` are the rows of the source that `values` hold, or None for all of them. Of experts, the
    values are those of one, and `tensor` is the name of all of them in the stock layout."""

    source: str
    rows: np.ndarray | None
    values: np.ndarray
    expert: int | None = None
    tensor: str = ""


@dataclass(frozen=True, kw_only=True)
class Written:
    """`source` is a checkpoint folder or a GGUF; `path` is where the file is before it is renamed
    to `output`. `restored` yields the tensors of the source that the file was made from (of a fused
    one, each part), except predictors and limits. It raises HotsplitError for one whose values
    differ from the source's by more than the rounding of its type."""

    source: Path
    path: Path
    output: Path
    restored: Callable[[], Iterator[Restored]]
