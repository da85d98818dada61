"""Separates an answer's reasoning, from <think> at its beginning to </think>, from the rest."""

from typing import Literal

from hotsplit.runtime.generate.stops import overlap

Place = Literal["before", "inside", "after"]
BEGIN, END = "<think>", "</think>"


def opens_reasoning(prompt: str, continued: str = "") -> bool:
    """True if the answer starts inside the reasoning: the chat template has opened it or, where the
    answer continues a message, that message has, without closing it.

    Tags elsewhere, such as in a question, open nothing."""
    if continued.strip():
        return continued.lstrip().startswith(BEGIN) and END not in continued
    return prompt.rstrip().endswith(BEGIN)


def close_reasoning(answer: str, *, is_open: bool) -> str:
    """Appends the closing tag, which templates look for, to an answer that stopped while
    reasoning."""
    has_begun = is_open or answer.lstrip().startswith(BEGIN)
    return f"{answer}\n{END}\n\n" if has_begun and END not in answer else answer


class ReasoningSplitter:
    """Takes an answer in pieces and returns it as (text, whether it is reasoning). Both tags count
    as reasoning; later tags are ordinary text."""

    def __init__(self, *, is_open: bool) -> None:
        self._place: Place = "inside" if is_open else "before"
        self._held = ""

    def push(self, text: str) -> list[tuple[str, bool]]:
        """Adds a piece; returns the text whose kind is certain and holds back the rest."""
        self._held += text
        if self._place == "before":
            begun = self._held.lstrip()
            if len(begun) < len(BEGIN) and BEGIN.startswith(begun):
                return []
            self._place = "inside" if begun.startswith(BEGIN) else "after"
        parts = [(self._reasoning(), True)] if self._place == "inside" else []
        if self._place == "after":
            parts.append((self._take(len(self._held)), False))
        return [part for part in parts if part[0]]

    def flush(self) -> list[tuple[str, bool]]:
        """Returns the held-back text, at the end of the answer."""
        text = self._take(len(self._held))
        return [(text, self._place == "inside")] if text else []

    def _reasoning(self) -> str:
        """Takes the text that is certainly reasoning: all but a possible start of the closing
        tag."""
        at = self._held.find(END)
        if at >= 0:
            self._place = "after"
            return self._take(at + len(END))
        return self._take(len(self._held) - overlap(self._held, END))

    def _take(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text
