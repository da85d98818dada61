"""Translates GBNF rules for llguidance, into one regex or into Lark.

A grammar without recursion becomes one regex, the fastest form, unless that is too long. Any other
becomes Lark, whose terminals llguidance lexes, longest match first. With the grammar's own
terminals, some texts would be rejected (`("a" | "ab") "bc"` would not match abc) and some grammars
would never end (`word word` with `word ::= "x"+`); llguidance's own converter has these faults.
Here terminals are single characters, which makes parsing exact, or longer ones that are
unambiguous: their characters show where they end, and no other terminal starts with the same
characters. A quoted string is such a terminal: a mask of a JSON grammar then takes 57 us instead of
1,700 (49,152 tokens, one core)."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from hotsplit.runtime.generate.gbnf_parser import (
    Alternation,
    Character,
    Concatenation,
    Lexeme,
    Node,
    Ranges,
    Reference,
    Repeat,
    inside,
    references,
)

MAX_LARK_DEPTH = 20  # of groups in a line of Lark; llguidance has a limit
MAX_PARTS = 40  # longer sequences are not searched for lexemes of several parts
MAX_ROUNDS = 8  # of withdrawing lexemes that start like others; then all are withdrawn
MAX_NODES = 20_000  # of an expansion
MAX_DEPTH = 80  # of groups in a regex, each of which is up to 3 of the 250 levels of Rust's regex
MAX_POSITIONS = 400  # of a part that is analysed character by character


def as_regex(rules: dict[str, Node]) -> str | None:
    """The grammar as one regex; None if it is recursive or the regex would be too long."""
    node = WrittenOut(rules).of(rules["root"])
    return None if node is None else regex_of(node)


def as_lark(rules: dict[str, Node]) -> str:
    """The grammar in llguidance's Lark."""
    found = _with_lexemes(rules)
    writer = _LarkWriter({name: f"r{number}" for number, name in enumerate(found)})
    for name, node in found.items():
        writer.add(writer.numbers[name], node)
    return "\n".join([f"start: {writer.numbers['root']}", *writer.lines]) + "\n"


class _LarkWriter:
    def __init__(self, numbers: dict[str, str]) -> None:
        self.numbers = numbers  # names in Lark, by rule
        self.lines: list[str] = []
        self._groups = itertools.count()

    def add(self, name: str, node: Node) -> None:
        self.lines.append(f"{name}: {self._written(node, 0)}")

    def _written(self, node: Node, depth: int) -> str:
        if depth == MAX_LARK_DEPTH and isinstance(node, Alternation | Repeat):
            name = f"g{next(self._groups)}"
            self.add(name, node)
            return name
        match node:
            case Character() | Lexeme():
                return f"/{node.regex}/"
            case Reference():
                return self.numbers[node.name]
            case Concatenation():
                return " ".join(self._written(part, depth) for part in node.nodes) or '""'
            case Alternation():
                return f"({' | '.join(self._written(part, depth + 1) for part in node.nodes)})"
            case Repeat():
                return f"({self._written(node.node, depth + 1)}){times(node)}"


def _with_lexemes(rules: dict[str, Node]) -> dict[str, Node]:
    """The rules reachable from `root`, with terminals as long as possible."""
    finder = _Finder(rules)
    for _ in range(MAX_ROUNDS):
        found = _reached({name: finder.of(node) for name, node in rules.items()})
        terminals = list(
            {
                part
                for node in found.values()
                for part in inside(node)
                if isinstance(part, Character | Lexeme)
            }
        )
        starts = [part.starts if isinstance(part, Lexeme) else part.ranges for part in terminals]
        mistaken = {
            lexeme.regex
            for lexeme in (terminals[index] for index in overlapping(starts))
            if isinstance(lexeme, Lexeme)
        }
        if not mistaken:
            return found
        finder.refused |= mistaken
    return _reached(dict(rules))


class _Finder:
    def __init__(self, rules: dict[str, Node]) -> None:
        self.refused: set[str] = set()  # regexes of lexemes
        self._written_out = WrittenOut(rules)
        self._known: dict[tuple[int, ...], Lexeme | None] = {}  # by nodes of the rules

    def of(self, node: Node) -> Node:
        lexeme = self._lexeme(node, id(node))
        if lexeme is not None:
            return lexeme
        match node:
            case Concatenation():
                return Concatenation(nodes=tuple(self._parts(node.nodes)))
            case Alternation():
                return Alternation(nodes=tuple(self.of(part) for part in node.nodes))
            case Repeat():
                return Repeat(node=self.of(node.node), least=node.least, most=node.most)
        return node

    def _parts(self, nodes: tuple[Node, ...]) -> Iterator[Node]:
        """The parts of a sequence, joined into the longest lexemes from left to right."""
        start = 0
        while start < len(nodes):
            ends = range(len(nodes), start + 1, -1) if len(nodes) <= MAX_PARTS else ()
            for end in ends:
                lexeme = self._lexeme(Concatenation(nodes=nodes[start:end]), id(nodes), start, end)
                if lexeme is not None:
                    yield lexeme
                    start = end
                    break
            else:
                yield self.of(nodes[start])
                start += 1

    def _lexeme(self, node: Node, *key: int) -> Lexeme | None:
        if key not in self._known:
            self._known[key] = self._new_lexeme(node)
        found = self._known[key]
        return None if found is None or found.regex in self.refused else found

    def _new_lexeme(self, node: Node) -> Lexeme | None:
        if isinstance(node, Reference):
            return None  # the referenced rule is examined by itself
        written_out = self._written_out.of(node)
        starts = None if written_out is None else starts_if_unmistakable(written_out)
        if written_out is None or starts is None:
            return None
        return Lexeme(regex=regex_of(written_out), starts=starts)


def _reached(rules: dict[str, Node]) -> dict[str, Node]:
    found: dict[str, Node] = {}
    waiting = ["root"]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = rules[name]
            waiting += [reference.name for reference in references(rules[name])]
    return found


@dataclass(frozen=True)
class _WrittenOut:
    node: Node
    size: int  # nodes
    depth: int


class WrittenOut:
    """Expands nodes by replacing references with the rules' bodies."""

    def __init__(self, rules: dict[str, Node]) -> None:
        self._rules = rules
        self._known: dict[str, _WrittenOut | None] = {}

    def of(self, node: Node) -> Node | None:
        """The expansion; None if a rule is recursive or the whole would be too large or deep."""
        found = self._expanded(node)
        return None if found is None else found.node

    def _expanded(self, node: Node) -> _WrittenOut | None:
        match node:
            case Character():
                return _WrittenOut(node, 1, 1)
            case Reference():
                if node.name not in self._known:
                    self._known[node.name] = None  # for a reference from its own body: recursive
                    self._known[node.name] = self._expanded(self._rules[node.name])
                return self._known[node.name]
            case Repeat():
                inner = self._expanded(node.node)
                if inner is None or inner.depth == MAX_DEPTH:
                    return None
                expanded = Repeat(node=inner.node, least=node.least, most=node.most)
                return _WrittenOut(expanded, inner.size + 1, inner.depth + 1)
            case Concatenation() | Alternation():
                parts = [self._expanded(part) for part in node.nodes]
                found = [part for part in parts if part is not None]
                size = 1 + sum(part.size for part in found)
                depth = max((part.depth for part in found), default=0) + isinstance(
                    node, Alternation
                )
                if len(found) < len(parts) or size > MAX_NODES or depth > MAX_DEPTH:
                    return None
                return _WrittenOut(
                    type(node)(nodes=tuple(part.node for part in found)), size, depth
                )
            case Lexeme():
                raise AssertionError(node)


def regex_of(node: Node) -> str:
    """The regex of a node without references."""
    match node:
        case Character():
            return node.regex
        case Concatenation():
            return "".join(regex_of(part) for part in node.nodes)
        case Alternation():
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
class _Edges:
    is_nullable: bool
    first: frozenset[int] = frozenset()  # positions
    last: frozenset[int] = frozenset()


@dataclass
class _Positions:
    ranges: list[Ranges] = field(default_factory=list)
    follow: list[frozenset[int]] = field(default_factory=list)

    def of(self, node: Node) -> _Edges:
        match node:
            case Character():
                if len(self.ranges) == MAX_POSITIONS:
                    raise _TooLong
                self.ranges.append(node.ranges)
                self.follow.append(frozenset())
                here = frozenset({len(self.ranges) - 1})
                return _Edges(is_nullable=False, first=here, last=here)
            case Concatenation():
                found = _Edges(is_nullable=True)
                for inner in node.nodes:
                    found = self._joined(found, self.of(inner))
                return found
            case Alternation():
                parts = [self.of(inner) for inner in node.nodes]
                return _Edges(
                    is_nullable=any(part.is_nullable for part in parts),
                    first=frozenset().union(*(part.first for part in parts)),
                    last=frozenset().union(*(part.last for part in parts)),
                )
            case Repeat():
                return self._repeated(node)
        raise AssertionError(node)

    def _repeated(self, node: Repeat) -> _Edges:
        copies = max(node.least, 1) if node.most is None else node.most
        if copies > MAX_POSITIONS:
            raise _TooLong
        found = _Edges(is_nullable=True)
        for copy in range(copies):
            part = self.of(node.node)
            if node.most is None and copy == copies - 1:
                self._link(part.last, part.first)
            if copy >= node.least:
                part = _Edges(is_nullable=True, first=part.first, last=part.last)
            found = self._joined(found, part)
        return found

    def _joined(self, left: _Edges, right: _Edges) -> _Edges:
        self._link(left.last, right.first)
        return _Edges(
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
        return all(
            left[1] < right[0] for left, right in itertools.pairwise(self.ordered(positions))
        )


def overlapping(groups: list[Ranges]) -> set[int]:
    """The indices of the groups that share a character with another one."""
    ordered = sorted(
        (low, high, index) for index, ranges in enumerate(groups) for low, high in ranges
    )
    found, reach = set[int](), (-1, -1)  # (the last character of those before, its group)
    for low, high, index in ordered:
        if low <= reach[0]:
            found |= {index, reach[1]}
        reach = max(reach, (high, index))
    return found
