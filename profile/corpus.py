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
MIN_WINDOW = 16  # the end of a piece is left out where it is shorter
PIECE_CHARACTERS = 8192
BATCH = 64  # pieces tokenised at a time


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
    """Windows of all files, up to `max_tokens` in all, from places drawn from the seed.

    A text is cut at ends of lines into pieces, and only as many pieces are tokenised as needed.
    Raises SparkinferError for a file that is missing or not UTF-8 text, and for too little text."""
    pieces = [(number, p) for number, path in enumerate(files) for p in _pieces(_read(path))]
    order = np.random.default_rng(seed).permutation(len(pieces))
    length = min(WINDOW, context_length)
    chosen: list[Tensor] = []
    used, left = [0] * len(files), max_tokens
    for start in range(0, len(order), BATCH):
        batch = [pieces[index] for index in order[start : start + BATCH]]
        for (number, _), ids in zip(batch, codec.encode_many([t for _, t in batch]), strict=True):
            for window in torch.tensor(ids, dtype=torch.int64).split(length):
                window = window[:left]
                if len(window) >= min(MIN_WINDOW, length):
                    chosen.append(window)
                    used[number] += len(window)
                    left -= len(window)
        if left < MIN_WINDOW:
            break
    if not chosen:
        raise SparkinferError(
            f"{files[0]}: fewer than {MIN_WINDOW} tokens in all; give a longer text"
        )
    corpora = tuple(
        Corpus(name=path.name, sha256=sha256_of(path), num_tokens=count)
        for path, count in zip(files, used, strict=True)
        if count
    )
    return Windows(ids=tuple(chosen), corpora=corpora)


def _pieces(text: str) -> list[str]:
    """The text in pieces of about PIECE_CHARACTERS, cut behind ends of lines where there are any."""
    pieces, start = [], 0
    while start < len(text):
        end = min(start + PIECE_CHARACTERS, len(text))
        newline = text.rfind("\n", start, end)
        if end < len(text) and newline > start:
            end = newline + 1
        pieces.append(text[start:end])
        start = end
    return pieces


def _read(path: Path) -> str:
    require_file(path, "text file (UTF-8)")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SparkinferError(f"{path}: not UTF-8 text (byte {error.start}); convert it") from error
    if not text.strip():
        raise SparkinferError(f"{path}: an empty corpus; give a file with text in it")
    return text
