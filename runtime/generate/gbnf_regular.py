"""The regular parts of a GBNF grammar: expands references and builds regexes."""

from dataclasses import dataclass, field

from hotsplit.runtime.generate.gbnf_parser import (
    Character,
    Choice,
    Lexeme,
    Node,
    Ranges,
    Reference,
    Repeat,
    Sequence,
    without,
)

MAX_NODES = 20_000  # of an expansion
MAX_POSITIONS = 400  # of a part that is analysed character by character


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
    return tuple(sorted(low_high for first in part.first for low_high in positions.ranges[first]))


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

    def are_apart(self, positions: frozenset[int]) -> bool:
        """True if no character belongs to two of the positions."""
        return apart([self.ranges[position] for position in positions])


def apart(groups: list[Ranges]) -> bool:
    """True if no character is in two of the groups."""
    ordered = sorted(low_high for ranges in groups for low_high in ranges)
    return all(left[1] < right[0] for left, right in zip(ordered, ordered[1:], strict=False))


def overlap(left: Ranges, right: Ranges) -> bool:
    return without(left, right) != left
