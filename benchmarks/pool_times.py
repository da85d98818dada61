"""Times an empty job and one of 100 KB, by threads and by the pause before it, in three thread
pools.

    python benchmarks/pool_times.py [--rival PYTHON] [--threads 1,2,4,8,16] [--output FILE]

The pools are ours (runtime/kernels/cpu/thread_pool.cpp), OpenMP's, both compiled into one program
by g++, and llama.cpp's, through a Python that has llama_cpp. A decode step of ours has about four
jobs a layer; llama.cpp starts its pool once a token, and then runs a graph of many nodes, so the
time of a node within a graph stands beside that of a graph of one node. A minute; the machine
should be idle."""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from machine import result_of, write_result
from table_threads import IN_A_GRAPH, PAUSES, THREADS, pool_times_of

from hotsplit.system.processors import environment_as_found, processors

HERE = Path(__file__).parent / "pool"
KERNELS = Path(__file__).parent.parent / "runtime" / "kernels" / "cpu"
PAUSES_US = dict(zip(PAUSES, (0, 50, 300, -3000), strict=True))  # negative: of a sleep
SIZES = {"empty": 0, "100 KB": 100 << 10}


def main() -> None:
    arguments = _arguments()
    threads = [int(count) for count in arguments.threads.split(",")]
    result = result_of("pool_times", processors=processors().usable, unit="us: median, 90 %")
    result["pools"] = {}
    with tempfile.TemporaryDirectory() as folder:
        program = built(Path(folder))
        commands = {pool: [program, pool] for pool in ("hotsplit", "openmp")}
        if arguments.rival:
            commands["llama.cpp"] = [arguments.rival, str(HERE / "ggml_jobs.py")]
        for pool, command in commands.items():
            result["pools"][pool] = {
                size: {count: measured(pool, command, count, num_bytes) for count in threads}
                for size, num_bytes in SIZES.items()
            }
    print(pool_times_of(result))
    print(f"wrote {write_result(result, 'pool-times', arguments.output)}")


def built(folder: Path) -> str:
    """Compiles the program of our pool and OpenMP's."""
    program = folder / "jobs"
    subprocess.run(
        [
            "g++",
            "-O2",
            "-std=c++17",
            "-fopenmp",
            "-pthread",
            f"-I{KERNELS}",
            HERE / "jobs.cpp",
            KERNELS / "thread_pool.cpp",
            "-o",
            program,
        ],
        check=True,
    )
    return str(program)


def measured(pool: str, command: list[str], threads: int, num_bytes: int) -> dict[str, list[float]]:
    """Microseconds by pause, the median and the 90th percentile."""
    words = [*command, str(threads), str(num_bytes)]
    names = list(PAUSES_US)
    if pool == "llama.cpp":
        names.append(IN_A_GRAPH)
    else:
        words.append(str(processors().usable))
    done = subprocess.run(
        [*words, *map(str, PAUSES_US.values())],
        check=True,
        capture_output=True,
        text=True,
        env=environment_as_found(),
    )
    lines = [[int(ns) / 1000 for ns in line.split()] for line in done.stdout.splitlines()]
    return dict(zip(names, lines, strict=True))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rival", help="Python that has llama-cpp-python")
    parser.add_argument("--threads", default=",".join(THREADS))
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
