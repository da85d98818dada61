"""Measures which keys a token needs, and what finding them costs: recall of attention's mass
against bytes read.

    python benchmarks/kv_selection.py MODEL TEXT [TEXT ...] [--length 8000] [--queries 48]
    python benchmarks/kv_selection.py --planted [--length 8000] [--queries 48]

Queries and keys are a real model's own, after the rotary embedding, over the first --length tokens
of each document; or they are planted, so that two known keys have nearly all of the mass (see
planted_heads). A rule
may read a share of the bytes of a cache in f16: bytes of summaries and codes are subtracted first,
and the rest goes to keys and values of the positions it selects. The selection is judged by the
exact attention of each query head: the share of its mass on these positions. Heads that share keys
share a selection. The first SINKS positions and a window of the last ones are always read (a quarter
of the share; for the sliding window, all of it).

    window       only the last positions (StreamingLLM, arXiv 2309.17453)
    infllm       units of 128 by four representative keys, those with the largest products with the
                 queries that follow (arXiv 2402.04617)
    mean N       blocks of N by the mean of their keys (ShadowKV's landmarks, arXiv 2410.21465)
    minmax N     blocks of N by the largest product within their keys' bounds (Quest, arXiv 2406.10774)
    codes B      every key by a code of B bits per value, rotated by the Hadamard matrix first
    N > codes B  four times as many keys as needed, in blocks of N by minmax, then keys by their codes
    N > rest     blocks of N by bounds, then the residual of each key from the middle of its block's
                 bounds in codes of two bits: the runtime's rule (hotsplit.options.key_selection), with
                 bounds and queries rounded as it rounds them
    oracle       the positions with most mass, found at no cost: an upper bound for all rules"""

import argparse
import json
import math
import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from machine import machine, processor, slug
from torch import Tensor

from hotsplit import Engine
from hotsplit.files.atomic import partial_file
from hotsplit.runtime.cache.key_tables import (
    QUERY_LARGEST,
    SUMMARY_LARGEST,
    decode_keys,
    encode_keys,
)
from hotsplit.runtime.cache.stored_rows import turn_by_hadamard
from hotsplit.runtime.model import attention

SHARES = (0.02, 0.05, 0.1)
SINKS = 4
F16 = 2  # bytes
UNIT, REPRESENTATIVES, FOLLOWING = 128, 4, 512
PLANTED_HEADS, STRENGTH = 8, 2.0


@dataclass(frozen=True)
class Head:
    """A key-value head of a layer over one document: keys [N, W], all queries [N, G, W]."""

    key_NW: Tensor
    query_NGW: Tensor

    @property
    def width(self) -> int:
        return self.key_NW.shape[1]


Score = Callable[[Tensor, int], Tensor]  # (queries [G, W], number of positions t) -> scores [t]


@dataclass(frozen=True)
class Rule:
    """`score` ranks positions (equal within a block, if the rule has blocks); `bytes_of` is the
    number of bytes that a token reads to compute it, given the number of positions."""

    score: Score
    bytes_of: Callable[[int], float]
    # A second stage, which looks only into the best blocks: its bytes per position, and its score.
    then: Score | None = None
    then_bytes: float = 0.0


def mass(query_GW: Tensor, key_TW: Tensor) -> Tensor:
    """Weights of exact attention, [G, T]."""
    return (query_GW @ key_TW.T / math.sqrt(key_TW.shape[1])).softmax(dim=-1)


def shared(score_GT: Tensor, width: int) -> Tensor:
    """Combines the scores of a group's heads: the sum of their softmax mass."""
    return (score_GT / math.sqrt(width)).softmax(dim=-1).sum(dim=0)


def codes(head: Head, bits: int) -> Score:
    """Keys quantised to `bits` per value with one scale per key, the best of a few: one bit is the
    sign, more bits are evenly spaced levels."""
    turned_NW = turn_by_hadamard(head.key_NW)
    levels = 2 ** (bits - 1)
    best_NW, least_N1 = torch.zeros_like(turned_NW), torch.full((len(turned_NW), 1), torch.inf)
    spread_N1 = turned_NW.square().mean(dim=1, keepdim=True).sqrt()
    for factor in (0.4, 0.5, 0.6, 0.8, 1.0, 1.25, 1.5):
        step_N1 = (
            spread_N1 * factor * 2 / levels if bits > 1 else 2 * spread_N1 * factor
        ).clamp_min(1e-12)
        level_NW = (turned_NW / step_N1).floor().clamp(-levels, levels - 1) + 0.5
        coded_NW = level_NW * step_N1
        error_N1 = (coded_NW - turned_NW).square().sum(dim=1, keepdim=True)
        best_NW = torch.where(error_N1 < least_N1, coded_NW, best_NW)
        least_N1 = torch.minimum(error_N1, least_N1)

    def score(query_GW: Tensor, t: int) -> Tensor:
        return shared(turn_by_hadamard(query_GW) @ best_NW[:t].T, head.width)

    return score


def rounded(x: Tensor, largest: float) -> Tensor:
    """Each row's values, rounded to whole multiples of its largest magnitude / `largest`."""
    unit = (x.abs().amax(dim=-1, keepdim=True) / largest).clamp_min(torch.finfo(x.dtype).tiny)
    return (x / unit).round() * unit


def rounded_bounds(head: Head, size: int) -> tuple[Tensor, Tensor]:
    """The smallest and largest values of blocks [B, W], rounded as in the runtime."""
    blocks_BSW = blocks_of(head, size)
    both_BV = torch.cat([blocks_BSW.amin(dim=1), blocks_BSW.amax(dim=1)], dim=1)
    low_BW, high_BW = rounded(both_BV, SUMMARY_LARGEST).chunk(2, dim=1)
    return low_BW, high_BW


def bounds(head: Head, size: int) -> Score:
    """The runtime's first stage: `minmax`, rounded."""
    low_BW, high_BW = rounded_bounds(head, size)

    def score(query_GW: Tensor, t: int) -> Tensor:
        query_GW = rounded(query_GW, QUERY_LARGEST)
        up_GB = query_GW.clamp_min(0) @ high_BW.T + query_GW.clamp_max(0) @ low_BW.T
        return by_block(up_GB, size, t, head.width)

    return score


def rests(head: Head, size: int) -> Score:
    """The runtime's second stage: keys approximated by the middle of their block's bounds and a
    code of the residual."""
    blocks_BSW = blocks_of(head, size)
    low_BW, high_BW = rounded_bounds(head, size)
    middle_B1W = (high_BW + low_BW)[:, None] / 2
    code, factor = encode_keys(turn_by_hadamard(blocks_BSW - middle_B1W))
    level = decode_keys(code.flatten(0, 1))[:, : head.width].unflatten(0, (-1, size)) - 1.5
    rest_NW = (level * factor[..., None]).flatten(0, 1)
    middle_NW = middle_B1W.expand(-1, size, -1).flatten(0, 1)
    middle_NW = torch.cat([middle_NW, head.key_NW[len(middle_NW) :]])
    rest_NW = torch.cat([rest_NW, torch.zeros_like(head.key_NW[len(rest_NW) :])])

    def score(query_GW: Tensor, t: int) -> Tensor:
        turned_GW = rounded(turn_by_hadamard(query_GW), QUERY_LARGEST)
        from_middle_GT = rounded(query_GW, QUERY_LARGEST) @ middle_NW[:t].T
        return shared(from_middle_GT + turned_GW @ rest_NW[:t].T, head.width)

    return score


def blocks_of(head: Head, size: int) -> Tensor:
    """Keys in whole blocks, [blocks, size, W]; an incomplete last block is in the window."""
    whole = len(head.key_NW) // size * size
    return head.key_NW[:whole].unflatten(0, (-1, size))


def by_block(score_GB: Tensor, size: int, t: int, width: int) -> Tensor:
    """The score of each position's block [t]; 0 for positions outside whole blocks."""
    found = torch.zeros(t)
    score_B = shared(score_GB[:, : t // size], width)
    found[: t // size * size] = score_B.repeat_interleave(size)
    return found


def minmax(head: Head, size: int) -> Score:
    blocks_BSW = blocks_of(head, size)
    low_BW, high_BW = blocks_BSW.amin(dim=1), blocks_BSW.amax(dim=1)

    def score(query_GW: Tensor, t: int) -> Tensor:
        up_GB = query_GW.clamp_min(0) @ high_BW.T + query_GW.clamp_max(0) @ low_BW.T
        return by_block(up_GB, size, t, head.width)

    return score


def mean(head: Head, size: int) -> Score:
    mean_BW = blocks_of(head, size).mean(dim=1)
    return lambda query_GW, t: by_block(query_GW @ mean_BW.T, size, t, head.width)


def infllm(head: Head) -> Score:
    sums_NW = head.query_NGW.sum(dim=1).cumsum(dim=0)
    following_NW = torch.cat([sums_NW, sums_NW[-1:].expand(FOLLOWING, -1)])[FOLLOWING:] - sums_NW
    liked_BS = (
        (following_NW * head.key_NW)
        .sum(dim=1)[: len(head.key_NW) // UNIT * UNIT]
        .unflatten(0, (-1, UNIT))
    )
    chosen_BR = liked_BS.topk(REPRESENTATIVES, dim=1).indices
    sum_BW = torch.stack(
        [
            block[rows].sum(dim=0)
            for block, rows in zip(blocks_of(head, UNIT), chosen_BR, strict=True)
        ]
    )

    def score(query_GW: Tensor, t: int) -> Tensor:
        found = torch.full((t,), -torch.inf)
        score_B = (query_GW @ sum_BW[: t // UNIT].T).sum(dim=0)
        found[: t // UNIT * UNIT] = score_B.repeat_interleave(UNIT)
        return found

    return score


def rules(head: Head) -> dict[str, Rule]:
    width = head.width
    found = {"infllm": Rule(infllm(head), lambda t: t / UNIT * REPRESENTATIVES * F16 * width)}
    for size in (16, 32, 64):
        found[f"mean {size}"] = Rule(mean(head, size), lambda t, n=size: t / n * F16 * width)
        found[f"minmax {size}"] = Rule(
            minmax(head, size), lambda t, n=size: t / n * 2 * F16 * width
        )
    for bits in (1, 2):
        size = bits * width / 8 + F16
        found[f"codes {bits}"] = Rule(codes(head, bits), lambda t, n=size: t * n)
    for size in (16, 32, 64):
        found[f"{size} > rest"] = Rule(
            bounds(head, size), lambda t, n=size: t / n * (2 * width + 4),
            rests(head, size), width / 4 + 4,
        )  # fmt: skip
    for size, bits in ((32, 2), (64, 2), (32, 4), (16, 2)):
        found[f"{size} > codes {bits}"] = Rule(
            minmax(head, size), lambda t, n=size: t / n * 2 * F16 * width,
            codes(head, bits), bits * width / 8 + F16,
        )  # fmt: skip
    return found


def recall(head: Head, name: str, rule: Rule | None, share: float, t: int) -> float | None:
    """The share of position t - 1's attention that falls on the positions that the rule reads; None
    if its bytes are spent before it has selected any."""
    query_GW, key_TW = head.query_NGW[t - 1], head.key_NW[:t]
    is_read = taken(name, rule, query_GW, key_TW, share)
    return None if is_read is None else float(mass(query_GW, key_TW)[:, is_read].sum(dim=1).mean())


def taken(
    name: str, rule: Rule | None, query_GW: Tensor, key_TW: Tensor, share: float
) -> Tensor | None:
    """The positions that a rule reads, bool [T]; None if it has no bytes left for any."""
    t, width = key_TW.shape
    row = 2 * F16 * width  # of a key and a value
    budget = share * t * row
    is_read = torch.zeros(t, dtype=torch.bool)
    is_read[:SINKS] = True
    left = budget - SINKS * row - (0.0 if rule is None else rule.bytes_of(t))
    window = int(left / row) if name == "window" else int(min(left, budget / 4) / row)
    if left < row:
        return None
    is_read[max(0, t - window) :] = True
    left -= window * row
    if name == "oracle":
        best_T = mass(query_GW, key_TW).sum(dim=0).masked_fill(is_read, -1)
        is_read[best_T.topk(int(left / row)).indices] = True
    elif rule is not None:
        is_read |= won(rule, query_GW, is_read, left, row, t)
    return is_read


def won(rule: Rule, query_GW: Tensor, is_read: Tensor, left: float, row: int, t: int) -> Tensor:
    """The positions that a rule reads for `left` bytes."""
    score_T = rule.score(query_GW, t).masked_fill(is_read, -torch.inf)
    found = torch.zeros(t, dtype=torch.bool)
    if rule.then is None:
        found[score_T.topk(min(t, int(left / row))).indices] = True
        return found
    wanted = left / (row + 4 * rule.then_bytes)
    candidates = score_T.topk(min(t, int(4 * wanted))).indices
    again_C = rule.then(query_GW, t).masked_fill(is_read, -torch.inf)[candidates]
    found[candidates[again_C.topk(min(len(candidates), int(wanted))).indices]] = True
    return found


def heads_of(engine: Engine, ids: Tensor) -> Iterator[tuple[int, Head]]:
    """Every layer's key-value heads of one document, with all queries."""
    kept: list[list[Tensor]] = [[] for _ in engine.layers]
    calls = 0
    original = attention.attend

    def watched(query_THW: Tensor, key_CKW: Tensor, value_CKW: Tensor) -> Tensor:
        nonlocal calls
        kept[calls % len(kept)].append(query_THW.clone())
        calls += 1
        return original(query_THW, key_CKW, value_CKW)

    attention.attend = watched
    try:
        with engine.observe(lambda name, layer, tensor: None), engine.sequence() as text:
            text.extend(ids.tolist(), "none")
            state = text.read_state()
    finally:
        attention.attend = original
    for layer, (key_NKW, _) in enumerate(state):
        query_NHW = torch.cat(kept[layer])
        assert len(query_NHW) == len(ids)
        grouped = query_NHW.unflatten(1, (key_NKW.shape[1], -1))
        for k in range(key_NKW.shape[1]):
            yield layer, Head(key_NKW[:, k].float().contiguous(), grouped[:, k].contiguous())


def planted_heads(length: int) -> Iterator[tuple[int, Head]]:
    """Heads whose queries are STRENGTH times the sum of two earlier keys at random places. A key is
    the sum of two normal vectors of 64 values, divided by sqrt(2): one of its topic, which 64
    positions share, and one of its own. Each position has three queries."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    for number in range(PLANTED_HEADS):
        topic_NW = normal(-(-length // 64), 64).repeat_interleave(64, dim=0)[:length]
        key_NW = (topic_NW + normal(length, 64)) / math.sqrt(2)
        place_NG2 = (
            torch.rand(length, 3, 2, generator=generator) * torch.arange(length)[:, None, None]
        )
        yield number, Head(key_NW, STRENGTH * key_NW[place_NG2.long()].sum(dim=2))


def measure(
    heads: Iterator[tuple[int, Head]], length: int, num_queries: int
) -> dict[str, dict[float, list[float]]]:
    """Each head's mean recall at evenly spaced places in the second half, by rule and share; shares
    that leave a rule no bytes for positions are omitted."""
    found: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    places = torch.linspace(length // 2, length, num_queries).int().tolist()
    for layer, head in heads:
        named: dict[str, Rule | None] = {"window": None, "oracle": None, **rules(head)}
        for name, rule in named.items():
            for share in SHARES:
                recalls = [recall(head, name, rule, share, t) for t in places]
                if None not in recalls:
                    found[name][share].append(statistics.mean(r for r in recalls if r is not None))
        print(f"layer {layer}", end="\r", flush=True)
    return found


def measured(arguments: argparse.Namespace) -> dict[str, dict[float, list[float]]]:
    """The recalls of `measure` over all documents, or over planted heads."""
    if arguments.planted:
        return measure(planted_heads(arguments.length), arguments.length, arguments.queries)
    totals: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    with Engine.load(
        arguments.model, mode="dense", device="cpu", cache_type_k="f32",
        context_length=arguments.length, is_resident=False,
    ) as engine:  # fmt: skip
        for path in arguments.texts:
            ids = torch.tensor(engine.codec.encode(path.read_text()[: 8 * arguments.length]))
            assert len(ids) >= arguments.length, f"{path}: {len(ids)} tokens"
            heads = heads_of(engine, ids[: arguments.length])
            for name, shares in measure(heads, arguments.length, arguments.queries).items():
                for share, recalls in shares.items():
                    totals[name][share] += recalls
    return totals


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("texts", type=Path, nargs="*")
    parser.add_argument("--planted", action="store_true", help="instead of a model and texts")
    parser.add_argument("--length", type=int, default=8000, help="tokens per document")
    parser.add_argument(
        "--queries", type=int, default=48, help="queries per document, layer and head"
    )
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.planted == bool(arguments.texts):
        parser.error("give a model and texts, or --planted")
    with torch.inference_mode():
        totals = measured(arguments)
    name = "kv-selection-planted" if arguments.planted else "kv-selection"
    result: dict[str, Any] = {
        "benchmark": name, "model": None if arguments.planted else arguments.model.stem,
        "machine": machine(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"), "load": os.getloadavg(),
        "texts": [path.name for path in arguments.texts], "length": arguments.length,
        "queries": arguments.queries,
        "recall": {
            name: {
                str(share): {"mean": statistics.mean(r), "worst_tenth": sorted(r)[len(r) // 10]}
                for share, r in shares.items()
            }
            for name, shares in totals.items()
        },
    }  # fmt: skip
    for rule, shares in result["recall"].items():
        told = (f"{shares[str(s)]['mean']:.3f}" if str(s) in shares else "  -  " for s in SHARES)
        print(f"{rule:16}", *told)
    folder = Path(__file__).parent / "results"
    output = arguments.output or folder / f"{name}-{slug(processor())}.json"
    with partial_file(output) as partial:
        partial.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
