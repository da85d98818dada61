"""Requests with heavy grammars beside others: they have a lane of their own, of bounded length, and
a request's time counts from its arrival."""

import asyncio
import contextlib
import http.client
import json
import random
import threading
import time

import pytest
from serving import SAID, Served

from hotsplit.serve.lane import NUM_AT_ONCE, Lane
from hotsplit.serve.scheduler import QueueFull

pytest_plugins = ("serve_fixtures",)
CHAT = "/v1/chat/completions"
# 27 kB that need more than the 2 s of processor time that a grammar may take.
HEAVY = {
    "allOf": [{"type": "integer", "multipleOf": number} for number in (9973, 9967)],
    "description": "x" * 27_000,
}
PLAIN = {"messages": SAID, "max_tokens": 1}
MORE_S = 0.5  # that a plain request may take beside heavy ones


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
    running = [asyncio.create_task(lane.run(gate.wait, 1)) for _ in range(NUM_AT_ONCE)]
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
        while lane._num_free < NUM_AT_ONCE:
            await asyncio.sleep(0.001)
    assert lane._num_free == NUM_AT_ONCE and lane.num_waiting == 0 and len(begun) >= 60
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
        served.until(lambda: served.metric("hotsplit_compiling") >= num_heavy - NUM_AT_ONCE)
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
            assert seconds_of(served, small) < 20  # before the large ones: after one or two of them
        served.until(lambda: served.metric("hotsplit_compiling") == 0)  # clients that hung up


def test_the_lane_is_bounded_and_time_counts_from_arrival(model):
    with Served(model, "--queue", "3") as served:
        served.chat(json_schema={"type": "null"}, max_tokens=9)
        with beside(served, NUM_AT_ONCE + 3) as connections:
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
