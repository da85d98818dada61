"""Decode and prompts beside llama.cpp by number of threads, as `hotsplit bench --compare` measures
them.

    python benchmarks/by_threads.py FOLDER --rival path/to/venv/bin/python [--models smollm2]

The models are SmolLM2-135M-Instruct and Gemma 3 270M (`make smollm2 gemma3`), each with its
matrices in q8_0, q4_0 and f16, and mixed as Q4_K_M. A first run converts them into FOLDER, in
llama.cpp's layout, which both sides run as it is; 2 GB. The numbers of threads are 1, 2, 4, 8 and
16, as far as this machine has processors. A run measures for five minutes, and adds to the result
of earlier ones, so that each may measure a part. A cell whose rounds differ much is left out and
said: llama.cpp's threads wait for each other, so a core that another program uses slows it several
times."""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from machine import add_to_result, path_of, result_of
from table_threads import THREADS, by_threads_of

from hotsplit.system.processors import processors

BUILD = Path(__file__).parent.parent / "build"
SOURCES = {
    "smollm2": BUILD / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf",
    "gemma3": BUILD / "gemma3" / "gemma-3-270m-q4_k_m.gguf",
}
TYPES = ("q8_0", "q4_0", "q4_k_m", "f16")
PROMPT, TOKENS, ROUNDS = 256, 48, 3
MOST_SPREAD = 1.3  # of the ratios of a cell's rounds
NAME = "by-threads"


def main() -> None:
    arguments = _arguments()
    counts = arguments.threads or [int(n) for n in THREADS if int(n) <= processors().usable]
    files = {
        (model, kind): made(arguments.folder, model, kind)
        for model in arguments.models.split(",")
        for kind in arguments.types.split(",")
    }
    if arguments.only_make:
        return
    began = time.monotonic()
    for (model, kind), file in files.items():
        for count in counts:
            if time.monotonic() - began > arguments.seconds:
                print(
                    f"left out, as time is over: {model} {kind}, {count} threads", file=sys.stderr
                )
                continue
            cell = measured(file, count, arguments.rival)
            if (factor := spread(cell)) > MOST_SPREAD:
                words = f"rounds differ by {factor:.1f} times, as if other programs used a core"
                print(f"{model} {kind}, {count} threads: {words}; left out", file=sys.stderr)
                continue
            result = result_of("by_threads", prompt=PROMPT, tokens=TOKENS, rounds=ROUNDS)
            result["models"] = {model: {kind: {str(count): cell}}}
            add_to_result(result, NAME, arguments.output)
            words = ", ".join(f"{name} {test['times']:.2f}x" for name, test in cell.items())
            print(f"{model} {kind}, {count} threads: {words}", file=sys.stderr, flush=True)
    if (path := path_of(NAME, arguments.output)).exists():
        print(by_threads_of(json.loads(path.read_text())))


def made(folder: Path, model: str, kind: str) -> Path:
    """The file of a model in a type, converted first if it is missing."""
    source, output = SOURCES[model], folder / f"{model}-{kind}.gguf"
    if kind == "q4_k_m" and kind in source.name:
        return source
    if not output.exists():
        command = ["convert", source, "-o", output, "--outtype", kind, "--layout", "stock"]
        hotsplit(*command, "--no-verify")
    return output


def measured(file: Path, threads: int, rival: str) -> dict[str, dict[str, object]]:
    """The tests of `bench`, by name: tokens per second of both sides, and ours over llama.cpp's."""
    lengths = ["-p", str(PROMPT), "-n", str(TOKENS), "-r", str(ROUNDS)]
    command = ["bench", file, *lengths, "-t", str(threads), "--compare", rival, "--json"]
    report = json.loads(hotsplit(*command))
    return {
        test["test"]: {
            "level": report["level"],
            "load_before": report["load_before"],
            "tokens_per_s": test["median_ts"],
            "llamacpp_tokens_per_s": test["llamacpp"]["median_ts"],
            "times": test["ratio"],
            "times_in_rounds": test["ratios"],
            "share_of_limit": test["share_of_limit"],
        }
        for test in report["tests"]
    }


def spread(cell: dict[str, dict[str, object]]) -> float:
    """The largest over the smallest ratio of a test's rounds."""
    return max(
        max(test["times_in_rounds"]) / min(test["times_in_rounds"]) for test in cell.values()
    )


def hotsplit(*words: object) -> str:
    command = [sys.executable, "-m", "hotsplit", *map(str, words)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of the converted models")
    parser.add_argument("--rival", required=True, help="Python that has llama-cpp-python")
    parser.add_argument("--models", default=",".join(SOURCES))
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--threads", type=int, nargs="*")
    parser.add_argument("--seconds", type=float, default=285.0, help="no cell begins later")
    parser.add_argument("--only-make", action="store_true", help="convert, and measure nothing")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
