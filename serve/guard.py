"""Checks every request before its body is read, and logs it.

CORS preflight requests from an allowed origin are answered without a check. If the server has an
API key, every other request needs it, except for /health. Without a key, a server on a loopback
address refuses requests whose Host is not localhost, an IP address or an allowed name: they can
come from web pages whose own name resolves to 127.0.0.1 (DNS rebinding)."""

import base64
import binascii
import hmac
import ipaddress
import logging
import re
import secrets
import socket
import time

from h11 import LocalProtocolError
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hotsplit.serve.api_error import ApiError, too_large, unavailable
from hotsplit.serve.exchange import STATUS_GONE, Gone, drop_body, error_response
from hotsplit.serve.request_log import RequestLine
from hotsplit.serve.serve_config import HOST_NAME, host_of
from hotsplit.serve.service import Service

log = logging.getLogger("hotsplit.serve")
OPEN_PATHS = ("/health",)
MAX_HEAD_BYTES = 32 << 10
MAX_DIGITS = 20  # of a content length, as in h11
_HOST = re.compile(rf"(\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>{HOST_NAME}))(:[0-9]{{0,5}})?")
_ALLOWED = {
    "access-control-allow-methods": "GET, POST, OPTIONS",
    "access-control-allow-headers": "Authorization, Content-Type, X-Api-Key, X-Request-Id",
    "access-control-max-age": "600",
}


class Guard:
    """The outermost layer of the application: counts active requests and logs each."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service, self._config = app, service, service.config
        self._is_local = self._config.api_key is None and is_loopback(self._config.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        line = RequestLine(
            id=f"req_{secrets.token_hex(8)}", method=scope["method"], path=scope["path"]
        )
        scope.setdefault("state", {})["line"] = line
        began = time.perf_counter()
        self._service.num_active += 1
        try:
            await self._answer(scope, receive, self._marked(scope, send, line))
        except Gone:
            line.status = STATUS_GONE
            scope["state"].get("abort", lambda: None)()  # set by a Connection
        except Exception as error:  # a request never ends the process
            log.exception("%s failed", line.id)
            line.error = f"{type(error).__name__}: {error}"
            failed = ApiError(
                500, "the request failed; see the server's log under its id", "internal_error"
            )
            if line.status == 0:
                await error_response(failed, line.path)(
                    scope, receive, self._marked(scope, send, line)
                )
            else:
                raise  # closes the connection mid-answer
        finally:
            self._service.num_active -= 1
            line.seconds = time.perf_counter() - began
            self._service.observe(line)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            _check_framing(headers)
            is_preflight = scope["method"] == "OPTIONS" and self._origin(headers) is not None
            if is_preflight and "access-control-request-method" in headers:
                allowed = [(name.encode(), value.encode()) for name, value in _ALLOWED.items()]
                await send({"type": "http.response.start", "status": 204, "headers": allowed})
                await send({"type": "http.response.body", "body": b""})
                return
            self._check(scope, headers)
        except ApiError as error:
            scope["state"]["line"].error = error.message
            if "expect" not in headers:  # clients with Expect have not sent the body yet
                await drop_body(receive)
            await error_response(error, scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope, headers: Headers) -> None:
        if sum(len(name) + len(value) for name, value in headers.raw) > MAX_HEAD_BYTES:
            raise ApiError(
                431,
                f"the headers have more than {MAX_HEAD_BYTES} bytes",
                "headers_too_large",
                headers={"Connection": "close"},
            )
        if self._is_local and not self._is_ours(headers.get("host", "")):
            raise ApiError(
                403,
                "this server only serves its own machine; give it an --api-key,"
                " or allow this host name (--allow-host)",
                "wrong_host",
            )
        path = scope["path"]
        if path not in OPEN_PATHS:
            self._check_key(headers, is_page=path == "/")
        if self._service.is_stopping and path not in (*OPEN_PATHS, "/metrics"):
            raise unavailable("the server is stopping")
        length = headers.get("content-length", "0")
        # Python's int refuses thousands of digits
        is_number = length.isdecimal() and len(length) <= MAX_DIGITS
        if not is_number or int(length) > self._config.max_body_bytes:
            raise too_large(self._config.max_body_bytes)

    def _check_key(self, headers: Headers, *, is_page: bool) -> None:
        wanted = self._config.api_key
        if wanted is None:
            return
        given = _given_key(headers)
        if given is not None and hmac.compare_digest(given, wanted.encode()):
            return
        what = "wrong" if given is not None else "missing: send Authorization: Bearer KEY"
        scheme = 'Basic realm="hotsplit", charset="UTF-8"' if is_page else "Bearer"
        raise ApiError(
            401, f"the API key is {what}", "invalid_api_key", headers={"WWW-Authenticate": scheme}
        )

    def _is_ours(self, host: str) -> bool:
        found = _HOST.fullmatch(host)
        name = None if found is None else found["address"] or host_of(found["name"])
        return name is not None and (name in ("localhost", *self._config.hosts) or is_address(name))

    def _origin(self, headers: Headers) -> str | None:
        """Access-Control-Allow-Origin for this request; None without an allowed origin."""
        origin, known = headers.get("origin"), self._config.origins
        if origin is None or not known:
            return None
        return "*" if "*" in known else origin if origin in known else None

    def _marked(self, scope: Scope, send: Send, line: RequestLine) -> Send:
        origin = self._origin(Headers(scope=scope))

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                line.status = message["status"]
                message = {**message, "headers": list(message.get("headers", []))}
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = line.id
                headers["x-content-type-options"] = "nosniff"
                if origin is not None:
                    headers["access-control-allow-origin"] = origin
                    headers.add_vary_header("Origin")
            try:
                await send(message)
            except LocalProtocolError as error:  # uvicorn has refused the rest of the request
                raise Gone from error

        return marked


def _check_framing(headers: Headers) -> None:
    """Refuses a body with two lengths: a proxy that goes by the other one would take a part of it
    for another request, so the connection is closed (RFC 9112, section 6.1)."""
    if "transfer-encoding" in headers and "content-length" in headers:
        raise ApiError(
            400,
            "the request has both Content-Length and Transfer-Encoding; send one",
            "wrong_framing",
            headers={"Connection": "close"},
        )


def _given_key(headers: Headers) -> bytes | None:
    """The key in X-Api-Key or Authorization: Bearer, or the password in Authorization: Basic."""
    if (key := headers.get("x-api-key")) is not None:
        return key.encode("latin-1")
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip().encode("latin-1")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return b""
    return None


def is_loopback(host: str) -> bool:
    """True if a server that listens on this name or address is reached from its own machine only.
    Names are looked up, as for listening: LOCALHOST and a machine's own name can be loopback."""
    try:
        address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0]
    except (OSError, UnicodeError):  # no server can listen there
        return False
    return ipaddress.ip_address(address).is_loopback


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
