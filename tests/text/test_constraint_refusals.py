"""Refusals of schemas, grammars and regexes, and the command-line options that take them."""

import sys
from itertools import combinations

import click
import pytest
import regex as regexes
from click.testing import CliRunner
from constrained_texts import tiny_codec, written

from hotsplit.commands.options.constraint_options import (
    constraint_of,
    constraint_options,
    take_constraint,
)
from hotsplit.errors import HotsplitError
from hotsplit.runtime.generate import constraints
from hotsplit.runtime.generate.constraints import (
    gbnf_constraint,
    json_schema_constraint,
    lark_constraint,
    regex_constraint,
)
from hotsplit.runtime.generate.grammar_text import message_of
from hotsplit.runtime.text.codec import TextCodec

GBNF_REFUSALS = {
    'foo ::= "a"': "no rule 'root'",
    "root ::= foo": "line 1 .* no rule is called 'foo'",
    'root ::= "a"\nroot ::= "b"': "line 2 .* duplicate rule 'root'",
    'root ::= "a': "line 1 .* the text ends before '\"'",
    "root ::= [a": "line 1 .* the text ends before ']'",
    "root ::= []": "a class without characters",
    "root ::= [z-a]": "the range 'z' to 'a' runs backwards",
    'root ::= ("a"': "line 1 .* wanted '\\)'",
    'root ::= "a")': "line 1 .* '\\)' is not understood here",
    "root ::= <think>": r"tokens \(<...>\) are not supported",
    'root ::= "a"{3,2}': "the upper bound is below the lower one",
    'root ::= "a"{x}': "wanted .2., .2,. or .2,5.",
    'root = "a"': "wanted ::= after 'root'",
    'root ::= "\\q"': "unknown escape: a backslash and 'q'",
    'root ::= "\\ud800"': "unknown escape: a backslash and 'ud800'",
    'root ::= "\\x4"': "unknown escape: a backslash and 'x4.?'",
    'root ::= "a" root': "can never end",
    "root ::= a\na ::= b\nb ::= a": "can never end",
    "root ::= " + "(" * 300: "over 200 nested groups",
    "": "is empty",
    " \n": "is empty",
    "root ::= \0": "a zero byte at character 9",
    "root ::= \ud800": "not UTF-8 at character 9",
    "root ::= r0\n"
    + "\n".join(
        f"r{i} ::= {'(' * 150}r{i + 1}{')' * 150} | 'x'".replace("'", '"') for i in range(50)
    )
    + '\nr50 ::= "x"': "nested too deep; make it flatter",
    'root ::= "a"' + "?" * 201: "line 1 .* over 200 repetitions of one symbol",
    "* ::= 1": "wanted the name of a rule",
}
LARK_REFUSALS = {
    'root: "a"': "no start",
    "start: a": 'unknown name: "a"',
    "start: /(/": "invalid regex",
    "start: /a(?=b)/": "look-around",
    'start: %json {"not": {}}': "%json is not supported",
    "": "is empty",
}
REGEX_REFUSALS = {
    "(": "unclosed group",
    "a(?=b)": "look-around",
    r"(a)\1": "backreferences",
    r"a\b": "lookarounds not supported",
    "": "is empty",
    "a\0": "zero byte",
}
UNENFORCED = """
not if then else uniqueItems dependentSchemas dependentRequired dependencies contains
minContains maxContains propertyNames unevaluatedProperties unevaluatedItems $dynamicRef
$recursiveRef $dynamicAnchor
"""
STRING = {"type": "string"}
SCHEMA_REFUSALS = [
    ({"$ref": "http://example.org/a"}, "Resource 'http://example.org/a' is not present"),
    ({"$ref": "other.json#/a"}, "other.json' is not present"),
    ({"$ref": "#/$defs/no"}, "Pointer '/.defs/no' does not exist"),
    ({"$ref": "#"}, "allows no token from here on"),
    ('{"format": ["date"]}', "Expected string for 'format', got ..date.."),
    ({"format": {}}, "Expected string for 'format', got {}"),
    ({"type": "foo"}, "Invalid type: foo"),
    ({"type": "integer", "minimum": True}, "Expected f64 for 'minimum', got true"),
    ({"multipleOf": -3}, "#: 'multipleOf': is -3, wanted a number over 0"),
    ({"items": {"multipleOf": -0.5}}, "#/items: 'multipleOf': is -0.5, wanted a number over 0"),
    ({"multipleOf": 0}, "#: 'multipleOf': is 0, wanted a number over 0"),
    ({"type": "string", "minLength": -1}, "minLength"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength .3. is greater"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum .3. is greater"),
    ({"enum": []}, "Unsatisfiable"),
    ({"enum": "a"}, "enum must be an array"),
    ({"const": 1 << 60}, "'const': numbers beyond 2.53 are not kept exactly"),
    ('{"const": 1e400}', "'const': numbers beyond"),
    ({"const": float("inf")}, "Infinity is not a JSON number"),
    ({"pattern": "("}, "unclosed group"),
    ({"pattern": "(?=a)"}, "look-around"),
    ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf"),
    ({"anyOf": []}, "Unsatisfiable schema: anyOf is empty"),
    ({"items": 3}, "schema must be an object or boolean"),
    ({"properties": []}, "properties must be an object"),
    ({"required": "a"}, "Expected array for 'required', got .a."),
    ({"type": "object", "minProperties": 2}, "'minProperties': at most one more"),
    ({"additionalProperties": 3}, "schema must be an object or boolean"),
    ({"title": "\ud800"}, "JSON schema: it is not JSON: unexpected end of hex escape"),
    (False, "is false, which allows no document"),
    ([], "is a list; wanted an object"),
    ("{", "is not JSON"),
    ("", "the JSON schema is empty"),
    ('{"const": NaN}', "NaN is not a JSON number"),
    ("[" * 100_000, "is not JSON"),
    ('{"items": ' * 130 + "true" + "}" * 130, "JSON schema: a value in it is nested too deep"),
    ('{"const": ' + "[" * 200 + "]" * 200 + "}", "JSON schema: a value in it is nested too deep"),
    (
        {"oneOf": [{"type": "number"}, {"type": "integer"}]},
        "#: 'oneOf': .* use anyOf, or require a",
    ),
    (
        {"properties": {"a/b": {"oneOf": [{"const": "x"}, {"type": "string"}]}}},
        "#/properties/a~1b: 'oneOf': a document may match several of its alternatives",
    ),
]


def refused(make, text, message):
    with pytest.raises(HotsplitError, match=message) as raised:
        make(text, tiny_codec())
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 500


@pytest.mark.parametrize(("grammar", "message"), GBNF_REFUSALS.items())
def test_gbnf_that_is_not_understood_is_refused(grammar, message):
    refused(gbnf_constraint, grammar, message)


@pytest.mark.parametrize(("grammar", "message"), LARK_REFUSALS.items())
def test_lark_that_is_not_understood_is_refused(grammar, message):
    refused(lark_constraint, grammar, message)


@pytest.mark.parametrize(("regex", "message"), REGEX_REFUSALS.items())
def test_regexes_that_are_not_understood_are_refused(regex, message):
    refused(regex_constraint, regex, message)


@pytest.mark.parametrize(
    ("regex", "line"),
    [
        ("caf(é", "regex: unclosed group, from here: (é"),
        ("abc[a-", "regex: unclosed character class, from here: [a-"),
        (r"a\q", r"regex: unrecognized escape sequence, from here: \q"),
        ("a(?P<n", "regex: unclosed capture group name, at the end"),
        (r"a\b", "regex: lookarounds not supported"),
    ],
)
def test_the_refusal_of_a_regex_shows_where_it_is_wrong(regex, line):
    """llguidance's own numbers are places in a grammar that the user does not see."""
    with pytest.raises(HotsplitError) as raised:
        regex_constraint(regex, tiny_codec())
    assert str(raised.value).startswith(line) and "at 1(" not in str(raised.value)


def test_the_refusal_of_a_schemas_pattern_shows_where_it_is_wrong():
    with pytest.raises(HotsplitError) as raised:
        json_schema_constraint({"type": "string", "pattern": "ab(c"}, tiny_codec())
    assert str(raised.value) == "JSON schema: unclosed group, from here: (c"


@pytest.mark.parametrize(("schema", "message"), SCHEMA_REFUSALS)
def test_schemas_that_cannot_be_enforced_are_refused(schema, message):
    refused(json_schema_constraint, schema, message)


@pytest.mark.parametrize("keyword", UNENFORCED.split())
def test_a_keyword_that_would_not_be_enforced_is_refused_with_its_place(keyword):
    schema = {"type": "object", "properties": {"a/b": {"type": "array", keyword: {}}}}
    refused(json_schema_constraint, schema, f"#/properties/a~1b: '{regexes.escape(keyword)}': ")


@pytest.mark.parametrize("panic", ["panicked at src/a.rs:3", "no\n<backtrace>\n0: std::rt\n"])
def test_a_panic_of_llguidance_is_reported_without_its_backtrace(panic):
    wanted = "Lark grammar: llguidance cannot handle it; make it smaller or simpler"
    assert message_of("Lark grammar", "", panic) == wanted


def test_a_stuck_grammar_gives_one_line():
    refused(lark_constraint, "start: s\ns: s\n", "allows no token from here on")


def test_a_model_without_an_end_token_is_refused():
    codec = TextCodec(tiny_codec().tokenizer, 0, frozenset({5000}))
    with pytest.raises(HotsplitError, match="names no end token"):
        regex_constraint("a", codec)


def test_a_missing_package_is_reported_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setattr(constraints, "_processes", {})
    for make in (json_schema_constraint, regex_constraint, lark_constraint, gbnf_constraint):
        text = "{}" if make is json_schema_constraint else 'root ::= "a"'
        refused(make, text, "pip install llguidance")


@click.command()
@constraint_options
def command(**options):
    given = take_constraint(options)
    click.echo("none" if given is None else written(constraint_of(given, tiny_codec())))


def run(*arguments):
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


@pytest.mark.parametrize("as_file", [False, True])
@pytest.mark.parametrize(
    ("option", "text", "pattern"),
    [
        ("--json-schema", '{"enum": ["é"]}', '"é"\n'),
        ("--grammar", 'root ::= "x"{3}', "xxx\n"),
        ("--grammar", 'start: "y" A\nA: /z{2}/', "yzz\n"),
    ],
)
def test_options_take_texts_and_files(tmp_path, option, text, pattern, as_file):
    path = tmp_path / "text"
    path.write_text(text)
    result = run(option, f"@{path}") if as_file else run(option, text)
    assert (result.exit_code, result.output) == (0, pattern)


def test_short_options_and_none_and_the_lark_suffix(tmp_path):
    assert run().output == "none\n"
    assert run("-j", '{"const": 5}').output == "5\n" and run("--regex", "ab{2}").output == "abb\n"
    path = tmp_path / "a.lark"
    path.write_text('// a rule named root is a Lark one here\nroot: "x"\nstart: root\n')
    assert run("--grammar", f"@{path}").output == "x\n"
    path = tmp_path / "a.json"
    path.write_text('{"const": null}')
    assert run("-j", f"@{path}").output == "null\n"


def test_two_constraints_are_a_usage_error():
    for names in combinations(("--json-schema", "--grammar", "--regex"), 2):
        result = run(*(part for name in names for part in (name, "a")))
        assert result.exit_code == 2, result.output
        assert f"{names[0]} and {names[1]} exclude each other; give one" in result.output


@pytest.mark.parametrize("option", ["--json-schema", "--grammar"])
def test_files_that_cannot_be_read_give_one_line(tmp_path, option):
    contents = {
        "missing": (None, "no such file; wanted a "),
        "empty": (b" \n", "is empty; wanted a "),
        "latin1": ('{"const": "é"}'.encode("latin-1"), "cannot be read as text"),
        "large": (b"{" + b" " * (4 << 20), "has over 4194304 characters; wanted a "),
        "wrong": (b'{"not": {}}', "wrong: "),
    }
    for name, (content, message) in contents.items():
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        error = run(option, f"@{path}").exception
        assert isinstance(error, HotsplitError) and message in str(error), (name, error)
        assert str(path) in str(error) and "\n" not in str(error)
    assert "is a folder" in str(run(option, f"@{tmp_path}").exception)
