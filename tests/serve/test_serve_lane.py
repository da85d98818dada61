"""No request stops the others for long: what is large is computed without Python's lock, in pieces,
or refused; heavy grammars have a lane of their own, of bounded length, and a request's time counts
from its arrival."""

import asyncio
import contextlib
import gc
import http.client
import json
import random
import threading
import time

import pytest
from serving import SAID, TOKENIZER, Served
from tokenizers import Tokenizer

from hotsplit.options.generation_options import SamplingOptions
from hotsplit.runtime.answers.call_style import CallStyle
from hotsplit.runtime.generate.dry import dry_breakers
from hotsplit.runtime.text.codec import TextCodec
from hotsplit.serve.api_error import ApiError
from hotsplit.serve.chat_requests import ChatBody
from hotsplit.serve.exchange import dumps, dumps_with
from hotsplit.serve.request_body import MAX_MARKS, checked, marks_and_depth, parsed
from hotsplit.serve.scheduler import QueueFull
from hotsplit.serve.served_model import ServedModel
from hotsplit.serve.service import NUM_AT_ONCE as NUM_LANES
from hotsplit.serve.service import Lane
from hotsplit.serve.side_api import NUM_AT_ONCE, token_list

pytest_plugins = ("serve_fixtures",)
MOST_S = 0.2
NUM_TRIES = 20  # at most: other processes cause pauses, too
BODY = 8 << 20  # the largest body of a server with default options


@pytest.fixture(scope="module")
def served():
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    sizes = {"vocab_size": 4096, "context_length": 256, "trained_context_length": 256}
    none = {"num_parameters": 0, "num_bytes": 0, "created": 0, "pooling": None, "hidden_size": 64}
    return ServedModel(
        name="a",
        codec=TextCodec(tokenizer, None, frozenset()),
        template="none",
        longest_token=20,
        defaults=SamplingOptions(),
        max_tokens=-1,
        call_style=CallStyle(),
        **sizes,
        **none,
    )


@pytest.fixture(scope="module", autouse=True)
def frozen():
    """Freezes the objects that are there, as a server does that has loaded its model. They stay
    frozen: conftest.py's are among them."""
    gc.collect()
    gc.freeze()


def longest_pause(work, visit=lambda: None, num_tries=NUM_TRIES):
    """The longest time that another thread, which calls `visit`, waits while `work` runs: the least
    of several tries, until one is short enough."""
    found = []
    while len(found) < num_tries and min(found, default=1.0) > MOST_S:
        gaps, is_over = [], threading.Event()

        def beat(gaps=gaps, is_over=is_over):
            last = time.perf_counter()
            while not is_over.wait(0.002):
                visit()
                now = time.perf_counter()
                gaps.append(now - last)
                last = now
            gaps.append(time.perf_counter() - last)

        thread = threading.Thread(target=beat)
        thread.start()
        work()
        is_over.set()
        thread.join()
        found.append(max(gaps))
    return min(found)


def refused(body):
    with pytest.raises(ApiError, match=r"more values than are read here") as caught:
        parsed(body)
    assert caught.value.status == 400


def filled(start, item, end, size=BODY):
    """A body of the given size, or of `-size` items."""
    count = -size if size < 0 else (size - len(start) - len(end)) // len(item)
    return start + item * count + end


@pytest.mark.parametrize(
    "item", [b"[],", b"{},", b"1.5,", b"1,", b'"",', b"[[[]]],", b'{"":0},', b"null,", b'"\\"",']
)
def test_a_body_of_too_many_values_is_refused_at_once(item):
    body = filled(b'{"prompt":[', item, b"0]}")
    assert longest_pause(lambda: refused(body)) < MOST_S


@pytest.mark.parametrize(
    "item, marks", [(b"[],", 2), (b"{},", 2), (b"1.2345678901234567,", 2), (b"1,", 1)]
)
def test_a_body_of_the_most_values_is_read_at_once(item, marks):
    body = filled(b'{"prompt":[', item, b"0]}", -((MAX_MARKS - 3) // marks))
    assert MAX_MARKS - 2 <= marks_and_depth(body)[0] <= MAX_MARKS
    assert longest_pause(lambda: parsed(body)) < MOST_S


def test_the_most_calls_of_messages_are_checked_at_once():
    call = {"function": {"name": "f", "arguments": "{}"}}
    body = {"messages": [{"role": "assistant", "tool_calls": [call] * 128}] * 180}
    found = parsed(json.dumps(body, separators=(",", ":")).encode())
    assert longest_pause(lambda: checked(ChatBody, found)) < MOST_S
    body["messages"][0]["tool_calls"] = [5] * 100_000
    with pytest.raises(ApiError, match=r"messages\[0\].tool_calls\[0\] is 5, wanted an object"):
        checked(ChatBody, body)


@pytest.mark.parametrize("text", ["[,{:.", '\\",[', "\\", "\\\\", '\\\\\\"', "a\n\u20ac,"])
def test_marks_in_strings_do_not_count(text):
    body = json.dumps({text: [text, {"a": text}, 1.5]}, separators=(",", ":")).encode()
    assert marks_and_depth(body) == (8, 3)
    many = b'{"prompt":"' + b",[{:." * (1 << 20) + b'"}'
    assert marks_and_depth(many) == (2, 1) and "prompt" in parsed(many)


def test_marks_are_counted_across_slices():
    half = b'{"a":"' + b"," * (1 << 20)
    assert marks_and_depth(half + b'",' + b'"b":[0' + b",0" * 100 + b"]}") == (105, 2)


def test_the_pause_of_a_long_call_is_seen():
    numbers = list(range(1 << 23))
    assert longest_pause(lambda: json.dumps(numbers), num_tries=2) > MOST_S


@pytest.fixture(scope="module")
def text():
    return "".join(random.Random(1).choices("abcdefghij \n", k=1 << 20))


def test_other_threads_run_while_a_long_text_is_tokenised(served, text):
    assert longest_pause(lambda: served.encode_plain(2 * text)) < MOST_S
    assert longest_pause(lambda: served.encode(2 * text)) < MOST_S


@pytest.mark.parametrize("has_pieces", [False, True])
def test_other_threads_run_while_a_long_list_is_written(served, text, has_pieces):
    ids = served.encode_plain(text)
    assert longest_pause(lambda: token_list(served, ids, has_pieces=has_pieces)) < MOST_S


def test_a_list_written_in_parts_is_the_same():
    for count in (0, 1, NUM_AT_ONCE, NUM_AT_ONCE + 1):
        ids = list(range(count))
        for head in ({}, {"b": [1], "c": "[]"}):
            assert dumps_with(head, "a", map(dumps, ids)) == dumps({**head, "a": ids})


def test_a_long_text_gets_the_codecs_tokens(served):
    for text in ("Hello, world. " * 5000, "caf\u00e9 " * 5000, "a", ""):
        assert served.encode_plain(text) == served.codec.encode_rendered(text)
        assert served.encode(text) == served.codec.encode(text)
    with pytest.raises(ApiError, match="UTF-8"):
        served.encode("a" * 5000 + "\ud800")


def test_the_most_sequence_breakers_are_found_soon(served):
    """In little more time than one, which already reads the vocabulary."""
    breakers = [("abcdefghij" * 4)[number % 9 :] + str(number) for number in range(64)]

    def least_s(breakers):
        times = []
        for _ in range(3):
            began = time.process_time()
            dry_breakers(served.codec, breakers)
            times.append(time.process_time() - began)
        return min(times)

    assert least_s(breakers) < 15 * least_s(breakers[:1])


MANY = {"n": 16, "max_tokens": 200, "ignore_eos": True}


@pytest.mark.parametrize(
    "path, body",
    [
        ("chat/completions", {**MANY, "messages": SAID, "logprobs": True, "top_logprobs": 20}),
        ("completions", {"prompt": [[]] * 2_000_000}),
    ],
)
def test_a_server_answers_others_meanwhile(model, path, body):
    sent = json.dumps(body).encode()

    def request(method, path, sent=None, **headers):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path, sent, headers)
            answer = connection.getresponse()
            while answer.read(1 << 16):
                pass

    def work():
        request("POST", f"/v1/{path}", sent, **{"Content-Type": "application/json"})

    with Served(model, "--parallel", "4") as server:
        assert longest_pause(work, lambda: request("GET", "/health")) < MOST_S


CHAT = "/v1/chat/completions"
# 27 kB that need more than the 2 s of processor time that a grammar may take.
HEAVY = {
    "allOf": [{"type": "integer", "multipleOf": number} for number in (9973, 9967)],
    "description": "x" * 27_000,
}
PLAIN = {"messages": SAID, "max_tokens": 1}
MORE_S = 3.0  # that a plain request may take beside heavy ones, which take 30 s


def work_of(record, name, seconds=0.0):
    def work():
        record.append(name)
        time.sleep(seconds)
        return name

    return work


def test_the_smallest_waits_least_and_the_queue_is_bounded():
    asyncio.run(smallest_first())


async def smallest_first():
    lane, begun, gate = Lane(queue=3), [], threading.Event()
    running = [asyncio.create_task(lane.run(gate.wait, 1)) for _ in range(NUM_LANES)]
    waiting = [asyncio.create_task(lane.run(work_of(begun, n), n)) for n in (30, 10, 20)]
    await asyncio.sleep(0)
    assert lane.num_waiting == 3
    with pytest.raises(QueueFull):
        await lane.run(work_of(begun, 1), 1)
    waiting[0].cancel()
    await asyncio.sleep(0)
    assert lane.num_waiting == 2
    gate.set()
    assert await asyncio.gather(*running, *waiting[1:]) == [True, True, 10, 20]
    assert begun == [10, 20]
    lane.close()


def test_no_place_is_lost_whatever_is_cancelled():
    asyncio.run(cancelled_at_random())


async def cancelled_at_random():
    lane, draw, begun = Lane(queue=100), random.Random(0), []
    for _ in range(20):
        tasks = [asyncio.create_task(lane.run(work_of(begun, 0, 0.001), i)) for i in range(8)]
        for task in draw.sample(tasks, 5):
            await asyncio.sleep(draw.choice([0, 0, 0.001, 0.002]))
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    async with asyncio.timeout(5):
        while lane._num_free < NUM_LANES:
            await asyncio.sleep(0.001)
    assert lane._num_free == NUM_LANES and lane.num_waiting == 0 and len(begun) >= 60
    lane.close()


@contextlib.contextmanager
def beside(served, num_heavy):
    """Requests with heavy grammars, whose clients hang up at the end."""
    connections = [
        http.client.HTTPConnection("127.0.0.1", served.port, timeout=60) for _ in range(num_heavy)
    ]
    body = json.dumps({"messages": SAID, "json_schema": HEAVY})
    for connection in connections:
        connection.request("POST", CHAT, body, {"Content-Type": "application/json"})
    try:
        served.until(lambda: served.metric("hotsplit_compiling") >= num_heavy - NUM_LANES)
        yield connections
    finally:
        for connection in connections:
            connection.close()


def seconds_of(served, body):
    began = time.monotonic()
    status, answer = served.ask(CHAT, body)
    assert status == 200, answer
    return time.monotonic() - began


def test_a_plain_request_beside_32_heavy_grammars_takes_as_long_as_alone(model):
    with Served(model) as served:
        small = {**PLAIN, "json_schema": {"type": "null"}, "max_tokens": 9}
        seconds_of(served, small)
        alone_s = min(seconds_of(served, PLAIN) for _ in range(3))
        with beside(served, 32):
            found = [seconds_of(served, PLAIN) for _ in range(3)]
            assert min(found) < alone_s + MORE_S, (found, alone_s)
            seconds_of(served, small)  # before the large ones: after one or two of them
            assert served.metric("hotsplit_compiling") > 16
        served.until(lambda: served.metric("hotsplit_compiling") == 0)  # clients that hung up


def test_the_lane_is_bounded_and_time_counts_from_arrival(model):
    with Served(model, "--queue", "3") as served:
        served.chat(json_schema={"type": "null"}, max_tokens=9)
        with beside(served, NUM_LANES + 3) as connections:
            body = {"messages": SAID, "json_schema": HEAVY}
            status, answer = served.ask(CHAT, body)
            assert status == 429 and "grammars are waiting" in answer["error"]["message"], answer
            assert int(served.headers["retry-after"]) >= 1
            connections[-1].close()
            served.until(lambda: served.metric("hotsplit_compiling") < 3)
            began = time.monotonic()
            status, answer = served.ask(CHAT, {**body, "timeout": 0.5})
            assert status == 504 and answer["error"]["param"] == "timeout", answer
            assert 0.4 < time.monotonic() - began < 3
            assert seconds_of(served, PLAIN) < 5
            assert connections[0].getresponse().status == 400
