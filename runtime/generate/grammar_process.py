"""Grammars in processes of their own (grammar_worker), with limits of time and memory."""

import contextlib
import json
import selectors
import socket
import weakref
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count
from threading import Lock
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from hotsplit.errors import HotsplitError
from hotsplit.runtime.generate.grammar_text import Kind
from hotsplit.runtime.text.worker import Worker
from hotsplit.runtime.text.worker_inside import receive, send

# What grammar_worker's limits come to, in a user's words.
WALL_S = 61.0
LIMITS = "2 s of processor time or 256 MiB of memory"


@dataclass(frozen=True, kw_only=True)
class GrammarState:
    """Where a text stands in its grammar. `allowed`: bool, one per token of the tokenizer, of which
    those that end a text are undefined. `error`: what is wrong with the grammar, in one line; if it
    is set, or `is_over_limits`, nothing else is."""

    allowed: np.ndarray
    can_end: bool = False
    error: str | None = None
    is_over_limits: bool = False


class Matcher:
    """A text in its grammar. Copies share a process, which ends with the last of them.

    A matcher and its copies belong to one thread at a time."""

    def __init__(self, channel: "_Channel") -> None:
        self._channel, self._number = channel, next(channel.numbers)
        weakref.finalize(self, channel.waiting.append, ["drop", self._number]).atexit = False

    def compile(self, kind: Kind, text: str) -> None:
        self._channel.ask(self._number, ["compile", self._number, kind, text])

    def take(self, token_id: int) -> None:
        """Advances by a token. Does not wait: the next state is computed meanwhile."""
        self._channel.ask(self._number, ["take", self._number, token_id])

    def copy(self) -> "Matcher":
        other = Matcher(self._channel)
        self._channel.waiting.append(["copy", other._number, self._number])
        self._channel.states[other._number] = self.state
        return other

    def is_ready(self, within_s: float) -> bool:
        """Waits up to `within_s`; true if `state` need not be waited for."""
        return self._channel.has_answered(self._number, within_s)

    @property
    def state(self) -> GrammarState:
        return self._channel.state(self._number)


class GrammarProcess:
    """The process that knows a tokenizer and starts those of grammars: 0.1 s, and 0.3 s for 49,152
    tokens. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, end_ids: Collection[int]) -> None:
        """Raises HotsplitError if llguidance is missing, or cannot read the tokenizer."""
        if find_spec("llguidance") is None:
            raise HotsplitError(
                "grammars and JSON schemas need the package llguidance: pip install llguidance"
            )
        self._lock = Lock()
        self._worker = Worker("hotsplit.runtime.generate.grammar_worker", ("llguidance",))
        weakref.finalize(self, self._worker.end)
        ends = [end for end in sorted(end_ids) if end < tokenizer.get_vocab_size()]
        setup = json.dumps([ends, tokenizer.to_str()]).encode()
        answer = json.loads(self._worker.ask(setup) or b'{"error": "its process has ended"}')
        if "error" in answer:
            message = " ".join(answer["error"].split())[:300]
            raise HotsplitError(f"the model's tokenizer cannot be constrained: {message}")
        self.num_tokens: int = answer["num_tokens"]

    def matcher(self, kind: Kind, text: str) -> Matcher:
        """Begins to compile a grammar. Raises OSError if the process has ended."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            socket.send_fds(self._worker.connection, [b"\0"], [theirs.fileno()])
        ours.settimeout(WALL_S)
        matcher = Matcher(_Channel(ours, self.num_tokens))
        matcher.compile(kind, text)
        return matcher


class _Channel:
    """The connection to a grammar's process, and the answers that have come over it."""

    def __init__(self, connection: socket.socket, num_tokens: int) -> None:
        self._connection, self._num_tokens = connection, num_tokens
        self.numbers = count()
        self.waiting = deque[list[Any]]()  # operations that the next request takes along
        self.states: dict[int, GrammarState] = {}
        self._asked = deque[int]()  # matchers whose answers have not come
        weakref.finalize(self, connection.close)

    def ask(self, number: int, operation: list[Any]) -> None:
        operations = [self.waiting.popleft() for _ in range(len(self.waiting))]
        for kind, dropped, *_ in operations:
            if kind == "drop":
                self.states.pop(dropped, None)
        self.states.pop(number, None)
        self._asked.append(number)
        with contextlib.suppress(OSError):  # it has ended, as `state` will find
            send(self._connection, json.dumps([*operations, operation]).encode())

    def has_answered(self, number: int, within_s: float) -> bool:
        """An answer to another matcher uses up the wait."""
        while number not in self.states and self._has_come(within_s):
            self._receive()
            within_s = 0.0
        return number in self.states

    def state(self, number: int) -> GrammarState:
        while number not in self.states:
            self._receive()
        return self.states[number]

    def _has_come(self, within_s: float) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection, selectors.EVENT_READ)
            return bool(selector.select(within_s))

    def _receive(self) -> None:
        self.states[self._asked.popleft()] = self._received()

    def _received(self) -> GrammarState:
        try:
            answer = receive(self._connection)
        except OSError:
            answer = None
        if answer is None:
            return GrammarState(allowed=np.zeros(0, dtype=bool), is_over_limits=True)
        head, _, bits = answer.partition(b"\n")
        about = json.loads(head)
        if not bits:
            return GrammarState(allowed=np.zeros(self._num_tokens, dtype=bool), **about)
        words = np.frombuffer(bits, dtype=np.uint8)
        allowed = np.unpackbits(words, bitorder="little", count=self._num_tokens).view(bool)
        return GrammarState(allowed=allowed, **about)
