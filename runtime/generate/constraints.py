"""Constraints: masks of the tokens that may come next in a text that follows a JSON schema or a
grammar.

llguidance, an optional package, does the parsing, in a process of its own (grammar_process). This
module refuses schemas and grammars that it would not enforce in full, and turns its answers into
masks over logits.

Letters: V logits, which may be more than the tokenizer has tokens."""

import json
from collections.abc import Mapping
from threading import Lock
from weakref import WeakKeyDictionary

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from hotsplit.errors import HotsplitError
from hotsplit.files.typed import shown
from hotsplit.options.kinds import kinds_checked
from hotsplit.runtime.generate.grammar_process import LIMITS, Channel, GrammarProcess, GrammarState
from hotsplit.runtime.generate.grammar_text import Kind
from hotsplit.runtime.text.codec import TextCodec, check_unicode

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
