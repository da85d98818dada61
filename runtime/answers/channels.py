"""Headers of messages in gpt-oss's format (OpenAI's harmony): a role, a channel, perhaps a
recipient and a type, then <|message|> and the message's text.

The channel analysis is reasoning; a message to a function is a call; everything else is for the
user."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

MESSAGE, CHANNEL, CONSTRAIN = "<|message|>", "<|channel|>", "<|constrain|>"
BEGINS = ("<|start|>", CHANNEL)
ENDS = ("<|end|>", "<|return|>", "<|call|>")
MARKS = (*BEGINS, MESSAGE, *ENDS, CONSTRAIN)
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
FINAL = f"{CHANNEL}final{MESSAGE}"
ASSISTANT = "<|start|>assistant"  # before the channel of a further message
TO = "to="  # a recipient may come first: the prompt ends in <|start|>assistant
_MAX_HEADER = 512  # characters
_STOPS = re.compile("|".join(map(re.escape, (MESSAGE, *ENDS, "<|start|>"))))
_CHANNELS = re.compile(r"<\|channel\|>\s*(\w*)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTIONS = "functions."
# What a header consists of, where its end is missing.
_SOUND = re.compile(
    r"(<\|start\|>\w*|<\|channel\|>\s*(analysis|commentary|final)\b|<\|constrain\|>\w*|\bto=[^\s<]+|\s)*"
)


@dataclass(frozen=True, kw_only=True)
class Header:
    """The header at a text's beginning. `length`: its characters. `channel`: the last one that it
    names. `recipient`: the function that it calls, if any."""

    length: int
    channel: str
    recipient: str | None

    @property
    def kind(self) -> Literal["content", "reasoning"]:
        return "reasoning" if self.channel == "analysis" else "content"


def header_of(text: str, tools: Collection[str], *, is_over: bool) -> Header | None:
    """The header with which a text begins; None if its end is not there yet. `is_over`: nothing
    follows the text."""
    # The mark that begins it is its own.
    start = next((len(mark) for mark in BEGINS if text.startswith(mark)), 0)
    stop = _STOPS.search(text, start)
    if stop is None and not is_over and len(text) < _MAX_HEADER:
        return None
    if stop is not None and stop.group() == MESSAGE:
        return _header(text[: stop.end()], tools)
    whole = text if stop is None else text[: stop.start()]
    sound = _SOUND.match(whole)
    assert sound is not None
    found = _header(whole[: sound.end()], tools)
    if found.channel and found.length < len(whole):  # the text follows without <|message|>
        return found
    return Header(length=len(whole), channel="", recipient=None)


def _header(text: str, tools: Collection[str]) -> Header:
    named = _CHANNELS.findall(text)
    channel = named[-1] if named else ""
    return Header(
        length=len(text),
        channel=channel,
        recipient=None if channel == "final" else recipient_of(text, tools),  # it is for the user
    )


def recipient_of(header: str, tools: Collection[str]) -> str | None:
    """The function that a message calls: functions.NAME, or the name of a tool; None if it is for
    the user."""
    found = _RECIPIENT.search(header)
    if found is None:
        return None
    name = found.group(1)
    if name.startswith(_FUNCTIONS):
        return name.removeprefix(_FUNCTIONS) or None
    return name if name in tools else None
