"""Times a prompt of 512 tokens by type, with all of the model on the card, against llama.cpp,
attention against torch's (attention_times.py), a step's kernels with and without overlap
(overlap_times.py), and short passes launched and as graphs (pass_launches.py).

    python benchmarks/gpu_prompts.py [--output FILE.json] [--rival build/gpu-rival] [--seconds 80]

The model is eight layers of a 7B shape with random weights (gpu_model.py), written into the folder
of FILE and removed. Results are saved type by type; types with a result in FILE are not repeated.
`--smoke` does it with a toy on the CPU."""

import argparse
import random
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median

import torch
from attention_times import PASSES, attention
from gpu import SEVEN_B_8, SMOKE, shape_of
from gpu_model import Planted, write_dense
from gpu_rival import RivalModel, best_rival
from gpu_sections import Sections, SectionTable, page_of
from overlap_times import overlap
from pass_launches import launches
from worker_process import Process, ProcessError

KINDS = ("f16", "q8_0", "q4_k")
ROUNDS = 5
SMOLLM2 = shape_of(30, 576, 1536, 9, 3, vocab=49152, context_length=1024)
NO_LIMIT = 1 << 40  # llama.cpp may use all of the card
COLUMNS = ("type", "ours, ms", "llama.cpp, ms", "times as long")


class Prompts:
    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked, self.folder = asked, asked.output.parent
        self.sizes = SMOKE.sizes if asked.smoke else SEVEN_B_8.sizes
        self.device = torch.device("cpu" if asked.smoke else "cuda")
        self.num_tokens = min(512, self.sizes.context_length // 2)
        generator = random.Random(0)
        tokens = range(3, self.sizes.vocab_size)
        self.ids = generator.choices(tokens, k=self.num_tokens)

    def measure(self, kind: str) -> list[SectionTable]:
        planted = Planted(sizes=self.sizes, rank=32, device=self.device)
        with _folder(self.folder / f"models-{kind}") as folder:
            write_dense(planted, folder / "model.gguf", layout="sparse", kind=kind)
            ours = self._ours(folder / "model.gguf", kind)
            theirs: float | str = "no rival"
            if self.asked.rival:
                write_dense(planted, folder / "stock.gguf", layout="stock", kind=kind)
                theirs = self._theirs(folder / "stock.gguf", kind)
        is_known = not isinstance(theirs, str)
        row = [
            kind,
            f"{1e3 * ours:.1f}",
            f"{1e3 * theirs:.1f}" if is_known else theirs[:60],
            f"{ours / theirs:.2f}" if is_known else "-",
        ]
        title = f"{self.num_tokens} tokens through {self.sizes.num_layers} layers, all on the card"
        return [SectionTable(title=title, columns=COLUMNS, rows=[row])]

    def _ours(self, model: Path, kind: str) -> float:
        program = Path(__file__).with_name("gpu_worker.py")
        command = (sys.executable, program, model, "--mode", "dense", "--device", self.device.type)
        process = Process.of(command, f"hotsplit {kind}", self.folder / f"{kind}.log")
        try:
            process.ask("load")
            found = [process.ask("prefill", ids=self._other(i))["seconds"] for i in range(ROUNDS)]
        finally:
            process.close()
        return median(found[1:])

    def _theirs(self, model: Path, kind: str) -> float | str:
        """Seconds, or why there are none."""
        rival = RivalModel(
            folder=self.asked.rival,
            model=model,
            context_length=self.sizes.context_length,
            num_layers=self.sizes.num_layers,
            layer_bytes=1,
        )
        try:
            process = best_rival(rival, NO_LIMIT, self.folder / f"rival-{kind}.log").process
        except ProcessError as error:
            return str(error)
        try:
            found = [
                process.ask("prefill", threads=1, ids=self._other(i))["seconds"][0]
                for i in range(ROUNDS)
            ]
        except ProcessError as error:
            return str(error)
        finally:
            process.close()
        return median(found[1:])

    def _other(self, number: int) -> list[int]:
        """The same tokens from another start: no prompt is a prefix of the one before."""
        return self.ids[number:] + self.ids[:number]


@contextmanager
def _folder(path: Path) -> Iterator[Path]:
    path.mkdir(parents=True, exist_ok=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def command_line() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found.add_argument("--output", type=Path, default=Path("build/gpu-prompts/results.json"))
    found.add_argument("--rival", type=Path, help="folder built by gpu_rival.sh; else no rival")
    found.add_argument("--seconds", type=float, default=80.0)
    found.add_argument("--smoke", action="store_true", help="a toy on the CPU, as a check")
    return found


def main() -> int:
    """Returns 0 if every type has a result."""
    asked = command_line().parse_args()
    sections, prompts = Sections(asked.output, "gpu-prompts", asked.seconds), Prompts(asked)
    for kind in KINDS:
        sections.run(kind, lambda k=kind: prompts.measure(k), least_s=10.0)
    places = ((4, 8),) if asked.smoke else PASSES
    sections.run("attention", lambda: attention(prompts.device, places), least_s=5.0)
    run = lambda: overlap(prompts.device, is_small=asked.smoke)  # noqa: E731
    sections.run("overlap", run, least_s=5.0)
    short = {
        "SmolLM2's shape": SMOKE.sizes if asked.smoke else SMOLLM2,
        "a 7B shape": prompts.sizes,
    }
    for name, sizes in short.items():
        passes = partial(launches, name, sizes, prompts.device, asked.output.parent)
        sections.run(f"launches, {name}", passes, least_s=8.0)
    names = (*KINDS, "attention", "overlap", *(f"launches, {name}" for name in short))
    print(page_of(sections.content, names))
    return 0 if sections.is_fine(names) else 1


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    sys.exit(main())
