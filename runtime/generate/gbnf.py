"""Translates GBNF rules for llguidance, into one regex or into Lark.

A grammar without recursion becomes one regex, the fastest form, unless that is too long. Any other
becomes Lark, whose terminals llguidance lexes, longest match first. With the grammar's own terminals,
some texts would be rejected (`("a" | "ab") "bc"` would not match abc) and some grammars would never
end (`word word` with `word ::= "x"+`); llguidance's own converter has these faults. Here terminals
are single characters, which makes parsing exact, or longer ones that are unambiguous: their
characters show where they end, and no other terminal starts with the same characters. A quoted
string is such a terminal: a mask of a JSON grammar then takes 57 us instead of 1,700 (49,152 tokens,
one core)."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from hotsplit.runtime.generate.gbnf_parser import (
    Character,
    Choice,
    Lexeme,
    Node,
    Ranges,
    Reference,
    Repeat,
    Sequence,
    inside,
    references,
    without,
)

MAX_PARTS = 40  # longer sequences are not searched for lexemes of several parts
MAX_ROUNDS = 8  # of withdrawing lexemes that start like others; then all are withdrawn
MAX_NODES = 20_000  # of an expansion
MAX_POSITIONS = 400  # of a part that is analysed character by character


def as_regex(rules: dict[str, Node]) -> str | None:
    """The grammar as one regex; None if it is recursive or the regex would be too long."""
    node = WrittenOut(rules).of(rules["root"])
    return None if node is None else regex_of(node)


def as_lark(rules: dict[str, Node]) -> str:
    """The grammar in llguidance's Lark."""
    found = _with_lexemes(rules)
    numbers = {name: f"r{number}" for number, name in enumerate(found)}
    lines = [f"{numbers[name]}: {_lark(node, numbers)}" for name, node in found.items()]
    return "\n".join([f"start: {numbers['root']}", *lines]) + "\n"


def _lark(node: Node, numbers: dict[str, str]) -> str:
    match node:
        case Character() | Lexeme():
            return f"/{node.regex}/"
        case Reference():
            return numbers[node.name]
        case Sequence():
            return " ".join(_lark(part, numbers) for part in node.nodes) or '""'
        case Choice():
            return "(" + " | ".join(_lark(part, numbers) for part in node.nodes) + ")"
        case Repeat():
            return f"({_lark(node.node, numbers)}){times(node)}"


def _with_lexemes(rules: dict[str, Node]) -> dict[str, Node]:
    """The rules reachable from `root`, with terminals as long as possible."""
    refused: set[str] = set()
    for _ in range(MAX_ROUNDS):
        finder = _Finder(rules, refused)
        found = _reached({name: finder.of(node) for name, node in rules.items()})
        terminals = {
            part
            for node in found.values()
            for part in inside(node)
            if isinstance(part, Character | Lexeme)
        }
        mistaken = {
            lexeme.regex
            for lexeme in terminals
            if isinstance(lexeme, Lexeme)
            and any(
                overlap(lexeme.starts, other.starts if isinstance(other, Lexeme) else other.ranges)
                for other in terminals - {lexeme}
            )
        }
        if not mistaken:
            return found
        refused |= mistaken
    return _reached(dict(rules))


class _Finder:
    def __init__(self, rules: dict[str, Node], refused: set[str]) -> None:
        self._written_out, self._refused = WrittenOut(rules), refused

    def of(self, node: Node) -> Node:
        lexeme = self._lexeme(node)
        if lexeme is not None:
            return lexeme
        match node:
            case Sequence():
                return Sequence(nodes=tuple(self._parts(node.nodes)))
            case Choice():
                return Choice(nodes=tuple(self.of(part) for part in node.nodes))
            case Repeat():
                return Repeat(node=self.of(node.node), least=node.least, most=node.most)
        return node

    def _parts(self, nodes: tuple[Node, ...]) -> Iterator[Node]:
        """The parts of a sequence, joined into the longest lexemes from left to right."""
        start = 0
        while start < len(nodes):
            ends = range(len(nodes), start + 1, -1) if len(nodes) <= MAX_PARTS else ()
            for end in ends:
                lexeme = self._lexeme(Sequence(nodes=nodes[start:end]))
                if lexeme is not None:
                    yield lexeme
                    start = end
                    break
            else:
                yield self.of(nodes[start])
                start += 1

    def _lexeme(self, node: Node) -> Lexeme | None:
        if isinstance(node, Reference):
            return None  # the referenced rule is examined by itself
        written_out = self._written_out.of(node)
        starts = None if written_out is None else starts_if_unmistakable(written_out)
        if written_out is None or starts is None:
            return None
        regex = regex_of(written_out)
        return None if regex in self._refused else Lexeme(regex=regex, starts=starts)


def _reached(rules: dict[str, Node]) -> dict[str, Node]:
    found: dict[str, Node] = {}
    waiting = ["root"]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = rules[name]
            waiting += [reference.name for reference in references(rules[name])]
    return found


class WrittenOut:
    """Expands nodes by replacing references with the rules' bodies."""

    def __init__(self, rules: dict[str, Node]) -> None:
        self._rules = rules
        self._known: dict[str, tuple[Node, int] | None] = {}

    def of(self, node: Node) -> Node | None:
        """The expansion; None if a rule is recursive or the whole would be too large."""
        found = self._sized(node)
        return None if found is None else found[0]

    def _sized(self, node: Node) -> tuple[Node, int] | None:
        match node:
            case Character():
                return node, 1
            case Reference():
                if node.name not in self._known:
                    self._known[node.name] = (
                        None  # a reference to it from its own body is recursive
                    )
                    self._known[node.name] = self._sized(self._rules[node.name])
                return self._known[node.name]
            case Repeat():
                inner = self._sized(node.node)
                if inner is None:
                    return None
                return Repeat(node=inner[0], least=node.least, most=node.most), inner[1] + 1
            case Sequence() | Choice():
                parts = [self._sized(part) for part in node.nodes]
                found = [part for part in parts if part is not None]
                size = 1 + sum(size for _, size in found)
                if len(found) < len(parts) or size > MAX_NODES:
                    return None
                return type(node)(nodes=tuple(part for part, _ in found)), size
            case Lexeme():
                raise AssertionError(node)


def regex_of(node: Node) -> str:
    """The regex of a node without references."""
    match node:
        case Character():
            return node.regex
        case Sequence():
            return "".join(regex_of(part) for part in node.nodes)
        case Choice():
            return "(?:" + "|".join(regex_of(part) for part in node.nodes) + ")"
        case Repeat():
            return f"(?:{regex_of(node.node)}){times(node)}"
    raise AssertionError(node)


def times(node: Repeat) -> str:
    """The repetition operator in the syntax of regexes and Lark."""
    signs = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    most = "" if node.most is None else node.most
    return signs.get((node.least, node.most)) or f"{{{node.least},{most}}}"


def starts_if_unmistakable(node: Node) -> Ranges | None:
    """The characters that a part starts with, if its characters show where it ends; else None. They
    do if the part is deterministic and none of its texts is a prefix of a longer one. None also for
    a single character, which is a terminal anyway, and for over MAX_POSITIONS characters. The node
    has no references.

    Decided by Glushkov's automaton: each character of the expression is a position, and positions
    that may follow the same position must have disjoint characters."""
    positions = _Positions()
    try:
        part = positions.of(node)
    except _TooLong:
        return None
    groups = [part.first, *positions.follow]
    if part.is_nullable or not all(map(positions.are_apart, groups)):
        return None
    if any(positions.follow[last] for last in part.last) or len(positions.ranges) < 2:
        return None
    return positions.ordered(part.first)


class _TooLong(Exception):
    pass


@dataclass(frozen=True, kw_only=True)
class _Part:
    is_nullable: bool
    first: frozenset[int] = frozenset()  # positions
    last: frozenset[int] = frozenset()


@dataclass
class _Positions:
    ranges: list[Ranges] = field(default_factory=list)
    follow: list[frozenset[int]] = field(default_factory=list)

    def of(self, node: Node) -> _Part:
        match node:
            case Character():
                if len(self.ranges) == MAX_POSITIONS:
                    raise _TooLong
                self.ranges.append(node.ranges)
                self.follow.append(frozenset())
                here = frozenset({len(self.ranges) - 1})
                return _Part(is_nullable=False, first=here, last=here)
            case Sequence():
                found = _Part(is_nullable=True)
                for inner in node.nodes:
                    found = self._joined(found, self.of(inner))
                return found
            case Choice():
                parts = [self.of(inner) for inner in node.nodes]
                return _Part(
                    is_nullable=any(part.is_nullable for part in parts),
                    first=frozenset().union(*(part.first for part in parts)),
                    last=frozenset().union(*(part.last for part in parts)),
                )
            case Repeat():
                return self._repeated(node)
        raise AssertionError(node)

    def _repeated(self, node: Repeat) -> _Part:
        copies = max(node.least, 1) if node.most is None else node.most
        if copies > MAX_POSITIONS:
            raise _TooLong
        found = _Part(is_nullable=True)
        for copy in range(copies):
            part = self.of(node.node)
            if node.most is None and copy == copies - 1:
                self._link(part.last, part.first)
            if copy >= node.least:
                part = _Part(is_nullable=True, first=part.first, last=part.last)
            found = self._joined(found, part)
        return found

    def _joined(self, left: _Part, right: _Part) -> _Part:
        self._link(left.last, right.first)
        return _Part(
            is_nullable=left.is_nullable and right.is_nullable,
            first=left.first | right.first if left.is_nullable else left.first,
            last=left.last | right.last if right.is_nullable else right.last,
        )

    def _link(self, before: frozenset[int], after: frozenset[int]) -> None:
        for position in before:
            self.follow[position] |= after

    def ordered(self, positions: frozenset[int]) -> Ranges:
        """The ranges of the positions, of which some may overlap."""
        return tuple(sorted(each for position in positions for each in self.ranges[position]))

    def are_apart(self, positions: frozenset[int]) -> bool:
        """True if no character belongs to two of the positions."""
        return all(left[1] < right[0] for left, right in pairwise(self.ordered(positions)))


def overlap(left: Ranges, right: Ranges) -> bool:
    return without(left, right) != left
