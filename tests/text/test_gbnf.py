"""GBNF: the usual grammars, llama.cpp's reading of them, and random grammars against a brute-force
parser."""

import json
import random
from itertools import product

import pytest
import regex as regexes
import torch
from constrained_texts import (
    ARITHMETIC_GBNF,
    CHESS_GBNF,
    JSON_GBNF,
    LIST_GBNF,
    exact,
    takes,
    tiny_codec,
    written,
)

from hotsplit.errors import HotsplitError
from hotsplit.runtime.generate import gbnf, gbnf_parser
from hotsplit.runtime.generate.constraints import gbnf_constraint, lark_constraint, regex_constraint


@pytest.mark.parametrize("grammar", [JSON_GBNF, ARITHMETIC_GBNF, LIST_GBNF, CHESS_GBNF])
def test_texts_of_the_usual_gbnf_grammars(grammar):
    """Each has its own oracle: one of Python's parsers, or a regex written by hand."""
    constraint = gbnf_constraint(grammar, tiny_codec())
    for seed in range(8):
        text = written(constraint, seed)
        if grammar is JSON_GBNF:
            assert isinstance(json.loads(text, parse_float=exact), dict)
        elif grammar is ARITHMETIC_GBNF:
            assert text.endswith("\n") and all(is_equation(line) for line in text.split("\n")[:-1])
        elif grammar is LIST_GBNF:
            assert regexes.fullmatch(r"(- [^\r\n\u2028\u2029]+\n)+", text)
        else:
            move = r"(([a-h]x)?[a-h][1-8](=[NBKQR])?|[NBKQR][a-h]?[1-8]?x?[a-h][1-8]|O-O(-O)?)[+#]?"
            assert regexes.fullmatch(rf"1\. {move} {move}\n([1-9]\d?\. {move} {move}\n)+", text)


def is_equation(line):
    left, right = line.split("=")
    for side in (left, right):  # to Python 007 is not a number, and a name may not be "if"
        side = regexes.sub(r"[a-z][a-z0-9_]*|[0-9]+", "x", side)
        compile(side.strip(), "side", "eval")
    return True


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        # The longest terminal does not win: llguidance's own conversion fails here.
        ('root ::= ("a" | "ab") "bc"', ["abc", "abbc"], ["ab", "abcbc"]),
        ('root ::= word word\nword ::= "x"+', ["xx", "xxxxx"], ["x", ""]),
        ('root ::= s "end"\ns ::= "(" s ")" | [a-z]*', ["end", "eend", "(en)end"], ["en", "(end"]),
        (
            'root ::= "(" root ")" | "\\u00e9" [\\u0041-\\x43] "\\U0001F600"',
            ["(éB😀)"],
            ["éD😀", "éB"],
        ),
        ('root ::= . "/" [^\\n/]', ["\n//".replace("//", "/x"), "//é"], ["///", "/\n"]),
        ("root ::= [a&&b] [-x] [\\]\\[^] [^^]", ["&-]b", "ax^a", "b-[é"], ["&a]b", "&-]^"]),
        ('root ::= "a"{2} "b"{1,} "c"{0,2}', ["aab", "aabbcc"], ["ab", "aa", "aabccc"]),
        ('root ::= a-b a_b A-b\na-b ::= "1"\na_b ::= "2"\nA-b ::= "3"', ["123"], ["12"]),
        ('root ::= start |\n  "b" # or\nstart ::= | "x"', ["", "x", "b"], ["xb"]),
        ('root ::= root "+" root | [0-9]', ["1", "1+2+3"], ["1+", "+1"]),
        ('root ::= (("a")? "b"*)? # no end of line', ["", "a", "abb", "b"], ["ba"]),
    ],
)
def test_gbnf_is_read_as_by_llama_cpp(grammar, right, wrong):
    constraint = gbnf_constraint(grammar, tiny_codec())
    assert all(takes(constraint, text) for text in right)
    assert not any(takes(constraint, text) for text in wrong)


def test_a_grammar_gives_the_same_masks_as_a_regex_and_as_lark():
    rules = gbnf_parser.parse(CHESS_GBNF)
    regex = gbnf.as_regex(rules)
    assert regex is not None and gbnf.as_regex(gbnf_parser.parse(JSON_GBNF)) is None
    both = [
        regex_constraint(regex, tiny_codec()),
        lark_constraint(gbnf.as_lark(rules), tiny_codec()),
    ]
    for token_id in tiny_codec().encode("1. e4 e5\n2. Nf3 Nc6\n3. O-O-O exd8=Q#\n"):
        first, second = (constraint.mask_V(4096) for constraint in both)
        assert torch.equal(first, second) and 0 < first.sum() < 4096
        for constraint in both:
            constraint.accept(token_id)
    assert all(constraint.can_end for constraint in both)


def ends_of(rules, node, text, start, known):
    """The positions where a node that starts at `start` may end; `known` has the ends found so far,
    by rule and start."""
    if isinstance(node, gbnf_parser.Character):
        is_in = start < len(text) and any(a <= ord(text[start]) <= b for a, b in node.ranges)
        return {start + 1} if is_in else set()
    if isinstance(node, gbnf_parser.Reference):
        return known[node.name, start]
    if isinstance(node, gbnf_parser.Alternation):
        return set().union(*(ends_of(rules, part, text, start, known) for part in node.nodes))
    if isinstance(node, gbnf_parser.Repeat):
        parts = [node.node] * (len(text) + 1 if node.most is None else node.most)
        ends = {start} if node.least == 0 else set()
    else:
        parts, ends = node.nodes, set()
    reached = {start}
    for count, part in enumerate(parts, 1):
        reached = {b for a in reached for b in ends_of(rules, part, text, a, known)}
        ends |= reached if isinstance(node, gbnf_parser.Repeat) and count >= node.least else set()
    return ends if isinstance(node, gbnf_parser.Repeat) else reached


def is_text_of(rules, text):
    """Applies `ends_of` to all rules and positions until nothing is added."""
    known = {(name, start): set() for name in rules for start in range(len(text) + 1)}
    while True:
        more = {
            (name, start): ends_of(rules, rules[name], text, start, known) for name, start in known
        }
        if more == known:
            return len(text) in known["root", 0]
        known = more


def random_gbnf(rng):
    def expression(depth):
        kind = rng.choice(
            ["literal", "literal", "class", "name"] + ["many", "or", "row"] * (depth < 3)
        )
        if kind == "literal":
            return '"' + "".join(rng.choice("ab(") for _ in range(rng.randint(1, 2))) + '"'
        if kind == "class":
            return rng.choice(["[ab]", "[^a]", "[(-)]", "[^()]"])
        if kind == "name":
            return rng.choice(["root", "x", "y"])
        if kind == "many":
            return f"({expression(depth + 1)}){rng.choice(['*', '+', '?', '{2}', '{1,2}'])}"
        joint = " | " if kind == "or" else " "
        return "(" + joint.join(expression(depth + 1) for _ in range(rng.randint(1, 3))) + ")"

    root = f'{expression(0)} | "(" root ")" {expression(0)}'
    return f"root ::= {root}\nx ::= {expression(0)}\ny ::= {expression(0)}\n"


def test_random_grammars_accept_the_texts_that_brute_force_finds():
    """Some of the grammars have terminals of several characters."""
    rng, num_grammars, num_with_lexemes, num_texts = random.Random(0), 0, 0, 0
    texts = ["".join(signs) for length in range(5) for signs in product("ab(", repeat=length)]
    while num_grammars < 60:
        grammar = random_gbnf(rng)
        try:
            constraint = gbnf_constraint(grammar, tiny_codec())
        except HotsplitError as error:
            assert "can never end" in str(error)
            continue
        rules = gbnf_parser.parse(grammar)
        num_grammars += 1
        num_with_lexemes += "][" in gbnf.as_lark(rules)
        for text in rng.sample(texts, 60):
            want = is_text_of(rules, text)
            assert takes(constraint, text) == want, (grammar, text)
            num_texts += want
    assert num_with_lexemes >= 20 and num_texts >= 60, (num_with_lexemes, num_texts)
