"""No request stops the others for long: what is large is computed without Python's lock, in pieces,
or refused."""

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
from hotsplit.serve.served_model import ServedModel
from hotsplit.serve.side_api import NUM_AT_ONCE, token_list

pytest_plugins = ("serve_fixtures",)
MOST_S = 0.2
NUM_TRIES = 5  # other processes cause pauses, too
BODY = 8 << 20  # the largest body of a server with default options


@pytest.fixture(scope="module")
def served():
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    return ServedModel(
        name="a",
        created=0,
        codec=TextCodec(tokenizer, None, frozenset()),
        template="none",
        vocab_size=4096,
        context_length=256,
        trained_context_length=256,
        num_parameters=0,
        hidden_size=64,
        pooling=None,
        num_bytes=0,
        longest_token=20,
        defaults=SamplingOptions(),
        max_tokens=-1,
        call_style=CallStyle(),
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


def test_the_most_keys_are_read_at_once():
    body = json.dumps({str(number): 1 for number in range(MAX_MARKS // 2)}).encode()
    assert longest_pause(lambda: parsed(body)) < MOST_S


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


@pytest.mark.parametrize(
    "path, body",
    [
        (
            "/v1/chat/completions",
            {
                "messages": SAID,
                "n": 16,
                "max_tokens": 200,
                "logprobs": True,
                "top_logprobs": 20,
                "ignore_eos": True,
            },
        ),
        (
            "/v1/completions",
            {"prompt": "a", "n": 16, "max_tokens": 200, "logprobs": 20, "ignore_eos": True},
        ),
        ("/tokenize", {"content": "ab c\n" * (1 << 17), "with_pieces": True}),
        ("/v1/completions", {"prompt": [[]] * 2_000_000}),
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
        request("POST", path, sent, **{"Content-Type": "application/json"})

    with Served(model, "--parallel", "4") as server:
        assert longest_pause(work, lambda: request("GET", "/health")) < MOST_S
