"""`hotsplit serve` as a process, and clients of it over plain sockets.

HTTP is written by hand, without a library, so that a client can stop in the middle of anything and
send what no library allows, and so that hundreds of clients cost little processor time."""

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

READY_S = 120.0  # enough to start while other processes use all cores
CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"


class ServerProcess:
    """A server of `model`, on a free port unless the options name one. As a context manager it
    waits until the server is ready for requests, and kills it at the end."""

    def __init__(self, model: Path, log: Path, *options: str, key: str | None = None) -> None:
        environment = {**os.environ, "HOTSPLIT_API_KEY": key} if key else dict(os.environ)
        self.log = log
        command = [sys.executable, "-m", "hotsplit", "serve", str(model), "--json", *options]
        if "--port" not in options:
            command += ["--port", "0"]
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, env=environment
            )
        self.about: dict[str, Any] = {}
        self.port = 0

    def __enter__(self) -> Self:
        try:
            self._wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    @property
    def url(self) -> str:
        return self.about["url"]

    def rss_bytes(self) -> int:
        """Resident memory of the process and its descendants (the chat template runs in one)."""
        return sum(_rss_bytes(pid) for pid in family(self.process.pid))

    def end(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float) -> int:
        return self.process.wait(seconds)

    def _wait_until_ready(self) -> None:
        assert self.process.stdout is not None
        deadline = time.monotonic() + READY_S
        said = b""
        while not said.endswith(b"\n"):
            if select.select([self.process.stdout], [], [], 0.2)[0]:
                said += os.read(self.process.stdout.fileno(), 1 << 12)
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start: {self.log.read_text()[-2000:]}")
        self.about = json.loads(said)
        self.port = urlsplit(self.url).port or 0


def family(pid: int) -> list[int]:
    found = [pid]
    for each in found:
        for task in Path(f"/proc/{each}/task").glob("*/children"):
            try:
                found += [int(child) for child in task.read_text().split()]
            except OSError:  # a thread that has ended meanwhile
                continue
    return found


def _rss_bytes(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, kw_only=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Refused(Exception):
    """A stream did not begin: the answer had a status other than 200."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(f"{reply.status}: {reply.body[:300]!r}")
        self.reply = reply


class Broken(Exception):
    """The answer ended too early, reported an error or was malformed."""


def request_bytes(
    path: str,
    body: object = None,
    *,
    method: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> bytes:
    """A request as it goes over the wire; `body` is bytes, or becomes JSON."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {"Host": "localhost", "Connection": "close"}
    if body is not None:
        given |= {"Content-Type": "application/json", "Content-Length": str(len(data))}
    given |= headers or {}
    head = [f"{method or ('GET' if body is None else 'POST')} {path} HTTP/1.1"]
    head += [f"{name}: {value}" for name, value in given.items()]
    return "\r\n".join(head).encode("utf-8", "surrogateescape") + b"\r\n\r\n" + data


async def ask(
    port: int,
    path: str,
    body: object = None,
    *,
    method: str | None = None,
    headers: Mapping[str, str] | None = None,
    seconds: float = 120.0,
) -> Reply:
    async with asyncio.timeout(seconds), connected(port) as (reader, writer):
        writer.write(request_bytes(path, body, method=method, headers=headers))
        await writer.drain()
        return await read_reply(reader)


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection that is aborted on exit, along with answers in progress."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def read_reply(reader: asyncio.StreamReader) -> Reply:
    """Reads a whole reply; raises Broken if the connection ends within it."""
    status, headers = await read_head(reader)
    if status in (204, 304):
        return Reply(status=status, headers=headers, body=b"")
    body = b"".join([piece async for piece in read_body(reader, headers)])
    return Reply(status=status, headers=headers, body=body)


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError as error:
        raise Broken(f"within the head: {error.partial[:200]!r}") from None
    except ConnectionError as error:
        raise Broken(str(error)) from None
    first, *lines = head.rstrip("\r\n").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (s.partition(":") for s in lines)}
    return int(first.split()[1]), headers


async def read_body(
    reader: asyncio.StreamReader, headers: Mapping[str, str]
) -> AsyncIterator[bytes]:
    try:
        if headers.get("transfer-encoding") == "chunked":
            while length := int(await reader.readline(), 16):
                yield await reader.readexactly(length)
                await reader.readexactly(2)
            await reader.readline()
        elif (whole := int(headers.get("content-length", "0"))) > 0:
            yield await reader.readexactly(whole)
    except (asyncio.IncompleteReadError, ConnectionError, ValueError) as error:
        raise Broken(f"within the body: {error}") from None


@dataclass(kw_only=True)
class Answer:
    """The content of a stream. `times_s`: when each piece came, by time.perf_counter."""

    text: str = ""
    finish: str | None = None
    began_s: float = 0.0
    times_s: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)

    @property
    def first_s(self) -> float:
        return self.times_s[0] - self.began_s

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.times_s, self.times_s[1:], strict=False)]

    def take(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            raise Broken(f"an error within the answer: {chunk['error']}")
        self.usage = chunk.get("usage") or self.usage
        self.timings = chunk.get("timings") or self.timings
        for choice in chunk["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            if text:
                self.times_s.append(time.perf_counter())
                self.text += text
            self.finish = choice.get("finish_reason") or self.finish


async def stream(
    port: int,
    path: str,
    body: Mapping[str, object],
    *,
    headers: Mapping[str, str] | None = None,
    most_pieces: int | None = None,
    seconds: float = 120.0,
) -> Answer:
    """The whole answer, or its first `most_pieces`, after which the connection is aborted.

    Raises Refused, Broken, or TimeoutError."""
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    answer = Answer(began_s=time.perf_counter())
    async with asyncio.timeout(seconds), connected(port) as (reader, writer):
        writer.write(request_bytes(path, asked, headers=headers))
        await writer.drain()
        status, found = await read_head(reader)
        if status != 200:
            rest = b"".join([piece async for piece in read_body(reader, found)])
            raise Refused(Reply(status=status, headers=found, body=rest))
        async for data in events(read_body(reader, found)):
            if data == "[DONE]":
                if answer.finish is None:
                    raise Broken("[DONE] came before a finish_reason")
                return answer
            answer.take(json.loads(data))
            if most_pieces is not None and len(answer.times_s) >= most_pieces:
                return answer
    raise Broken("the stream ended without [DONE]")


async def events(pieces: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """The data of server-sent events."""
    rest = b""
    async for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n\n")
        for event in whole:
            for line in event.decode().split("\n"):
                if line.startswith("data: "):
                    yield line[6:]


async def gauges(port: int, *names: str, headers: Mapping[str, str] | None = None) -> list[float]:
    """The values of the metrics hotsplit_NAME on /metrics."""
    page = (await ask(port, "/metrics", headers=headers)).body.decode()
    found = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    return [float(found[f"hotsplit_{name}"]) for name in names]
