"""Loads one server with many clients, and checks its answers and its memory.

Every finished answer must be byte-identical to that of the same request sent alone; no answer may
be lost, mixed up or stuck; the server's memory must not grow by more than MAX_GROWTH.

    python benchmarks/serve_load.py MODEL [--clients 200] [--minutes 20] [--parallel 16]

Each request of a pool (chats and completions, greedy and seeded, prompts and answers of random
lengths, some with a common prefix) is first answered alone. Then each client sends random ones, one
after another; for a third of them it disconnects at a random moment, before the first token or
later. After a refusal because the queue is full, it waits and sends another one. The numbers of
running and waiting texts are read from /metrics about twice a second and checked against their
bounds. Times to the first token include the wait in the queue.

Resident memory of the server and its child process is sampled as often, after texts nearly as long
as the context have filled all places. Its growth is that from the mean of the second fifth of the
samples to the mean of the last fifth. Clients run on the same processor."""

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from machine import machine, write_result

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from serve_client import CHAT, COMPLETE, Answer, Broken, Refused, ServerProcess, gauges, stream  # noqa: E402

MAX_GROWTH = 0.02  # of resident memory
STUCK_S = 600.0
WORDS = (  # noqa: SIM905  # words
    "river lantern copper window garden thunder paper winter mountain silver music harbour kettle "
    "orange velvet engine forest candle bridge summer marble pocket ribbon shadow"
).split()


@dataclass(frozen=True, kw_only=True)
class Request:
    path: str
    body: dict[str, Any]


@dataclass(kw_only=True)
class LoadTally:
    """What the clients and the watcher of the server observed."""

    finished: int = 0
    cancelled: int = 0
    refused: int = 0
    failures: list[str] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    tokens: int = 0
    most_running: float = 0
    most_waiting: float = 0
    rss_bytes: list[int] = field(default_factory=list)


def main() -> int:
    arguments = arguments_of()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with ServerProcess(arguments.model, log, *_options(arguments)) as server:
            result = asyncio.run(measure(server, arguments))
    print(f"wrote {write_result(result, 'serve-load', arguments.output)}", file=sys.stderr)
    print(json.dumps(result))
    return 1 if result["failures"] else 0


def _options(arguments: argparse.Namespace) -> list[str]:
    options = ["--parallel", arguments.parallel, "--queue", arguments.queue]
    options += ["--context", arguments.context]
    options += ["--threads", arguments.threads] if arguments.threads else []
    return [str(option) for option in options]


async def measure(server: ServerProcess, arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs the benchmark. `arguments` must hold the options that the server was started with."""
    pool = requests(arguments)
    alone = [await stream(server.port, each.path, each.body) for each in pool]
    wanted = [(answer.text, answer.finish) for answer in alone]
    await _fill(server, arguments)
    began = time.monotonic()
    tally = await _load(server, arguments, pool, wanted)
    seconds = time.monotonic() - began
    await _check_rest(server, tally)
    if server.process.poll() is not None:
        tally.failures.append(f"the server ended: {server.log.read_text()[-500:]}")
    return _result(arguments, tally, seconds)


async def _fill(server: ServerProcess, arguments: argparse.Namespace) -> None:
    """Fills all places, also those of kept texts, with texts nearly as long as the context,
    because the cache's memory becomes resident only when it is first written."""
    draw = random.Random(arguments.seed)
    for _ in range(2):
        texts = [
            [draw.randrange(10, 80) for _ in range(arguments.context - 4)]
            for _ in range(arguments.parallel)
        ]
        bodies = [{"prompt": ids, "max_tokens": 2} for ids in texts]
        await asyncio.gather(
            *(stream(server.port, COMPLETE, body, seconds=STUCK_S) for body in bodies)
        )


def requests(arguments: argparse.Namespace) -> list[Request]:
    """The pool, determined by the seed. About half of the chats share a system prompt."""
    draw = random.Random(arguments.seed)
    shared = " ".join(draw.choices(WORDS, k=60))
    return [
        _request(draw, number, shared, arguments.max_tokens) for number in range(arguments.pool)
    ]


def _request(draw: random.Random, number: int, shared: str, most: int) -> Request:
    text = " ".join(draw.choices(WORDS, k=draw.randint(1, 40))) + f" {number}"
    body: dict[str, Any] = {"max_tokens": draw.randint(1, most)}
    if number % 2:
        body |= {"temperature": 1.0, "seed": draw.randrange(1 << 31), "top_k": 50}
    else:
        body["temperature"] = 0.0
    if number % 3 == 0:
        return Request(path=COMPLETE, body={**body, "prompt": text})
    messages = [{"role": "user", "content": text}]
    if draw.random() < 0.5:
        messages.insert(0, {"role": "system", "content": shared})
    return Request(path=CHAT, body={**body, "messages": messages})


async def _load(
    server: ServerProcess,
    arguments: argparse.Namespace,
    pool: list[Request],
    wanted: list[tuple[str, str | None]],
) -> LoadTally:
    tally = LoadTally()
    deadline = time.monotonic() + 60 * arguments.minutes
    watch = asyncio.create_task(_watch(server, arguments, tally))
    clients = [
        _client(server.port, random.Random(f"{arguments.seed} {n}"), pool, wanted, deadline, tally)
        for n in range(arguments.clients)
    ]
    await asyncio.gather(*clients)
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)
    if not watch.cancelled() and (error := watch.exception()):
        tally.failures.append(f"watching the server failed: {error!r}")
    return tally


async def _client(
    port: int,
    draw: random.Random,
    pool: list[Request],
    wanted: list[tuple[str, str | None]],
    deadline: float,
    tally: LoadTally,
) -> None:
    while time.monotonic() < deadline:
        number = draw.randrange(len(pool))
        patience = None
        if draw.random() < 1 / 3:  # disconnects, after some time or some pieces
            patience = draw.choice([draw.uniform(0, 2.0), draw.randint(1, 20)])
        try:
            answer = await _asked(port, pool[number], patience)
        except Refused as refused:
            if refused.reply.status != 429 or "retry-after" not in refused.reply.headers:
                tally.failures.append(f"request {number}: {refused}")
            tally.refused += 1
            await asyncio.sleep(draw.uniform(0.2, 1.0))
            continue
        except TimeoutError:
            tally.failures.append(f"request {number} is stuck: not finished in {STUCK_S:.0f} s")
            continue
        except (Broken, OSError) as error:
            tally.failures.append(f"request {number}: {error!r}")
            continue
        _judge(number, answer, wanted[number], tally)


async def _asked(port: int, request: Request, patience: float | int | None) -> Answer | None:
    """The answer; None for a client that was to disconnect."""
    most = patience if isinstance(patience, int) else None
    asked = stream(port, request.path, request.body, most_pieces=most, seconds=STUCK_S)
    if not isinstance(patience, float):
        answer = await asked
        return answer if most is None else None
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asked, patience)
    return None


def _judge(
    number: int, answer: Answer | None, wanted: tuple[str, str | None], tally: LoadTally
) -> None:
    if answer is None:
        tally.cancelled += 1
        return
    tally.finished += 1
    if (answer.text, answer.finish) != wanted:
        found = (answer.text, answer.finish)
        tally.failures.append(f"request {number} got {found!r}, alone {wanted!r}")
    tally.tokens += answer.usage["completion_tokens"]
    if answer.times_s:
        tally.first_s.append(answer.first_s)
        tally.gaps_s += answer.gaps_s


async def _watch(server: ServerProcess, arguments: argparse.Namespace, tally: LoadTally) -> None:
    num_above = 0
    while True:
        tally.rss_bytes.append(server.rss_bytes())
        running, waiting = await gauges(server.port, "running", "waiting")
        tally.most_running = max(tally.most_running, running)
        tally.most_waiting = max(tally.most_waiting, waiting)
        is_above = running + waiting > arguments.parallel + arguments.queue
        # The two gauges are not read at the same moment, so a single excess proves nothing.
        num_above = num_above + 1 if is_above else 0
        if num_above > 1 or running > arguments.parallel:
            tally.failures.append(f"{running:g} texts run, {waiting:g} wait: above the bounds")
        await asyncio.sleep(0.5)


async def _check_rest(server: ServerProcess, tally: LoadTally) -> None:
    """Checks that cancelled texts have released their places."""
    deadline = time.monotonic() + 10
    while True:
        left = await gauges(server.port, "running", "waiting")
        if left == [0, 0]:
            return
        if time.monotonic() > deadline:
            tally.failures.append(f"no client is left, but {left[0]:g} texts run, {left[1]:g} wait")
            return
        await asyncio.sleep(0.05)


def growth(rss_bytes: list[int]) -> float:
    """Relative growth of the mean, from the second fifth of the samples to the last fifth."""
    fifth = max(1, len(rss_bytes) // 5)
    return statistics.mean(rss_bytes[-fifth:]) / statistics.mean(rss_bytes[fifth : 2 * fifth]) - 1


def _result(arguments: argparse.Namespace, tally: LoadTally, seconds: float) -> dict[str, Any]:
    grown = growth(tally.rss_bytes)
    if grown > MAX_GROWTH:
        tally.failures.append(f"resident memory grew by {grown:.1%}")
    return {
        "benchmark": "serve-load",
        "model": arguments.model.stem,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "load_after": os.getloadavg(),
        "clients": arguments.clients,
        "seconds": seconds,
        "parallel": arguments.parallel,
        "queue": arguments.queue,
        "finished": tally.finished,
        "cancelled": tally.cancelled,
        "refused": tally.refused,
        "failures": tally.failures[:20],
        "num_failures": len(tally.failures),
        "tokens_per_s": tally.tokens / seconds,
        "most_running": tally.most_running,
        "most_waiting": tally.most_waiting,
        "first_token_ms": _percentiles(tally.first_s),
        "token_gap_ms": _percentiles(tally.gaps_s),
        "rss_mib": [round(each / (1 << 20), 1) for each in _thinned(tally.rss_bytes)],
        "rss_growth": grown,
    }


def _percentiles(seconds: list[float]) -> dict[str, float]:
    if len(seconds) < 2:
        return {}
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {"p50": 1e3 * cuts[49], "p99": 1e3 * cuts[98], "max": 1e3 * max(seconds)}


def _thinned(values: list[int]) -> list[int]:
    return values[:: max(1, len(values) // 60)]


def arguments_of(words: list[str] | None = None) -> argparse.Namespace:
    """Parses a list of arguments; None means those of this process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--parallel", type=int, default=16)
    parser.add_argument("--queue", type=int, default=160)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--pool", type=int, default=48, help="number of different requests")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
