"""Constraints: masks of the tokens that may come next in a text that follows a JSON schema or a
grammar.

llguidance, an optional package, does the parsing. This module passes it the vocabulary, refuses
schemas and grammars that it would not enforce in full, and turns its answers into masks over
logits.

Letters: V logits, which may be more than the tokenizer has tokens."""

import json
import re
from typing import TYPE_CHECKING, Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from hotsplit.errors import HotsplitError
from hotsplit.files.typed import shown
from hotsplit.runtime.generate import gbnf, gbnf_parser
from hotsplit.runtime.generate.json_schema import check_schema, parse_schema
from hotsplit.runtime.text.codec import TextCodec, check_unicode

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Kind = Literal["JSON schema", "regex", "Lark grammar", "GBNF grammar"]

# As in llama.cpp, at most a space, or a newline and indentation, separates the parts of a document.
# An uncertain model could otherwise emit whitespace forever.
_WHITESPACE = r" |\n[ \t]{0,20}"
# Without \uXXXX, which could disguise one key as another.
_ESCAPES = 'nrbtf\\"'
# A mask of a grammar of single characters may exceed llguidance's default limit of 50,000 items.
_MAX_STEP = 1_000_000
# Without this, llguidance expands forced text, however long, and allows only the tokens that the
# tokenizer would use for it. Appended at the end, so line numbers in its messages stay right.
_NOT_FORCED = '%llguidance {"no_forcing": true}'
_tokenizers: WeakKeyDictionary[TextCodec, "LLTokenizer"] = WeakKeyDictionary()


class Constraint:
    """The state of one text in its grammar; `fork` copies it for another text.

    End tokens are allowed only where the grammar may end."""

    def __init__(self, matcher: "LLMatcher", codec: TextCodec, num_tokens: int, what: Kind) -> None:
        self._matcher, self._codec, self._what = matcher, codec, what
        self._num_tokens = num_tokens
        self._end_ids = [end for end in codec.end_ids if end < num_tokens]
        self._has_ended = False
        self._allowed: np.ndarray | None = None  # the tokens that may come next, once known

    def mask_V(self, vocab_size: int) -> Tensor:
        """bool [V], True where a token is allowed; False for logits without a token.

        Raises HotsplitError if no token is allowed: the grammar cannot continue from here."""
        mask = np.zeros(vocab_size, dtype=bool)
        allowed = self._allowed_now()[:vocab_size]
        mask[: len(allowed)] = allowed
        if not mask.any():
            raise HotsplitError(f"the {self._what} allows no token from here on; change it")
        return torch.from_numpy(mask)

    def accept(self, token_id: int) -> None:
        """Advances by a token. Raises HotsplitError and keeps its state if it is not allowed."""
        is_token = 0 <= token_id < self._num_tokens
        if not is_token or not self._allowed_now()[token_id]:
            text = self._codec.tokenizer.id_to_token(token_id) if is_token else None
            raise HotsplitError(f"the {self._what} does not allow token {token_id} ({shown(text)})")
        if token_id in self._codec.end_ids:
            self._has_ended, self._allowed = True, None
            return
        is_taken = self._matcher.consume_token(token_id)
        if not is_taken:
            raise HotsplitError(f"{self._what}: {_one_line(self._matcher.get_error())}")
        self._allowed = None

    @property
    def can_end(self) -> bool:
        """True if the text so far is complete."""
        return self._has_ended or bool(self._matcher.is_accepting())

    def fork(self) -> "Constraint":
        """A copy with the same state; takes 15 us."""
        other = Constraint(self._matcher.deep_copy(), self._codec, self._num_tokens, self._what)
        other._has_ended, other._allowed = self._has_ended, self._allowed
        return other

    def _allowed_now(self) -> np.ndarray:
        """bool, one per token of the tokenizer."""
        if self._allowed is None:
            allowed = self._from_matcher()
            allowed[self._end_ids] = self.can_end
            self._allowed = allowed
        return self._allowed

    def _from_matcher(self) -> np.ndarray:
        if self._has_ended or self._matcher.is_stopped():
            return np.zeros(self._num_tokens, dtype=bool)
        words = np.empty((self._num_tokens + 31) // 32, dtype=np.uint32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            if self._matcher.get_error().startswith("NoExtension"):
                return np.zeros(self._num_tokens, dtype=bool)
            raise HotsplitError(f"{self._what}: {_one_line(self._matcher.get_error())}")
        bits = np.unpackbits(words.view(np.uint8), bitorder="little", count=self._num_tokens)
        return bits.view(bool)


def json_schema_constraint(schema: dict[str, object] | str, codec: TextCodec) -> Constraint:
    """Constrains texts to JSON that is valid under a schema (Draft 2020-12); a str is parsed as
    JSON.

    Named properties come in the schema's order. Raises HotsplitError for a schema that is
    malformed, unsatisfiable, or has a keyword that would not be enforced."""
    found = check_schema(parse_schema(schema) if isinstance(schema, str) else schema)
    options = {
        "lenient": False,
        "coerce_one_of": False,
        "whitespace_pattern": _WHITESPACE,
        "json_allowed_escapes": _ESCAPES,
    }
    try:
        text = json.dumps(found | {"x-guidance": options}, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise HotsplitError(f"JSON schema: {_one_line(str(error))}") from error
    return _constraint("JSON schema", f"start: %json {text}\n", codec)


def regex_constraint(regex: str, codec: TextCodec) -> Constraint:
    """Constrains texts to those that a regex matches in full. The syntax is that of Rust's regex,
    without look-around.

    Raises HotsplitError for a regex that does not parse or is too large."""
    _check_text(regex, "regex")
    return _constraint("regex", _lark_of_regex(regex), codec)


def lark_constraint(grammar: str, codec: TextCodec) -> Constraint:
    """Constrains texts to a grammar in llguidance's dialect of Lark, from its rule `start`.

    Terminals are lexed, longest match first. Raises HotsplitError with the position of a syntax
    error."""
    _check_text(grammar, "Lark grammar")
    if "%json" in grammar:  # its schema would not be checked for ignored keywords
        raise HotsplitError("Lark grammar: %json is not supported; give --json-schema instead")
    return _constraint("Lark grammar", grammar, codec)


def gbnf_constraint(grammar: str, codec: TextCodec) -> Constraint:
    """Constrains texts to a grammar in llama.cpp's syntax, from its rule `root`.

    Raises HotsplitError with the line of a syntax error."""
    _check_text(grammar, "GBNF grammar")
    try:
        rules = gbnf_parser.parse(grammar)
        regex = gbnf.as_regex(rules)
        lark = gbnf.as_lark(rules) if regex is None else _lark_of_regex(regex)
    except RecursionError as error:
        raise HotsplitError("GBNF grammar: its rules are nested about a thousand deep") from error
    return _constraint("GBNF grammar", lark, codec)


def _lark_of_regex(regex: str) -> str:
    found = json.loads(_matcher_class().grammar_from_regex(regex))
    return str(found["grammars"][0]["lark_grammar"])


def _constraint(what: Kind, lark: str, codec: TextCodec) -> Constraint:
    matcher_class = _matcher_class()
    from llguidance import LLParserLimits

    limits = LLParserLimits(
        step_lexer_fuel=_MAX_STEP, step_max_items=_MAX_STEP, verbose_errors=False
    )
    tokenizer = _tokenizer(codec)
    if "%llguidance" not in lark:
        lark = f"{lark}\n{_NOT_FORCED}\n"
    matcher = matcher_class(tokenizer, lark, log_level=0, limits=limits)
    messages = [matcher.get_error()] if matcher.is_error() else matcher.get_grammar_warnings()
    if messages:
        # The line numbers in messages on a Lark grammar are those of the user's text.
        is_grammar = what in ("Lark grammar", "GBNF grammar")
        words = _one_line if is_grammar else _regex_error
        raise HotsplitError(f"{what}: {words(messages[0])}")
    constraint = Constraint(matcher, codec, tokenizer.vocab_size, what)
    constraint.mask_V(tokenizer.vocab_size)  # raises if no text at all is allowed
    return constraint


def _tokenizer(codec: TextCodec) -> "LLTokenizer":
    """llguidance's form of the vocabulary, built once per codec: 0.3 s for 49,152 tokens."""
    from llguidance import LLTokenizer

    if codec not in _tokenizers:
        num_tokens = codec.tokenizer.get_vocab_size()
        if max(codec.tokenizer.get_vocab().values(), default=-1) + 1 != num_tokens:
            raise HotsplitError(
                "the model's tokenizer cannot be constrained: there are gaps between its token ids"
            )
        end_ids = sorted(end for end in codec.end_ids if end < num_tokens)
        if not end_ids:
            raise HotsplitError(
                "the model names no end token, without which no grammar can end; convert its"
                " checkpoint again with its generation_config.json"
            )
        try:
            _tokenizers[codec] = LLTokenizer(codec.tokenizer.to_str(), eos_token=end_ids)
        except ValueError as error:
            raise HotsplitError(
                f"the model's tokenizer cannot be constrained: {_one_line(str(error))}"
            ) from error
    return _tokenizers[codec]


def _matcher_class() -> "type[LLMatcher]":
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise HotsplitError(
            "grammars and JSON schemas need the package llguidance: pip install llguidance"
        ) from error
    return LLMatcher


def _check_text(text: str, what: Kind) -> None:
    if not text.strip(" \t\r\n") and (what != "regex" or not text):
        raise HotsplitError(f"the {what} is empty")
    if "\0" in text:
        raise HotsplitError(f"the {what} holds a zero byte at character {text.index(chr(0))}")
    check_unicode(text, what)


def _one_line(message: str) -> str:
    """llguidance's message without its source excerpt (lines of `3 | ...` and carets)."""
    if "panic" in message or "<backtrace>" in message:
        return "llguidance cannot handle it; make it smaller or simpler"
    lines = [line.strip() for line in message.splitlines()]
    kept = [line for line in lines if line.strip("^") and not line.split(" ")[0].isdigit()]
    text = " ".join(kept)
    return text.partition("failed to compile JSON schema: ")[2][:300] or text[:300]


def _regex_error(message: str) -> str:
    """llguidance's message on a regex or JSON schema: what is wrong, and if it says so, where.
    Leaves out line numbers, which are those of the grammar that surrounds the regex."""
    lines = message.splitlines()
    marks = [i for i, line in enumerate(lines) if "^" in line and not line.strip(" ^")]
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if not marks or not reasons:
        return re.sub(r"^at \d+\(\d+\): (invalid regex .* \(in regex\): )?", "", _one_line(message))
    part = lines[marks[0] - 1][lines[marks[0]].index("^") :][:60]
    return f"{reasons[0]}, {'from here: ' + part if part else 'at the end'}"
