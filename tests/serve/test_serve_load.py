"""`hotsplit serve` as a process: load, signals.

Tests use the bundled model and a random one that writes ASCII characters; most of those marked slow
use SmolLM2. Answers under load are compared with those of single requests."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from paths import ROOT, SEARCH_PATH
from serve_client import (
    CHAT,
    Answer,
    Broken,
    Refused,
    ServerProcess,
    ask,
    connected,
    gauges,
    read_reply,
    request_bytes,
    stream,
)
from test_chat import chat_model

sys.path.insert(0, str(ROOT / "benchmarks"))
import serve_load  # noqa: E402

SMOLLM2 = ROOT / "build" / "smollm2" / "q8_0.gguf"
needs_smollm2 = pytest.mark.skipif(not SMOLLM2.exists(), reason="no SmolLM2: make smollm2")
ANSWER = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}
SHORT = {**ANSWER, "max_tokens": 60, "ignore_eos": True}
ENDLESS = {**ANSWER, "max_tokens": 900, "ignore_eos": True}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A model that writes random ASCII characters."""
    return chat_model(tmp_path_factory.mktemp("serve") / "tiny.gguf", context_length=1024)


@pytest.fixture(scope="module")
def open_server(tiny, tmp_path_factory):
    """A server without a key, with a short queue."""
    folder = tmp_path_factory.mktemp("serve")
    options = ("--max-tokens", "16", "--threads", "1", "--parallel", "4", "--queue", "8")
    with ServerProcess(tiny, folder / "server.log", *options) as server:
        yield server
        assert "Traceback" not in server.log.read_text()


# ---- load -------------------------------------------------------------------


def test_answers_under_load_equal_those_of_single_requests(open_server, tiny):
    options = "--clients 24 --minutes 0.035 --parallel 4 --queue 8 --pool 12 --max-tokens 16"
    arguments = serve_load.arguments_of([str(tiny), *options.split()])
    result = asyncio.run(serve_load.measure(open_server, arguments))
    assert result["failures"] == []
    assert result["finished"] >= 16 and result["cancelled"] >= 8 and result["refused"] >= 1
    assert 1 <= result["most_running"] <= 4 and result["most_waiting"] <= 4 + 8
    assert result["first_token_ms"]["p99"] >= result["first_token_ms"]["p50"] > 0


def run_script(name: str, *arguments: object) -> dict[str, object]:
    """Runs a script, named from the root, and checks that it found no failures; returns the JSON
    object that it prints."""
    found = subprocess.run(
        [sys.executable, ROOT / name, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=3600,
        env=os.environ | {"PYTHONPATH": SEARCH_PATH},
    )
    assert found.stdout, found.stderr[-3000:]
    result = json.loads(found.stdout)
    assert result["failures"] == [] and found.returncode == 0
    return result


@pytest.mark.slow
@needs_smollm2
def test_two_hundred_clients_for_twenty_minutes(tmp_path):
    result = run_script("benchmarks/serve_load.py", SMOLLM2, "--output", tmp_path / "load.json")
    assert result["clients"] == 200 and result["seconds"] >= 1200 and result["finished"] > 1000
    assert result["most_running"] == 16 and result["rss_growth"] <= 0.02
    assert json.loads((tmp_path / "load.json").read_text()) == result


def test_the_checks_under_load_reject_wrong_answers_and_growth():
    said = Answer(text="a", finish="stop", usage={"completion_tokens": 1}, times_s=[1.0])
    for wanted, num_failures in ((("a", "stop"), 0), (("b", "stop"), 1), (("a", "length"), 1)):
        tally = serve_load.LoadTally()
        serve_load._judge(0, said, wanted, tally)
        assert len(tally.failures) == num_failures and tally.finished == 1
    flat = [100 + n % 2 for n in range(50)]
    assert abs(serve_load.growth(flat)) < 0.02 < serve_load.growth([100 + n for n in range(50)])


# ---- the end of a server -------------------------------------------------------------------------


@pytest.mark.slow
def test_a_server_ends_and_another_takes_its_port(tiny, tmp_path):
    """The first is killed in the middle of an answer, the second is stopped under load."""
    options = ("--parallel", "2", "--queue", "64", "--threads", "1", "--drain", "3")
    with ServerProcess(tiny, tmp_path / "log", *options) as server:
        asyncio.run(stream(server.port, CHAT, ENDLESS, most_pieces=2))
        server.end(signal.SIGKILL)
        assert server.wait(10) == -signal.SIGKILL
    with ServerProcess(tiny, tmp_path / "log", *options, "--port", str(server.port)) as server:
        began = asyncio.run(end_under_load(server))
        assert server.wait(60) == 0
        assert time.monotonic() - began < 3 + 20  # --drain, and seconds to exit on a busy machine
        assert "Traceback" not in server.log.read_text()


async def end_under_load(server: ServerProcess) -> float:
    """Checks that running answers are finished, new requests are refused, and answers that take too
    long end with an error. Returns the time.monotonic() of the signal."""
    port = server.port
    whole = await stream(port, CHAT, SHORT)
    begun = [asyncio.create_task(stream(port, CHAT, SHORT)) for _ in range(2)]
    while await gauges(port, "running") < [2]:
        await asyncio.sleep(0.001)
    others = [asyncio.create_task(stream(port, CHAT, ENDLESS)) for _ in range(50)]
    async with connected(port) as (reader, writer):
        while await gauges(port, "waiting") < [40]:
            await asyncio.sleep(0.01)
        server.end()
        signalled = time.monotonic()
        while (await ask(port, "/health")).status == 200:
            await asyncio.sleep(0.01)
        writer.write(request_bytes(CHAT, ANSWER))
        assert (await read_reply(reader)).status == 503
    assert [answer.text for answer in await asyncio.gather(*begun)] == [whole.text] * 2
    found = await asyncio.gather(*others, return_exceptions=True)
    late = [each for each in found if isinstance(each, Refused | Broken)]
    assert late and all("stopping" in str(each) for each in late)
    assert all(each.finish == "length" for each in found if each not in late)
    return signalled
