"""Messages of one role in succession, for templates that want the roles to alternate: results of
tools that are followed by a message of the user, an answer's text and its calls as two messages.

They become one message, texts joined by an empty line and calls in their order, as people write
them who know that model. Results stay apart: a template tells them from each other by their ids."""

from collections.abc import Mapping, Sequence

_JOINED = ("system", "user", "assistant")
_TEXTS = ("content", "reasoning_content", "thinking", "reasoning")


def in_turns(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """The messages, of which those of one role in succession are joined."""
    found: list[dict[str, object]] = []
    for message in messages:
        if found and found[-1]["role"] == message["role"] and message["role"] in _JOINED:
            found[-1] = _both(found[-1], message)
        else:
            found.append(dict(message))
    return found


def _both(first: Mapping[str, object], second: Mapping[str, object]) -> dict[str, object]:
    found = {**first, **second}
    for name in _TEXTS:
        texts = [message[name] for message in (first, second) if message.get(name)]
        if texts:
            found[name] = _joined(texts)
    calls = [message.get("tool_calls") for message in (first, second)]
    lists = [part for part in calls if isinstance(part, list)]
    if lists:
        found["tool_calls"] = [call for part in lists for call in part]
    return found


def _joined(texts: list[object]) -> object:
    """Two texts; if one of them is a list of parts, such a list."""
    if all(isinstance(text, str) for text in texts):
        return "\n\n".join(map(str, texts))
    parts = ([{"type": "text", "text": t}] if isinstance(t, str) else t for t in texts)
    return [part for some in parts if isinstance(some, list) for part in some]
