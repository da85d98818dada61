"""The processes that run llguidance. One reads a tokenizer, then forks a process for each grammar.

llguidance builds automata without bound of time or memory, while it compiles and at any later
token. A grammar's process is limited in both, and a grammar that exceeds them ends it alone.

A grammar's process holds matchers by number. A request is a list of operations: ["compile", number,
kind, text], ["copy", number, of], ["take", number, token id] or ["drop", number]. The last one is
"compile" or "take", and its answer {"error": text}, or {"can_end": bool}, a newline, and a bit for
each token, set if it may come next; no bits if none may."""

import gc
import json
import os
import signal
import socket
import sys
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from hotsplit.errors import HotsplitError
from hotsplit.runtime.generate.grammar_text import Kind, message_of, translated, unenforced
from hotsplit.runtime.text import worker_inside

# Of CPU time: for a grammar, of which a schema of 2,000 properties takes 0.3 s, and for a token.
COMPILE_S, TOKEN_S = 2.0, 0.5
WALL_S = 60.0  # at its low priority, on an overloaded machine
MEMORY_BYTES = 256 << 20  # of a grammar; the same schema takes 25 MiB
_MAX_CALLS = 20_000  # within each other: rules that refer to rules
_NICENESS = 10  # a costly grammar must not slow down the texts beside it
# A mask of a grammar of single characters may exceed llguidance's default limit of 50,000 items,
# and a row of a grammar with thousands of alternatives that of 2,000.
_MAX_STEP = 1_000_000
_LIMITS = LLParserLimits(
    step_lexer_fuel=_MAX_STEP,
    step_max_items=_MAX_STEP,
    max_items_in_row=_MAX_STEP,
    verbose_errors=False,
)
# Without this, llguidance expands forced text, however long, and allows only the tokens that the
# tokenizer would use for it. Appended at the end, so line numbers in its messages stay right.
_NOT_FORCED = '\n%llguidance {"no_forcing": true}\n'


def main() -> None:
    """Answers the tokenizer with {"error": text} or {"num_tokens": count}, then forks a process for
    each connection that it is sent."""
    os.nice(_NICENESS)
    sys.setrecursionlimit(_MAX_CALLS)
    with socket.socket(fileno=0) as parent:
        end_ids, text = json.loads(worker_inside.receive(parent) or b"null")
        try:
            tokenizer = LLTokenizer(text, eos_token=end_ids)
        except ValueError as error:
            worker_inside.send(parent, json.dumps({"error": str(error)}).encode())
            return
        del text
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children leave no zombies
        gc.freeze()
        worker_inside.send(parent, json.dumps({"num_tokens": tokenizer.vocab_size}).encode())
        while files := socket.recv_fds(parent, 1, 1)[1]:
            if os.fork() == 0:
                parent.close()
                _answer_all(tokenizer, files[0])
                os._exit(0)
            os.close(files[0])


def _answer_all(tokenizer: LLTokenizer, file: int) -> None:
    worker_inside.confine(more_memory_bytes=MEMORY_BYTES, open_files=file + 1)
    grammar = _Grammar(tokenizer)
    with socket.socket(fileno=file) as connection:
        while (request := worker_inside.receive(connection)) is not None:
            operations = json.loads(request)
            cpu_s = COMPILE_S if operations[-1][0] == "compile" else TOKEN_S
            with worker_inside.limited(cpu_s, WALL_S):
                answer = grammar.answer(operations)
            try:
                worker_inside.send(connection, answer)
            except BrokenPipeError:
                return


class _Grammar:
    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer, self._matchers = tokenizer, dict[int, LLMatcher]()
        self._kind: Kind = "regex"
        self._text = ""

    def answer(self, operations: list[Any]) -> bytes:
        try:
            for operation, number, *given in operations:
                self._apply(operation, number, given)
            bits, can_end = self._state(self._matchers[operations[-1][1]])
        except HotsplitError as error:
            return json.dumps({"error": str(error)}).encode() + b"\n"
        except RecursionError:
            message = f"the {self._kind} is nested too deep; make it flatter"
            return json.dumps({"error": message}).encode() + b"\n"
        return json.dumps({"can_end": can_end}).encode() + b"\n" + bits

    def _apply(self, operation: str, number: int, given: list[Any]) -> None:
        if operation == "compile":
            self._kind, self._text = given
            matcher = self._matchers[number] = self._compiled()
            warnings = [] if matcher.is_error() else matcher.get_grammar_warnings()
            if (message := unenforced(self._kind, self._text, warnings)) is not None:
                raise HotsplitError(message)
        elif operation == "copy":
            self._matchers[number] = self._matchers[given[0]].deep_copy()
        elif operation == "take":
            self._matchers[number].consume_token(given[0])
        elif operation == "drop":
            del self._matchers[number]

    def _compiled(self) -> LLMatcher:
        syntax, grammar = translated(self._kind, self._text)
        if syntax == "regex":
            found = json.loads(LLMatcher.grammar_from_regex(grammar))
            grammar = found["grammars"][0]["lark_grammar"]
        if "%llguidance" not in grammar:
            grammar += _NOT_FORCED
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)

    def _state(self, matcher: LLMatcher) -> tuple[bytes, bool]:
        """(bits of the tokens that may come next, whether the text may end)."""
        self._check(matcher)
        can_end = matcher.is_accepting()
        if matcher.is_stopped():
            return b"", can_end
        bits = matcher.compute_bitmask()
        if matcher.is_error() and matcher.get_error().startswith("NoExtension"):
            return b"", can_end
        self._check(matcher)
        return bits, can_end

    def _check(self, matcher: LLMatcher) -> None:
        if matcher.is_error():
            raise HotsplitError(message_of(self._kind, self._text, matcher.get_error()))
