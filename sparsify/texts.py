"""The text of a run: windows for evaluation, for the first limits, and for training.

The corpus is a stream of windows of equal length, in an order drawn by a seed. The blocks of all
files (see profile.corpus.sources) are read in the seed's order and their tokens are concatenated: no
token is padding, and a window may hold the end of one text and the beginning of another. When all
blocks have been read they are read again in another order. Held-out blocks come first in the first
order and are never read again."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hotsplit.errors import HotsplitError
from hotsplit.files.json_file import read_text
from hotsplit.profile.corpus.corpus import read_windows
from hotsplit.profile.corpus.sources import STDIN, Source, find_sources
from hotsplit.runtime.text.codec import TextCodec
from hotsplit.sparsify.config import SparsifyConfig
from hotsplit.tokens.tokenizer_text import read_tokenizer

Encode = Callable[[list[str]], list[list[int]]]
BATCH = 16  # blocks tokenised at a time


class Stream:
    """Windows of `length` tokens. The same arguments give the same windows."""

    def __init__(
        self, sources: Sequence[Source], encode: Encode, *, length: int, seed: int
    ) -> None:
        self.sources, self.encode, self.length, self.seed = sources, encode, length, seed
        self._first = np.cumsum([0, *(source.num_blocks for source in sources)])
        self.held_out: frozenset[int] = frozenset()

    def hold_out(self, num_tokens: int) -> list[Tensor]:
        """Windows with `num_tokens` tokens in all (fewer if the corpus has fewer), from blocks that
        `windows` then leaves out. The last window may be shorter than `length`."""
        places: list[int] = []
        ids: list[int] = []
        for place in self._order(0):
            if len(ids) >= num_tokens:
                break
            places.append(int(place))
            ids += self._ids([int(place)])
        self.held_out = frozenset(places)
        return list(torch.tensor(ids[:num_tokens]).split(self.length))

    def windows(self, *, least: int = 1) -> Iterator[Tensor]:
        """Yields windows, int64 [length], without end.

        Raises HotsplitError instead of repeating a corpus of fewer than `least` windows."""
        rest: list[int] = []
        num_given = 0
        for turn in count():
            places = [int(p) for p in self._order(turn) if int(p) not in self.held_out]
            for start in range(0, len(places), BATCH):
                rest += self._ids(places[start : start + BATCH])
                whole = len(rest) // self.length * self.length
                yield from torch.tensor(rest[:whole], dtype=torch.int64).view(-1, self.length)
                num_given += whole // self.length
                rest = rest[whole:]
            if num_given < least:
                fewer = ", or hold out fewer tokens of it" if self.held_out else ""
                raise HotsplitError(
                    f"{self.sources[0].path}: {num_given * self.length + len(rest):,} tokens to"
                    f" train on, wanted {least * self.length:,} or more; give a longer text{fewer}"
                )

    def _order(self, turn: int) -> np.ndarray:
        total = int(self._first[-1])
        return np.random.default_rng([self.seed, turn]).permutation(
            np.arange(total, dtype=np.uint32)
        )

    def _ids(self, places: Sequence[int]) -> list[int]:
        texts = []
        for place in places:
            number = int(np.searchsorted(self._first, place, side="right")) - 1
            texts.append("\n".join(self.sources[number].texts(place - int(self._first[number]))))
        return [token for ids in self.encode(texts) for token in ids]


MEASURED_WINDOWS = 16  # for the neurons' weights and the first limits; training uses them too
HELD_OUT_WINDOW = 512


@dataclass(frozen=True, kw_only=True)
class Texts:
    """`held_out` has the windows of each held-out file, or of a part of the corpus if there are
    none; the first text selects the best state. `training` never ends."""

    held_out: dict[str, tuple[Tensor, ...]]
    measured: tuple[Tensor, ...]
    training: Iterator[Tensor]


def read_texts(config: SparsifyConfig, folder: Path) -> Texts:
    """The texts of a run. Raises HotsplitError for a corpus that is stdin, short, or not text."""
    codec = codec_of(folder)
    if STDIN in config.corpora:
        raise HotsplitError("-: the corpus is read more than once; give files, or a folder")
    sources = find_sources(config.corpora, config.text_key)

    def encode(texts: list[str]) -> list[list[int]]:
        return [e.ids for e in codec.tokenizer.encode_batch(texts, add_special_tokens=False)]

    stream = Stream(sources, encode, length=config.window, seed=config.seed)
    held_out = {
        str(file): read_windows(
            [file], codec, context_length=HELD_OUT_WINDOW, max_tokens=config.held_out_tokens,
            seed=config.seed, text_key=config.text_key,
        ).ids
        for file in config.held_out
    }  # fmt: skip
    if not held_out:
        held_out = {"held out of the corpus": tuple(stream.hold_out(config.held_out_tokens))}
    windows = stream.windows(least=MEASURED_WINDOWS)
    measured = tuple(islice(windows, MEASURED_WINDOWS))
    return Texts(held_out=held_out, measured=measured, training=chain(measured, windows))


def up_to(windows: Sequence[Tensor], num_tokens: int) -> tuple[Tensor, ...]:
    """The first windows that together have this many tokens or more; all if they have fewer."""
    found: list[Tensor] = []
    for window in windows:
        if found and sum(map(len, found)) >= num_tokens:
            break
        found.append(window)
    return tuple(found)


def codec_of(folder: Path) -> TextCodec:
    """The checkpoint's tokenizer. Raises HotsplitError for a folder without a fast one."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise HotsplitError(
            f"{folder}: no tokenizer.json; save the tokenizer with save_pretrained of transformers"
        )
    text = read_text(file, "tokenizer.json")
    return TextCodec(read_tokenizer(str(file), text), None, frozenset())
