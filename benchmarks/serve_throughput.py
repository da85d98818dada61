"""Benchmarks `hotsplit serve` against llama-server, alternating in one run.

It measures tokens per second and the time to the first token with 1, 4 and 16 clients, and the time
to the first token with and without a cached prefix.

    python benchmarks/serve_throughput.py MODEL STOCK --rival path/to/llama-server

MODEL is our model file, STOCK the same for llama.cpp (`make smollm2`). All servers stay up, and one
is queried at a time. llama-server runs with and without its flash attention; the better of the two
counts, figure by figure.

In a round, all clients send a prompt at the same moment, each its own of about 100 tokens, and
request --tokens tokens; decoding is greedy, end tokens are ignored and no prompt is cached. Tokens
per second are the generated tokens over the time from the first request to the last answer, which
includes the processing of the prompts. Texts are the same on both sides and new in each round.

The prefix test takes the time to the first token of a prompt that begins with about 1,000 new
tokens, and of a second prompt that begins with the same ones. Ratios are medians of the rounds'
ratios.

llama-server is built from the llama.cpp that llama-cpp-python (tests/llamacpp/requirements.txt)
ships, patched by tests/llamacpp/mend.sh: cmake with Release, GGML_NATIVE=ON,
BUILD_SHARED_LIBS=OFF, LLAMA_OPENSSL=OFF, LLAMA_USE_PREBUILT_UI=OFF, target llama-server."""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from machine import result_of, write_result
from serve_load import WORDS

from hotsplit.measure.timing.interleave import in_turn
from hotsplit.system.processors import processors

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from serve_client import COMPLETE, Answer, ServerProcess, ask, stream  # noqa: E402

COUNTS = (1, 4, 16)
CONTEXT = 2048  # per text
PROMPT_WORDS, PREFIX_WORDS = 80, 800  # of one to three tokens each
PAUSE_S = 0.1  # in which the other side's spinning threads go to sleep
OURS, FLASH = "hotsplit", "llama-server, flash"
RIVALS = {"llama-server": "off", FLASH: "on"}

Samples = dict[str, dict[str, list[float]]]  # by side and figure, one per round


def main() -> None:
    arguments = _arguments()
    result = result_of(
        "serve-throughput",
        model=arguments.model.stem,
        threads=arguments.threads,
        tokens=arguments.tokens,
        rounds=arguments.rounds,
    )
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        ports = start(arguments, Path(folder), stack)
        samples = asyncio.run(measure(arguments, ports))
    result |= {
        "load_after": os.getloadavg(),
        "medians": {
            side: {k: statistics.median(v) for k, v in of_side.items()}
            for side, of_side in samples.items()
        },
        "ratios": ratios(samples),
        "samples": samples,
    }
    _print(result)
    path = write_result(result, f"serve-throughput-{arguments.name}", arguments.output)
    print(f"wrote {path}", file=sys.stderr)
    print(json.dumps({key: value for key, value in result.items() if key != "samples"}))


def start(arguments: argparse.Namespace, folder: Path, stack: ExitStack) -> dict[str, int]:
    """Starts all servers; returns their ports by side."""
    options = f"--parallel {max(COUNTS)} --kept 0 --context {CONTEXT} --threads {arguments.threads}"
    ours = ServerProcess(arguments.model, folder / "ours.log", *options.split())
    ports = {OURS: stack.enter_context(ours).port}
    for side, flash in RIVALS.items():
        ports[side] = stack.enter_context(_rival(arguments, flash, folder / f"{flash}.log"))
    return ports


@contextmanager
def _rival(arguments: argparse.Namespace, flash: str, log: Path) -> Iterator[int]:
    most, port = max(COUNTS), arguments.port + (flash == "on")
    options = {
        "-m": arguments.stock,
        "--port": port,
        "-np": most,
        "-c": most * CONTEXT,
        "-fa": flash,
        "-t": arguments.threads,
        "-tb": arguments.threads,
        "--cache-ram": 0,
    }
    command = [str(part) for pair in options.items() for part in pair]
    with log.open("w") as output:
        process = subprocess.Popen([arguments.rival, *command], stdout=output, stderr=output)
    try:
        asyncio.run(_until_healthy(process, port, log))
        yield port
    finally:
        process.kill()
        process.wait()


async def _until_healthy(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if (await ask(port, "/health")).status == 200:
                return
        except OSError:
            pass
        await asyncio.sleep(0.1)
    raise SystemExit(f"llama-server did not start: {log.read_text()[-1000:]}")


async def measure(arguments: argparse.Namespace, ports: dict[str, int]) -> Samples:
    samples: Samples = defaultdict(lambda: defaultdict(list))
    for number in range(arguments.rounds + 1):
        draw = random.Random(number)
        for count in COUNTS:
            texts = [_words(draw, PROMPT_WORDS) for _ in range(count)]
            for side in in_turn(list(ports), number):
                found = await _together(ports[side], texts, arguments.tokens)
                if number:  # round 0 is a warm-up
                    for name, value in found.items():
                        samples[side][f"{name}, {count} clients"].append(value)
        beginning = _words(draw, PREFIX_WORDS)
        for side in in_turn(list(ports), number):
            found = await _prefix(ports[side], beginning)
            if number:
                for name, value in found.items():
                    samples[side][name].append(value)
        print(f"round {number} of {arguments.rounds}", file=sys.stderr)
    return samples


async def _together(port: int, texts: list[str], num_tokens: int) -> dict[str, float]:
    await asyncio.sleep(PAUSE_S)
    began = time.perf_counter()
    answers = await asyncio.gather(*(_asked(port, text, num_tokens, False) for text in texts))
    seconds = time.perf_counter() - began
    said = sum(answer.usage["completion_tokens"] for answer in answers)
    assert said == num_tokens * len(texts), (said, num_tokens, len(texts))
    return {
        "tokens/s": said / seconds,
        "first token ms": 1e3 * statistics.median(answer.first_s for answer in answers),
    }


async def _prefix(port: int, beginning: str) -> dict[str, float]:
    """Milliseconds to the first token of a text, and of a second one with the same prefix."""
    await asyncio.sleep(PAUSE_S)
    found = {}
    for name, ending in (
        ("new 1,000 tokens, first token ms", "one two"),
        ("kept 1,000 tokens, first token ms", "three four"),
    ):
        answer = await _asked(port, f"{beginning}\n{ending} five", 4, True)
        found[name] = 1e3 * answer.first_s
    return found


def _asked(port: int, text: str, num_tokens: int, is_kept: bool) -> Any:
    body = {
        "prompt": text,
        "max_tokens": num_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "cache_prompt": is_kept,
    }
    return _checked(stream(port, COMPLETE, body, seconds=600))


async def _checked(asked: Any) -> Answer:
    answer: Answer = await asked
    assert answer.times_s, "an answer without text"
    return answer


def _words(draw: random.Random, count: int) -> str:
    return " ".join(draw.choices(WORDS, k=count))


def ratios(samples: Samples) -> dict[str, float]:
    """Our figures relative to the better of the rival's two servers; above 1 ours is better."""
    found = {}
    for name, ours in samples[OURS].items():
        is_rate = name.startswith("tokens/s")
        by_side = []
        for side in RIVALS:
            pairs = zip(ours, samples[side][name], strict=True)
            by_side.append(statistics.median(a / b if is_rate else b / a for a, b in pairs))
        found[name] = min(by_side)
    return found


def _print(result: dict[str, Any]) -> None:
    sides = list(result["medians"])
    print(f"{'':36}" + "".join(f"{side:>22}" for side in sides) + f"{'times':>8}", file=sys.stderr)
    for name, ratio in result["ratios"].items():
        values = "".join(f"{result['medians'][side][name]:22.1f}" for side in sides)
        print(f"{name:36}{values}{ratio:7.2f}x", file=sys.stderr)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("stock", type=Path)
    parser.add_argument("--rival", type=Path, required=True, help="llama-server")
    parser.add_argument("--name", default="smollm2-q8_0")
    parser.add_argument("--threads", type=int, default=processors().threads)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--port",
        type=int,
        default=18080,
        help="port of one llama-server; the other takes the next one",
    )
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
