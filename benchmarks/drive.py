"""Benchmarks a mixture of experts that is larger than main memory: experts read from the drive
(--ram), the mapped file with the kernel's page faults, and llama-bench, in turns.

    python benchmarks/drive.py MODEL [--rival path/to/llama-bench[,OPTION...]] [--shares 50,75]

A missing MODEL named SHAPE-TYPE.gguf, of a shape of random_model.py, is made first. Each run is a
process of its own in a control group, whose limit is that share of the file's bytes; before it, the
file leaves the page cache. Without the right to make a group (root, or a delegated one), ours gets
the same limit by --ram alone, the others none, and a line says so. Ours: a prompt of 512 tokens,
then 64 tokens one by one, random ones, as llama-bench has them. `peak_bytes` is the most that the
group held by the kernel's count, page cache included; a run that the kernel ends has an `error`."""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llama_bench import seconds_of
from machine import result_of, write_result
from random_model import make_mixture

from hotsplit.system.sizes import format_bytes

GROUPS = Path("/sys/fs/cgroup")
DECODED = 64


class Group:
    """A control group with a limit on memory, of either version."""

    def __init__(self, limit: int) -> None:
        is_first = (GROUPS / "memory").is_dir()
        parent = GROUPS / "memory" if is_first else GROUPS
        self._path = parent / f"hotsplit-drive-{os.getpid()}"
        self._path.mkdir()
        name = "memory.limit_in_bytes" if is_first else "memory.max"
        self._peak = self._path / ("memory.max_usage_in_bytes" if is_first else "memory.peak")
        try:
            (self._path / name).write_text(str(limit))
        except OSError:
            self._path.rmdir()
            raise

    def enter(self) -> None:
        """Called in the child before it runs the program."""
        (self._path / "cgroup.procs").write_text(str(os.getpid()))

    def peak(self) -> int:
        return int(self._peak.read_text()) if self._peak.exists() else 0

    def remove(self) -> None:
        self._path.rmdir()


@contextmanager
def group_of(limit: int) -> Iterator[Group | None]:
    try:
        group = Group(limit)
    except OSError as error:
        print(f"no control group ({error}): only --ram limits memory, and only ours")
        yield None
        return
    try:
        yield group
    finally:
        group.remove()


def drop(path: Path) -> None:
    """Drops the file's pages, which would be counted in the group that has read them."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def ours(model: Path, way: str, limit: int, prompt: int, threads: int) -> None:
    """Prints seconds of the prompt and of each token. `way`: "drive", or "mapped" as without
    slots."""
    import torch

    from hotsplit import Engine
    from hotsplit.runtime import loading
    from hotsplit.runtime.kernels.cpu import library

    torch.set_num_threads(1)
    library.set_threads(threads)
    if way == "mapped":
        loading.expert_slots = lambda *_, **__: None
    generator = random.Random(0)
    ram = limit if way == "drive" else None
    with Engine.load(
        model, mode="dense", device="cpu", context_length=prompt + DECODED, ram_bytes=ram
    ) as engine:
        size = engine.model.spec.vocab_size
        ids = [generator.randrange(3, size) for _ in range(prompt + DECODED)]
        text, clock = engine.sequence(), time.perf_counter
        began = clock()
        text.extend(ids[:prompt])
        prompt_s, times = clock() - began, []
        for token in ids[prompt:]:
            began = clock()
            text.extend([token])
            times.append(clock() - began)
        facts = {} if engine.drive is None else engine.drive.facts
    print(json.dumps({"prompt_s": prompt_s, "token_s": sum(times) / len(times), "drive": facts}))


def run(arguments: argparse.Namespace, way: str, limit: int, rival: list[str]) -> dict[str, Any]:
    """Seconds of the prompt and of a token, and the group's peak; or an error."""
    drop(arguments.model)
    with group_of(limit) as group:
        enter = None if group is None else group.enter
        try:
            found = _seconds(arguments, way, limit, rival, enter)
        except subprocess.CalledProcessError as error:
            return {"error": f"ended with {error.returncode}"}
        return {**found, "peak_bytes": 0 if group is None else group.peak()}


def _seconds(
    arguments: argparse.Namespace,
    way: str,
    limit: int,
    rival: list[str],
    enter: Callable[[], None] | None,
) -> dict[str, Any]:
    if rival:
        given = rival, arguments.model, arguments.threads
        options = {"prompts": [arguments.prompt], "generated": DECODED, "repetitions": 1}
        seconds = seconds_of(*given, **options, before=enter)
        return {"prompt_s": seconds[arguments.prompt][0], "token_s": seconds[0][0] / DECODED}
    asked = json.dumps((way, limit, arguments.prompt, arguments.threads))
    command = [sys.executable, __file__, str(arguments.model), "--worker", asked]
    done = subprocess.run(command, check=True, text=True, stdout=-1, preexec_fn=enter)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def median_of(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """The medians of the runs that were not ended, and all of them."""
    ended = [each for each in samples if "error" not in each]
    names = ("token_s", "prompt_s") if ended else ()
    return {n: statistics.median(each[n] for each in ended) for n in names} | {"samples": samples}


def main() -> None:
    arguments = _arguments()
    if arguments.worker:
        return ours(arguments.model, *json.loads(arguments.worker))
    if not arguments.model.exists():
        shape, _, kind = arguments.model.stem.rpartition("-")
        make_mixture(arguments.model, shape, kind)
    size, result = arguments.model.stat().st_size, result_of("drive", model=arguments.model.stem)
    ways: dict[str, list[str]] = {"drive": [], "mapped": []}
    for each in arguments.rival:
        program, *options = each.split(",")
        ways[" ".join([Path(program).name, *options])] = [program, *options]
    for share in map(int, arguments.shares.split(",")):
        limit = size * share // 100
        found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
        for number in range(arguments.rounds):
            for way, rival in ways.items():
                if arguments.only and way not in arguments.only.split(","):
                    continue
                one = run(arguments, way, limit, rival)
                found[way].append(one)
                print(f"{share} %, {format_bytes(limit)}, round {number}, {way}: {one}", flush=True)
        result[str(share)] = {way: median_of(own) for way, own in found.items() if own}
    print(f"wrote {write_result(result, f'drive-{arguments.model.stem}', arguments.output)}")
    return None


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rival", action="append", default=[], help="llama-bench and its options")
    parser.add_argument("--shares", default="50,75", help="percent of the file's bytes")
    parser.add_argument("--only", default="", help="measure some ways only, e.g. drive,mapped")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
