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

    def channel(self) -> "Channel":
        """Starts the process of a grammar. Raises OSError if this one has ended."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            socket.send_fds(self._worker.connection, [b"\0"], [theirs.fileno()])
        ours.settimeout(WALL_S)
        return Channel(ours, self.num_tokens)


class Channel:
    """The connection to a grammar's process, in which texts are known by numbers, and the states
    that have come over it. The process ends with it.

    A channel belongs to one thread at a time."""

    def __init__(self, connection: socket.socket, num_tokens: int) -> None:
        self._connection, self.num_tokens = connection, num_tokens
        self._numbers = count()
        self._waiting = deque[list[Any]]()  # operations that the next request takes along
        self._states: dict[int, GrammarState] = {}
        self._asked = deque[int]()  # texts whose states have not come
        weakref.finalize(self, connection.close)

    def number_of(self, text: object) -> int:
        """A number for a text, which is dropped with the object."""
        number = next(self._numbers)
        weakref.finalize(text, self._waiting.append, ["drop", number]).atexit = False
        return number

    def copy(self, number: int, of: int) -> None:
        self._waiting.append(["copy", number, of])
        self._states[number] = self.state(of)

    def ask(self, kind: str, number: int, *given: object) -> None:
        """Has a text's next state computed, which is not waited for: "compile" with the kind of a
        grammar and the grammar, or "take" with a token's id."""
        operations = [self._waiting.popleft() for _ in range(len(self._waiting))]
        for what, dropped, *_ in operations:
            if what == "drop":
                self._states.pop(dropped, None)
        self._states.pop(number, None)
        self._asked.append(number)
        with contextlib.suppress(OSError):  # it has ended, as `state` will find
            send(self._connection, json.dumps([*operations, [kind, number, *given]]).encode())

    def is_ready(self, number: int, within_s: float) -> bool:
        """Waits up to `within_s`; true if `state` need not be waited for. The state of another text
        uses up the wait."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection, selectors.EVENT_READ)
            while number not in self._states and selector.select(within_s):
                self._receive()
                within_s = 0.0
        return number in self._states

    def state(self, number: int) -> GrammarState:
        while number not in self._states:
            self._receive()
        return self._states[number]

    def _receive(self) -> None:
        number = self._asked.popleft()
        self._states[number] = self._received()

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
            return GrammarState(allowed=np.zeros(self.num_tokens, dtype=bool), **about)
        words = np.frombuffer(bits, dtype=np.uint8)
        allowed = np.unpackbits(words, bitorder="little", count=self.num_tokens).view(bool)
        return GrammarState(allowed=allowed, **about)
