"""The tables of docs/gpu-proof.md, from benchmarks/results/gpu-proof.json."""

from collections import Counter
from collections.abc import Callable

from table_contents import markdown, result

NAME = "gpu-proof"
NOTHING = "nothing"
_WIDEST = 150  # characters of a cell, without the space before its last form
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
    found = result(NAME)
    rows = [[name, str(count)] for name, count in found["plans"].items()]
    rows.append(["all, each counted once", str(found["variants"])])
    return markdown(["plan", "variants of launches"], rows)


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


def opcodes() -> str:
    """Every executed form, grouped by the opcode's first word; long rows are split."""
    found = {name for counts in result(NAME)["instructions"].values() for name in counts}
    words: dict[str, list[str]] = {}
    for opcode in sorted(found):
        word, _, rest = opcode.partition(".")
        words.setdefault(word, []).append(f"`.{rest}`" if rest else "plain")
    rows = []
    for word, forms in words.items():
        line = ""
        for form in forms:
            if len(line) + len(form) > _WIDEST:
                rows.append([f"`{word}`", line])
                line = ""
            line = f"{line} {form}".strip()
        rows.append([f"`{word}`", line])
    return markdown(["instruction", "forms"], rows)


def faults() -> str:
    rows = [
        [each["fault"], f"`{each['place']}`", _how(each["found_by"])]
        for each in result(NAME)["faults"]
        if each["found_by"] != NOTHING
    ]
    return markdown(["fault", "where", "found by"], rows)


def _how(found_by: str) -> str:
    return "wrong values" if found_by == "values" else f"`{found_by}`"


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
    "gpu-proof-opcodes": opcodes,
    "gpu-proof-faults": faults,
    "gpu-proof-missed": missed,
    "gpu-proof-barriers": barriers,
}
