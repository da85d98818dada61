"""Measures what the neuron cache costs: the same text with and without it, in turns.

    python benchmarks/neuron_cache.py MODEL PLAN --text NAME=FILE ... [--tokens 800] [--output FILE]

Both roles of the plan run on the CPU and read the same memory, so no swap can gain anything here:
only the cost of the cache is measured. Before the text, a step of the model is timed; the policy
decides by the plan's times, scaled to that step. These engines decode in turns, a few tokens at a
time:

    static       the plan's neurons stay, in the cache's layout of weights
    plan         the plan's neurons stay, in the layout without a cache: shows the layout's effect
    cache        the policy, with copies as fast as this machine makes them
    slow link    the policy, with a link so slow that copying the misses that the plan expects of a
                 step takes two steps
    every miss   the same link; every miss is copied, which should be slower

Texts are read from the file, so that all engines decode the same tokens. A ratio is a turn's
seconds divided by those of `static` in the same turn; median and quartiles are printed."""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.split_file import Split
from hotsplit.costs.budget import layer_bytes
from hotsplit.files.atomic import partial_file
from hotsplit.files.json_file import read_text
from hotsplit.options.neuron_cache import OFF, CacheCosts, CacheOptions
from hotsplit.runtime.neuron_cache.cycle import SWAP, Policy
from hotsplit.runtime.neuron_cache.policy import CachePolicy
from hotsplit.runtime.neuron_cache.residency import Residency
from hotsplit.runtime.neuron_cache.setup import CacheSetup

TURN = 8  # tokens
WARM_UP = 32
SLOW_STEPS = 2.0  # steps that the slow link takes to copy the expected misses of one step


class Never:
    """Swaps nothing."""

    def learn(self, bits_RLW: np.ndarray) -> None: ...

    def step(self, bits_RLW: np.ndarray) -> np.ndarray:
        return np.zeros(0, SWAP)


class EveryMiss(Never):
    """Copies every neuron that a step misses, in place of the least recently used ones, as far as
    there are slots that the step did not read."""

    def __init__(self, resident_LN: Sequence[np.ndarray], num_neurons: int) -> None:
        self.residency = Residency(resident_LN, num_neurons)
        self.used_LF = np.zeros((len(resident_LN), num_neurons), np.int64)
        self.pending, self.time = np.zeros(0, SWAP), 0

    def step(self, bits_RLW: np.ndarray) -> np.ndarray:
        self.residency.swap(self.pending)
        self.time += 1
        bits = np.unpackbits(bits_RLW.view(np.uint8), axis=-1, bitorder="little").any(axis=0)
        is_read_LF = bits[:, : self.used_LF.shape[1]]
        self.used_LF[is_read_LF] = self.time
        found = []
        for layer in np.flatnonzero(self.residency.num_slots_L):
            missed = np.flatnonzero(is_read_LF[layer] & (self.residency.slot_LF[layer] < 0))
            ids = self.residency.id_N(layer)
            slots = np.argsort(self.used_LF[layer, ids], kind="stable")
            slots = slots[self.used_LF[layer, ids[slots]] < self.time][: len(missed)]
            missed = missed[: len(slots)]
            found += [(layer, *row) for row in zip(slots, missed, ids[slots], strict=True)]
        self.pending = np.array(found, SWAP)
        return self.pending


def load(model: Path, plan: Path, setup: CacheSetup | None) -> Engine:
    return Engine.load(model, plan, device="cpu", neuron_cache=setup or OFF)


def setup_of(policy: Any, copy_bytes_per_s: float | None = None) -> CacheSetup:
    return CacheSetup(policy_of=policy, most_rows=1 << 16, copy_bytes_per_s=copy_bytes_per_s)


def step_seconds(model: Path, plan: Path, ids: list[int]) -> float:
    """Median seconds of a token without swaps."""
    with load(model, plan, setup_of(lambda *_: Never())) as engine, engine.sequence() as text:
        seconds = []
        for token in ids:
            began = time.perf_counter()
            text.extend([token])
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def scaled_to(plan: Split, step_s: float) -> CacheCosts:
    """The plan's times, scaled so that by them a step takes `step_s`."""
    assert plan.cache is not None
    costs, read_LF = plan.cache.costs, plan.cache.frequency_LF
    hot_L = np.array([read_LF[layer, ids].sum() for layer, ids in enumerate(plan.hot)])
    cold_L = read_LF.sum(axis=1) - hot_L
    sides = costs.hot_s_L + costs.hot_row_s_L * hot_L, costs.cold_s_L + costs.cold_row_s_L * cold_L
    factor = step_s / (np.maximum(*sides).sum() + costs.rest_s)
    names = ("hot_s_L", "hot_row_s_L", "cold_s_L", "cold_row_s_L", "gather_row_s_L", "rest_s")
    names += ("copy_row_s_L", "copy_s")
    return replace(costs, **{name: factor * getattr(costs, name) for name in names})


def setups(model: Path, plan: Path, step_s: float) -> dict[str, CacheSetup | None]:
    split = Split.load(plan)
    assert split.cache is not None, "a plan with a neuron cache is needed"
    cache, costs = split.cache, scaled_to(split, step_s)
    file = ModelFile.load(model)
    sizes_L = np.array([layer_bytes(file, i).neuron for i in range(file.spec.num_layers)])
    missed_L = [np.delete(cache.frequency[i], ids).sum() for i, ids in enumerate(split.hot)]
    slow = float(missed_L @ sizes_L) / (SLOW_STEPS * step_s)  # bytes per second
    slow_costs = replace(costs, copy_row_s_L=sizes_L / slow * (costs.copy_row_s_L > 0))

    def policy(times: CacheCosts) -> Any:
        def of(resident_LN: Sequence[np.ndarray], num_neurons: int) -> Policy:
            options = replace(CacheOptions(), most_rows=cache.most_rows)
            return CachePolicy.of(resident_LN, cache.frequency_LF, times, options)

        return of

    return {
        "static": setup_of(lambda *_: Never()),
        "plan": None,
        "cache": setup_of(policy(costs)),
        "slow link": setup_of(policy(slow_costs), slow),
        "every miss": setup_of(EveryMiss, slow),
    }


def decoded(engines: dict[str, Engine], ids: list[int], context: int) -> dict[str, list[float]]:
    """Seconds of each turn of each engine, without the first WARM_UP tokens; the order of the
    engines changes from turn to turn."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    texts = {name: engine.sequence() for name, engine in engines.items()}
    names = list(engines)
    for turn, start in enumerate(range(0, len(ids), TURN)):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            text = texts[name]
            if text.length + TURN > context:
                text.rollback(0)
            began = time.perf_counter()
            for token in ids[start : start + TURN]:
                text.extend([token])
            seconds[name].append(time.perf_counter() - began)
    for text in texts.values():
        text.close()
    return {name: values[WARM_UP // TURN :] for name, values in seconds.items()}


def measured(model: Path, plan: Path, ids: list[int], step_s: float) -> dict[str, Any]:
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(load(model, plan, setup))
            for name, setup in setups(model, plan, step_s).items()
        }
        context = engines["static"].context_length
        seconds = decoded(engines, ids, context)
        found: dict[str, Any] = {}
        for name, engine in engines.items():
            ratios = [a / b for a, b in zip(seconds[name], seconds["static"], strict=True)]
            cache = engine.neuron_cache
            found[name] = {
                "ms": 1e3 * statistics.median(seconds[name]) / TURN,
                "of_static": statistics.median(ratios),
                "quartiles": statistics.quantiles(ratios, n=4),
                "swaps": 0 if cache is None else cache.num_swaps,
                "copied_bytes": 0 if cache is None else cache.num_bytes,
            }
            if cache is not None and isinstance(cache.policy, CachePolicy):
                found[name]["line"] = cache.line
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--text", action="append", required=True, metavar="NAME=FILE")
    parser.add_argument("--tokens", type=int, default=800)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for item in options.text:
        name, _, path = item.partition("=")
        with Engine.load(options.model, options.plan, device="cpu") as engine:
            ids = engine.codec.encode(read_text(Path(path), "text"))[: options.tokens]
        step_s = step_seconds(options.model, options.plan, ids[:64])
        results[name] = measured(options.model, options.plan, ids, step_s)
        for kind, found in results[name].items():
            print(f"{name:10} {kind:10} {found['ms']:8.3f} ms  {found['of_static']:.3f} of static"
                  f" ({found['quartiles'][0]:.3f} to {found['quartiles'][2]:.3f}),"
                  f" {found['swaps']} swaps; {found.get('line', '')}", flush=True)  # fmt: skip
    content = {
        "benchmark": "neuron_cache", "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(), "model": options.model.name, "tokens": options.tokens,
        "results": results,
    }  # fmt: skip
    if options.output is not None:
        with partial_file(options.output) as partial:
            partial.write_text(json.dumps(content, indent=1) + "\n")
    else:
        print(json.dumps(content))


if __name__ == "__main__":
    main()
