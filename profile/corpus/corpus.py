"""Corpora as windows of token ids, from places drawn by a seed.

Places are drawn as follows. The blocks of all files (see profile.corpus.sources) form one list,
files in the given order and those of a folder in sorted order; the seed permutes the blocks, and
they are read in that order until there are enough tokens. A block yields one stretch of each of its
texts: short texts are joined up to STRETCH characters, and a longer one yields a stretch of about
that length in each round over all blocks, so that a few long documents do not crowd out the rest.

With a chat template every paragraph becomes a user message, and a window is one conversation of
one message; the tokens that the template adds are run but not counted.

Letters: T tokens."""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.profile_file import Corpus
from hotsplit.errors import HotsplitError
from hotsplit.profile.corpus.processes import Ranks
from hotsplit.profile.corpus.sources import CorpusFile, find_sources, sha256_of_text, stdin_as_file
from hotsplit.runtime.text.chat_template import ChatTemplate, chat_template_of
from hotsplit.runtime.text.codec import TextCodec

WINDOW = 512
MIN_WINDOW = 16  # a shorter remainder of a stretch is dropped
STRETCH = 8192  # characters
BATCH = 64  # stretches tokenised at a time


@dataclass(frozen=True, kw_only=True)
class Windows:
    ids: tuple[Tensor, ...]  # int64 [T] each, T up to WINDOW
    corpora: tuple[Corpus, ...]  # tokens used of each file

    @property
    def num_tokens(self) -> int:
        return sum(len(window) for window in self.ids)

    @property
    def sha256(self) -> str:
        """Digest of all ids and the lengths of the windows."""
        digest = hashlib.sha256()
        for window in self.ids:
            digest.update(len(window).to_bytes(8, "little") + window.numpy().tobytes())
        return digest.hexdigest()


def read_windows(
    files: Sequence[Path],
    codec: TextCodec,
    *,
    context_length: int,
    max_tokens: int,
    seed: int,
    text_key: str = "text",
    must_fill: bool = False,
    vocab_size: int | None = None,
) -> Windows:
    """Windows of all files, up to `max_tokens` in all, from places drawn by the seed. A last window
    of one token is left out, unless it is the only one.

    `-` is standard input. Blocks are read and tokenised until there are enough tokens; then the
    files that tokens came from are read through for their sha256. Raises HotsplitError for a file
    that is missing or unreadable, for a corpus without a stretch of MIN_WINDOW tokens (or of the
    context, if that is shorter) or, with `must_fill`, of fewer than `max_tokens` tokens, for tokens
    at or above `vocab_size`, and for a context of one token."""
    if context_length < 2:
        raise HotsplitError("the model has a context of one token, which no text fits into")
    with stdin_as_file(files) as paths:
        sources = find_sources(paths, text_key)
        length = min(WINDOW, context_length)
        least = min(MIN_WINDOW, length)
        chosen: list[Tensor] = []
        used, left = [0] * len(sources), max_tokens
        drawn = draw(sources, seed)
        while left and (batch := list(islice(drawn, BATCH))):
            for (number, _), ids in zip(
                batch, codec.encode_many([x for _, x in batch]), strict=True
            ):
                if vocab_size is not None and ids and max(ids) >= vocab_size:
                    raise HotsplitError(
                        f"{sources[number].path}: token {max(ids)} of the tokenizer"
                        f" ({codec.tokenizer.get_vocab_size()} tokens) is not in the model's"
                        f" vocabulary of {vocab_size}; convert the checkpoint again with the"
                        " tokenizer it was trained with"
                    )
                for window in torch.tensor(ids, dtype=torch.int64).split(length):
                    if left == 1 and chosen:
                        left = 0  # a window of one token has no next token to compare
                    if len(window) >= least and left:
                        chosen.append(window[:left].clone())
                        used[number] += len(chosen[-1])
                        left -= len(chosen[-1])
        _check_enough(files, max_tokens - left, max_tokens, least, must_fill)
        corpora = tuple(
            Corpus(name=source.name, sha256=sha256_of_text(source), num_tokens=num_tokens)
            for source, num_tokens in zip(sources, used, strict=True)
            if num_tokens
        )
    return Windows(ids=tuple(chosen), corpora=corpora)


def spread_windows(windows: Windows | None, ranks: Ranks) -> Windows:
    """The first process's windows in every process; the others pass None and get no `corpora`."""
    ids = windows.ids if windows else ()
    lengths = ranks.spread_bytes(np.array([len(w) for w in ids], np.int64).tobytes())
    flat = ranks.spread_bytes(torch.cat(ids).numpy().tobytes() if ids else None)
    all_ids = torch.from_numpy(np.frombuffer(flat, np.int64).copy())
    split = all_ids.split(np.frombuffer(lengths, np.int64).tolist())
    return Windows(ids=tuple(split), corpora=windows.corpora if windows else ())


def draw(sources: Sequence[CorpusFile], seed: int) -> Iterator[tuple[int, str]]:
    """(index of the source, stretch of text) until all text is drawn."""
    first = np.cumsum([0, *(source.num_blocks for source in sources)])
    total = int(first[-1])
    # 4 bytes per block of 8 KiB: 64 MiB for 128 GiB of text.
    order = np.random.default_rng(seed).permutation(np.arange(total, dtype=np.uint32))
    for turn in count():
        most = 0
        for place in order:
            number = int(np.searchsorted(first, place, side="right")) - 1
            texts = sources[number].texts(int(place) - int(first[number]))
            most = max([most, *(_num_stretches(text) for text in texts)])
            for stretch in stretches(texts, turn, int(place)):
                yield number, stretch
        if turn + 1 >= most:
            return


def stretches(texts: Sequence[str], turn: int, shift: int) -> Iterator[str]:
    """One stretch of each text that has one left in this turn; short ones are joined by newlines. A
    text of n stretches starts at stretch `shift` modulo n and wraps round, so that not only the
    beginnings of texts are taken."""
    joined: list[str] = []
    for text in texts:
        number = _num_stretches(text)
        if turn >= number:
            continue
        size = -(-len(text) // number)
        start = (turn + shift) % number * size
        stretch = text[start : start + size]
        if joined and sum(map(len, joined)) + len(stretch) > STRETCH:
            yield "\n".join(joined)
            joined = []
        joined.append(stretch)
    if any(stretch.strip() for stretch in joined):
        yield "\n".join(joined)


def _num_stretches(text: str) -> int:
    return max(1, round(len(text) / STRETCH))


def _check_enough(
    files: Sequence[Path], found: int, wanted: int, least: int, must_fill: bool
) -> None:
    name = files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
    if not found:
        raise HotsplitError(f"{name}: no text of {least} tokens or more; give a longer text")
    if must_fill and found < wanted:
        raise HotsplitError(
            f"{name}: {found:,} tokens in all, --tokens asks for {wanted:,};"
            " give a longer text or fewer --tokens"
        )


BLANK_LINES = re.compile(r"\n[ \t]*(?:\n[ \t]*)+")


def read_chat_windows(
    files: Sequence[Path],
    model: ModelFile,
    codec: TextCodec,
    *,
    template: str | None,
    context_length: int,
    max_tokens: int,
    seed: int,
) -> tuple[list[Tensor], list[Tensor]]:
    """(token ids, whether each is counted), int64 and bool [T] per window. The tokens of paragraphs
    are counted, up to `max_tokens` in all. A window is cut after WINDOW tokens, and skipped if
    fewer than MIN_WINDOW of them count. `template` is as in chat_template_of. Raises HotsplitError
    if there is no template, for a template that changes messages, and for a corpus without a
    paragraph that is long enough."""
    length = min(WINDOW, context_length)
    windows, counted, left = list[Tensor](), list[Tensor](), max_tokens
    found = chat_template_of(model, codec, template)
    try:
        with stdin_as_file(files) as paths:
            stretches = (stretch for _, stretch in draw(find_sources(paths, "text"), seed))
            paragraphs = chain.from_iterable(map(BLANK_LINES.split, stretches))
            for paragraph in filter(None, map(str.strip, paragraphs)):
                ids_T, is_counted_T = _window(paragraph, codec, found)
                ids_T, is_counted_T = ids_T[:length], is_counted_T[:length]
                if int(is_counted_T.sum()) < MIN_WINDOW:
                    continue
                is_counted_T &= is_counted_T.cumsum(0) <= left
                windows.append(ids_T)
                counted.append(is_counted_T)
                left -= int(is_counted_T.sum())
                if not left:
                    break
    finally:
        found.close()
    if not windows:
        raise HotsplitError(
            f"{files[0]}: no paragraph of {MIN_WINDOW} tokens or more; give a longer text"
        )
    return windows, counted


def _window(paragraph: str, codec: TextCodec, template: ChatTemplate) -> tuple[Tensor, Tensor]:
    message = {"role": "user", "content": paragraph}
    text = template.render([message], add_generation_prompt=False)
    start = text.find(paragraph)
    if start < 0:
        raise HotsplitError(
            f"{template.name}: the chat template changes messages, so the tokens of the corpus"
            " cannot be identified; leave --chat-template out"
        )
    encoded = codec.tokenizer.encode(text, add_special_tokens=False)
    stop = start + len(paragraph)
    is_counted = [start <= first < stop for first, _ in encoded.offsets]
    return torch.tensor(encoded.ids, dtype=torch.int64), torch.tensor(is_counted)
