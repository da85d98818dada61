"""The text of a run: windows for evaluation, for the first limits, and for training."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from tokenizers import Tokenizer
from torch import Tensor

from hotsplit.errors import HotsplitError
from hotsplit.files.json_file import read_text
from hotsplit.profile.corpus.corpus import read_windows
from hotsplit.profile.corpus.sources import STDIN, find_sources
from hotsplit.runtime.text.codec import TextCodec
from hotsplit.sparsify.config import SparsifyConfig
from hotsplit.sparsify.stream import Stream
from hotsplit.tokens.tokenizer_text import read_tokenizer

MEASURED_WINDOWS = 16  # for the neurons' weights and the first limits; training uses them too
HELD_OUT_WINDOW = 512


@dataclass(frozen=True, kw_only=True)
class Texts:
    """`held_out` has the windows of each held-out file, or of a part of the corpus if there are
    none; the first text selects the best state. `training` never ends."""

    held_out: dict[str, tuple[Tensor, ...]]
    measured: tuple[Tensor, ...]
    training: Iterator[Tensor]

    @property
    def deciding(self) -> str:
        return next(iter(self.held_out))


def read_texts(config: SparsifyConfig, folder: Path) -> Texts:
    """Reads the texts of a run. Raises HotsplitError for a corpus that is stdin, too short, or not
    text."""
    codec = codec_of(folder)
    if STDIN in config.corpora:
        raise HotsplitError("-: the corpus is read more than once; give files, or a folder")
    sources = find_sources(config.corpora, config.text_key)
    encode = _encoder(codec.tokenizer)
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


def _encoder(tokenizer: Tokenizer) -> Callable[[list[str]], list[list[int]]]:
    def encode(texts: list[str]) -> list[list[int]]:
        return [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)]

    return encode
