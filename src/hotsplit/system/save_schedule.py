"""When a long run saves its state."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

SAVE_SHARE = 0.05  # largest share of the time spent saving: larger states are saved less often


class SaveSchedule:
    """Saves are due every `seconds`, or less often if one takes long."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._saved_at, self._took_s = seconds, time.monotonic(), 0.0

    @property
    def is_due(self) -> bool:
        since = time.monotonic() - self._saved_at
        return since > max(self._seconds, self._took_s / SAVE_SHARE)

    @contextmanager
    def save(self) -> Iterator[None]:
        """Times a save."""
        began = time.monotonic()
        yield
        self._saved_at = time.monotonic()
        self._took_s = self._saved_at - began
