"""`hotsplit serve` as a process: OpenAI's client, load, hostile requests, keys, signals.

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
from types import SimpleNamespace

import pytest
import serve_hostile
from chat_templates import CHATML
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

from hotsplit.convert.convert import ConvertConfig, convert

try:
    import openai
except ImportError:  # the tests that need it are skipped
    openai = None

sys.path.insert(0, str(ROOT / "benchmarks"))
import serve_load  # noqa: E402

SMOLLM2 = ROOT / "build" / "smollm2" / "q8_0.gguf"
KEY = "secret-key"
needs_smollm2 = pytest.mark.skipif(not SMOLLM2.exists(), reason="no SmolLM2: make smollm2")
ANSWER = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}
SHORT = {**ANSWER, "max_tokens": 60, "ignore_eos": True}
ENDLESS = {**ANSWER, "max_tokens": 900, "ignore_eos": True}
ESCAPES = {
    "escape": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "file": "{% include '/etc/passwd' %}",
    "endless": "{% for i in range(10 ** 12) %}{{ i }}{% endfor %}",
    "memory": "{{ 'a' * 10 ** 12 }}",
    "globals": "{{ messages.append.__globals__ }}{{ cycler.__init__.__globals__.os.environ }}",
}


@pytest.fixture(scope="module")
def bundled(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("serve") / "tiny-relu.gguf"
    convert(ConvertConfig(source=ROOT / "examples" / "tiny-relu", output=path))
    return path


@pytest.fixture(
    scope="module",
    params=["bundled", pytest.param("smollm2", marks=[pytest.mark.slow, needs_smollm2])],
)
def server(request, tmp_path_factory):
    """A server that requires a key."""
    log = tmp_path_factory.mktemp("serve") / "server.log"
    options = ["--threads", "1", "--context", "512", "--alias", "model"]
    if request.param == "smollm2":
        model = SMOLLM2
    else:  # it was trained on code, and has no template
        model = request.getfixturevalue("bundled")
        options += ["--chat-template", "chatml"]
    with ServerProcess(model, log, *options, key=KEY) as server:
        yield server
        assert "Traceback" not in log.read_text()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A model that writes random ASCII characters."""
    return chat_model(tmp_path_factory.mktemp("serve") / "tiny.gguf", context_length=1024)


@pytest.fixture(scope="module")
def open_server(tiny, tmp_path_factory):
    """A server without a key, with a short queue, and with a template that tries to escape its
    sandbox when a message asks for it."""
    folder = tmp_path_factory.mktemp("serve")
    path = folder / "template.jinja"
    cases = [f"{{% if messages[0].content == {n!r} %}}{t}{{% endif %}}" for n, t in ESCAPES.items()]
    path.write_text("".join(cases) + CHATML)
    more = ("--chat-template", str(path), "--parallel", "4", "--queue", "8")
    with ServerProcess(tiny, folder / "server.log", *serve_hostile.OPTIONS, *more) as server:
        yield server
        assert "Traceback" not in server.log.read_text()


@pytest.fixture
def client(server):
    if openai is None:
        pytest.skip("pip install openai")
    with openai.OpenAI(
        base_url=server.url + "/v1", api_key=KEY, max_retries=0, timeout=120
    ) as client:
        yield client


def test_openai_lists_models_and_counts_tokens(client):
    assert [model.id for model in client.models.list()] == ["model"]
    assert client.models.retrieve("model").owned_by == "hotsplit"
    done = client.chat.completions.create(model="model", **ANSWER)
    assert done.model == "model" and done.object == "chat.completion"
    choice = done.choices[0]
    assert choice.message.role == "assistant" and choice.finish_reason in ("stop", "length")
    usage = done.usage
    assert 0 < usage.completion_tokens <= 8 < usage.prompt_tokens
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_openai_streams_what_it_answers_whole(client):
    whole = client.chat.completions.create(model="model", **ANSWER)
    chunks = list(
        client.chat.completions.create(
            model="model", stream=True, stream_options={"include_usage": True}, **ANSWER
        )
    )
    assert (
        len({chunk.id for chunk in chunks}) == 1 and chunks[0].choices[0].delta.role == "assistant"
    )
    said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert said == whole.choices[0].message.content
    ends = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert ends == [whole.choices[0].finish_reason]
    assert (
        chunks[-1].choices == []
        and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    )
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_openai_completes_and_stops(client):
    whole = client.completions.create(
        model="model", prompt="def main", max_tokens=24, temperature=0
    )
    text = whole.choices[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    cut = client.completions.create(
        model="model", prompt="def main", max_tokens=24, temperature=0, stop=[stop, "\u0000"]
    )
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    both = client.completions.create(
        model="model", prompt=["def main", "import"], max_tokens=24, temperature=0
    )
    assert [choice.index for choice in both.choices] == [0, 1] and both.choices[0].text == text


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"temperature": "hot"}, "BadRequestError", "temperature"),
        ({"messages": []}, "BadRequestError", "messages"),
        ({"max_tokens": 0}, "BadRequestError", "max_tokens"),
        ({"extra_body": {"top_k": "many"}}, "BadRequestError", "top_k"),
        ({"messages": [{"role": "user", "content": "a b " * 4000}]}, "BadRequestError", "context"),
        ({"extra_headers": {"Authorization": "Bearer other"}}, "AuthenticationError", "key"),
        ({"extra_headers": {"Content-Type": "text/plain"}}, "APIStatusError", "application/json"),
    ],
)
def test_openai_raises_its_own_errors(client, change, error, words):
    with pytest.raises(getattr(openai, error)) as caught:
        client.chat.completions.create(**{"model": "model", **ANSWER, **change})
    assert words in str(caught.value) and "\n" not in caught.value.body["message"]


def test_clients_that_disconnect_leave_no_text_running(server, client):
    long = {**ANSWER, "max_tokens": 400, "extra_body": {"ignore_eos": True}}
    with client.chat.completions.create(model="model", stream=True, **long) as chunks:
        next(iter(chunks))
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).chat.completions.create(model="model", n=8, **long)
    asyncio.run(until_idle(server, {"Authorization": f"Bearer {KEY}"}))


async def until_idle(server: ServerProcess, headers: dict[str, str] | None = None) -> None:
    """Waits until no text runs and none is queued."""
    deadline = time.monotonic() + 20
    while any(await gauges(server.port, "running", "waiting", headers=headers)):
        assert time.monotonic() < deadline, "texts still run though no client waits for them"
        await asyncio.sleep(0.02)


# ---- load and hostile requests -------------------------------------------------------------------


def test_answers_under_load_equal_those_of_single_requests(open_server, tiny):
    options = "--clients 24 --minutes 0.035 --parallel 4 --queue 8 --pool 12 --max-tokens 16"
    arguments = serve_load.arguments_of([str(tiny), *options.split()])
    result = asyncio.run(serve_load.measure(open_server, arguments))
    assert result["failures"] == []
    assert result["finished"] >= 16 and result["cancelled"] >= 8 and result["refused"] >= 1
    assert 1 <= result["most_running"] <= 4 and result["most_waiting"] <= 4 + 8
    assert result["first_token_ms"]["p99"] >= result["first_token_ms"]["p50"] > 0


def test_hostile_requests(open_server):
    result = asyncio.run(serve_hostile.attack(open_server, 150, 0))
    assert result["failures"] == []
    assert result["count"] == 150 and len(result["by_kind"]) > 15


def test_the_growth_of_a_server_that_has_ended_is_unknown():
    gone, alive = (
        SimpleNamespace(process=SimpleNamespace(poll=lambda code=code: code), rss_bytes=lambda: 150)
        for code in (1, None)
    )
    assert serve_hostile.growth(gone, 100) is None and serve_hostile.growth(alive, 0) is None
    assert serve_hostile.growth(alive, 100) == 0.5


def run_script(name: str, *arguments: object) -> dict[str, object]:
    """Runs a script, named from the root, and checks that it found no failures; returns the JSON object
    that it prints."""
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


@pytest.mark.slow
@needs_smollm2
def test_two_thousand_hostile_requests():
    assert run_script("tests/serve/serve_hostile.py", SMOLLM2, "--count", 2000)["count"] == 2000


def test_the_checks_under_load_reject_wrong_answers_and_growth():
    said = Answer(text="a", finish="stop", usage={"completion_tokens": 1}, times_s=[1.0])
    for wanted, num_failures in ((("a", "stop"), 0), (("b", "stop"), 1), (("a", "length"), 1)):
        tally = serve_load.Tally()
        serve_load._judge(0, said, wanted, tally)
        assert len(tally.failures) == num_failures and tally.finished == 1
    flat = [100 + n % 2 for n in range(50)]
    assert abs(serve_load.growth(flat)) < 0.02 < serve_load.growth([100 + n for n in range(50)])


def test_a_template_cannot_escape_its_sandbox(open_server):
    async def check(port: int) -> None:
        for name in ESCAPES:
            asked = {**ANSWER, "messages": [{"role": "user", "content": name}]}
            reply = await ask(port, CHAT, asked)
            assert reply.status == 400, name
            message = reply.json["error"]["message"]
            assert "template" in message and "root:" not in message and len(message) < 400
            # The process that rendered it is replaced, and the next request is answered.
            assert (await ask(port, CHAT, ANSWER)).status == 200

    asyncio.run(check(open_server.port))


# ---- the end of a server -----------------------------------------------------------------------------


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
