"""The tables of the caches: replays of the neuron cache, and what the types of the KV cache lose
and how fast they are."""

from math import exp
from statistics import median
from typing import Any

from table_contents import ZEN_5, markdown, percent, result, signed, times

REPLAYS = ("cache-replay-tiny-relu", "cache-replay-smollm2")
NAMES = {
    "tiny-relu": "bundled model, predicted",
    "smollm2": "SmolLM2, half of the neurons silenced, exact",
}
OWN = "code"  # the text on the subject of the profile
TYPES = f"cache-types-{ZEN_5}"
DEPTHS = ("512", "4096", "8000")


def cache_replay() -> str:
    """A row for each model and link, with ranges and medians over texts, budgets and CPUs."""
    header = [
        "model and link",
        "time on code, relative to the plan",
        "on English, Chinese, JSON",
        "against the best of the four others, at worst",
        "share of the way to the bound, median",
        "what hindsight would reach",
    ]
    rows = []
    for file in REPLAYS:
        results = result(file)["results"]
        for link in dict.fromkeys(r["link"] for r in results):
            mine = [r for r in results if r["link"] == link]
            own = [r for r in mine if r["text"] == OWN]
            other = [r for r in mine if r["text"] != OWN]
            rows.append(
                [
                    f"{NAMES[mine[0]['model']]}; {link}",
                    span(own, "of_static"),
                    span(other, "of_static"),
                    f"{max(r['of_best_rival'] for r in mine):.3f}",
                    percent(median(r["share_of_bound"] for r in other)),
                    percent(median(r["share_of_bound_hindsight"] for r in other)),
                ]
            )
    return markdown(header, rows)


def span(results: list[dict[str, Any]], name: str) -> str:
    values = [r[name] for r in results]
    return f"{min(values):.3f} to {max(values):.3f}"


def cache_types() -> str:
    rows = []
    for name, found in result(TYPES)["loss"]["types"].items():
        rows.append(
            [
                f"`{name}`",
                f"{found['bytes_of_f16']:.2f}",
                f"{found['kl']:.2g} ± {found['kl_error']:.1g}",
                signed(exp(found["loss_difference"]) - 1, 2),
                percent(found["same_top_token"], 1),
            ]
        )
    return markdown(
        ["keys, values", "bytes relative to f16", "KL", "perplexity", "same top token"], rows
    )


def cache_speed() -> str:
    """A row for each type: decode speed at each depth over llama.cpp's in the same run."""
    rows = [
        [f"`{name}`", *(times(found[depth]["times_rival"]) for depth in DEPTHS)]
        for name, found in result(TYPES)["speed"]["types"].items()
    ]
    return markdown(["keys, values", *(f"after {int(depth):,} tokens" for depth in DEPTHS)], rows)


TABLES = {"cache-replay": cache_replay, "cache-types": cache_types, "cache-speed": cache_speed}
