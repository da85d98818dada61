"""Whether swapping experts while a text is written is faster than keeping those of a plan: replays the
neuron cache with experts as its units, and the policies of other programs, on recorded routings.

Seconds are computed from bytes: experts and the rest of a token as in Qwen3-30B-A3B (Q4_K_M), a GPU of
272 GB/s, a CPU of 60 GB/s, and links of three speeds. Routings are those of the bundled mixture, whose
plan was made from another text, and random ones by Zipf's law whose ranks drift.

    expert_cache.py [--random] [PROFILE TEXT_PROFILE ...] [-o RESULT]

PROFILE is the profile that plans are made from, the others are of the texts that are replayed (hotsplit
profile).

Letters: L layers, T tokens, K experts of a token, E experts."""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from machine import RESULTS, processor, result_of, slug, write_result

from hotsplit.artifacts.profile_file import Profile
from hotsplit.measure.cache_replay.policies import Case, ours, seconds_T
from hotsplit.measure.cache_replay.recording import Trace
from hotsplit.measure.cache_replay.replay import compare
from hotsplit.options.neuron_cache import CacheCosts, CacheOptions
from hotsplit.runtime.neuron_cache.policy import packed
from hotsplit.solver.replay import Sides, polished

GPU, CPU, LINKS = 272e9, 60e9, (6e9, 13e9, 26e9)  # bytes per second
LAYER_BYTES = 128 * 2.65e6  # of the experts of a layer, however many they are
REST_S, HAND_OVER_S, KERNELS_S, COPY_S, SWAP_S = 4.0e-3, 25e-6, 6e-6, 10e-6, 1e-5
SHARES = 0.25, 0.5, 0.75  # of a layer's experts that have slots
TOKENS, LAYERS = 2048, 12  # of random routings
# Experts are few, so a step considers those of every layer; chosen on these routings.
OPTIONS = {
    "neurons' options": CacheOptions(),
    "experts' options": CacheOptions(
        visited=1.0, most_rows=256, margin=0.06, burst_weight=0.4, start_gain=0.03
    ),
}


@dataclass(frozen=True, kw_only=True)
class Routing:
    """What a plan is made from, and what is replayed, int16 [L, T, K]."""

    name: str
    planned_LTK: np.ndarray
    replayed_LTK: np.ndarray
    num_experts: int


def zipf(name: str, *, drift: float, exponent: float, seed: int = 0) -> Routing:
    """Tokens choose 8 of 128 experts without replacement, by Zipf's law of their ranks. Every 64 tokens
    a share `drift` of each layer's experts exchange their ranks; those of the plan are the first."""
    random, num_experts, num_used = np.random.default_rng(seed), 128, 8
    logit_E = -exponent * np.log1p(np.arange(num_experts))
    rank_LE = np.stack([random.permutation(num_experts) for _ in range(LAYERS)])
    found = np.empty((LAYERS, 2 * TOKENS, num_used), np.int16)
    for token in range(2 * TOKENS):
        if token > TOKENS and token % 64 == 0 and drift:
            for rank_E in rank_LE:
                chosen = random.permutation(num_experts)[: int(drift * num_experts)]
                rank_E[chosen] = rank_E[random.permutation(chosen)]
        noisy_LE = logit_E[rank_LE] + random.gumbel(size=rank_LE.shape)
        found[:, token] = np.sort(np.argpartition(-noisy_LE, num_used)[:, :num_used], axis=1)
    return Routing(
        name=name, planned_LTK=found[:, :TOKENS], replayed_LTK=found[:, TOKENS:],
        num_experts=num_experts,
    )  # fmt: skip


def recorded(planned: Path, replayed: Path) -> Routing:
    one, two = (Profile.load(path).routing_LTK for path in (planned, replayed))
    assert one is not None and two is not None, "the profiles are of a model without experts"
    return Routing(
        name=replayed.stem, planned_LTK=one, replayed_LTK=two,
        num_experts=int(max(one.max(), two.max())) + 1,
    )  # fmt: skip


def case_of(routing: Routing, share: float, link: float) -> Case:
    """The solver's experts of each layer in a share of the slots."""
    num_layers, num_experts = len(routing.planned_LTK), routing.num_experts
    size, count = LAYER_BYTES / num_experts, round(share * num_experts)
    slots, frequency_LE = [], []
    for id_TK in routing.planned_LTK:
        count_E = np.bincount(id_TK.ravel(), minlength=num_experts)
        sides = Sides(
            rank_TK=id_TK, num_experts=num_experts, hot_s=size / GPU, cold_s=size / CPU,
            kernels_s=KERNELS_S, hand_over_s=HAND_OVER_S,
        )  # fmt: skip
        is_hot_E = np.zeros(num_experts, bool)
        is_hot_E[np.argsort(-count_E, kind="stable")[:count]] = True
        slots.append(np.flatnonzero(polished(sides, is_hot_E)))
        frequency_LE.append(count_E / len(id_TK))
    is_read_LTE = np.zeros((*routing.replayed_LTK.shape[:2], num_experts), bool)
    np.put_along_axis(is_read_LTE, routing.replayed_LTK.astype(np.int64), True, axis=2)
    every_L = np.ones(num_layers)
    return Case(
        trace=Trace(num_neurons=num_experts, bits_TLW=packed(is_read_LTE.transpose(1, 0, 2))),
        slots_LN=tuple(slots),
        frequency_LF=np.stack(frequency_LE),
        costs=CacheCosts(
            hot_s_L=KERNELS_S * every_L, hot_row_s_L=size / GPU * every_L,
            cold_s_L=HAND_OVER_S * every_L, cold_row_s_L=size / CPU * every_L,
            copy_row_s_L=size / link * every_L, gather_row_s_L=SWAP_S * every_L,
            rest_s=REST_S * num_layers / 48, copy_s=COPY_S,
        ),
        options=CacheOptions(),
        group=1,
    )  # fmt: skip


def reports(routing: Routing) -> Iterator[tuple[str, dict[str, float]]]:
    """For each share and link, milliseconds a token by policy, with those of each of OPTIONS."""
    for share in SHARES:
        for link in LINKS:
            case = case_of(routing, share, link)
            report = compare(case)
            times = {r.name: r.ms for r in (*report.policies, report.hindsight)}
            del times["ours"]
            for name, options in OPTIONS.items():
                outcome = ours(replace(case, options=options))
                steps_T = seconds_T(case.costs, case.trace.read_TL, outcome)
                times[f"ours, {name}"] = float(steps_T.mean()) * 1e3
            times |= {"bound": report.bound_ms, "static hits": report.of["static"].hit_rate,
                      "most hits": report.belady_hit_rate}  # fmt: skip
            yield f"{share:.0%} in slots, link {link / 1e9:.0f} GB/s", times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("profiles", nargs="*", type=Path)
    parser.add_argument("--random", action="store_true", help="replay random routings")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    texts = arguments.profiles[1:]
    routings = [recorded(arguments.profiles[0], text) for text in texts]
    routings += (
        []
        if not arguments.random
        else [
            zipf("zipf", drift=0.0, exponent=0.8),
            zipf("zipf, slow drift", drift=0.03, exponent=0.8),
            zipf("zipf, fast drift", drift=0.2, exponent=0.8),
            zipf("steep zipf, slow drift", drift=0.03, exponent=1.2),
        ]
    )
    result = result_of("expert_cache")
    path = arguments.output or RESULTS / f"expert-cache-{slug(processor())}.json"
    if path.exists():  # of other routings
        result = json.loads(path.read_text()) | result
    for routing in routings:
        result[routing.name] = {}
        for name, times in reports(routing):
            result[routing.name][name] = times  # type: ignore[index]
            shown = ", ".join(f"{key} {value:.3f}" for key, value in times.items())
            print(f"{routing.name}, {name}: {shown}", flush=True)
    write_result(result, "expert-cache", arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
