"""The tables of docs/gpu-proof.md, from benchmarks/results/gpu-proof.json."""

from collections import Counter
from collections.abc import Callable

from table_contents import markdown, result

NAME = "gpu-proof"
NOTHING = "nothing"


def plans() -> str:
    """One row a model: its types, its modes, and the fewest and most variants of one plan."""
    found = result(NAME)
    by_model: dict[str, list[tuple[str, str, int]]] = {}
    for name, count in found["plans"].items():
        model, weight_type, mode = name.split(", ")
        by_model.setdefault(model, []).append((weight_type, mode, count))
    rows = []
    for model, cases in by_model.items():
        types, modes, counts = zip(*cases, strict=True)
        least, most = min(counts), max(counts)
        rows.append(
            [model, ", ".join(dict.fromkeys(types)), ", ".join(dict.fromkeys(modes))]
            + [str(len(cases)), str(least) if least == most else f"{least} to {most}"]
        )
    rows.append(["all, each counted once", "", "", "", str(found["variants"])])
    return markdown(["model", "types", "modes", "plans", "variants of launches in each"], rows)


def faults() -> str:
    """How many faults of each place were found, and by what."""
    found: dict[str, Counter[str]] = {}
    for each in result(NAME)["faults"]:
        if each["found_by"] != NOTHING:
            found.setdefault(each["place"], Counter())[each["found_by"]] += 1
    rows = [
        [f"`{place}`", str(counts.total()), str(counts["values"]), _errors(counts)]
        for place, counts in found.items()
    ]
    every = sum(found.values(), Counter())
    rows.append(["all", str(every.total()), str(every["values"]), _errors(every)])
    return markdown(["where", "faults found", "by wrong values", "by an error"], rows)


def _errors(counts: Counter[str]) -> str:
    names = sorted(name for name in counts if name != "values")
    return ", ".join(f"{counts[name]} `{name}`" for name in names) or "-"


def missed() -> str:
    rows = [
        [each["fault"], f"`{each['place']}`", each["reason"]]
        for each in result(NAME)["faults"]
        if each["found_by"] == NOTHING
    ]
    return markdown(["fault", "where", "why nothing finds it"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "gpu-proof-plans": plans,
    "gpu-proof-faults": faults,
    "gpu-proof-missed": missed,
}
