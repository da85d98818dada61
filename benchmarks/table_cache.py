"""The table of the neuron cache's replays."""

from statistics import median
from typing import Any

from table_contents import markdown, percent, result

FILES = ("cache-replay-tiny-relu", "cache-replay-smollm2")
NAMES = {
    "tiny-relu": "bundled model, predicted",
    "smollm2": "SmolLM2, half of the neurons silenced, exact",
}
OWN = "code"  # the text on the subject of the profile


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
    for file in FILES:
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


TABLES = {"cache-replay": cache_replay}
