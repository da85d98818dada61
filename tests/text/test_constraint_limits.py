"""Constraints that are refused in one line, and the options that take them; constraints that are
large, or whose automata would be: followed, or refused within the limits of their process, which
ends alone."""

import json
import os
import socket
import subprocess
import sys
import time
from itertools import combinations
from pathlib import Path

import click
import jsonschema
import pytest
import regex as regexes
from case_tables import rows_of
from click.testing import CliRunner
from constrained_texts import follows, takes, tiny_codec, written

from hotsplit.commands.options.constraint_options import (
    constraint_of,
    constraint_options,
    take_constraint,
)
from hotsplit.errors import HotsplitError
from hotsplit.runtime.generate import constraints
from hotsplit.runtime.generate.constraints import (
    ConstraintError,
    gbnf_constraint,
    json_schema_constraint,
    lark_constraint,
    regex_constraint,
)
from hotsplit.runtime.generate.grammar_text import message_of
from hotsplit.runtime.text.codec import TextCodec

# A grammar => what the refusal says.
GBNF_REFUSED = r"""
foo ::= "a" => no rule 'root'
root ::= foo => line 1 .* no rule is called 'foo'
root ::= "a => line 1 .* the text ends before '"'
root ::= [a => line 1 .* the text ends before ']'
root ::= [] => a class without characters
root ::= [z-a] => the range 'z' to 'a' runs backwards
root ::= ("a" => line 1 .* wanted '\)'
root ::= "a") => line 1 .* '\)' is not understood here
root ::= <think> => tokens \(<...>\) are not supported
root ::= "a"{3,2} => the upper bound is below the lower one
root ::= "a"{x} => wanted .2., .2,. or .2,5.
root = "a" => wanted ::= after 'root'
root ::= "\q" => unknown escape: a backslash and 'q'
root ::= "\ud800" => unknown escape: a backslash and 'ud800'
root ::= "\x4" => unknown escape: a backslash and 'x4.?'
root ::= "a" root => can never end
* ::= 1 => wanted the name of a rule
"""
_DEEP = (f'r{i} ::= {"(" * 150}r{i + 1}{")" * 150} | "x"' for i in range(50))
GBNF_REFUSALS = dict(rows_of(GBNF_REFUSED)) | {
    'root ::= "a"\nroot ::= "b"': "line 2 .* duplicate rule 'root'",
    "root ::= a\na ::= b\nb ::= a": "can never end",
    "root ::= " + "(" * 300: "over 200 nested groups",
    "": "is empty",
    " \n": "is empty",
    "root ::= \0": "a zero byte at character 9",
    "root ::= \ud800": "not UTF-8 at character 9",
    "\n".join(["root ::= r0", *_DEEP, 'r50 ::= "x"']): "nested too deep; make it flatter",
    'root ::= "a"' + "?" * 201: "line 1 .* over 200 repetitions of one symbol",
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
    # With the place: llguidance's own numbers are places in a grammar that the user does not see.
    "(": "^regex: unclosed group, from here: .",
    "caf(é": "^regex: unclosed group, from here: .é",
    "abc[a-": "^regex: unclosed character class, from here: .a-",
    r"a\q": r"^regex: unrecognized escape sequence, from here: .q",
    "a(?P<n": "^regex: unclosed capture group name, at the end",
    "a(?=b)": "look-around",
    r"(a)\1": "backreferences",
    r"a\b": "^regex: lookarounds not supported",
    "": "is empty",
    "a\0": "zero byte",
}
UNENFORCED = """
not if then else uniqueItems dependentSchemas dependentRequired dependencies contains
minContains maxContains propertyNames unevaluatedProperties unevaluatedItems $dynamicRef
$recursiveRef $dynamicAnchor
"""
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
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize(
    ("make", "text", "message"),
    [
        *((gbnf_constraint, *case) for case in GBNF_REFUSALS.items()),
        *((lark_constraint, *case) for case in LARK_REFUSALS.items()),
        *((regex_constraint, *case) for case in REGEX_REFUSALS.items()),
    ],
)
def test_what_is_not_understood_is_refused(make, text, message):
    refused(make, text, message)


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
    large = (b"{" + b" " * (4 << 20), "has over 4194304 characters; wanted a ")
    contents = {
        "missing": (None, "no such file; wanted a "),
        "empty": (b" \n", "is empty; wanted a "),
        "latin1": ('{"const": "é"}'.encode("latin-1"), "cannot be read as text"),
        "large": large,
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


LIMITS = "needs more than 2 s of processor time or 256 MiB of memory; make it smaller or simpler"


def matching(*patterns):
    return {"type": "string", "allOf": [{"pattern": pattern} for pattern in patterns]}


def multiples(*numbers):
    return {"allOf": [{"type": "integer", "multipleOf": number} for number in numbers]}


LETTERS = "abcdefghijklmnopqrst"
ALL_OF = "start: A\nA: " + " & ".join(f"/.*{c}.*/" for c in LETTERS)
LONG = "root ::= " + " | ".join(f'"x{i}" root?' for i in range(9000))
ALL_IN_ONE = matching(*[f".*{sign}.*" for sign in LETTERS])
EXPLOSIVE = [
    (json_schema_constraint, {"multipleOf": 0.00011}, None),
    (json_schema_constraint, {"multipleOf": 2**8 * 5**5}, None),
    (json_schema_constraint, ALL_IN_ONE, "JSON schema.* smaller or simpler"),
    (json_schema_constraint, {**multiples(9973, 9967)}, LIMITS),
    (gbnf_constraint, LONG, LIMITS),
    (lark_constraint, ALL_OF, "smaller or simpler"),
]


@pytest.mark.parametrize(("make", "text", "message"), EXPLOSIVE)
def test_an_explosive_constraint_is_refused_at_once_or_followed(make, text, message):
    other = regex_constraint("ab*", tiny_codec())
    began = time.monotonic()
    if message is None:
        assert make(text, tiny_codec()).mask_V(4096).any()
    else:
        with pytest.raises(HotsplitError, match=message):
            make(text, tiny_codec())
    assert time.monotonic() - began < 90  # on a free machine two seconds
    assert takes(other, "abb") and takes(regex_constraint("c", tiny_codec()), "c")


def test_this_process_neither_computes_nor_grows():
    memory = Path("/proc/self/statm")
    regex_constraint("a", tiny_codec())
    began_s, pages = time.process_time(), int(memory.read_text().split()[1])
    with pytest.raises(ConstraintError, match=LIMITS):
        json_schema_constraint(multiples(9973, 9967), tiny_codec())
    assert time.process_time() - began_s < 1.0  # the other process may take twice as long
    assert int(memory.read_text().split()[1]) - pages < 4096


def test_a_grammar_that_exceeds_its_limits_later_ends_its_own_texts():
    late, other = (regex_constraint("ab*", tiny_codec()) for _ in range(2))
    copy = late.fork()
    late._channel._connection.shutdown(socket.SHUT_RDWR)  # as if its process were killed
    for each in (late, copy):
        each.accept(tiny_codec().tokenizer.token_to_id("a"))
        assert each.is_ready(1.0)
        with pytest.raises(ConstraintError, match=LIMITS):
            each.mask_V(4096)
    assert takes(other, "abb")


def descendants():
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return [
        grandchild
        for child in children
        for grandchild in Path(f"/proc/{child}/task/{child}/children").read_text().split()
    ]


def test_a_grammars_process_ends_with_the_last_copy():
    regex_constraint("a", tiny_codec())
    before = set(descendants())
    one = regex_constraint("ab*", tiny_codec())
    other = one.fork()
    (pid,) = set(descendants()) - before
    del one
    other.accept(tiny_codec().tokenizer.token_to_id("a"))
    assert other.can_end and Path(f"/proc/{pid}").exists()
    del other
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_another_process_takes_the_place_of_one_that_was_killed():
    regex_constraint("a", tiny_codec())
    process = constraints._processes[tiny_codec().tokenizer]
    process._worker._process.kill()
    process._worker._process.wait()
    assert takes(regex_constraint("ab", tiny_codec()), "ab")
    assert constraints._processes[tiny_codec().tokenizer] is not process


LARGE = {
    "alternatives": 'root ::= "x" (' + " | ".join(f'"{i}"' for i in range(3000)) + ")",
    "recursive": 'root ::= "(" root ")" | ' + " | ".join(f'"{i}."' for i in range(1500)),
    "groups": "root ::= " + "(" * 190 + '"a" root?' + ")" * 190,
    "optional groups": "root ::= " + '("a" ' * 150 + '"b"' + ")?" * 150,
    "chain": "root ::= r0\n"
    + "\n".join(f'r{i} ::= "a" r{i + 1}' for i in range(990))
    + '\nr990 ::= "b"',
    "rules": 'root ::= "a"\n' + "\n".join(f'r{i} ::= "x"' for i in range(2000)),
    "repetitions": "root ::= " + "(" * 4 + '"a"' + "{1,1000})" * 4,
    "class": "root ::= [" + "".join(chr(200 + 2 * i) for i in range(2000)) + "]",
    "literal": 'root ::= "' + "a" * 12_000 + '"',
}


OPTIONALS = ["", "a", "aaaa", "a" * 150 + "b"]


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("alternatives", ["x0", "x2999"], ["x", "x3000"]),
        ("recursive", ["(1499.)", "7."], ["(1499.", "1500."]),
        ("optional groups", OPTIONALS, ["b", "ab", "a" * 151]),
        ("groups", ["a", "aaaa"], ["", "ab"]),
        ("chain", ["a" * 990 + "b"], ["a" * 989 + "b"]),
        ("rules", ["a"], ["x"]),
        ("repetitions", ["a", "aaaa"], ["", "b"]),
        ("class", [chr(200), chr(4198)], [chr(201), "a"]),
        ("literal", ["a" * 12_000], ["a" * 100]),
    ],
)
def test_a_large_grammar_is_followed(name, right, wrong):
    constraint = gbnf_constraint(LARGE[name], tiny_codec())
    for text in (*right, *wrong):
        assert follows(constraint, text) == (text in right), text


OPTIONAL = {f"p{i}": {"type": "null"} for i in range(2000)}
ONE_OF_MANY = [
    {"type": "object", "properties": {f"p{i}": {"type": "null"}}, "required": [f"p{i}"]}
    for i in range(700)
]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": OPTIONAL},
        {"anyOf": [{"const": f"c{i}"} for i in range(3000)]},
        {"anyOf": ONE_OF_MANY},
        {"enum": list(range(3000))},
    ],
)
def test_a_large_schema_is_followed_to_the_end(schema):
    constraint = json_schema_constraint(schema, tiny_codec())
    jsonschema.validate(json.loads(written(constraint)), schema)


WITHOUT_PROC = """
import resource
from pathlib import Path
from hotsplit.runtime.text import worker_inside
def missing(path): raise FileNotFoundError(path)
Path.read_text = missing
worker_inside.confine(more_memory_bytes=1 << 20, open_files=8)
print(resource.getrlimit(resource.RLIMIT_AS)[0], resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def test_a_process_is_confined_where_proc_is_not_mounted():
    done = subprocess.run([sys.executable, "-c", WITHOUT_PROC], capture_output=True, text=True)
    assert done.stdout.split() == [str((1 << 30) + (1 << 20)), "8"], done.stderr
