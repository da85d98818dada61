"""Whether swapping experts while a text is written is faster than keeping those of a plan: replays
the neuron cache with experts as its units, and the policies of other programs, on recorded
routings.

Seconds are computed from bytes: experts and the rest of a token as in Qwen3-30B-A3B (Q4_K_M), a GPU
of 272 GB/s, a CPU of 60 GB/s, and links of three speeds. Routings are those of the bundled mixture,
whose plan was made from another text, and random ones by Zipf's law whose ranks drift. The options
of our policy were chosen by others (`tune`), of other seeds, exponents and drifts, and by no
recorded text.

    expert_cache.py [--random] [--tune] [PROFILE TEXT_PROFILE ...] [-o RESULT]

PROFILE is the profile that plans are made from, the others are of the texts that are replayed
(hotsplit profile).

Letters: L layers, T tokens, K experts of a token, E experts."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
from cache_policies import POLICIES, ReplayCase, Trace, compare, ours
from machine import RESULTS, processor, result_of, slug, write_result

from hotsplit.artifacts.profile_file import Profile
from hotsplit.options.neuron_cache_options import CacheCosts, CacheOptions
from hotsplit.runtime.neuron_cache.policy import packed
from hotsplit.solver.cache_costs import EXPERT_SWAP_S, MOVED_BYTES
from hotsplit.solver.replay import Sides, polished

GPU, CPU, LINKS = 272e9, 60e9, (6e9, 13e9, 26e9)  # bytes per second
LAYER_BYTES = 128 * 2.65e6  # of the experts of a layer, however many they are
REST_S, HAND_OVER_S, KERNELS_S, COPY_S = 4.0e-3, 25e-6, 6e-6, 10e-6
SHARES = 0.25, 0.5, 0.75  # of a layer's experts that have slots
TOKENS, LAYERS = 2048, 12  # of random routings
TUNING_TOKENS, TUNING_LAYERS = 1024, 8
RIVALS = "static", "lru", "ring", "lfu"


@dataclass(frozen=True, kw_only=True)
class Routing:
    """What a plan is made from, and what is replayed, int16 [L, T, K]; only layers with experts."""

    name: str
    planned_LTK: np.ndarray
    replayed_LTK: np.ndarray
    num_experts: int


def zipf(
    name: str,
    *,
    drift: float,
    exponent: float,
    seed: int,
    tokens: int = TOKENS,
    layers: int = LAYERS,
) -> Routing:
    """Tokens choose 8 of 128 experts without replacement, by Zipf's law of their ranks. Every 64
    tokens a share `drift` of each layer's experts exchange their ranks; those of the plan are the
    first."""
    random, num_experts, num_used = np.random.default_rng(seed), 128, 8
    logit_E = -exponent * np.log1p(np.arange(num_experts))
    rank_LE = np.stack([random.permutation(num_experts) for _ in range(layers)])
    found = np.empty((layers, 2 * tokens, num_used), np.int16)
    for token in range(2 * tokens):
        if token > tokens and token % 64 == 0 and drift:
            for rank_E in rank_LE:
                chosen = random.permutation(num_experts)[: int(drift * num_experts)]
                rank_E[chosen] = rank_E[random.permutation(chosen)]
        noisy_LE = logit_E[rank_LE] + random.gumbel(size=rank_LE.shape)
        found[:, token] = np.sort(np.argpartition(-noisy_LE, num_used)[:, :num_used], axis=1)
    return Routing(
        name=name,
        planned_LTK=found[:, :tokens],
        replayed_LTK=found[:, tokens:],
        num_experts=num_experts,
    )


def judged() -> list[Routing]:
    """The random routings of the results."""
    return [
        zipf("zipf", drift=0.0, exponent=0.8, seed=0),
        zipf("zipf, slow drift", drift=0.03, exponent=0.8, seed=0),
        zipf("zipf, fast drift", drift=0.2, exponent=0.8, seed=0),
        zipf("steep zipf, slow drift", drift=0.03, exponent=1.2, seed=0),
    ]


def of_tuning() -> list[Routing]:
    """The random routings by which options are chosen."""
    kinds = (0.0, 0.9), (0.02, 1.0), (0.08, 0.7), (0.3, 1.1), (0.3, 1.0)
    return [
        zipf(
            f"drift {drift}, exponent {exponent}",
            drift=drift,
            exponent=exponent,
            seed=100 + number,
            tokens=TUNING_TOKENS,
            layers=TUNING_LAYERS,
        )
        for number, (drift, exponent) in enumerate(kinds)
    ]


def recorded(planned: Path, replayed: Path) -> Routing:
    one, two = (Profile.load(path).routing_LTK for path in (planned, replayed))
    assert one is not None and two is not None, "the profiles are of a model without experts"
    has_experts_L = (one >= 0).all(axis=(1, 2))  # -1 in the other layers
    return Routing(
        name=replayed.stem,
        planned_LTK=one[has_experts_L],
        replayed_LTK=two[has_experts_L],
        num_experts=int(max(one.max(), two.max())) + 1,
    )


def case_of(routing: Routing, share: float, link: float) -> ReplayCase:
    """The solver's experts of each layer in a share of the slots."""
    num_layers, num_experts = len(routing.planned_LTK), routing.num_experts
    size, count = LAYER_BYTES / num_experts, round(share * num_experts)
    slots, frequency_LE = [], []
    for id_TK in routing.planned_LTK:
        count_E = np.bincount(id_TK.ravel(), minlength=num_experts)
        sides = Sides(
            rank_TK=id_TK,
            num_experts=num_experts,
            hot_s=size / GPU,
            cold_s=size / CPU,
            kernels_s=KERNELS_S,
            hand_over_s=HAND_OVER_S,
        )
        is_hot_E = np.zeros(num_experts, bool)
        is_hot_E[np.argsort(-count_E, kind="stable")[:count]] = True
        slots.append(np.flatnonzero(polished(sides, is_hot_E)))
        frequency_LE.append(count_E / len(id_TK))
    is_read_LTE = np.zeros((*routing.replayed_LTK.shape[:2], num_experts), bool)
    np.put_along_axis(is_read_LTE, routing.replayed_LTK.astype(np.int64), True, axis=2)
    every_L = np.ones(num_layers)
    return ReplayCase(
        trace=Trace(num_neurons=num_experts, bits_TLW=packed(is_read_LTE.transpose(1, 0, 2))),
        slots_LN=tuple(slots),
        frequency_LF=np.stack(frequency_LE),
        costs=CacheCosts(
            hot_s_L=KERNELS_S * every_L,
            hot_row_s_L=size / GPU * every_L,
            cold_s_L=HAND_OVER_S * every_L,
            cold_row_s_L=size / CPU * every_L,
            copy_row_s_L=size / link * every_L,
            gather_row_s_L=(EXPERT_SWAP_S + MOVED_BYTES * size / GPU) * every_L,
            rest_s=REST_S * num_layers / 48,
            copy_s=COPY_S,
        ),
        options=CacheOptions(),
        units="experts",
    )


def reports(routing: Routing) -> Iterator[tuple[str, dict[str, float]]]:
    """For each share and link, milliseconds a token by policy."""
    for share, link in product(SHARES, LINKS):
        report = compare(case_of(routing, share, link))
        times = {r.name: r.ms for r in (*report.policies, report.hindsight)}
        times |= {
            "bound": report.bound_ms,
            "static hits": report.of["static"].hit_rate,
            "hits": report.of["ours"].hit_rate,
            "copied": report.of["ours"].copied,
            "most hits": report.belady_hit_rate,
        }
        yield f"{share:.0%} in slots, link {link / 1e9:.0f} GB/s", times


def tune(routings: Sequence[Routing]) -> Iterator[tuple[str, dict[str, float]]]:
    """For each of a grid of options (margin, burst weight, start gain, decay, stay), the mean and
    the largest time over that of `static`, and the largest over that of the best of RIVALS."""
    cases = [case_of(*given) for given in product(routings, SHARES, LINKS)]
    rivals = [{name: case.seconds(POLICIES[name](case)) for name in RIVALS} for case in cases]
    grid = product((0.03, 0.06, 0.09), (0.0, 0.2), (0.005, 0.03), (0.985, 0.99), (50.0, 100.0))
    for margin, burst_weight, start_gain, decay, stay in grid:
        options = CacheOptions(
            margin=margin, burst_weight=burst_weight, start_gain=start_gain, decay=decay, stay=stay
        )
        own = [case.seconds(ours(replace(case, options=options))) for case in cases]
        of_static = [s / of["static"] for s, of in zip(own, rivals, strict=True)]
        of_best = [s / min(of.values()) for s, of in zip(own, rivals, strict=True)]
        name = ",".join(f"{value:g}" for value in (margin, burst_weight, start_gain, decay, stay))
        yield (
            name,
            {
                "mean of static": float(np.mean(of_static)),
                "most of static": max(of_static),
                "most of best": max(of_best),
            },
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("profiles", nargs="*", type=Path)
    parser.add_argument("--random", action="store_true", help="replay random routings")
    parser.add_argument("--tune", action="store_true", help="try options on other random routings")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    routings = [recorded(arguments.profiles[0], text) for text in arguments.profiles[1:]]
    routings += judged() if arguments.random else []
    parts = [(routing.name, reports(routing)) for routing in routings]
    parts += [("tuning", tune(of_tuning()))] if arguments.tune else []
    result = result_of("expert_cache")
    path = arguments.output or RESULTS / f"expert-cache-{slug(processor())}.json"
    if path.exists():  # of other routings
        result = json.loads(path.read_text()) | result
    for name, found in parts:
        result[name] = of = {}
        for case, times in found:
            of[case] = times
            shown = ", ".join(f"{key} {value:.3f}" for key, value in times.items())
            print(f"{name}, {case}: {shown}", flush=True)
        write_result(result, "expert-cache", arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
