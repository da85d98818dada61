"""Reads a corpus as chat messages: every paragraph becomes a user message in a chat template.

A window is one conversation of one message. The tokens that the template adds are run but not
counted. Places in the text are drawn by `corpus`.

Letters: T tokens."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.errors import HotsplitError
from hotsplit.profile.corpus.corpus import MIN_WINDOW, WINDOW, draw
from hotsplit.profile.corpus.sources import find_sources, stdin_as_file
from hotsplit.runtime.text.chat_template import ChatTemplate, chat_template_of
from hotsplit.runtime.text.codec import TextCodec

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
    fewer than MIN_WINDOW of them count. `template` is as in chat_template_of.

    Raises HotsplitError if there is no template, for a template that changes messages, and for a
    corpus without a paragraph that is long enough."""
    length = min(WINDOW, context_length)
    windows, counted, left = list[Tensor](), list[Tensor](), max_tokens
    found = chat_template_of(model, codec, template)
    try:
        with stdin_as_file(files) as paths:
            for paragraph in _paragraphs(paths, seed):
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


def _paragraphs(paths: Sequence[Path], seed: int) -> Iterator[str]:
    for _, stretch in draw(find_sources(paths, "text"), seed):
        for paragraph in BLANK_LINES.split(stretch):
            if paragraph.strip():
                yield paragraph.strip()


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
