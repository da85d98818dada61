"""Constraints: masks of the tokens that may come next in a text that follows a JSON schema or a
grammar.

llguidance, an optional package, does the parsing, in processes with limits of time and memory
(grammar_worker). This module refuses schemas and grammars that it would not enforce in full, and
turns its answers into masks over logits.

Letters: V logits, which may be more than the tokenizer has tokens."""

import contextlib
import json
import selectors
import socket
import weakref
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from hotsplit.errors import HotsplitError
from hotsplit.files.typed import shown
from hotsplit.options.kinds import kinds_checked
from hotsplit.runtime.generate.grammar_text import Kind
from hotsplit.runtime.text.codec import TextCodec, check_unicode
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


_processes: WeakKeyDictionary[Tokenizer, GrammarProcess] = WeakKeyDictionary()
_one_at_a_time = Lock()  # to start a process


class ConstraintError(HotsplitError):
    """The text cannot go on under its constraint."""


class Constraint:
    """The state of one text in its grammar; `fork` copies it for another text. `grammar` is the
    text of a grammar or regex, and empty for JSON schemas and tool calls.

    End tokens are allowed only where the grammar may end."""

    def __init__(self, channel: Channel, codec: TextCodec, what: Kind, grammar: str) -> None:
        self._channel, self._codec, self._what = channel, codec, what
        self._number = channel.number_of(self)
        self.grammar = grammar
        self._num_tokens = channel.num_tokens
        self._end_ids = [end for end in codec.end_ids if end < channel.num_tokens]
        self._has_ended = False
        self._allowed: np.ndarray | None = None  # the tokens that may come next, once known

    @kinds_checked
    def mask_V(self, vocab_size: int) -> Tensor:
        """bool [V], True where a token is allowed; False for logits without a token.

        Raises ConstraintError if no token is allowed: the grammar cannot continue from here, or
        exceeds its limits of time and memory."""
        if not 1 <= vocab_size < 1 << 31:
            raise HotsplitError(f"vocab_size is {shown(vocab_size)}, wanted 1 to 2^31")
        mask = np.zeros(vocab_size, dtype=bool)
        allowed = self._allowed_now()[:vocab_size]
        mask[: len(allowed)] = allowed
        if not mask.any():
            raise ConstraintError(f"the {self._what} allows no token from here on; change it")
        return torch.from_numpy(mask)

    @kinds_checked
    def accept(self, token_id: int) -> None:
        """Advances by a token. Raises HotsplitError and keeps its state if it is not allowed."""
        is_token = 0 <= token_id < self._num_tokens
        if not is_token or not self._allowed_now()[token_id]:
            text = self._codec.tokenizer.id_to_token(token_id) if is_token else None
            raise HotsplitError(f"the {self._what} does not allow token {token_id} ({shown(text)})")
        if token_id in self._codec.end_ids:
            self._has_ended, self._allowed = True, None
            return
        self._channel.ask("take", self._number, token_id)
        self._allowed = None

    @kinds_checked
    def is_ready(self, within_s: float) -> bool:
        """Waits up to `within_s` for the next mask; true if it has been computed."""
        if self._has_ended or self._allowed is not None:
            return True
        return self._channel.is_ready(self._number, within_s)

    @property
    def can_end(self) -> bool:
        """True if the text so far is complete."""
        return self._has_ended or self._state().can_end

    def fork(self) -> "Constraint":
        """A copy with the same state."""
        other = Constraint(self._channel, self._codec, self._what, self.grammar)
        self._channel.copy(other._number, self._number)
        other._has_ended, other._allowed = self._has_ended, self._allowed
        return other

    def _allowed_now(self) -> np.ndarray:
        """bool, one per token of the tokenizer."""
        if self._allowed is None:
            if self._has_ended:
                allowed = np.zeros(self._num_tokens, dtype=bool)
            else:
                allowed = self._state().allowed.copy()
            allowed[self._end_ids] = self.can_end
            self._allowed = allowed
        return self._allowed

    def _state(self) -> GrammarState:
        state = self._channel.state(self._number)
        if state.is_over_limits:
            raise ConstraintError(
                f"the {self._what} needs more than {LIMITS}; make it smaller or simpler"
            )
        if state.error is not None:
            raise ConstraintError(state.error)
        return state


def json_schema_constraint(schema: dict[str, object] | str, codec: TextCodec) -> Constraint:
    """Constrains texts to JSON that is valid under a schema (Draft 2020-12); a str is parsed as
    JSON.

    Named properties come in the schema's order. Raises HotsplitError for a schema that is
    malformed, unsatisfiable, or has a keyword that would not be enforced."""
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
    except (ValueError, TypeError, RecursionError) as error:
        raise HotsplitError(f"JSON schema: {str(error)[:200]}") from error
    return _constraint("JSON schema", text, codec)


def tool_call_constraint(
    grammar: str, schemas: Mapping[str, dict[str, object]], codec: TextCodec
) -> Constraint:
    """Constrains texts to a grammar in llguidance's dialect of Lark that uses rules named in
    `schemas`, whose texts are JSON that is valid under the schema.

    Raises HotsplitError as `json_schema_constraint` does."""
    check_unicode(grammar, "grammar of tool calls")
    text = json.dumps({"grammar": grammar, "schemas": schemas})
    return _constraint("grammar of tool calls", text, codec)


def regex_constraint(regex: str, codec: TextCodec) -> Constraint:
    """Constrains texts to those that a regex matches in full. The syntax is that of Rust's regex,
    without look-around.

    Raises HotsplitError for a regex that does not parse or is too large."""
    return _constraint("regex", regex, codec)


def lark_constraint(grammar: str, codec: TextCodec) -> Constraint:
    """Constrains texts to a grammar in llguidance's dialect of Lark, from its rule `start`.

    Terminals are lexed, longest match first. Raises HotsplitError with the position of a syntax
    error."""
    return _constraint("Lark grammar", grammar, codec)


def gbnf_constraint(grammar: str, codec: TextCodec) -> Constraint:
    """Constrains texts to a grammar in llama.cpp's syntax, from its rule `root`.

    Raises HotsplitError with the line of a syntax error."""
    return _constraint("GBNF grammar", grammar, codec)


def _constraint(what: Kind, text: str, codec: TextCodec) -> Constraint:
    _check_text(text, what)
    if not any(end < codec.tokenizer.get_vocab_size() for end in codec.end_ids):
        raise HotsplitError(
            "the model names no end token, without which no grammar can end; convert its checkpoint"
            " again with its generation_config.json"
        )
    try:
        channel = _process(codec).channel()
    except OSError:  # something has ended it since
        _processes.pop(codec.tokenizer, None)
        channel = _process(codec).channel()
    grammar = "" if what in ("JSON schema", "grammar of tool calls") else text
    constraint = Constraint(channel, codec, what, grammar)
    channel.ask("compile", constraint._number, what, text)
    constraint.mask_V(channel.num_tokens)  # raises if no text at all is allowed
    return constraint


def _process(codec: TextCodec) -> GrammarProcess:
    """The process of the codec's tokenizer, started once."""
    tokenizer = codec.tokenizer
    with _one_at_a_time:
        if tokenizer in _processes:
            return _processes[tokenizer]
        num_tokens = tokenizer.get_vocab_size()
        if max(tokenizer.get_vocab().values(), default=-1) + 1 != num_tokens:
            raise HotsplitError(
                "the model's tokenizer cannot be constrained: there are gaps between its token ids"
            )
        _processes[tokenizer] = GrammarProcess(tokenizer, codec.end_ids)
        return _processes[tokenizer]


def _check_text(text: str, what: Kind) -> None:
    if not text.strip(" \t\r\n") and (what != "regex" or not text):
        raise HotsplitError(f"the {what} is empty")
    if "\0" in text:
        raise HotsplitError(f"the {what} holds a zero byte at character {text.index(chr(0))}")
    check_unicode(text, what)
