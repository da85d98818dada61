"""Measures recall of facts from a long document under each method of selecting keys.

    python benchmarks/kv_tasks.py MODEL TEXT [--tokens 7000] [--facts 20] [--documents 3]

A document consists of lines "The code of WORD is CODE." with words of TEXT and random codes. Then
some lines are started again; the score is the probability of the code's tokens given the line
before them. A model that copies does this well with full attention. `bytes` is what each method
reads per token of a head's keys, values and tables at the end of the document; full attention reads
all."""

import argparse
import json
import math
import random
import re
import statistics
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from machine import machine, processor, slug

from sparkinfer import Engine
from sparkinfer.files import partial_file
from sparkinfer.key_selection import KeySelection
from sparkinfer.runtime.step.sequences import Sequence

F16 = 2
# For some 7,000 tokens, these read 5 % and 10 % of the bytes of keys and values with head width 64.
WAYS = {
    "full attention": None,
    "the defaults": "on",
    "two stages, 5 %": "block=64,sinks=64,window=64,top=128,candidates=4,summary=bounds",
    "two stages, 10 %": "block=32,sinks=64,window=128,top=320,candidates=4,summary=bounds",
    "means of blocks, 5 %": "block=64,sinks=64,window=64,top=192,candidates=0,summary=mean",
    "means of blocks, 10 %": "block=32,sinks=64,window=128,top=416,candidates=0,summary=mean",
    "bounds of blocks, 5 %": "block=64,sinks=64,window=64,top=128,candidates=0,summary=bounds",
    "bounds of blocks, 10 %": "block=32,sinks=64,window=128,top=384,candidates=0,summary=bounds",
}


def bytes_of(rule: KeySelection | None, tokens: int, width: int) -> float:
    """Bytes that one head reads for a token."""
    row = 2 * F16 * width
    if rule is None:
        return tokens * row
    far = (tokens - rule.window - rule.sinks) / rule.block
    codes = rule.candidates * rule.top * (rule.code_width(width) + 4)
    positions = rule.sinks + rule.top + rule.window + rule.block / 2
    return positions * row + far * (rule.summary_width(width) + 4) + codes


def document(
    engine: Engine, words: list[str], tokens: int, chance: random.Random
) -> tuple[list[int], list[tuple[list[int], list[int]]]]:
    """The document's ids, and each line's as (beginning, rest)."""
    ids: list[int] = []
    lines = []
    for word in chance.sample(words, len(words)):
        begun, rest = f"\nThe code of {word} is", f" {chance.randrange(10_000, 100_000)}."
        first, whole = engine.codec.encode(begun), engine.codec.encode(begun + rest)
        if whole[: len(first)] != first:
            continue
        if len(ids) + len(whole) > tokens:
            return ids, lines
        ids += whole
        lines.append((first, whole[len(first) :]))
    raise SystemExit(f"{len(words)} words are too few for {tokens} tokens")


def tell(text: Sequence, begun: list[int], answer: list[int]) -> float:
    """The mean logarithm of the probability of the answer's tokens."""
    length = text.length
    logits = text.extend([*begun, *answer[:-1]], "all")[len(begun) - 1 :]
    text.rollback(length)
    shares = logits.log_softmax(dim=-1)
    return float(shares[range(len(answer)), answer].mean())


def measure(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    way = WAYS[name]
    scores, tokens, chance = [], 0, random.Random(1)
    words = sorted(set(re.findall(r"\b[a-z]{5,9}\b", arguments.text.read_text())))
    with Engine.load(
        arguments.model, mode="dense", device="cpu", context_length=arguments.tokens + 128,
        kv_offload=way,
    ) as engine:  # fmt: skip
        width = engine.layers[0].attention.cache.head_width
        for _ in range(arguments.documents):
            ids, lines = document(engine, words, arguments.tokens, chance)
            asked = chance.sample(lines, arguments.facts)
            with engine.sequence() as text:
                text.extend(ids, "none")
                scores += [tell(text, *line) for line in asked]
            tokens = len(ids)
    rule = None if way is None else KeySelection.parse(way)
    mean = statistics.mean(scores)
    return {
        "selection": way, "log_probability": mean, "probability": math.exp(mean),
        "standard_error": statistics.stdev(scores) / math.sqrt(len(scores)), "facts": len(scores),
        "tokens": tokens, "share_of_bytes": bytes_of(rule, tokens, width) / bytes_of(None, tokens, width),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path, help="text whose words name the facts")
    parser.add_argument("--tokens", type=int, default=7000)
    parser.add_argument("--facts", type=int, default=20)
    parser.add_argument("--documents", type=int, default=3)
    parser.add_argument(
        "--ways",
        default=";".join(WAYS),
        help="the ways to measure; figures of the others stay in the file",
    )
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    folder = Path(__file__).parent / "results"
    output = arguments.output or folder / f"kv-tasks-{slug(processor())}.json"
    found = json.loads(output.read_text())["ways"] if output.exists() else {}
    for name in arguments.ways.split(";"):
        found[name] = measure(arguments, name)
        print(f"{name:24} {found[name]['share_of_bytes']:6.1%} of the bytes, probability"
              f" {found[name]['probability']:.3f}", flush=True)  # fmt: skip
    result = {
        "benchmark": "kv-tasks", "model": arguments.model.stem, "machine": machine(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"), "ways": {name: found[name] for name in WAYS if name in found},
    }  # fmt: skip
    with partial_file(output) as partial:
        partial.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
