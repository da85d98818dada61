"""The server's process: how it starts and stops, what it refuses, and what waiting
clients get."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from serving import Served

from hotsplit.cli import main
from hotsplit.runtime.engine import Engine
from hotsplit.serve.serve_config import ServeConfig
from hotsplit.serve.server import Server

pytest_plugins = ("serve_fixtures",)
LONG = {"prompt": [7], "max_tokens": 250, "ignore_eos": True, "temperature": 0}
# 64 texts, more than `narrow` lets wait, and 16,000 tokens, enough to run on after a few requests.
FULL = {**LONG, "prompt": [[7]] * 4, "n": 16}


@pytest.fixture
def narrow(model):
    """A server that computes one text at a time and refuses requests while 30 wait."""
    options = ("-np", "1", "--kept", "1", "--queue", "30", "--drain", "60")
    with Served(model, *options, key="k") as served:
        yield served


def wait_until(is_so):
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def in_background(served, body, found):
    def ask():
        found.append(served.ask("/v1/completions", body))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    return thread


def test_the_queue_the_timeout_and_a_graceful_stop(narrow):
    """One server for all three, since a server takes seconds to start."""
    found = []
    first = in_background(narrow, FULL, found)
    narrow.until(lambda: narrow.metric("hotsplit_running") == 1)
    # Another 64 texts are refused until half of the first 64 have ended.
    status, answer = narrow.ask("/v1/completions", FULL)
    assert status == 429 and answer["error"]["type"] == "rate_limit_error"
    assert 1 <= int(narrow.headers["retry-after"]) <= 60
    first.join(120)
    assert found[0][0] == 200 and narrow.ask("/v1/completions", {**LONG, "max_tokens": 1})[0] == 200

    status, answer = narrow.ask("/v1/completions", {**FULL, "timeout": 0.02})
    assert status == 504 and answer["error"] == {
        "message": "the answer took longer than the request's timeout allows",
        "type": "server_error",
        "param": "timeout",
        "code": "timeout",
    }

    found.clear()
    running = in_background(narrow, FULL, found)
    narrow.until(lambda: narrow.metric("hotsplit_running") == 1)
    narrow.process.send_signal(signal.SIGTERM)
    narrow.until(lambda: narrow.ask("/health") == (503, {"status": "stopping"}))
    status, answer = narrow.ask("/v1/completions", LONG)
    assert status == 503 and narrow.headers["retry-after"]
    running.join(120)
    status, answer = found[0]
    assert status == 200 and answer["usage"]["completion_tokens"] == 16_000
    assert narrow.process.wait(60) == 0
    ended = next(line for line in narrow.log if " 16000 generated" in line)
    assert " POST /v1/completions 200 " in ended


def test_a_stop_that_times_out_ends_the_process_and_every_answer(model):
    served = Served(model, "-np", "1", "--queue", "1024", "--drain", "1e-6")
    found = []
    # 256,000 tokens, one text at a time, so that the signal comes before the last token.
    waiting = in_background(served, {**LONG, "prompt": [[7]] * 64, "n": 16}, found)
    served.until(lambda: served.metric("hotsplit_running") > 0)
    served.process.send_signal(signal.SIGINT)
    waiting.join(60)
    assert served.process.wait(60) == 0
    status, answer = found[0]
    assert status == 503 and answer["error"]["message"] == "the server is stopping"
    served.until(lambda: served.log[-1].endswith(": stopped\n"))


def test_a_model_loaded_only_after_the_port_is_closed_ends_quietly(model, caplog):
    """A signal while the model is being loaded closes the port before the model is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    is_ready = []

    def is_open() -> bool:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
        except ConnectionRefusedError:
            return False
        return True

    def open_engine() -> Engine:
        wait_until(is_open)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: not is_open())
        return Engine.load(model, device="cpu", num_sequences=2)

    config = ServeConfig(model=model, port=port, parallel=1, kept=1)
    Server(config, 2, open_engine, lambda *_: is_ready.append(True)).run()
    assert not is_ready and not [each for each in caplog.records if each.name == "asyncio"]


def test_a_port_in_use_is_refused_before_the_model_is_loaded(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "none.gguf", "--port", str(port)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"cannot listen on 127.0.0.1:{port}: " in line


@pytest.mark.parametrize("host", ["a" * 300, "a..b", ".", "\udcff", "ü" * 70])
def test_a_host_that_cannot_be_looked_up_is_refused(capsys, host):
    assert main(["serve", "none.gguf", "--port", "0", "--host", host]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "--host" in line and "is not a host name" in line and len(line) < 200


def test_a_missing_model_ends_the_process(capsys, tmp_path):
    assert main(["serve", str(tmp_path / "none.gguf"), "--port", "0", "--threads", "1"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert "none.gguf" in lines[-1] and len(lines) == 2, lines


def test_an_invalid_key_in_the_environment_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("HOTSPLIT_API_KEY", "a\nb")
    assert main(["serve", "none.gguf"]) == 1
    assert "API key" in capsys.readouterr().err


def test_a_start_line_that_cannot_be_written_ends_the_server(codec_model):
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-m", "hotsplit", "serve", codec_model, "--port", "0", "--json"]
        options = {"stderr": subprocess.PIPE, "text": True, "timeout": 60}
        done = subprocess.run(command, stdout=full, **options)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last == "hotsplit: the output cannot be written: No space left on device"
