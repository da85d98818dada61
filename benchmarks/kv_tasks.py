"""Measures recall of facts from a long document under each method of selecting keys.

    python benchmarks/kv_tasks.py MODEL TEXT [--tokens 7000] [--facts 20] [--documents 3]

A document consists of lines "The code of WORD is CODE." with words of TEXT and random codes. Then
some lines are started again; the score is the probability of the code's tokens after the line's
beginning. A model that copies does this well with full attention.

The document itself is read with full attention (`after_full`), and, with --under-rule, also with the
rule under test. `share_of_bytes` is what a rule reads per token of a head's keys, values and tables
at the end of the document, `share_of_keys` the keys and values alone, which an offload fetches.
Rules of kv_selection.py, computed in torch, have a share of the bytes in place of sizes."""

import argparse
import json
import math
import random
import re
import statistics
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from kv_selection import Head, Rule, heads_of, infllm, taken
from machine import machine, processor, slug
from torch import Tensor

from sparkinfer import Engine
from sparkinfer.files import partial_file
from sparkinfer.key_selection import KeySelection
from sparkinfer.runtime.model import attention
from sparkinfer.runtime.step.sequences import Sequence

F16 = 2
# For some 7,000 tokens, these read 5 % and 10 % of the bytes of keys and values with head width 64.
WAYS = {
    "full attention": None,
    "the defaults": "on",
    "two stages, 5 % of the keys": "block=32,sinks=32,window=64,top=224,candidates=64",
    "two stages, 5 %": "block=64,sinks=64,window=64,top=128,candidates=4,summary=bounds",
    "two stages, 10 %": "block=32,sinks=64,window=128,top=320,candidates=4,summary=bounds",
    "means of blocks, 5 %": "block=64,sinks=64,window=64,top=192,candidates=0,summary=mean",
    "means of blocks, 10 %": "block=32,sinks=64,window=128,top=416,candidates=0,summary=mean",
    "bounds of blocks, 5 %": "block=64,sinks=64,window=64,top=128,candidates=0,summary=bounds",
    "bounds of blocks, 10 %": "block=32,sinks=64,window=128,top=384,candidates=0,summary=bounds",
}
# Rules of kv_selection.py, by their share of the bytes.
IN_TORCH = {
    "the best positions, 5 %": ("oracle", 0.05),
    "InfLLM's units, 5 %": ("infllm", 0.05),
    "InfLLM's units, 10 %": ("infllm", 0.1),
}
LEAST = "block=16,sinks=0,window=16,top=16"  # with it, attention in torch calls attend_to_chosen
Line = tuple[list[int], list[int]]


@dataclass(frozen=True)
class Document:
    """A document, the lines to be completed, and its state and scores under full attention."""

    ids: list[int]
    asked: list[Line]
    state: list[tuple[Tensor, Tensor]]  # keys and values
    full: list[float]  # scores


def bytes_of(rule: KeySelection | None, tokens: int, width: int) -> float:
    """Bytes that one head reads for a token."""
    row = 2 * F16 * width
    if rule is None:
        return tokens * row
    far = (tokens - rule.window - rule.sinks) / rule.block
    codes = min(rule.candidates * rule.top, far * rule.block) * (rule.code_width(width) + 4)
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


def documents(arguments: argparse.Namespace) -> list[Document]:
    """The documents, read with full attention, or those that an earlier run has kept."""
    kept: Path | None = arguments.kept
    if kept is not None and kept.exists():
        return [Document(*each) for each in torch.load(kept)]
    found, chance = [], random.Random(1)
    words = sorted(set(re.findall(r"\b[a-z]{5,9}\b", arguments.text.read_text())))
    with load(arguments, None) as engine:
        for _ in range(arguments.documents):
            ids, lines = document(engine, words, arguments.tokens, chance)
            asked = chance.sample(lines, arguments.facts)
            with engine.sequence() as text:
                text.extend(ids, "none")
                full = [tell(text, *line) for line in asked]
                found.append(Document(ids, asked, text.read_state(), full))
    if kept is not None:
        torch.save([(each.ids, each.asked, each.state, each.full) for each in found], kept)
    return found


def load(arguments: argparse.Namespace, way: str | None) -> Engine:
    return Engine.load(
        arguments.model, mode="dense", device="cpu", context_length=arguments.tokens + 128,
        kv_offload=way,
    )  # fmt: skip


def scores(engine: Engine, each: Document, *, has_state: bool) -> list[float]:
    with engine.sequence() as text:
        if has_state:
            text.write_state(each.ids, each.state)
        else:
            text.extend(each.ids, "none")
        return [tell(text, *line) for line in each.asked]


def measure(arguments: argparse.Namespace, name: str, read: list[Document]) -> dict[str, Any]:
    """The figures of one way; `under_rule` only if asked for."""
    full = [score for each in read for score in each.full]
    found: dict[str, Any] = {"facts": len(full), "tokens": len(read[-1].ids)}
    if name in IN_TORCH:
        share = IN_TORCH[name][1]
        found |= {"share_of_bytes": share, "share_of_keys": share if "best" in name else None}
        return found | {"after_full": against(full, in_torch(arguments, name, read))}
    way = WAYS[name]
    rule = None if way is None else KeySelection.parse(way)
    with load(arguments, way) as engine:
        width = engine.layers[0].attention.cache.head_width
        after = [s for each in read for s in scores(engine, each, has_state=True)]
        under = (
            [s for each in read for s in scores(engine, each, has_state=False)]
            if arguments.under_rule and rule is not None
            else None
        )
    count = found["tokens"]
    positions = count if rule is None else rule.longest - rule.block / 2
    found |= {
        "selection": way, "share_of_keys": positions / count,
        "share_of_bytes": bytes_of(rule, count, width) / bytes_of(None, count, width),
        "after_full": against(full, after),
    }  # fmt: skip
    return found if under is None else found | {"under_rule": against(full, under)}


def against(full: list[float], found: list[float]) -> dict[str, float]:
    """Compares scores, which are paired. Probabilities are geometric means; the standard error is
    that of the mean difference of logarithms."""
    differences = [a - b for a, b in zip(found, full, strict=True)]
    return {
        "probability": math.exp(statistics.mean(found)),
        "of_full": math.exp(statistics.mean(differences)),
        "standard_error": statistics.stdev(differences) / math.sqrt(len(differences)),
    }


def in_torch(arguments: argparse.Namespace, name: str, read: list[Document]) -> list[float]:
    """Scores with the choice of a rule of kv_selection.py."""
    kind, share = IN_TORCH[name]
    found, original = [], attention.attend_to_chosen
    for each in read:
        rules: list[list[Rule | None]] = []
        if kind == "infllm":
            with load(arguments, None) as engine:
                for layer, head in heads_of(engine, torch.tensor(each.ids)):
                    rules += [[]] if layer == len(rules) else []
                    rules[layer].append(landmarks(head))
        with load(arguments, LEAST) as engine, torch.inference_mode():
            attention.attend_to_chosen = Chosen(kind, share, len(engine.layers), rules).attend
            try:
                with engine.observe(lambda name, layer, tensor: None):
                    found += scores(engine, each, has_state=True)
            finally:
                attention.attend_to_chosen = original
    return found


def landmarks(head: Head) -> Rule:
    """InfLLM's units of the document; the positions after it are in the window."""
    score, count = infllm(head), len(head.key_NW)

    def padded(query_GW: Tensor, t: int) -> Tensor:
        known = score(query_GW, min(t, count))
        return torch.cat([known, torch.full((t - len(known),), -torch.inf)])

    return Rule(padded, lambda t: t / 128 * 4 * F16 * head.width)


@dataclass
class Chosen:
    """Attention over what a rule reads; layers call it in turn."""

    kind: str
    share: float
    num_layers: int
    rules: list[list[Rule | None]]  # by layer and head; empty: the rule needs no tables
    calls: int = 0

    def attend(
        self, query_THW: Tensor, key_CKW: Tensor, value_CKW: Tensor, tables: object, sequence: int
    ) -> Tensor:
        layer, num_kv = self.calls % self.num_layers, key_CKW.shape[1]
        self.calls += 1
        heads = []
        for k in range(num_kv):
            rule = self.rules[layer][k] if self.rules else None
            keys, values = key_CKW[:, k].float(), value_CKW[:, k].float()
            queries = query_THW.unflatten(1, (num_kv, -1))[:, k]
            heads.append(torch.stack([self._row(rule, q, keys[: t + 1], values[: t + 1])
                                      for t, q in enumerate(queries, len(keys) - len(queries))]))  # fmt: skip
        return torch.stack(heads, dim=1).flatten(1)

    def _row(self, rule: Rule | None, query_GW: Tensor, key_TW: Tensor, value_TW: Tensor) -> Tensor:
        is_read = taken(self.kind, rule, query_GW, key_TW, self.share)
        assert is_read is not None
        score_GT = query_GW @ key_TW[is_read].T / math.sqrt(key_TW.shape[1])
        return score_GT.softmax(dim=-1) @ value_TW[is_read]


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
        default=";".join([*WAYS, *IN_TORCH]),
        help="the ways to measure; figures of the others stay in the file",
    )
    parser.add_argument(
        "--under-rule", action="store_true", help="also read the documents with each rule"
    )
    parser.add_argument(
        "--kept", type=Path, help="file of the documents as read, written if it does not exist"
    )
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    folder = Path(__file__).parent / "results"
    output = arguments.output or folder / f"kv-tasks-{slug(processor())}.json"
    found = json.loads(output.read_text())["ways"] if output.exists() else {}
    read = documents(arguments)
    for name in arguments.ways.split(";"):
        found[name] = found.get(name, {}) | measure(arguments, name, read)
        after = found[name]["after_full"]
        print(f"{name:28} {found[name]['share_of_bytes']:6.1%} of the bytes, probability"
              f" {after['probability']:.3f}, {after['of_full']:.3f} of full attention's", flush=True)  # fmt: skip
    result = {
        "benchmark": "kv-tasks", "model": arguments.model.stem, "machine": machine(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "ways": {name: found[name] for name in (*WAYS, *IN_TORCH) if name in found},
    }  # fmt: skip
    with partial_file(output) as partial:
        partial.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
