"""An OpenAI-compatible server with scripted answers, for tests of the web page.

Answers are streamed in the form of `hotsplit serve`; the page and its Content-Security-Policy are
the real ones. The last message of a request names the script to play."""

import base64
import hashlib
import json
import re
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from paths import ROOT

PAGE = ROOT / "serve" / "page.html"


def page_policy(page: str) -> str:
    """A Content-Security-Policy that allows the page's own style and script, by their hashes."""

    def hashes(name: str) -> str:
        parts = re.findall(f"<{name}>(.*?)</{name}>", page, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(part.encode()).digest()) for part in parts]
        return " ".join(f"'sha256-{digest.decode()}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )


@dataclass(kw_only=True)
class Script:
    """The answer to a question: pieces with pauses between them, an error, or both."""

    pieces: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    pause_s: float = 0.0
    finish: str | None = "stop"  # None: the connection breaks instead
    status: int = 200
    error: str = ""
    wait: threading.Event | None = None  # the answer stops after its first piece until this is set


class ScriptedServer:
    """A context manager that serves on a free port; `asked` has the bodies of accepted
    questions."""

    def __init__(self, scripts: dict[str, Script], *, key: str = "") -> None:
        self.scripts, self.key = scripts, key
        self.asked: list[dict[str, Any]] = []
        self.is_closed = False
        self.unready = ""  # why there is no model yet
        self.num_broken = 0  # answers during which the client disconnected
        handler = type("Handler", (_Handler,), {"owner": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), daemon=True
        )

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/"

    def __enter__(self) -> "ScriptedServer":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.is_closed = True
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    owner: ScriptedServer

    def parse_request(self) -> bool:
        """False also after the end: a browser may then use a connection that it opened in
        advance."""
        return super().parse_request() and not self.owner.is_closed

    def do_GET(self) -> None:
        if self.path == "/":
            page = PAGE.read_text()
            self._send(200, "text/html; charset=utf-8", page.encode(), page_policy(page))
        elif self.path == "/v1/models" and self.owner.unready:
            self._send_json(503, {"error": {"message": self.owner.unready}})
        elif self.path == "/v1/models" and self._is_allowed():
            model = {"id": "SmolLM2-135M-Instruct", "object": "model", "meta": {"n_ctx": 8192}}
            self._send_json(200, {"object": "list", "data": [model]})
        elif self.path != "/v1/models":
            self._send_json(404, {"error": {"message": "no such path"}})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._is_allowed():
            return None
        self.owner.asked.append(asked)
        script = self.owner.scripts[asked["messages"][-1]["content"]]
        if script.status != 200:
            return self._send_json(script.status, {"error": {"message": script.error}})
        try:
            self._play(script)
        except (BrokenPipeError, ConnectionResetError):
            self.owner.num_broken += 1

    def _play(self, script: Script) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        began = time.monotonic()
        for text in script.thoughts:
            self._say({"choices": [{"index": 0, "delta": {"reasoning_content": text}}]})
            time.sleep(script.pause_s)
        for n, text in enumerate(script.pieces):
            self._say({"choices": [{"index": 0, "delta": {"content": text}}]})
            if n == 0 and script.wait is not None:
                while not script.wait.wait(0.05):
                    self._write(b": waiting\n\n")  # fails if the client is gone
            time.sleep(script.pause_s)
        if script.finish is None:
            return None
        if script.error:
            return self._say({"error": {"message": script.error}})
        num = len(script.pieces)
        speed = {"predicted_n": num, "predicted_per_second": num / (time.monotonic() - began)}
        self._say({"choices": [{"index": 0, "delta": {}, "finish_reason": script.finish}]})
        usage = {"prompt_tokens": 31, "completion_tokens": num, "total_tokens": 31 + num}
        self._say({"choices": [], "usage": usage, "timings": speed})
        self._write(b"data: [DONE]\n\n")
        return None

    def _say(self, chunk: dict[str, Any]) -> None:
        self._write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    def _write(self, data: bytes) -> None:
        self.wfile.write(data)
        self.wfile.flush()

    def _is_allowed(self) -> bool:
        if self.owner.key and self.headers["Authorization"] != f"Bearer {self.owner.key}":
            self._send_json(401, {"error": {"message": "wrong key"}})
            return False
        return True

    def _send_json(self, status: int, value: dict[str, Any]) -> None:
        self._send(status, "application/json", json.dumps(value).encode())

    def _send(self, status: int, kind: str, data: bytes, policy: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        if policy:
            self.send_header("Content-Security-Policy", policy)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        pass
