"""Parses GBNF, llama.cpp's grammar format, into rules.

The syntax is that of llama.cpp's grammars/README.md, without tokens (`<think>`)."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hotsplit.errors import HotsplitError
from hotsplit.files.typed import shown

Ranges = tuple[tuple[int, int], ...]  # of code points, inclusive, ordered and disjoint
ANY: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))
MAX_DEPTH = 200  # of nested groups, and of repetitions of one symbol, such as "a"?+*
_NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


@dataclass(frozen=True, kw_only=True)
class Character:
    ranges: Ranges

    @property
    def regex(self) -> str:
        parts = (f"{_escaped(a)}-{_escaped(b)}" if a < b else _escaped(a) for a, b in self.ranges)
        return f"[{''.join(parts)}]"


@dataclass(frozen=True, kw_only=True)
class Reference:
    name: str
    line: int


@dataclass(frozen=True, kw_only=True)
class Concatenation:
    nodes: tuple["Node", ...]


@dataclass(frozen=True, kw_only=True)
class Alternation:
    nodes: tuple["Node", ...]


@dataclass(frozen=True, kw_only=True)
class Repeat:
    node: "Node"
    least: int
    most: int | None


@dataclass(frozen=True, kw_only=True)
class Lexeme:
    """A part translated into one terminal (see gbnf.py); the parser creates none."""

    regex: str
    starts: Ranges


Node = Character | Reference | Concatenation | Alternation | Repeat | Lexeme


def parse(text: str) -> dict[str, Node]:
    """The rules by name. Raises HotsplitError with the line of a syntax error."""
    rules = _Parser(text).rules()
    if "root" not in rules:
        raise HotsplitError("the grammar has no rule 'root', from which every text is derived")
    for node in rules.values():
        for reference in references(node):
            if reference.name not in rules:
                raise HotsplitError(
                    f"line {reference.line} of the grammar: no rule is called"
                    f" {shown(reference.name)}"
                )
    if "root" not in _ending(rules):
        raise HotsplitError(
            "the grammar can never end: every alternative of rule 'root' recurses without end"
        )
    return rules


def without(ranges: Ranges, taken: Iterable[tuple[int, int]]) -> Ranges:
    """The characters of `ranges` that are in none of `taken`."""
    left, ordered = [], sorted(taken)
    for first, last in ranges:
        for low, high in ordered:
            if low > last:
                break
            if first < low:
                left.append((first, low - 1))
            first = max(first, high + 1)
        if first <= last:
            left.append((first, last))
    return tuple(left)


def inside(node: Node) -> Iterator[Node]:
    """The node and all nodes in it, but not those of the rules that it refers to."""
    yield node
    match node:
        case Concatenation() | Alternation():
            for part in node.nodes:
                yield from inside(part)
        case Repeat():
            yield from inside(node.node)


def references(node: Node) -> list[Reference]:
    return [part for part in inside(node) if isinstance(part, Reference)]


def _ending(rules: dict[str, Node]) -> set[str]:
    """The names of the rules that can derive a finite text."""
    found: set[str] = set()
    while more := {name for name in rules.keys() - found if _ends(rules[name], found)}:
        found |= more
    return found


def _ends(node: Node, known: set[str]) -> bool:
    match node:
        case Character() | Lexeme():
            return True
        case Reference():
            return node.name in known
        case Concatenation():
            return all(_ends(part, known) for part in node.nodes)
        case Alternation():
            return any(_ends(part, known) for part in node.nodes)
        case Repeat():
            return node.least == 0 or _ends(node.node, known)


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text.replace("\r\n", "\n").replace("\r", "\n")
        self._at = 0

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        self._skip(across_lines=True)
        while self._at < len(self._text):
            name = self._name("the name of a rule")
            self._skip()
            if not self._take("::="):
                raise self._error(f"wanted ::= after {shown(name)}")
            if name in rules:
                raise self._error(f"duplicate rule {shown(name)}")
            self._skip(across_lines=True)
            rules[name] = self._choice(depth=0)
            if self._peek() not in ("", "\n"):
                raise self._error(f"{self._peek()!r} is not understood here")
            self._skip(across_lines=True)
        return rules

    def _choice(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise self._error(f"over {MAX_DEPTH} nested groups")
        nodes = [self._sequence(depth)]
        while self._take("|"):
            self._skip(across_lines=True)
            nodes.append(self._sequence(depth))
        return nodes[0] if len(nodes) == 1 else Alternation(nodes=tuple(nodes))

    def _sequence(self, depth: int) -> Node:
        nodes: list[Node] = []
        self._skip(across_lines=depth > 0)
        while (found := self._symbol(depth)) is not None:
            self._skip(across_lines=depth > 0)
            for count in itertools.count():
                if (times := self._repetition()) is None:
                    break
                if count == MAX_DEPTH:
                    raise self._error(f"over {MAX_DEPTH} repetitions of one symbol")
                found = Repeat(node=found, least=times[0], most=times[1])
                self._skip(across_lines=depth > 0)
            nodes.append(found)
        return Concatenation(nodes=tuple(nodes))

    def _symbol(self, depth: int) -> Node | None:
        """One literal, class, group or reference; None at the end of the sequence."""
        sign = self._peek()
        if sign in ("<", "!"):
            raise self._error("tokens (<...>) are not supported, only their text in quotes")
        if self._take('"'):
            return self._literal()
        if self._take("["):
            return self._class()
        if self._take("."):
            return Character(ranges=ANY)
        if self._take("("):
            node = self._choice(depth + 1)
            if not self._take(")"):
                raise self._error("wanted ')'")
            return node
        if sign and sign in _NAME:
            line = self._line()
            return Reference(name=self._name("a rule"), line=line)
        return None

    def _literal(self) -> Node:
        characters: list[Node] = []
        while not self._take('"'):
            code = ord(self._character('"'))
            characters.append(Character(ranges=((code, code),)))
        return Concatenation(nodes=tuple(characters))

    def _class(self) -> Node:
        is_negated = self._take("^")
        ranges: list[tuple[int, int]] = []
        while not self._take("]"):
            first = last = self._character("]")
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                last = self._character("]")
            if last < first:
                raise self._error(f"the range {first!r} to {last!r} runs backwards")
            ranges.append((ord(first), ord(last)))
        found = without(ANY, ranges)
        if not is_negated:
            found = without(ANY, found)
        if not found:
            raise self._error("a class without characters")
        return Character(ranges=found)

    def _character(self, end: str) -> str:
        sign = self._peek()
        if not sign:
            raise self._error(f"the text ends before {end!r}")
        self._at += 1
        if sign != "\\":
            return sign
        kind = self._peek()
        self._at += 1
        if kind in _ESCAPES:
            return _ESCAPES[kind]
        digits = self._text[self._at : self._at + _HEX_DIGITS.get(kind, 0)]
        try:
            found = chr(int(digits, 16)) if len(digits) == _HEX_DIGITS.get(kind) else ""
            found.encode()
        except (ValueError, OverflowError):  # no digits, too large, half a surrogate pair
            found = ""
        if not found:
            raise self._error(f"unknown escape: a backslash and {kind + digits!r}")
        self._at += len(digits)
        return found

    def _repetition(self) -> tuple[int, int | None] | None:
        for sign, times in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return times
        if not self._take("{"):
            return None
        inside, closing, _ = self._text[self._at :].partition("}")
        least, comma, most = (part.strip() for part in inside.partition(","))
        if not closing or not _is_count(least) or not (_is_count(most) or not most):
            raise self._error("wanted {2}, {2,} or {2,5}")
        if most and int(most) < int(least):
            raise self._error(f"{{{inside}}}: the upper bound is below the lower one")
        self._at += len(inside) + 1
        return int(least), int(most) if most else None if comma else int(least)

    def _name(self, what: str) -> str:
        start = self._at
        while (sign := self._peek()) and sign in _NAME:
            self._at += 1
        if start == self._at:
            raise self._error(f"wanted {what}")
        return self._text[start : self._at]

    def _skip(self, across_lines: bool = False) -> None:
        """Skips spaces and comments, and with `across_lines` also newlines."""
        while sign := self._peek():
            if sign == "#":
                line_end = self._text.find("\n", self._at)
                self._at = len(self._text) if line_end < 0 else line_end
            elif sign in " \t" or (across_lines and sign == "\n"):
                self._at += 1
            else:
                return

    def _take(self, signs: str) -> bool:
        is_there = self._text.startswith(signs, self._at)
        self._at += len(signs) if is_there else 0
        return is_there

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _line(self) -> int:
        return self._text.count("\n", 0, self._at) + 1

    def _error(self, message: str) -> HotsplitError:
        return HotsplitError(f"line {self._line()} of the grammar: {message}")


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def _escaped(code: int) -> str:
    return f"\\u{{{code:x}}}"
