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

from hotsplit.runtime.generate.gbnf_parser import (
    Character,
    Choice,
    Lexeme,
    Node,
    Reference,
    Repeat,
    Sequence,
    references,
)
from hotsplit.runtime.generate.gbnf_regular import (
    WrittenOut,
    overlap,
    regex_of,
    starts_if_unmistakable,
    times,
)

MAX_PARTS = 40  # longer sequences are not searched for lexemes of several parts
MAX_ROUNDS = 8  # of withdrawing lexemes that start like others; then all are withdrawn


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
        terminals = {part for node in found.values() for part in _terminals(node)}
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


def _terminals(node: Node) -> Iterator[Character | Lexeme]:
    match node:
        case Character() | Lexeme():
            yield node
        case Sequence() | Choice():
            for part in node.nodes:
                yield from _terminals(part)
        case Repeat():
            yield from _terminals(node.node)


def _reached(rules: dict[str, Node]) -> dict[str, Node]:
    found: dict[str, Node] = {}
    waiting = ["root"]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = rules[name]
            waiting += [reference.name for reference in references(rules[name])]
    return found
