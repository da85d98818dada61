"""Measures what a hand-over between GPU and CPU costs, and what alternatives would.

    python benchmarks/gpu_handover.py [--output FILE.json] [--seconds 55] [--only NAME,...] [--fake]

Needs torch for CUDA, Triton and a C compiler, but not hotsplit itself. Some 40 s. Results are saved
section by section; sections with a result in FILE are not repeated. `--fake` runs the sections that
need no real device on a thread instead: their times mean nothing.

    handover  one per layer, with an empty job, for three gaps of GPU time: our form, alternatives
    job       the same, with 10 MB read by a pool of threads
    idle      with other cores asleep or kept awake: is the cost that of waking one?
    split     GPU to CPU and CPU to GPU apart
    kernels   what a small dependent kernel costs in a graph, with and without PDL
    alloc     what torch reserves for an arena of passes, and beside a graph"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from gpu_sections import Sections, SectionTable, page_of
from handover import allocator, round_trips
from handover.exchange_forms import Buffers
from handover.fake import FakeGpu
from handover.handover_gpu import HandoverGpu
from handover.host import Host
from handover.kernel_times import kernels
from handover.round_trips import HandoverBench

FAKED = ("handover", "job", "idle")


def sections_of(bench: HandoverBench) -> dict[str, Callable[[], Sequence[SectionTable]]]:
    return {
        "handover": lambda: round_trips.handover(bench),
        "job": lambda: round_trips.job(bench),
        "idle": lambda: round_trips.idle(bench),
        "split": lambda: round_trips.split(bench),
        "kernels": lambda: kernels(bench.gpu),
        "alloc": allocator.alloc,
    }


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found.add_argument("--output", type=Path, default=Path("build/gpu-handover.json"))
    found.add_argument("--seconds", type=float, default=55.0)
    found.add_argument("--only", default="", help="sections, separated by commas")
    found.add_argument("--fake", action="store_true", help="a thread for a GPU")
    return found


def main() -> int:
    """Returns 0 if every section has a result."""
    asked = parser().parse_args()
    if not asked.fake and not torch.cuda.is_available():
        sys.exit("gpu_handover: no CUDA device here; --fake shows that the rest works")
    gpu = FakeGpu() if asked.fake else HandoverGpu()
    buffers = Buffers(gpu)
    gpu.warm_up(buffers.x, buffers.y_host, buffers.ready)
    cores = len(os.sched_getaffinity(0))
    bench = HandoverBench(gpu=gpu, host=Host(), buffers=buffers, cores=cores, is_small=asked.fake)
    sections = Sections(asked.output, "gpu-handover", asked.seconds)
    sections.add_facts(**round_trips.facts_of(bench))
    measures = sections_of(bench)
    names = [n for n in measures if n in (asked.only.split(",") if asked.only else measures)]
    names = [name for name in names if not asked.fake or name in FAKED]
    for name in names:
        sections.run(name, measures[name])
    print(page_of(sections.content, names))
    return 0 if sections.is_fine(names) else 1


if __name__ == "__main__":
    sys.exit(main())
