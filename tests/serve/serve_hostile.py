"""Malformed, oversized and badly timed requests, each with the statuses that are correct for it:
never a 5xx, but a closed connection where that is correct. About half of the requests are honest
ones with one or two values replaced or added."""

import asyncio
import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from serve_client import CHAT, COMPLETE, Broken, ServerProcess, connected, read_reply, request_bytes

from hotsplit.serve.chat_requests import ChatBody
from hotsplit.serve.responses_requests import ResponsesBody
from hotsplit.serve.text_requests import CompletionBody

AT_ONCE = 8
HANG_S = 90.0  # a grammar may take 60 s on an overloaded machine
MAX_BODY = 8 << 20
# Options that the server must be started with.
OPTIONS = ("--threads", "1", "--parallel", "4", "--queue", "64")
HUNG_UP = 0  # stands for a closed connection without a status

HONEST: dict[str, Any] = {
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
    "max_tokens": 4,
    "temperature": 0.0,
    "top_p": 0.9,
    "top_k": 20,
    "seed": 3,
    "stop": ["\n\n"],
    "stream": False,
    "n": 1,
    "logprobs": True,
    "top_logprobs": 2,
    "logit_bias": {"5": 1.0},
    "response_format": {"type": "text"},
    "frequency_penalty": 0.1,
    "dry_multiplier": 0.5,
    "dry_sequence_breakers": ["\n", ":"],
    "xtc_probability": 0.1,
    "samplers": ["dry", "top_k", "xtc"],
}
TEXT = {key: HONEST[key] for key in ("max_tokens", "temperature", "seed", "stop", "stream")}
FIELDS = sorted(ChatBody.model_fields | CompletionBody.model_fields | ResponsesBody.model_fields)
HONEST_BY_PATH: dict[str, dict[str, Any]] = {
    CHAT: HONEST,
    COMPLETE: {**TEXT, "prompt": ["Hello", "there"], "logprobs": 2, "echo": False, "n": 1},
    "/v1/responses": {
        "input": "Hello",
        "max_output_tokens": 4,
        "temperature": 0.0,
        "stream": False,
    },
    "/tokenize": {"content": "Hello", "add_special": True, "with_pieces": True},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/apply-template": {"messages": HONEST["messages"], "chat_template_kwargs": {"a": 1}},
}
_NUMBERS = (0, -1, 1, 1.5, 1e308, -1e308, 10**30, -(10**30), 2**31, 2**63, 2**64)
_TEXTS = ("", "x", "\ud800", "\udfff\ud800", "\x00", "a" * 5000, "\u202e\U0001f98a")
_LISTS = ([], [[]], [None], ["x"] * 1000, [1, "2", None])
_OBJECTS = ({}, {"": {}}, {"a" * 1000: 1}, {"type": "json_schema"}, {"role": "user"})
_PATTERN = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(a+)+$"}}}
JUNK: tuple[Any, ...] = (None, True, False, *_NUMBERS, *_TEXTS, *_LISTS, *_OBJECTS, _PATTERN)


@dataclass(frozen=True, kw_only=True)
class Case:
    """`data` is sent; then the client hangs up, or waits for an answer, perhaps after closing its
    sending half. `right` has the statuses that are correct."""

    name: str
    data: bytes
    right: frozenset[int]
    closes_half: bool = False
    pieces: int = 1  # the most pieces that the data is sent in, with pauses
    hangs_up: bool = False  # without waiting for an answer


Make = Callable[[random.Random], Case]


def cases_of(seed: int, count: int) -> list[Case]:
    """Every explosive constraint, bodies with replaced values, and cases of all other kinds."""
    draw = random.Random(seed)
    cases = [_explosive(more) for more in EXPLOSIVE]
    cases += [replaced(draw) for _ in range((count - len(cases)) // 2)]
    cases += [KINDS[number % len(KINDS)](draw) for number in range(count - len(cases))]
    draw.shuffle(cases)
    return cases


async def status_of(server: ServerProcess, case: Case) -> int:
    """The status of the answer; HUNG_UP if the connection closed, -1 if neither within HANG_S."""
    try:
        async with asyncio.timeout(HANG_S), connected(server.port) as (reader, writer):
            size = -(-len(case.data) // case.pieces)
            for start in range(0, len(case.data), size):
                writer.write(case.data[start : start + size])
                await writer.drain()
                if case.pieces > 1:
                    await asyncio.sleep(0.01)
            if case.hangs_up:
                return HUNG_UP
            if case.closes_half:
                writer.write_eof()
            return (await read_reply(reader)).status
    except (Broken, ConnectionError):
        return HUNG_UP
    except TimeoutError:
        return -1


# ---- bodies --------------------------------------------------------------------------------------


def replaced(draw: random.Random) -> Case:
    """An honest body with one or two values replaced or added, at any depth."""
    path = draw.choice((CHAT, *HONEST_BY_PATH))
    body = copy.deepcopy(HONEST_BY_PATH[path])
    for _ in range(draw.randint(1, 2)):
        _replace(body, draw)
    return Case(
        name="replaced",
        data=request_bytes(path, json.dumps(body).encode()),
        right=frozenset({200, 400}),
    )


def _replace(value: Any, draw: random.Random) -> None:
    while True:
        if isinstance(value, dict):
            key: Any = draw.choice([*value, draw.choice([*FIELDS, "__class__"])])
        elif isinstance(value, list) and value:
            key = draw.randrange(len(value))
        else:
            return
        inner = value.get(key) if isinstance(value, dict) else value[key]
        if not isinstance(inner, dict | list) or not inner or draw.random() < 0.4:
            value[key] = copy.deepcopy(draw.choice(JUNK))
            return
        value = inner


def no_json(draw: random.Random) -> Case:
    whole = json.dumps(HONEST).encode()
    cut, number = whole[: draw.randrange(1, len(whole))], b"9" * 6000
    bodies = [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe\x00",
        b"\xef\xbb\xbf{}",
        b"\x00" * 64,
    ]
    bodies += [cut, whole + b"}", whole.replace(b":", b"=", 1), whole.decode().encode("utf-16")]
    bodies += [b"[" * 100_000, b'{"a":' * 50_000, draw.randbytes(200), b'{"seed": %s}' % number]
    bodies += [b'{"messages": NaN}', b'{"temperature": Infinity}', b'{"n": -Infinity}']
    bodies += [b'{"temperature": 1e%s}' % number[:300], b'{"messages": "\xc3\x28"}']
    body = draw.choice(bodies)
    return Case(name="no JSON", data=request_bytes(_path(draw), body), right=frozenset({400}))


def deep(draw: random.Random) -> Case:
    depth = draw.choice((65, 200, 900, 20_000, 100_000))
    inner = (
        b"[" * depth + b"]" * depth
        if draw.random() < 0.5
        else b'{"a":' * depth + b"1" + b"}" * depth
    )
    body = b'{"messages": [{"role": "user", "content": ' + inner + b"}]}"
    return Case(name="deep", data=request_bytes(CHAT, body), right=frozenset({400}))


def bad_constraint(draw: random.Random) -> Case:
    more = draw.choice(
        [
            {"grammar": "root ::= ("},
            {"grammar": "root ::= root"},
            {"grammar": "x" * 70_000},
            {"json_schema": {"type": "nonsense"}},
            {"json_schema": {"$ref": "http://localhost/x"}},
            {"json_schema": {"type": "string", "pattern": "("}},
            {"json_schema": "{"},
            {"json_schema": {"enum": []}},
            {"response_format": {"type": "json_schema"}},
            {"response_format": {"type": "xml"}},
            {"grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000},
        ]
    )
    return Case(
        name="constraint", data=request_bytes(CHAT, {**HONEST, **more}), right=frozenset({400})
    )


EXPLOSIVE: tuple[dict[str, Any], ...] = (
    {"json_schema": {"type": "integer", "multipleOf": 123456789}},
    {"json_schema": {"allOf": [{"type": "string", "pattern": f".*{i}.*"} for i in range(20)]}},
    {"json_schema": {"allOf": [{"type": "integer", "multipleOf": m} for m in (9973, 9967)]}},
    {"json_schema": {"type": "string", "minLength": 10**9}},
    {"json_schema": {"type": "string", "pattern": "(a|b)*a(a|b){60}(.*c.*){9}"}},
    {
        "json_schema": {
            "anyOf": [{"type": "object", "properties": {f"p{i}": {}}} for i in range(900)]
        }
    },
    {"json_schema": {"properties": {f"p{i}": {"type": "integer"} for i in range(1500)}}},
    {
        "json_schema": {
            "$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(900)}
            | {"a900": {"type": "null"}},
            "$ref": "#/$defs/a0",
        }
    },
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "x",
                "schema": {"oneOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]},
            },
        }
    },
    {"grammar": "root ::= " + "(" * 4 + '"a"' + "{1,1000})" * 4},
    {"grammar": "root ::= " + " | ".join(f'"x{i}" root?' for i in range(3000))},
    {"grammar": "root ::= " + " ".join(['"a"?'] * 3000)},
    {
        "grammar": "root ::= r0\n"
        + "\n".join(f'r{i} ::= r{i + 1} r{i + 1} | "a"' for i in range(900))
        + '\nr900 ::= "b"'
    },
    {"grammar": 'root ::= root root root | "a" | ""', "max_tokens": 16},
    {"grammar": 'root ::= ("a" | "b")* "a" ' + '("a" | "b") ' * 40, "max_tokens": 16},
)


def _explosive(more: dict[str, Any]) -> Case:
    """An automaton of any size: refused, or followed."""
    data = request_bytes(CHAT, {**HONEST, **more})
    return Case(name="explosive", data=data, right=frozenset({200, 400}))


def own_template(draw: random.Random) -> Case:
    text = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    return Case(
        name="template",
        data=request_bytes(CHAT, {**HONEST, "chat_template": text}),
        right=frozenset({400}),
    )


def out_of_place(draw: random.Random) -> Case:
    """Pictures, sound, parts that are no parts, tools that are no tools, and sizes out of range."""
    tool, picture = (
        {"type": "function", "function": {"name": "f"}},
        {"url": "data:," + "A" * 100_000},
    )
    parts = [
        {"type": "image_url", "image_url": picture},
        {"type": "input_audio", "input_audio": {}},
        {"type": "text"},
        {"type": "text", "text": 5},
        {"type": ["text"], "text": "a"},
        5,
        None,
        [],
        {},
    ]
    more = draw.choice(
        [
            {"messages": [{"role": "user", "content": [draw.choice(parts)]}]},
            {"tools": "x"},
            {"tools": [draw.choice((5, {}, {"type": "function"}, {"type": "web_search"}))]},
            {"tools": [tool] * 129},
            {"tools": [tool], "tool_choice": draw.choice(("any", 5, {"type": "function"}))},
            {"messages": [{"role": "assistant", "tool_calls": draw.choice(("x", [5], [{}]))}]},
            {"max_tokens": draw.choice((10**18, 1e18, -2))},
            {"n": 10**9},
            {"top_logprobs": 10**18},
            {"stop": draw.choice(("a" * 900_000, ["a" * 50_000] * 16, ["a"] * 100_000))},
            {"logit_bias": draw.choice(({str(i): 1 for i in range(20_000)}, {"\u0663": 1}))},
        ]
    )
    data = request_bytes(CHAT, {**HONEST, **more})
    return Case(name="out of place", data=data, right=frozenset({400}))


def long_prompt(draw: random.Random) -> Case:
    body = {"prompt": "a " * 200_000, "max_tokens": 1}
    return Case(name="long prompt", data=request_bytes(COMPLETE, body), right=frozenset({400}))


# ---- heads ---------------------------------------------------------------------------------------


def too_long(draw: random.Random) -> Case:
    """A body above the limit. The server may hang up before the client has sent all of it."""
    if draw.random() < 0.5:
        size = draw.choice((MAX_BODY + 1, 1 << 40, 10**30))
        data = request_bytes(CHAT, b"x", headers={"Content-Length": str(size)})
    else:
        piece = b"%x\r\n" % (1 << 16) + b" " * (1 << 16) + b"\r\n"
        headers = {"Content-Type": "application/json", "Transfer-Encoding": "chunked"}
        data = request_bytes(CHAT, method="POST", headers=headers) + piece * 130 + b"0\r\n\r\n"
    return Case(name="too long", data=data, right=frozenset({413, 400, HUNG_UP}))


def odd_head(draw: random.Random) -> Case:
    lines = draw.choice(
        [
            b"GET / HTTP/9.9\r\n\r\n",
            b"\r\n\r\n\r\n\r\n",
            b"GET\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost localhost\r\n\r\n",
            b"POST /v1/chat/completions HTTP/1.1\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: " + b"a" * 100_000 + b"\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: a\r\n" * 20_000 + b"\r\n",
            b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 2_000_000 + b"\r\n\r\n",
            b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
            b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nContent-Length:"
            b" 4\r\n\r\nabcd",
            b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"zz\r\n",
            b"GET /\x00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"GET http:// HTTP/1.1\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            draw.randbytes(draw.randint(1, 500)) + b"\r\n\r\n",
        ]
    )
    right = frozenset({400, 403, 404, 413, 415, 431, HUNG_UP})
    return Case(name="odd head", data=lines, right=right, closes_half=True)


_WRONG_PATHS = r"""
/../../etc/passwd /%2e%2e/%2e%2e/etc/passwd /..%2f..%2fetc/passwd /page.html //etc/passwd
/v1/models/../../etc/passwd /v1/models/%2e%2e%2fpage.html /serve/page.html /.git/config /v1/nothing
/v1/chat/completions/ /v1/models/none /\..\..\etc\passwd /%00 /%ff
"""


def wrong_place(draw: random.Random) -> Case:
    path = draw.choice(_WRONG_PATHS.split())
    return Case(name="wrong path", data=request_bytes(path), right=frozenset({404}))


def wrong_method(draw: random.Random) -> Case:
    path = draw.choice(("/", "/health", CHAT, "/tokenize", "/metrics", "/v1/models"))
    known = "POST" if path in (CHAT, "/tokenize") else "GET"
    methods = {"GET", "POST", "PUT", "DELETE", "PATCH", "TRACE", "OPTIONS", "NONSENSE"} - {known}
    data = request_bytes(path, method=draw.choice(sorted(methods)), headers={"Content-Length": "0"})
    return Case(name="wrong method", data=data, right=frozenset({405}))


def wrong_kind(draw: random.Random) -> Case:
    form = "application/x-www-form-urlencoded"
    kind = draw.choice(("text/plain", "", "multipart/form-data", form, "application/jsonp", "*/*"))
    data = request_bytes(_path(draw), HONEST, headers={"Content-Type": kind})
    return Case(name="wrong content type", data=data, right=frozenset({415}))


def wrong_host(draw: random.Random) -> Case:
    host = draw.choice(("evil.example", "localhost.evil.example", "127.0.0.1.nip.io", ""))
    data = request_bytes("/v1/models", headers={"Host": host})
    return Case(name="wrong host", data=data, right=frozenset({403, 400}))


# ---- senders -------------------------------------------------------------------------------------


def unfinished(draw: random.Random) -> Case:
    """Stops in the middle of the headers or the body, and closes its sending half."""
    whole = request_bytes(_path(draw), HONEST)
    data = whole[: draw.randrange(1, len(whole))]
    right = frozenset({400, 408, HUNG_UP})
    return Case(name="unfinished", data=data, right=right, closes_half=True)


def half_closed(draw: random.Random) -> Case:
    """Everything is sent, then the sending half is closed: some servers take that for a
    disconnected client."""
    data = request_bytes(CHAT, {**HONEST, "stream": draw.random() < 0.5})
    right = frozenset({200, HUNG_UP})
    return Case(name="half closed", data=data, right=right, closes_half=True)


def gone(draw: random.Random) -> Case:
    data = request_bytes(CHAT, {**HONEST, "max_tokens": 8, "stream": draw.random() < 0.5})
    return Case(name="gone", data=data, right=frozenset({HUNG_UP}), hangs_up=True)


def slow(draw: random.Random) -> Case:
    """An honest request over a bad line: in many pieces, yet complete in time."""
    data = request_bytes(CHAT, HONEST)
    return Case(name="slow", data=data, right=frozenset({200}), pieces=draw.randint(2, 30))


def _path(draw: random.Random) -> str:
    return draw.choice((CHAT, COMPLETE, "/tokenize", "/apply-template"))


KINDS: tuple[Make, ...] = (
    no_json,
    deep,
    bad_constraint,
    out_of_place,
    own_template,
    long_prompt,
    too_long,
    odd_head,
    wrong_place,
    wrong_method,
    wrong_kind,
    wrong_host,
    unfinished,
    half_closed,
    gone,
    slow,
)
