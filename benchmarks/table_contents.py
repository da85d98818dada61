"""Most tables of the documents, each a function of the files in benchmarks/results, and the
helpers of the other table_*.py.

`TABLES` maps a name, as the documents write it, to the function that makes the Markdown. Ratios are
llama.cpp's seconds over ours unless the header says otherwise: above 1 ours is faster."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
TYPES = ("q8_0", "q4_0", "f16")
# Processors in the names of result files. A cloud calls both "AMD EPYC"; the family tells them
# apart (25: Zen 4, 26: Zen 5).
ZEN_4, ZEN_5 = "amd-epyc-family-25", "amd-epyc-family-26"
ZEN_4_EARLIER = "amd-epyc"  # in names of before the family was part of them


def path_of(name: str, folder: Path = RESULTS) -> Path:
    """The file of a result; a Zen 4's is the earlier one until the benchmark has run again."""
    path = folder / f"{name}.json"
    return path if path.exists() else folder / f"{name.replace(ZEN_4, ZEN_4_EARLIER)}.json"


@cache
def result(name: str) -> Any:
    return json.loads(path_of(name).read_text())


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; every row has a cell for each column."""
    assert all(len(row) == len(header) for row in rows), (header, rows)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def times(ratio: float) -> str:
    return f"{ratio:.2f}x"


def percent(share: float, digits: int = 0) -> str:
    return f"{share * 100:.{digits}f} %"


def signed(share: float, digits: int = 1) -> str:
    return f"{share * 100:+.{digits}f} %"


# ---- what sparsity costs ------------------------------------------------------------------------


def predictors() -> str:
    found = result("predictors-intel-xeon-processor-2.50ghz")["results"]
    rows = []
    for name, row in found.items():
        predictor, lost = name.rsplit(", lost norm ", 1)
        rows.append(
            [
                percent(float(lost)),
                predictor,
                f"{row['num_bytes'] / 1e3:.0f} kB",
                percent(row["predicted_density"], 1),
                percent(row["precision"]),
                f"{row['bytes_per_token'] / 1e3:.0f} kB",
            ]
        )
    header = [
        "lost norm",
        "predictor",
        "bytes a layer",
        "named",
        "precision",
        "feed-forward bytes a token",
    ]
    return markdown(header, sorted(rows, key=lambda row: row[0]))


def kv_selection() -> str:
    names = {
        "oracle": "the best positions, known in advance",
        "window": "sinks and a window",
        "infllm": "InfLLM's units",
        "mean 32": "mean of 32",
        "minmax 32": "bounds of 32 (Quest)",
        "codes 1": "every key by codes of 1 bit",
        "codes 2": "every key by codes of 2 bits",
        "64 > codes 2": "bounds of 64, then codes of 2 bits",
        "64 > rest": "bounds of 64, then codes of the residuals (the runtime's rule)",
        "32 > rest": "the same with 32",
    }
    recalls = [
        result(name)["recall"]
        for name in (f"kv-selection-{ZEN_4}", f"kv-selection-planted-{ZEN_5}")
    ]
    rows = [
        [
            words,
            *(
                f"{recall[name][s]['mean']:.3f}" if s in recall[name] else "-"
                for recall in recalls
                for s in ("0.02", "0.05", "0.1")
            ),
        ]
        for name, words in names.items()
    ]
    header = ["share of the cache's bytes read", "2 %", "5 %", "10 %"]
    return markdown([*header, *(f"planted, {share}" for share in header[1:])], rows)


# Measured as well, and no reader needs them beside 5 % and the defaults.
OTHER_WAYS = {
    "the defaults, 4 candidates",
    "two stages, 10 %",
    "means of blocks, 10 %",
    "bounds of blocks, 10 %",
    "InfLLM's units, 10 %",
}


def kv_tasks() -> str:
    ways = {
        **result(f"kv-tasks-{ZEN_5}")["ways"],
        **{
            name: way
            for name, way in result(f"kv-tasks-in-full-{ZEN_5}")["ways"].items()
            if "after_full" not in way
        },
    }

    def told(found: dict[str, Any] | None) -> str:
        if found is None:
            return "-"
        low, high = (signed(end - 1) for end in found["interval"])
        return f"{signed(found['of_full'] - 1)} ({low} to {high})"

    def share(way: dict[str, Any], name: str) -> str:
        return percent(way[name], 1) if way.get(name) is not None else "-"

    def row(name: str, way: dict[str, Any]) -> list[str]:
        found = way.get("after_full") or way["under_rule"]
        return [
            name,
            share(way, "share_of_keys"),
            share(way, "share_of_bytes"),
            share(way, "share_of_tables"),
            str(found["facts"]),
            f"{found['probability']:.3f}",
            told(way.get("after_full")),
            told(way.get("under_rule")),
        ]

    rows = [row(name, way) for name, way in ways.items() if name not in OTHER_WAYS]
    header = [
        "read",
        "keys and values",
        "with tables",
        "size of tables",
        "facts",
        "probability",
        "after full attention",
        "under the rule",
    ]
    return markdown(header, rows)


def long_context() -> str:
    rows = []
    for processor, name in (("Zen 5", ZEN_5), ("Zen 4", ZEN_4)):
        found = result(f"long-context-{name}")
        for depth, ways in found["depths"].items():
            cells = [
                f"{1e3 * ways[way]['ours_s']:.0f} ms, {times(ways[way]['times_rival'])} llama.cpp"
                for way in ("all", "chosen")
            ]
            rows.append([processor, f"{int(depth):,} tokens", *cells])
        growth = found["growth"]
        every = f"{times(growth['all'])} (llama.cpp {times(growth['llamacpp'])})"
        rows.append([processor, "growth", every, times(growth["chosen"])])
    return markdown(["processor", "after", "all keys", "`--kv-offload`"], rows)


# ---- the offline stages -------------------------------------------------------------------------


def placement() -> str:
    """How much longer other placements take, by shape and machine, over budgets for 10, 25, 50,
    75 and 90 % of the weights."""
    cases: dict[str, list[Any]] = {}
    for row in result("placement")["rows"]:
        cases.setdefault(f"{row['shape']}, {row['machine']}", []).append(row)
    rows = []
    for case, of in cases.items():
        longer = [
            [row["seconds"][other] / row["seconds"]["ours"] - 1 for row in of]
            for other in ("random", "hottest", "powerinfer")
        ]
        speeds = " ".join(f"{1 / row['seconds']['ours']:.1f}" for row in of)
        ranges = [f"{percent(max(0, min(each)), 1)} to {percent(max(each), 1)}" for each in longer]
        gap, seconds = (max(row[name] for row in of) for name in ("gap", "solve_cpu_s"))
        rows.append([case, speeds, *ranges, percent(gap, 4), f"{seconds:.1f} s"])
    others = ("random", "hottest first", "PowerInfer")
    return markdown(["", "our tokens/s", *others, "largest gap", "longest processor time"], rows)


def predicted_time() -> str:
    name = "predicted-time-f16-intelr-xeonr-processor-@-2.50ghz"
    rows = [
        [
            row["size"],
            f"{row['predicted_s'] * 1e3:.1f} ms",
            f"{row['measured_s'] * 1e3:.1f} ms",
            signed(row["error"]),
            f"{row['median_s'] * 1e3:.1f} ms",
        ]
        for row in result(name)["rows"]
    ]
    return markdown(["shape", "predicted", "best measured", "error", "median measured"], rows)


def convert() -> str:
    rows = []
    for kind, found in result("convert-intel-xeon-processor-2.50ghz")["types"].items():
        ours, rival = found["ours"], found["rival"]
        rows.append(
            [
                kind,
                found["rival_outtype"],
                f"{found['rival_over_ours']:.1f}x",
                f"{ours['max_rss_mib']:.0f} MiB",
                f"{rival['max_rss_mib']:.0f} MiB",
            ]
        )
    header = ["ours", "llama.cpp's converter", "times as fast", "our peak memory", "theirs"]
    return markdown(header, rows)


def profile_overhead() -> str:
    names = {
        "bundled model in f16, 1 thread": f"profile-overhead-{ZEN_5}",
        "SmolLM2 in q8_0, 2 threads": f"profile-overhead-smollm2-{ZEN_5}",
        "1.1 B in q8_0, 2 threads": f"profile-overhead-1.1b-{ZEN_5}",
    }
    rows = [
        [words, str(found["rounds"]), signed(found["overhead_processor"])]
        for words, found in ((words, result(name)) for words, name in names.items())
    ]
    return markdown(["model", "rounds", "more processor time"], rows)


def samplers() -> str:
    found = result(f"samplers-{ZEN_4}")
    sizes = [size for size in ("32000", "49152", "151936", "262144") if size in found]
    rows = [
        [
            words,
            *(
                f"{found[size]['us'][name]:.0f} ({found[size]['llama_cpp_us'][name]:.0f})"
                for size in sizes
            ),
        ]
        for name, words in (("default chain", "the default chain"), ("greedy", "greedy"))
    ]
    header = ["microseconds a token, ours (llama.cpp's), by vocabulary"]
    return markdown([*header, *(f"{int(size):,}" for size in sizes)], rows)


def fair_share() -> str:
    processors = {"Zen 5": ZEN_5, "Zen 4": ZEN_4}
    found = [result(f"fair-share-{name}")["median_ratios"] for name in processors.values()]
    names = {"eval": "`eval`", "prefill": "a prompt", "first_token": "the first token"}
    rows = [[words, *(times(each[name]) for each in found)] for name, words in names.items()]
    return markdown(
        ["times as long alongside two processes that keep both cores busy", *processors], rows
    )


TABLES: dict[str, Callable[[], str]] = {
    "predictors": predictors,
    "kv-selection": kv_selection,
    "kv-tasks": kv_tasks,
    "long-context": long_context,
    "placement": placement,
    "predicted-time": predicted_time,
    "convert": convert,
    "profile-overhead": profile_overhead,
    "samplers": samplers,
    "fair-share": fair_share,
}
