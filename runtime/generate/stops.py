"""Stop strings: they end a text regardless of token boundaries."""

from collections.abc import Sequence
from itertools import compress

from hotsplit.runtime.text.codec import overlap


class StopFilter:
    """Passes on text up to the first stop string; holds back a possible start of one. Hidden text,
    that of special tokens, is a part of stop strings only."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._is_shown: list[bool] = []  # for each character held

    def push(self, text: str, hidden: str = "") -> tuple[str, bool]:
        """(text that cannot belong to a stop string, whether one was found); `hidden` follows
        `text`."""
        self._held += text + hidden
        self._is_shown += [True] * len(text) + [False] * len(hidden)
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            text = self._take(min(found))
            self._held, self._is_shown = "", []
            return text, True
        keep = max((overlap(self._held, stop) for stop in self._stops), default=0)
        return self._take(len(self._held) - keep), False

    def flush(self) -> str:
        """Returns the held-back text, at the end of the text."""
        return self._take(len(self._held))

    def _take(self, count: int) -> str:
        """Removes the first `count` characters, and returns those that are shown."""
        text = "".join(compress(self._held[:count], self._is_shown))
        self._held, self._is_shown = self._held[count:], self._is_shown[count:]
        return text
