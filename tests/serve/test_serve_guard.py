"""Checks of a request before its handler runs: the key, the host, CORS, sizes, and slow clients.

The application runs in this process, without a model: these tests need none."""

import asyncio
import base64
import contextlib
import errno
import json
import logging
import socket
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import uvicorn
from forked import run_python
from scripted_server import page_policy

from hotsplit.errors import HotsplitError
from hotsplit.serve import connections
from hotsplit.serve.app import ROUTES, app_of
from hotsplit.serve.connections import connection_class
from hotsplit.serve.exchange import Gone, drop_body
from hotsplit.serve.guard import Guard
from hotsplit.serve.request_log import RequestLine, _Format
from hotsplit.serve.serve_config import ServeConfig
from hotsplit.serve.service import Service

KEY = "correct horse"
PATHS = [(method, path.replace("{name:path}", "tiny")) for method, path, _ in ROUTES]


def service_of(**fields):
    return Service(ServeConfig(model=Path("none.gguf"), **fields))


def ask(service, method, path, headers=(), body=(b"",), scope=()):
    """(status, headers, content) of a request's answer; JSON is parsed. `body` is in pieces; a
    piece that is None never arrives."""
    pieces = list(body)
    sent = []

    async def receive():
        if not pieces:
            await asyncio.sleep(3600)
        piece = pieces.pop(0)
        if piece is None:
            await asyncio.sleep(3600)
        return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

    async def send(message):
        sent.append(message)

    given = {"host": "localhost:8080"} | dict(headers)
    request = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "http_version": "1.1",
        "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
        **dict(scope),
    }
    asyncio.run(app_of(service)(request, receive, send))
    assert sent[0]["type"] == "http.response.start"
    content = b"".join(message.get("body", b"") for message in sent[1:])
    found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    is_json = found.get("content-type") == "application/json"
    return sent[0]["status"], found, json.loads(content) if is_json else content


def basic(password):
    return "Basic " + base64.b64encode(f"me:{password}".encode()).decode()


WRONG_KEYS = ("Bearer wrong", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", "Bearer ", "Bearer caf\u00e9")
WRONG_KEYS += (basic("wrong"), "Basic %%%")


@pytest.mark.parametrize("method, path", [*PATHS, ("GET", "/docs"), ("PUT", "/"), ("GET", "//")])
def test_every_path_except_health_needs_the_key(method, path):
    given = [{"Authorization": key} for key in WRONG_KEYS]
    for headers in ({}, {"X-Api-Key": "wrong"}, *given):
        status, _, content = ask(service_of(api_key=KEY), method, path, headers)
        if path == "/health":
            assert status == 503 and content == {"status": "loading model"}
        else:
            assert status == 401 and "the API key is" in str(content["error"]), headers


RIGHT_KEYS = (f"Bearer {KEY}", f"bearer {KEY}", basic(KEY))


@pytest.mark.parametrize(
    "headers", [{"X-Api-Key": KEY}, *({"Authorization": key} for key in RIGHT_KEYS)]
)
def test_the_key_is_accepted_on_every_path(headers):
    service = service_of(api_key=KEY)
    for method, path in PATHS:
        sent = {**headers, "Content-Type": "application/json"}
        status, _, _ = ask(service, method, path, sent, [b"{}"])
        assert status in (200, 400, 404, 503), (path, status)


def test_only_the_page_makes_a_browser_ask_for_the_key():
    service = service_of(api_key=KEY)
    assert ask(service, "GET", "/")[1]["www-authenticate"].startswith("Basic")
    assert ask(service, "GET", "/v1/models")[1]["www-authenticate"] == "Bearer"


def test_the_page_runs_only_its_own_script():
    """The policy allows the page's script and style by hashes, which the test computes again."""
    _, headers, page = ask(service_of(), "GET", "/")
    policy = headers["content-security-policy"]
    assert policy == page_policy(page.decode()) and "unsafe" not in policy
    assert policy.count("sha256-") == 2


OURS = """
localhost:8080 127.0.0.1:8080 [::1]:8080 LOCALHOST my.name My.Name.:80 localhost. [::1]
xn--mller-kva.local
"""
OTHERS = """
evil.example:8080 localhost.evil.example 127.0.0.1.evil.example [::1].evil.example [::1]evil
[::1 ::1 [localhost] [my.name] localhost:80.evil.example localhost:a 127.0.0.1:80:80
evil.example@localhost localhost@evil.example localhost/ [::1%25a] localhost:\u0661
"""


@pytest.mark.parametrize(
    "host, is_ours",
    [
        *((host, True) for host in OURS.split()),
        *((host, False) for host in ("", "localhost, evil.example", *OTHERS.split())),
    ],
)
def test_a_local_server_without_a_key_accepts_only_its_own_host_names(host, is_ours):
    service = service_of(hosts=("My.NAME", "m\u00fcller.local"))
    status, _, content = ask(service, "GET", "/health", {"host": host})
    assert (status, content.get("error", {}).get("code")) == (
        (503, None) if is_ours else (403, "wrong_host")
    )
    assert ask(service_of(api_key=KEY), "GET", "/health", {"host": host})[0] == 503
    assert ask(service_of(host="0.0.0.0"), "GET", "/health", {"host": host})[0] == 503


LOOPBACK = (("localhost", "LocalHost", "127.1", "127.9.9.9"), ("0.0.0.0", "8.8.8.8"))


def test_what_is_loopback_is_looked_up():
    for hosts, wanted in zip(LOOPBACK, (403, 503), strict=True):
        for host in hosts:
            service = service_of(host=host)
            assert ask(service, "GET", "/health", {"host": "evil.example"})[0] == wanted, host


ORIGIN = {"origin": "http://page.example"}
PREFLIGHT = {**ORIGIN, "access-control-request-method": "POST"}


def test_cors_is_off_unless_the_origin_is_allowed():
    for origins in ((), ("http://other.example",)):
        service = service_of(origins=origins)
        _, headers, _ = ask(service, "GET", "/health", ORIGIN)
        assert not [name for name in headers if "access-control" in name]
        assert ask(service, "OPTIONS", "/v1/completions", PREFLIGHT)[0] == 405


SAME = ("http://page.example", "http://Page.Example", "HTTP://page.example:80")


@pytest.mark.parametrize("known, allowed", [("*", "*"), *((known, SAME[0]) for known in SAME)])
def test_cors_for_allowed_origins(known, allowed):
    service = service_of(origins=(known,), api_key=KEY)
    status, headers, _ = ask(service, "OPTIONS", "/v1/completions", PREFLIGHT)
    assert status == 204 and headers["access-control-allow-origin"] == allowed
    assert "Authorization" in headers["access-control-allow-headers"]
    status, headers, _ = ask(service, "GET", "/v1/models", ORIGIN)
    assert status == 401 and headers["access-control-allow-origin"] == allowed


JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded"])
def test_a_body_without_the_json_content_type_is_refused(kind):
    """Pages of other origins may send these types without a preflight request."""
    headers = {"Content-Type": kind} if kind else {}
    status, _, content = ask(service_of(), "POST", "/v1/completions", headers, [b"{}"])
    assert status == 415
    assert "add -H 'Content-Type: application/json'" in content["error"]["message"]
    assert kind in content["error"]["message"]


@pytest.mark.parametrize("is_announced", [True, False])
def test_a_long_body_is_refused(is_announced):
    service = service_of(max_body_bytes=2000)
    length = {"Content-Length": "2001"} if is_announced else {}
    pieces = [None] if is_announced else [b" " * 1000] * 3
    status, _, content = ask(service, "POST", "/v1/completions", {**JSON, **length}, pieces)
    assert status == 413 and content["error"]["code"] == "request_too_large"
    short = {**JSON, "Content-Length": "2000"}
    assert ask(service, "POST", "/v1/completions", short, [b" " * 2000])[0] == 400


@pytest.mark.parametrize("length", ["9" * 21, "9" * 5000, "-1", "0x10", "\u00b2"])
def test_a_length_that_is_no_number_or_endless_is_refused(length):
    headers = [
        (name.lower().encode(), value.encode("latin-1"))
        for name, value in {**JSON, "Host": "localhost", "Content-Length": length}.items()
    ]
    status, _, content = ask(
        service_of(), "POST", "/v1/completions", body=[b""], scope={"headers": headers}
    )
    assert status == 413 and content["error"]["code"] == "request_too_large"


def test_a_slow_body_is_refused():
    """Its length is known to be too large, although its rest is awaited beyond the deadline."""
    service = service_of(read_s=0.1, max_body_bytes=2000)
    for first, status, code in (
        (b"{", 408, "request_timeout"),
        (b" " * 3000, 413, "request_too_large"),
    ):
        found, _, content = ask(service, "POST", "/v1/completions", JSON, [first, None])
        assert (found, content["error"]["code"]) == (status, code)


def test_the_log_says_once_that_the_model_is_being_loaded(caplog):
    service = service_of()
    with caplog.at_level(logging.INFO, "hotsplit.serve"):
        for path in ("/health", "/v1/models", "/health"):
            assert ask(service, "GET", path)[0] == 503
        assert [record.message for record in caplog.records if "503" in record.message] == [
            "requests get 503 until the model is loaded, which the log does not repeat"
        ]
        assert len(caplog.records) == 1
        service.state = "stopping"
        ask(service, "GET", "/health")
        assert len(caplog.records) == 2


def test_requests_while_loading_and_stopping_are_refused():
    service = service_of()
    status, headers, content = ask(service, "GET", "/v1/models")
    assert status == 503 and "loaded" in content["error"]["message"] and headers["retry-after"]
    service.state = "stopping"
    assert ask(service, "GET", "/health")[2] == {"status": "stopping"}
    status, headers, content = ask(service, "POST", "/v1/completions", JSON, [b"{}"])
    assert status == 503 and "stopping" in content["error"]["message"] and headers["retry-after"]


def test_unknown_paths_and_wrong_methods_are_refused():
    service = service_of()
    status, _, content = ask(service, "GET", "/v1/nothing/../../etc/passwd")
    assert status == 404 and content["error"]["code"] == "not_found"
    status, headers, content = ask(service, "GET", "/v1/completions")
    assert status == 405 and content["error"]["code"] == "method_not_allowed"
    assert headers["allow"] == "POST"


def test_paths_of_llama_server_are_refused_with_ours():
    from hotsplit.serve.app import OF_LLAMACPP, ROUTES

    service = service_of()
    assert {"/completion", "/slots"} <= {*OF_LLAMACPP}
    for path, ours in OF_LLAMACPP.items():
        status, _, content = ask(service, "POST", path, JSON, [b"{}"])
        assert status == 404
        assert content["error"]["message"].endswith(f"closest to llama-server's is {ours}")
        assert ours in [known for _, known, _ in ROUTES]


def test_an_unexpected_error_ends_only_its_own_request(monkeypatch, caplog):
    service = service_of()
    monkeypatch.setattr(service.metrics, "page", lambda: 1 / 0)
    with caplog.at_level(logging.ERROR):
        status, headers, content = ask(service, "GET", "/metrics")
    assert status == 500 and content["error"]["type"] == "server_error"
    assert "division" not in content["error"]["message"]
    assert headers["x-request-id"] in caplog.text
    assert ask(service, "GET", "/health")[0] == 503


def test_a_line_of_the_log_is_one_line():
    line = RequestLine(id="req_1", method="GET", path="/a\nb\x1b[2J", status=404, error="x\ny")
    record = logging.LogRecord("a", logging.INFO, "", 0, "request", (), None)
    record.line = line
    text = _Format().format(record)
    assert "\n" not in text and "\x1b" not in text and "404" in text


HOSTS = ("my.name:80", "http://my.name", "", ".", "*", "a b", "[::1]")
ORIGINS = ("http://a/", "a", "http://a:123456", "http://a:\u0661", "localhost:3000", "*.a.org", "")
WRONG = ({"parallel": 0}, {"port": 70000}, {"queue": -1}, {"max_tokens": 0}, {"kept": -1})
WRONG += ({"timeout_s": 0.0}, {"drain_s": float("nan")}, {"api_key": ""}, {"api_key": "a\nb"})


@pytest.mark.parametrize(
    "fields", [*WRONG, *({"hosts": (x,)} for x in HOSTS), *({"origins": (x,)} for x in ORIGINS)]
)
def test_impossible_configs_are_refused(fields):
    with pytest.raises(HotsplitError):
        service_of(**fields)
    for fine in ("*", "null", "http://localhost:3000", "http://[::1]:80"):
        service_of(origins=(fine,))


def test_the_key_is_not_shown():
    assert KEY not in repr(ServeConfig(model=Path("a"), api_key=KEY))


@pytest.fixture
def listening():
    """The port of a server that allows 0.3 s for a head and two connections."""
    with served_by(app_of(service_of(read_s=0.3))) as port:
        yield port


@pytest.fixture
def patient():
    """The port of a server whose limits on connections and time for a head no test reaches."""
    service = service_of(read_s=20.0)
    with served_by(app_of(service), head_s=20.0, most=64) as port:
        yield port


@contextlib.contextmanager
def served_by(app, head_s=0.3, most=2):
    http, options = connection_class(head_s, most), {"lifespan": "off", "log_config": None}
    config = uvicorn.Config(app, http=http, port=0, ws="none", timeout_keep_alive=1, **options)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join(20)


def closed_after(port, pieces, wait=0.1):
    """Sends pieces, with `wait` seconds after each; returns what the server sends until it closes
    the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        found = b""
        try:
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(wait)
            while piece := connection.recv(1 << 16):
                found += piece
        except (ConnectionError, BrokenPipeError):
            pass
        return found


HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


def test_connections_with_slow_heads_are_closed(listening):
    began = time.monotonic()
    assert closed_after(listening, [HEAD]) == b""
    assert closed_after(listening, [HEAD, *[b"A: b\r\n"] * 30]) == b""
    assert closed_after(listening, []) == b""
    assert time.monotonic() - began < 60
    assert b"loading" in closed_after(listening, [HEAD + b"Connection: close\r\n\r\n"])


def test_the_time_for_the_second_head_of_a_connection_is_limited_too(listening):
    found = closed_after(listening, [HEAD + b"\r\n", HEAD])
    assert found.count(b"HTTP/1.1 503") == 1


@pytest.mark.parametrize("line", [b"POST /tokenize", b"GET /health", b"OPTIONS /tokenize"])
@pytest.mark.parametrize("is_length_first", [True, False])
def test_a_request_with_two_lengths_is_refused_and_its_connection_closed(
    patient, line, is_length_first
):
    lengths = [b"Content-Length: 4\r\n", b"Transfer-Encoding: chunked\r\n"]
    more = (
        b"Content-Type: application/json\r\nOrigin: http://a\r\nAccess-Control-Request-Method:"
        b" POST\r\n"
    )
    head = line + b" HTTP/1.1\r\nHost: localhost\r\n" + more
    head += b"".join(lengths if is_length_first else lengths[::-1]) + b"\r\n"
    found = closed_after(patient, [head + b"2\r\n{}\r\n0\r\n\r\n" + HEAD + b"\r\n"])
    assert found.startswith(b"HTTP/1.1 400") and b"connection: close" in found.lower()
    assert found.count(b"HTTP/1.1") == 1 and b"Transfer-Encoding; send one" in found


def test_connections_are_bounded(listening):
    waiting = [socket.create_connection(("127.0.0.1", listening)) for _ in range(2)]
    time.sleep(0.05)
    assert closed_after(listening, [HEAD + b"\r\n"], wait=0) == b""
    for connection in waiting:
        connection.close()


def test_an_oversized_head_is_refused(listening):
    found = closed_after(listening, [b"GET /health HTTP/1.1\r\n" + b"A: " + b"b" * 200_000], wait=0)
    assert found.startswith(b"HTTP/1.1 431")


LONG_HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: " + b"b" * (8 << 20) + b"\r\n\r\n"
CLOSED_BODY = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (40 << 20)
) + bytes(40 << 20)


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
CHUNKED += b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNKED += (b"100000\r\n" + bytes(1 << 20) + b"\r\n") * 12 + b"0\r\n\r\n"


@pytest.mark.parametrize(
    "request_, wanted", [(LONG_HEAD, b"431"), (CLOSED_BODY, b"413"), (CHUNKED, b"413")]
)
def test_a_client_that_sends_more_than_is_read_sees_the_answer(patient, request_, wanted):
    """The request is larger than what the server reads before it answers, and than what socket
    buffers hold."""
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", patient), timeout=20) as connection:
            connection.sendall(request_)
            connection.shutdown(socket.SHUT_WR)
            found = b"".join(iter(lambda: connection.recv(1 << 16), b""))  # noqa: B023
        assert found.startswith(b"HTTP/1.1 " + wanted)


def test_a_client_that_never_stops_sending_is_closed(patient, monkeypatch):
    monkeypatch.setattr(connections, "LINGER_S", 0.2)
    began = time.monotonic()
    with (
        socket.create_connection(("127.0.0.1", patient), timeout=20) as connection,
        pytest.raises(ConnectionError),
    ):
        while time.monotonic() - began < 20:
            connection.sendall(b"b" * 1000)
            time.sleep(0.001)
    monkeypatch.setattr(connections, "LINGER_S", 60)
    with (
        socket.create_connection(("127.0.0.1", patient), timeout=20) as connection,
        pytest.raises(ConnectionError),
    ):
        for _ in range(200):
            connection.sendall(b"b" * (1 << 20))


def test_dropping_a_body_is_bounded_in_bytes_and_time():
    num_read = 0

    async def receive():
        nonlocal num_read
        num_read += 1
        return {"type": "http.request", "body": bytes(1 << 20), "more_body": True}

    async def never():
        await asyncio.sleep(3600)

    asyncio.run(drop_body(receive))
    assert num_read == 16
    began = time.monotonic()
    asyncio.run(drop_body(never))
    assert 0.9 < time.monotonic() - began < 10


def test_an_answer_that_the_client_does_not_read_leaves_one_line_in_the_log(caplog):
    """The connection is cut, and uvicorn does not log it as an error of the application."""
    lines = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        raise Gone

    service = service_of()
    service.observe = lines.append
    with caplog.at_level(logging.INFO), served_by(Guard(app, service)) as port:
        found = closed_after(port, [HEAD + b"\r\n"])
        while not lines:
            time.sleep(0.01)
    assert not found.endswith(b"0\r\n\r\n")  # the end of a whole answer
    assert [line.status for line in lines] == [499]
    assert "ASGI" not in caplog.text


def test_without_the_packages_the_command_says_which():
    probe = (
        "import sys; sys.modules['starlette'] = None\n"
        "from hotsplit.cli import main\n"
        "sys.exit(main(['serve', 'none.gguf']))"
    )
    done = run_python(probe)
    assert done.returncode == 1 and "needs the package starlette: pip install " in done.stderr


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOTCONN, "not connected"), ConnectionResetError()]
)
def test_a_connection_that_its_client_resets_is_closed_at_once(error):
    """It may be reset between the answer's last byte and the server's end of the stream."""
    transport = Mock(is_closing=Mock(return_value=False), write_eof=Mock(side_effect=error))
    lingering = connections.LingeringTransport(transport, lambda: True)
    lingering.close()
    assert transport.close.call_count == 1 and not lingering.is_lingering
