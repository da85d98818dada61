"""Text files as windows of token ids, in an order drawn from a seed.

What this module does not know: what the tokens are counted for."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sparkinfer.errors import SparkinferError
from sparkinfer.files import require_file, sha256_of
from sparkinfer.profile_file import Corpus
from sparkinfer.runtime.text import TextCodec

WINDOW = 512
MIN_WINDOW = 16  # the end of a file is left out where it is shorter


@dataclass(frozen=True, kw_only=True)
class Windows:
    ids: tuple[Tensor, ...]  # int64 [T] each, T up to WINDOW
    corpora: tuple[Corpus, ...]  # tokens used of each file

    @property
    def num_tokens(self) -> int:
        return sum(len(window) for window in self.ids)


def read_windows(
    files: Sequence[Path], codec: TextCodec, *, context_length: int, max_tokens: int, seed: int
) -> Windows:
    """Windows of all files, shuffled, up to `max_tokens` in all.

    Raises SparkinferError for a file that is missing, not UTF-8 text, or too short to count."""
    length = min(WINDOW, context_length)
    pieces: list[tuple[int, Tensor]] = []
    for number, path in enumerate(files):
        ids = torch.tensor(codec.encode(_read(path)), dtype=torch.int64)
        whole = [p for p in ids.split(length) if len(p) >= min(MIN_WINDOW, length)]
        if not whole:
            raise SparkinferError(
                f"{path}: {len(ids)} tokens, wanted {MIN_WINDOW} or more; give a longer text"
            )
        pieces += [(number, piece) for piece in whole]
    order = np.random.default_rng(seed).permutation(len(pieces))
    chosen, used, left = [], [0] * len(files), max_tokens
    for index in order.tolist():
        number, piece = pieces[index]
        if left < min(MIN_WINDOW, length):
            break
        piece = piece[:left]
        left -= len(piece)
        chosen.append(piece)
        used[number] += len(piece)
    corpora = tuple(
        Corpus(name=path.name, sha256=sha256_of(path), num_tokens=count)
        for path, count in zip(files, used, strict=True)
        if count
    )
    return Windows(ids=tuple(chosen), corpora=corpora)


def _read(path: Path) -> str:
    require_file(path, "text file (UTF-8)")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SparkinferError(f"{path}: not UTF-8 text (byte {error.start}); convert it") from error
    if not text.strip():
        raise SparkinferError(f"{path}: an empty corpus; give a file with text in it")
    return text
