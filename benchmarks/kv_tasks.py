"""Measures recall of facts from a long document under each way of selecting keys.

    python benchmarks/kv_tasks.py MODEL TEXT [--tokens 7000] [--facts 20] [--documents 10]

A document consists of lines "The code of WORD is CODE." with words of TEXT and random codes. After
it, the beginnings of some lines are repeated; the score is the mean logarithm of the probability of
the tokens that complete the line. Each way is compared with full attention on the same facts of the
same documents; the same lines in another order show how far full attention itself varies.

In `after_full`, the document is read with full attention and only the questions under the rule; in
`under_rule`, which has only some of the ways, the document is read under the rule too (but with all
keys if `is_read_in_full`). Shares are of the bytes of a head's keys and values in f16, at the end
of the document: `share_of_keys` is what a token reads of the keys and values themselves, which an
offload has to fetch; `share_of_bytes` includes the tables it reads to find them; `share_of_tables`
is the size of the tables. Rules of kv_selection.py, computed in torch, have a share of the bytes in
place of sizes; unlike in the paper, InfLLM's units are chosen for each key-value head
separately."""

import argparse
import hashlib
import json
import math
import random
import re
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from kv_selection import REPRESENTATIVES, UNIT, Head, Rule, heads_of, infllm, taken
from machine import machine, processor, slug
from torch import Tensor

from hotsplit import Engine
from hotsplit.files.atomic import partial_file
from hotsplit.options.key_selection import KeySelection
from hotsplit.runtime.generate.prompt_cache import PromptKey
from hotsplit.runtime.model import attention
from hotsplit.runtime.step.sequences import Sequence
from hotsplit.runtime.text.codec import TextCodec

F16 = 2  # bytes
LEAST = "block=16,sinks=0,window=16,top=16"  # so that attention in torch calls attend_to_chosen
NORMAL_95 = 1.96
Line = tuple[list[int], list[int]]
Scores = dict[str, dict[str, list[float]]]  # by case and way, one for each fact


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way of attending: sizes of --kv-offload, or a rule of kv_selection.py with its share of the
    bytes; with neither, full attention."""

    sizes: str | None = None
    in_torch: tuple[str, float] | None = None
    # Where little is lost, more documents are needed to tell how much.
    num_documents: int = 1
    num_read: int = 0  # number of documents in `under_rule`
    is_shuffled: bool = False  # the lines are in another order
    # In `under_rule`, the document is still read with all keys (`full` is its length).
    is_read_in_full: bool = False

    def sizes_for(self, num_tokens: int) -> str | None:
        """The sizes for a document of `num_tokens` tokens."""
        return f"{self.sizes},full={num_tokens}" if self.is_read_in_full else self.sizes


ALL = 1_000_000
# A share in a name is about what a token reads of the bytes of all keys and values, after some
# 7,000 tokens and with heads of 64 values. It includes tables, except with "of the keys".
WAYS = {
    "full attention": Way(num_documents=ALL),
    "full attention, lines in another order": Way(is_shuffled=True),
    "the defaults": Way(sizes="on", num_documents=ALL),
    "the defaults, 4 candidates": Way(sizes="candidates=4", num_read=1),
    "the defaults, 16 candidates": Way(sizes="candidates=16", num_read=1),
    "two stages, 5 % of the keys": Way(
        sizes="block=32,sinks=32,window=64,top=224,candidates=64", num_documents=ALL, num_read=1
    ),
    "two stages, 5 % of the keys, the document in full": Way(
        sizes="block=32,sinks=32,window=64,top=224,candidates=64",
        num_documents=0,
        num_read=ALL,
        is_read_in_full=True,
    ),  # fmt: skip
    "two stages, 2 % of the keys": Way(sizes="block=32,sinks=32,window=32,top=64,candidates=64"),
    "two stages, 5 %": Way(sizes="block=64,sinks=64,window=64,top=128,candidates=4"),
    "two stages, 10 %": Way(sizes="block=32,sinks=64,window=128,top=320,candidates=4"),
    "means of blocks, 5 %": Way(
        sizes="block=64,sinks=64,window=64,top=192,candidates=0,summary=mean"
    ),
    "means of blocks, 10 %": Way(
        sizes="block=32,sinks=64,window=128,top=416,candidates=0,summary=mean"
    ),
    "bounds of blocks, 5 %": Way(sizes="block=64,sinks=64,window=64,top=128,candidates=0"),
    "bounds of blocks, 10 %": Way(sizes="block=32,sinks=64,window=128,top=384,candidates=0"),
    "the best positions, 5 %": Way(in_torch=("oracle", 0.05)),
    "InfLLM's units, 5 %": Way(in_torch=("infllm", 0.05)),
    "InfLLM's units, 10 %": Way(in_torch=("infllm", 0.1)),
}


@dataclass(frozen=True, kw_only=True)
class Document:
    """A document, the lines to be completed, and the model that reads them."""

    ids: list[int]
    asked: list[Line]
    model: PromptKey

    @property
    def name(self) -> str:
        """A digest of all that scores depend on, except the way of attending."""
        content = [self.ids, self.asked, asdict(self.model)]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def bytes_of(rule: KeySelection | None, tokens: int, width: int) -> float:
    """Bytes that one head reads for a token."""
    row = 2 * F16 * width
    if rule is None:
        return tokens * row
    positions = rule.longest - rule.block / 2
    return positions * row + rule.searched_bytes(tokens, width)


def start_of(codec: TextCodec) -> list[int]:
    """The special tokens that the tokenizer puts before a text."""
    ids, (first, *_) = codec.encode("\nThe"), codec.encode_rendered("\nThe")
    return ids[: ids.index(first)]


def lines_of(codec: TextCodec, words: list[str], tokens: int, chance: random.Random) -> list[Line]:
    """A document's lines as (beginning, rest), up to `tokens` tokens together."""
    lines: list[Line] = []
    count = 0
    for word in chance.sample(words, len(words)):
        begun, rest = f"\nThe code of {word} is", f" {chance.randrange(10_000, 100_000)}."
        # Without special tokens, which belong to the beginning of the document only.
        first, whole = codec.encode_rendered(begun), codec.encode_rendered(begun + rest)
        if whole[: len(first)] != first:
            continue
        count += len(whole)
        if count > tokens:
            return lines
        lines.append((first, whole[len(first) :]))
    raise SystemExit(f"{len(words)} words are too few for {tokens} tokens")


def documents(arguments: argparse.Namespace) -> Iterator[tuple[Document, Document]]:
    """Pairs of a document and the same lines in another order."""
    words = sorted(set(re.findall(r"\b[a-z]{5,9}\b", arguments.text.read_text())))
    with load(arguments, None) as engine:
        codec, model = engine.codec, engine.prompt_key()
    start = start_of(codec)
    for number in range(1, arguments.documents + 1):
        chance = random.Random(number)
        lines = lines_of(codec, words, arguments.tokens - len(start), chance)
        asked = chance.sample(lines, arguments.facts)
        orders = lines, chance.sample(lines, len(lines))
        first, second = (
            [*start, *(i for line in order for part in line for i in part)] for order in orders
        )
        yield (
            Document(ids=first, asked=asked, model=model),
            Document(ids=second, asked=asked, model=model),
        )


def tell(text: Sequence, begun: list[int], answer: list[int]) -> float:
    """The mean logarithm of the probability of the answer's tokens."""
    length = text.length
    logits = text.extend([*begun, *answer[:-1]], "all")[len(begun) - 1 :]
    text.rollback(length)
    shares = logits.log_softmax(dim=-1)
    return float(shares[range(len(answer)), answer].mean())


def load(arguments: argparse.Namespace, sizes: str | None) -> Engine:
    return Engine.load(
        arguments.model, mode="dense", device="cpu", context_length=arguments.tokens + 128,
        kv_offload=sizes,
    )  # fmt: skip


class Reader:
    """Asks for the facts of one document, which is read with full attention or under the rule."""

    def __init__(self, arguments: argparse.Namespace, document: Document, other: Document) -> None:
        self.arguments, self.document, self.other = arguments, document, other
        self._state: list[tuple[Tensor, Tensor]] | None = None
        self._units: list[list[Rule]] | None = None

    def after_full(self, way: Way) -> list[float]:
        if way.is_shuffled:
            return self._read(None, self.other)
        if way.in_torch is not None:
            return self._in_torch(*way.in_torch)
        with load(self.arguments, way.sizes) as engine:
            return self._asked(engine)

    def under_rule(self, way: Way) -> list[float]:
        return self._read(way.sizes_for(len(self.document.ids)), self.document)

    def _read(self, sizes: str | None, document: Document) -> list[float]:
        with load(self.arguments, sizes) as engine, engine.sequence() as text:
            text.extend(document.ids, "none")
            return [tell(text, *line) for line in document.asked]

    def _asked(self, engine: Engine) -> list[float]:
        if self._state is None:
            with load(self.arguments, None) as full, full.sequence() as text:
                text.extend(self.document.ids, "none")
                self._state = text.read_state()
        with engine.sequence() as text:
            text.write_state(self.document.ids, self._state)
            return [tell(text, *line) for line in self.document.asked]

    def _in_torch(self, kind: str, share: float) -> list[float]:
        """Scores with the positions that a rule of kv_selection.py selects."""
        original = attention.attend_to_chosen
        units = self._landmarks() if kind == "infllm" else []
        with load(self.arguments, LEAST) as engine, torch.inference_mode():
            attention.attend_to_chosen = Chosen(kind, share, len(engine.layers), units).attend
            try:
                with engine.observe(lambda name, layer, tensor: None):
                    return self._asked(engine)
            finally:
                attention.attend_to_chosen = original

    def _landmarks(self) -> list[list[Rule]]:
        """InfLLM's units of the document, by layer and head."""
        if self._units is None:
            self._units = []
            with load(self.arguments, None) as engine, torch.inference_mode():
                for layer, head in heads_of(engine, torch.tensor(self.document.ids)):
                    self._units += [[]] if layer == len(self._units) else []
                    self._units[layer].append(landmarks(head))
        return self._units


def landmarks(head: Head) -> Rule:
    """InfLLM's units of the document; the positions after it are in the window."""
    score, count = infllm(head), len(head.key_NW)

    def padded(query_GW: Tensor, t: int) -> Tensor:
        known = score(query_GW, min(t, count))
        return torch.cat([known, torch.full((t - len(known),), -torch.inf)])

    return Rule(padded, lambda t: t / UNIT * REPRESENTATIVES * F16 * head.width)


@dataclass
class Chosen:
    """Attention over what a rule reads; layers call it in turn."""

    kind: str
    share: float
    num_layers: int
    rules: list[list[Rule]]  # by layer and head; empty: the rule needs no tables
    calls: int = 0

    def attend(
        self, query_THW: Tensor, key_CKW: Tensor, value_CKW: Tensor, tables: object, sequence: int, *,
        scale: float,
    ) -> Tensor:  # fmt: skip
        layer, num_kv = self.calls % self.num_layers, key_CKW.shape[1]
        self.calls += 1
        heads = []
        for k in range(num_kv):
            rule = self.rules[layer][k] if self.rules else None
            keys, values = key_CKW[:, k].float(), value_CKW[:, k].float()
            queries = query_THW.unflatten(1, (num_kv, -1))[:, k]
            heads.append(torch.stack([self._row(rule, q, keys[: t + 1], values[: t + 1], scale)
                                      for t, q in enumerate(queries, len(keys) - len(queries))]))  # fmt: skip
        return torch.stack(heads, dim=1).flatten(1)

    def _row(
        self, rule: Rule | None, query_GW: Tensor, key_TW: Tensor, value_TW: Tensor, scale: float
    ) -> Tensor:
        is_read = taken(self.kind, rule, query_GW, key_TW, self.share)
        assert is_read is not None
        score_GT = query_GW @ key_TW[is_read].T * scale
        return score_GT.softmax(dim=-1) @ value_TW[is_read]


def against(full: list[float], found: list[float]) -> dict[str, Any]:
    """Compares scores, which are paired by fact. Probabilities are geometric means; the standard
    error is that of the mean difference of logarithms; the 95 % interval is that of `of_full`."""
    full = full[: len(found)]
    differences = [a - b for a, b in zip(found, full, strict=True)]
    middle = statistics.mean(differences)
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return {
        "facts": len(found),
        "probability": math.exp(statistics.mean(found)),
        "full": math.exp(statistics.mean(full)),
        "of_full": math.exp(middle),
        "standard_error": error,
        "interval": [math.exp(middle + side * NORMAL_95 * error) for side in (-1, 1)],
    }


def gather(arguments: argparse.Namespace) -> tuple[Scores, int, int]:
    """(scores of all documents, mean number of tokens of a document, head width)."""
    scores: Scores = {"after_full": {}, "under_rule": {}}
    read = list(documents(arguments))
    for case, found in scores.items():
        for number, (document, other) in enumerate(read):
            ways = {
                name: way for name, way in arguments.ways.items()
                if number < (way.num_read if case == "under_rule" else way.num_documents)
            }  # fmt: skip
            for name, values in of_document(arguments, case, document, other, ways).items():
                found.setdefault(name, []).extend(values)
                full = scores["after_full"]["full attention"]
                show(name, case, against(full, found[name]))
    with load(arguments, None) as engine:
        width = engine.layers[0].attention.cache.head_width
    return scores, round(statistics.mean(len(each.ids) for each, _ in read)), width


def of_document(
    arguments: argparse.Namespace, case: str, document: Document, other: Document,
    ways: dict[str, Way],
) -> dict[str, list[float]]:  # fmt: skip
    """A document's scores by way; those that an earlier run of the model has kept are not measured
    again."""
    kept = None if arguments.kept is None else arguments.kept / f"{document.name}.json"
    known: Scores = {"after_full": {}, "under_rule": {}}
    if kept is not None and kept.exists():
        known = json.loads(kept.read_text())
    reader = Reader(arguments, document, other)
    found = {}
    for name, way in ways.items():
        sizes = way.sizes_for(len(document.ids))
        at = name if sizes is None else f"{name}: {KeySelection.parse(sizes)}"
        if at not in known[case]:
            known[case][at] = (
                reader.under_rule(way) if case == "under_rule" else reader.after_full(way)
            )
            if kept is not None:
                kept.write_text(json.dumps(known))
        found[name] = known[case][at]
    return found


def show(name: str, case: str, found: dict[str, Any]) -> None:
    low, high = (100 * (end - 1) for end in found["interval"])
    print(f"{name:40} {case:10} {found['facts']:4} facts: {found['probability']:.3f},"
          f" {low:+.1f} % to {high:+.1f} % of full attention's", flush=True)  # fmt: skip


def shares(way: Way, tokens: int, width: int) -> dict[str, Any]:
    """The sizes of a way, and its shares of the bytes of keys and values."""
    if way.in_torch is not None:
        kind, share = way.in_torch
        return {"share_of_bytes": share, "share_of_keys": share if kind == "oracle" else None}
    rule = None if way.sizes is None else KeySelection.parse(way.sizes)
    entire = bytes_of(None, tokens, width)
    return {
        "selection": None if rule is None else str(rule),
        "share_of_keys": 1.0 if rule is None else (rule.longest - rule.block / 2) / tokens,
        "share_of_bytes": bytes_of(rule, tokens, width) / entire,
        "share_of_tables": 0.0 if rule is None else rule.table_bytes(tokens, width) / entire,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path, help="text from which the facts take their words")
    parser.add_argument("--tokens", type=int, default=7000)
    parser.add_argument("--facts", type=int, default=20, help="of each document")
    parser.add_argument("--documents", type=int, default=10)
    parser.add_argument(
        "--kept", type=Path, help="folder to keep scores in; an interrupted run resumes from it"
    )
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, metavar="WAY", help="only these, and full attention"
    )
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.facts < 2:
        parser.error(f"--facts is {arguments.facts}, wanted 2 or more: one has no standard error")
    chosen = arguments.ways or list(WAYS)
    arguments.ways = {name: WAYS[name] for name in dict.fromkeys(["full attention", *chosen])}
    if arguments.kept is not None:
        arguments.kept.mkdir(parents=True, exist_ok=True)
    scores, tokens, width = gather(arguments)
    full = scores["after_full"]["full attention"]
    result = {
        "benchmark": "kv-tasks", "model": arguments.model.stem, "machine": machine(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "documents": arguments.documents, "tokens": tokens,
        "ways": {
            name: shares(way, tokens, width)
            | {case: against(full, found[name]) for case, found in scores.items() if name in found}
            for name, way in arguments.ways.items()
        },
    }  # fmt: skip
    folder = Path(__file__).parent / "results"
    output = arguments.output or folder / f"kv-tasks-{slug(processor())}.json"
    with partial_file(output) as partial:
        partial.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
