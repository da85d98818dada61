"""An agent's session: how many tokens of its growing prompt a server computes again, beside
llama-server on the same file.

    python benchmarks/agent_session.py MODEL... --rival path/to/llama-server [--turns 20]

Each turn sends the whole conversation, as clients do: the instructions, descriptions of tools, all
messages so far, and the result of a tool that the answer would have called. Answers are greedy and
stay in the conversation as the server wrote them. Both servers count tokens of prompts and those
that they took from their caches; what no turn before had seen is new. A prompt's tokens that are
neither new nor taken from the cache were computed again. Times are those from a request to its
first token. MODEL is a file that both run, in llama.cpp's layout."""

import argparse
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from machine import add_to_result, result_of

CONTEXT = 16384
WORDS = "file line error test build path read write branch merge commit table index cache key"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does what {name} does, for one path, and returns what it printed.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
    for name in ("read_file", "write_file", "list_folder", "run_tests", "search")
]


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Tokens of a prompt, those taken from the cache, and seconds to the first token."""

    prompt: int
    cached: int
    written: int
    first_s: float


def main() -> None:
    arguments = _arguments()
    for model in arguments.models:
        sides = {
            "hotsplit": [sys.executable, "-m", "hotsplit", "serve", str(model), "--device", "cpu"],
            "llama-server": [str(arguments.rival), "-m", str(model), "-t", str(arguments.threads)],
        }
        found = {}
        for side, command in sides.items():
            port = free_port()
            options = ["-c", str(CONTEXT), "--port", str(port)]
            options += ["--threads", str(arguments.threads)] * (side == "hotsplit")
            with running([*command, *options], port):
                turns = list(session(port, arguments.turns))
            found[side] = summary(turns)
            print(f"{model.stem}, {side}: {found[side]}", flush=True)
        result = result_of("agent_session", turns=arguments.turns, models={model.stem: found})
        path = add_to_result(result, "agent-session", arguments.output)
    print(f"wrote {path}")


def session(port: int, num_turns: int) -> Iterator[Turn]:
    chance = random.Random(0)
    system = "You are an agent that works on a program. " + text(chance, 150)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
    for number in range(num_turns):
        role = "tool" if number % 3 else "user"
        message = {"role": role, "content": text(chance, 60)}
        messages.append(message | ({"tool_call_id": f"call{number}"} if role == "tool" else {}))
        answer, turn = asked(port, messages)
        messages.append({"role": "assistant", "content": answer})
        yield turn


def text(chance: random.Random, count: int) -> str:
    return " ".join(chance.choices(WORDS.split(), k=count)) + "."


def asked(port: int, messages: Sequence[dict[str, Any]]) -> tuple[str, Turn]:
    body = {"messages": messages, "tools": TOOLS, "max_tokens": 32, "temperature": 0, "seed": 1}
    body |= {"stream": True, "stream_options": {"include_usage": True}, "tool_choice": "none"}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    began, first_s, usage, pieces = time.perf_counter(), 0.0, {}, []
    with urllib.request.urlopen(request) as lines:
        for line in lines:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                delta = choice.get("delta", {})
                piece = delta.get("content") or delta.get("reasoning_content") or ""
                first_s = first_s or (time.perf_counter() - began if piece else 0.0)
                pieces.append(delta.get("content") or "")
    turn = Turn(
        prompt=usage["prompt_tokens"],
        cached=usage["prompt_tokens_details"]["cached_tokens"],
        written=usage["completion_tokens"],
        first_s=first_s,
    )
    return "".join(pieces), turn


def summary(turns: Sequence[Turn]) -> dict[str, Any]:
    """`again`: tokens that were computed although a turn before had them. An answer is only new in
    the turn that wrote it; its last token is computed when the next turn begins."""
    seen = again = 0
    for turn in turns:
        known = min(seen, turn.prompt)
        again += max(0, known - turn.cached)
        seen = turn.prompt + max(0, turn.written - 1)
    return {
        "prompt_tokens": sum(turn.prompt for turn in turns),
        "computed": sum(turn.prompt - turn.cached for turn in turns),
        "again": again,
        "last_prompt": turns[-1].prompt,
        "first_s": statistics.median(turn.first_s for turn in turns[1:]),
        "turns": [asdict(turn) for turn in turns],
    }


@contextmanager
def running(command: Sequence[str], port: int) -> Iterator[None]:
    """A server that answers; what it said is shown if it ends before."""
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT) as process,
    ):
        try:
            for _ in range(600):
                if process.poll() is not None:
                    said.seek(0)
                    raise SystemExit(said.read().decode(errors="replace")[-2000:])
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
                    break
                except OSError:
                    time.sleep(0.2)
            yield
        finally:
            process.terminate()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--rival", type=Path, required=True, help="llama-server")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
