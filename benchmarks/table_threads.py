"""The tables of thread pools and of speed by number of threads."""

from typing import Any

from table_contents import RESULTS, markdown, percent, result, times

PAUSES = ("0 us", "50 us", "300 us", "after a sleep")
IN_A_GRAPH = "node in a graph"
THREADS = ("1", "2", "4", "8", "16")


def pool_times_of(found: Any) -> str:
    """Median microseconds of a job, of `pool_times.py`'s result."""
    rows = []
    pools = found["pools"].items()
    for size in next(iter(found["pools"].values())):
        for pool, by_size in pools:
            for count, cells in by_size[size].items():
                medians = [f"{cells[pause][0]:.1f}" for pause in PAUSES]
                graph = f"{cells[IN_A_GRAPH][0]:.1f}" if IN_A_GRAPH in cells else "-"
                rows.append([f"{size}, {pool}", count, *medians, graph])
    return markdown(["job, pool", "threads", *PAUSES, IN_A_GRAPH], rows)


def by_threads_of(*found: Any) -> str:
    """Times llama.cpp, of `by_threads.py`'s results: decode with its share of the byte limit,
    prompt."""
    cases = [
        (one, f"{one['machine']['processor']}: {model} {kind}", by_count)
        for one in found
        for model, kinds in one["models"].items()
        for kind, by_count in kinds.items()
    ]
    counts = [count for count in THREADS if any(by_count.get(count) for *_, by_count in cases)]
    rows = [
        [label, *(_cell(one, by_count.get(count)) for count in counts)]
        for one, label, by_count in cases
    ]
    header = ["decode (of its limit), prompt", *(f"{count} threads" for count in counts)]
    return markdown(header, rows)


def _cell(one: Any, tests: Any) -> str:
    if tests is None:
        return "-"
    prompt, decode = tests[f"pp{one['prompt']}"], tests[f"tg{one['tokens']}"]
    limit = percent(decode["share_of_limit"])
    return f"{times(decode['times'])} ({limit}), {times(prompt['times'])}"


def by_threads() -> str:
    return by_threads_of(*(result(path.stem) for path in sorted(RESULTS.glob("by-threads-*.json"))))


TABLES = {"by-threads": by_threads}
