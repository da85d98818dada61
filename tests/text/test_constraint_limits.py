"""Constraints that are large, or whose automata would be: followed, or refused in one line within
the limits of their process, which ends alone."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest
from constrained_texts import follows, takes, tiny_codec, written

from hotsplit.errors import HotsplitError
from hotsplit.runtime.generate import constraints
from hotsplit.runtime.generate.constraints import (
    ConstraintError,
    gbnf_constraint,
    json_schema_constraint,
    lark_constraint,
    regex_constraint,
)

LIMITS = "needs more than 2 s of processor time or 256 MiB of memory; make it smaller or simpler"


def matching(*patterns):
    return {"type": "string", "allOf": [{"pattern": pattern} for pattern in patterns]}


def multiples(*numbers):
    return {"allOf": [{"type": "integer", "multipleOf": number} for number in numbers]}


EXPLOSIVE = [
    (json_schema_constraint, {"multipleOf": 0.00011}, None),
    (json_schema_constraint, {"multipleOf": 2**8 * 5**5}, None),
    (
        json_schema_constraint,
        matching(*[f".*{sign}.*" for sign in "abcdefghijklmnopqrst"]),
        "JSON schema.* smaller or simpler",
    ),
    (json_schema_constraint, {**multiples(9973, 9967)}, LIMITS),
    (gbnf_constraint, "root ::= " + " | ".join(f'"x{i}" root?' for i in range(9000)), LIMITS),
    (
        lark_constraint,
        "start: A\nA: " + " & ".join(f"/.*{c}.*/" for c in "abcdefghijklmnopqrst"),
        "smaller or simpler",
    ),
]


@pytest.mark.parametrize(("make", "text", "message"), EXPLOSIVE)
def test_an_explosive_constraint_is_refused_at_once_or_followed(make, text, message):
    other = regex_constraint("ab*", tiny_codec())
    began = time.monotonic()
    if message is None:
        assert make(text, tiny_codec()).mask_V(4096).any()
    else:
        with pytest.raises(HotsplitError, match=message) as refusal:
            make(text, tiny_codec())
        assert "\n" not in str(refusal.value)
    assert time.monotonic() - began < 11  # the wall limit; on a free machine two seconds
    assert takes(other, "abb") and takes(regex_constraint("c", tiny_codec()), "c")


def test_this_process_neither_computes_nor_grows():
    memory = Path("/proc/self/statm")
    regex_constraint("a", tiny_codec())
    began_s, pages = time.process_time(), int(memory.read_text().split()[1])
    with pytest.raises(ConstraintError, match=LIMITS):
        json_schema_constraint(multiples(9973, 9967), tiny_codec())
    assert time.process_time() - began_s < 0.2
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


def test_a_process_of_a_grammar_is_confined():
    held = regex_constraint("a", tiny_codec())
    pid = descendants()[-1]
    lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    limits = {line[:26].strip(): line[26:47].strip() for line in lines}
    assert limits["Max file size"] == "0" and limits["Max processes"] == "0"
    assert int(limits["Max address space"]) < 1 << 30 and int(limits["Max open files"]) < 8
    assert held.mask_V(4096).any()


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


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("alternatives", ["x0", "x2999"], ["x", "x3000"]),
        ("recursive", ["(1499.)", "7."], ["(1499.", "1500."]),
        ("optional groups", ["", "a", "aaaa", "a" * 150 + "b"], ["b", "ab", "a" * 151]),
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


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(2000)}},
        {"anyOf": [{"const": f"c{i}"} for i in range(3000)]},
        {
            "anyOf": [
                {"type": "object", "properties": {f"p{i}": {"type": "null"}}, "required": [f"p{i}"]}
                for i in range(700)
            ]
        },
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
