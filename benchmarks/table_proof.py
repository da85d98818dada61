"""The tables of docs/gpu-proof.md, from benchmarks/results/gpu-proof.json."""

from collections import Counter
from collections.abc import Callable

from table_contents import markdown, result

NAME = "gpu-proof"
NOTHING = "nothing"
_GROUPS = {
    "memory": ("ld", "st", "ldmatrix", "stmatrix"),
    "between threads": ("shfl", "redux", "bar"),
    "floating point": (
        "abs",
        "div",
        "ex2",
        "fma",
        "max",
        "min",
        "neg",
        "rsqrt",
        "sub",
        "add",
        "mul",
    ),
    "conversions": ("cvt",),
    "comparisons and choices": ("setp", "selp"),
    "branches": ("bra", "ret"),
}


def group_of(opcode: str) -> str:
    """The group of an opcode; arithmetic counts under the type of its operands."""
    name, *rest = opcode.split(".")
    if name in _GROUPS["floating point"]:
        return "floating point" if rest[-1].startswith("f") else "integers and bits"
    return next((group for group, names in _GROUPS.items() if name in names), "integers and bits")


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


def instructions() -> str:
    found = result(NAME)["instructions"]
    total: dict[str, list[int]] = {}
    kinds: dict[str, set[str]] = {}
    for at, counts in enumerate(found.values()):
        for opcode, count in counts.items():
            group = group_of(opcode)
            total.setdefault(group, [0] * len(found))[at] += count
            kinds.setdefault(group, set()).add(opcode)
    rows = [
        [group, str(len(kinds[group])), *(f"{count / 1e6:,.1f}" for count in counts)]
        for group, counts in sorted(total.items())
    ]
    sums = [f"{sum(counts.values()) / 1e6:,.1f}" for counts in found.values()]
    rows.append(["all", str(sum(map(len, kinds.values()))), *sums])
    header = ["instructions", "forms", *(f"executed for {arch}, millions" for arch in found)]
    return markdown(header, rows)


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


def barriers() -> str:
    rows = []
    total: Counter[bool] = Counter()
    for kernel, counts in result(NAME)["barriers"].items():
        found = sum(count for name, count in counts.items() if name != NOTHING)
        total[True] += found
        total[False] += counts.get(NOTHING, 0)
        rows.append([f"`{kernel}`", str(sum(counts.values())), str(found)])
    rows.append(["all", str(sum(total.values())), str(total[True])])
    return markdown(["kernel", "barriers, removed one at a time", "of which found"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "gpu-proof-plans": plans,
    "gpu-proof-instructions": instructions,
    "gpu-proof-faults": faults,
    "gpu-proof-missed": missed,
    "gpu-proof-barriers": barriers,
}
