"""Turns SIGINT, SIGTERM and SIGHUP into exceptions that end a command with one line.

Python runs signal handlers between its own instructions, so they cannot stop long-running native
code; in that case a thread removes unfinished files and ends the process. Stages that save on a
signal (profile.count.run), conversations and servers install handlers of their own."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from hotsplit.errors import HotsplitError, Interrupted

# What signal.signal takes and returns.
SignalHandler = Callable[[int, FrameType | None], object] | int | signal.Handlers | None
NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INTERRUPTED = "interrupted"
MESSAGE = f"{INTERRUPTED}; nothing half-written was left"
READERS = ("inspect", "doctor")  # commands that write nothing
SAME_S = 2.0  # signals this close count as one: shells, torchrun and `timeout` send them twice
WAKE_S = 0.1  # interval at which the main thread is woken again
NATIVE_S = 3.0  # time for native code to return


def message_of(arguments: Sequence[str]) -> str:
    """What a command line's end by a signal is called."""
    return INTERRUPTED if arguments and arguments[0] in READERS else MESSAGE


class _EndingHandler:
    """Raises Interrupted, only once for signals that come together."""

    def __init__(self) -> None:
        self.told_at: float | None = None
        self.raised: Interrupted | None = None
        # Held while the main thread is woken, and while `ending` takes this handler away.
        self.lock = threading.Lock()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.told_at is not None and now - self.told_at < SAME_S:
            return
        self.told_at = now
        self.raised = Interrupted(MESSAGE, number)
        raise self.raised

    def instead_of(self, error: BaseException) -> BaseException:
        """The exception that this handler raised, if a library has replaced it with `error`. torch
        reports "could not determine the shape" if one is raised while it asks a sequence for its
        length."""
        is_own = isinstance(error, HotsplitError | KeyboardInterrupt)
        return error if self.raised is None or is_own else self.raised

    def watch(self, pipe: int) -> None:
        """Sends each signal to the main thread until the handler has run there, and ends the
        process if it has not within NATIVE_S. If two signals come at once, another thread may
        receive both, and nothing would wake the main thread while it waits."""
        signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)
        main = threading.main_thread().ident
        assert main is not None
        while data := os.read(pipe, 1):
            number = data[0]
            came_at = time.monotonic()
            while time.monotonic() < came_at + NATIVE_S:
                time.sleep(WAKE_S)
                with self.lock:
                    if self._is_taken(number, came_at):
                        break
                    signal.pthread_kill(main, number)
            else:
                if not self._is_taken(number, came_at):
                    _end(number)

    def _is_taken(self, number: int, came_at: float) -> bool:
        is_another = signal.getsignal(number) is not self
        return is_another or (self.told_at is not None and self.told_at > came_at - SAME_S)


def put_back(number: int, handler: SignalHandler) -> None:
    """Installs `handler` for the next signal; called by another handler that is taking one."""
    if isinstance(handler, _EndingHandler):
        # Signals that come with the one taken now are ignored, and `watch` does not pass it on.
        handler.told_at = time.monotonic()
    signal.signal(number, handler)


@contextmanager
def ending(*, is_program: bool) -> Iterator[_EndingHandler]:
    """Within the block the signals raise exceptions, except those that the process was started with
    ignored (nohup) or that have another handler. After the block, a program has nothing left to do,
    so the signals end it at once."""
    handler, plain = _EndingHandler(), (signal.SIG_DFL, signal.default_int_handler)
    if threading.current_thread() is not threading.main_thread():
        yield handler  # Python handles signals in the main thread only
        return
    before = {number: signal.getsignal(number) for number in NUMBERS}
    before = {number: found for number, found in before.items() if found in plain}
    for number in before:
        signal.signal(number, handler)
    if is_program:
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=handler.watch, args=(reader,), daemon=True).start()
    try:
        yield handler
    finally:
        with handler.lock:  # from here on, waking the main thread would end the process
            for number, found in before.items():
                signal.signal(number, signal.SIG_DFL if is_program else found)


def _end(number: int) -> None:
    from hotsplit.files.atomic import remove_unfinished

    remove_unfinished()
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"hotsplit: {message_of(sys.argv[1:])}\n")
        sys.stderr.flush()
    os._exit(128 + number)
