"""Benchmarks files in types of one to four bits beside other programs: each runs the file as it is.

    python benchmarks/low_bits.py make FOLDER
    python benchmarks/low_bits.py values MODEL... --rival path/to/venv/bin/python
    python benchmarks/low_bits.py speed MODEL... [--rival NAME=path/to/llama-bench[,OPTION,...]]

`make` writes random models: TinyLlama's shape with all matrices of one type, and eight layers in
Qwen3-30B-A3B's shape with as many types as unsloth's UD-Q2_K_XL files have.

`values` compares the logits of a text, the beginning of the one that `run` profiles on: the KL
divergence of ours from llama.cpp's on the same file, and of both from those of the file's values in
f32, as `convert` unpacks them. Then 64 tokens that llama.cpp chooses greedily, after each of which
ours says which it would have chosen. The load of the machine does not matter.

`speed` times decode and short prompts in turns, ours at each of --levels, rivals at what they were
built for, with 2 threads and 1; the least time of all rounds counts. It notes the bytes of the
weights in memory, and the last words of a rival that cannot load a file. No round begins that would
end after --seconds. All runs add to one result."""

import argparse
import json
import lzma
import math
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import llama_bench
import numpy as np
import torch
from chat_model import decode_s
from cpu_rival import PROMPT
from machine import add_to_result, result_of
from random_model import make_dense, make_mixture
from torch import Tensor
from torch.nn import functional as F

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.files.gguf_file import open_gguf
from hotsplit.measure.bench.runner import cpu_bandwidth
from hotsplit.measure.timing.interleave import in_turn
from hotsplit.options.engine_config import EngineConfig
from hotsplit.run.stages import DEFAULT_TEXT
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.loading import load

ORACLE = Path(__file__).parent.parent / "tests/llamacpp/oracle.py"
KINDS = ("iq3_s", "iq3_xxs", "iq2_s", "iq2_xs", "iq2_xxs", "iq1_m", "iq1_s")
KINDS += ("q2_0", "q1_0", "tq2_0", "tq1_0", "nvfp4")
MIXED = "ud-q2_k_xl"
# Types of experts by layer, about as frequent as in unsloth's UD-Q2_K_XL of Qwen3.8-27B.
GATES = ("iq2_xxs", "iq2_xs", "iq1_s", "iq2_xxs", "iq2_s", "iq1_m", "iq2_s", "iq2_xs")
DOWNS = ("iq3_s", "iq3_xxs", "iq2_s", "iq3_xxs", "iq3_xxs", "iq3_s", "q2_k", "iq4_xs")
WINDOW, BEFORE, GREEDY = 256, 32, 64  # tokens
LETTERS = 8 * WINDOW  # of text, enough for a window
PIECE = 32  # tokens compared at a time
PROMPTS, GENERATED = (4, 16, 64, 256), 32
REPETITIONS = 2  # in a round
CONFIG = EngineConfig(mode="dense", device="cpu", context_length=512)


def main() -> None:
    arguments = _arguments()
    arguments.do(arguments)


def about(model: Path) -> dict[str, Any]:
    """The file's bytes, in all and by type."""
    by_type: Counter[str] = Counter()
    for entry in open_gguf(model, "model file").tensors.values():
        by_type[entry.kind] += entry.num_bytes
    return {"file_bytes": model.stat().st_size, "bytes_by_type": dict(by_type.most_common())}


# ---- make ---------------------------------------------------------------------------------------


def make(arguments: argparse.Namespace) -> None:
    for kind in arguments.types.split(","):
        shape = "30b-a3b" if kind == MIXED else "1.1b"
        path = arguments.folder / f"{shape}-{kind}.gguf"
        if kind == MIXED:
            make_mixture(path, "qwen3-30b-a3b", mixed_type, 8)
        else:
            make_dense(path, kind)
        print(f"made {path}", flush=True)


def mixed_type(name: str) -> str:
    """The type of a matrix in the mixture of types."""
    if not name.startswith("blk."):
        return {"token_embd.weight": "q4_k", "output.weight": "q6_k"}[name]
    layer, part = int(name.split(".")[1]), name.split(".")[2]
    if part == "ffn_down_exps":
        return DOWNS[layer % len(DOWNS)]
    if part in ("ffn_gate_exps", "ffn_up_exps"):
        return GATES[layer % len(GATES)]
    return {"attn_v": "q5_k", "attn_output": "iq3_xxs"}.get(part, "q4_k")


# ---- values -------------------------------------------------------------------------------------


def values(arguments: argparse.Namespace) -> None:
    for model in arguments.models:
        add(arguments, model, {"values": _values(arguments, model)})


def _values(arguments: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Divergences in nats of a window of text, and a greedy continuation of its beginning."""
    with tempfile.TemporaryDirectory() as folder:
        ours_TV, theirs_TV, greedy = _both(arguments, model, Path(folder))
        exact = Path(folder) / "exact.gguf"
        config = ConvertConfig(source=model, output=exact, outtype="f32", layout="stock")
        convert(config)
        exact_TV = _logits_from_disk(exact, greedy.pop("window"))
    pairs = {
        "theirs_ours": (theirs_TV, ours_TV),
        "exact_ours": (exact_TV, ours_TV),
        "exact_theirs": (exact_TV, theirs_TV),
    }
    report = {"tokens": len(ours_TV), **greedy}
    for name, (first_TV, second_TV) in pairs.items():
        divergence_T = divergences(first_TV, second_TV)
        report[name] = {
            "kl_mean": divergence_T.mean().item(),
            "kl_max": divergence_T.max().item(),
            "same_top": (first_TV.argmax(1) == second_TV.argmax(1)).double().mean().item(),
        }
    told = ", ".join(f"{name} {report[name]['kl_mean']:.1e}" for name in pairs)
    print(
        f"{model.stem}: KL {told}; {greedy['num_same']} of {GREEDY} greedy tokens the same,"
        f" others at most {greedy['largest_gap']:.3f} nats apart",
        flush=True,
    )
    return report


def _both(
    arguments: argparse.Namespace, model: Path, folder: Path
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Logits [T, V] of both programs after each token of a window, and what became of the greedy
    text: how many tokens ours also has as the most likely, and how much less likely llama.cpp holds
    those that ours prefers."""
    text = lzma.decompress(DEFAULT_TEXT.read_bytes()).decode()[:LETTERS]
    with Engine.load(model, mode="dense", device="cpu", context_length=2 * WINDOW) as engine:
        ids = engine.codec.encode(text)[:WINDOW]
        ask = partial(_ask, arguments.rival, folder, model=model, kv_kind="f16")
        _, theirs_TV = ask("follow", ids=ids, count=len(ids))
        answer, greedy_TV = ask("greedy", prompt=ids[:BEFORE], count=GREEDY)
        whole = ids[:BEFORE] + answer["ids"]
        greedy_ours_TV = engine.logits(whole[:-1])[BEFORE - 1 :].float()
        ours_TV = engine.logits(ids).float()
    chosen_T, ours_T = torch.tensor(answer["ids"]), greedy_ours_TV.argmax(1)
    chances_TV = F.log_softmax(greedy_TV.double(), dim=1)
    gap_T = (chances_TV.gather(1, chosen_T[:, None]) - chances_TV.gather(1, ours_T[:, None]))[:, 0]
    same = int((ours_T == chosen_T).sum())
    return ours_TV, theirs_TV, {"num_same": same, "largest_gap": gap_T.max().item(), "window": ids}


def _ask(rival: Path, folder: Path, action: str, **request: Any) -> tuple[dict[str, Any], Tensor]:
    """llama.cpp's answer, and the logits that it wrote."""
    logits = folder / "logits.npy"
    asked = {"do": action, "logits": logits, **request}
    done = subprocess.run(
        [rival, ORACLE], input=json.dumps(asked, default=str), text=True, capture_output=True
    )
    if done.returncode:
        raise SystemExit(f"{request['model']}: llama.cpp failed: {done.stderr[-500:]}")
    return json.loads(done.stdout), torch.from_numpy(np.load(logits))


def _logits_from_disk(model: Path, ids: Sequence[int]) -> Tensor:
    options: dict[str, Any] = {"context_length": 2 * WINDOW, "is_resident": False}
    with Engine.load(model, mode="dense", device="cpu", **options) as engine:
        return engine.logits(ids).float()


def divergences(first_TV: Tensor, second_TV: Tensor) -> Tensor:
    """f64 [T]: KL divergence of the second from the first after each token."""
    pieces = []
    for a_PV, b_PV in zip(first_TV.split(PIECE), second_TV.split(PIECE), strict=True):
        a_PV, b_PV = (F.log_softmax(each.double(), dim=1) for each in (a_PV, b_PV))
        pieces.append((a_PV.exp() * (a_PV - b_PV)).sum(dim=1))
    return torch.cat(pieces)


# ---- speed --------------------------------------------------------------------------------------


def speed(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    began, bandwidth = time.perf_counter(), cpu_bandwidth()
    rivals = dict(each.split("=", 1) for each in arguments.rival)
    for number, model in enumerate(arguments.models):
        now = time.perf_counter()
        left = (began + arguments.seconds - now) / (len(arguments.models) - number)
        found = Speeds(model, arguments.levels.split(","), rivals, bandwidth)
        found.measure(list(map(int, arguments.threads.split(","))), arguments.rounds, now + left)
        add(arguments, model, {"speed": found.report()})


@dataclass
class Samples:
    """Samples with one number of threads: bytes a second that memory gives, and seconds by side
    and test, of a token (0) or of a prompt of so many."""

    bandwidths: list[float] = field(default_factory=list)
    seconds: dict[str, dict[int, list[float]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )


class Speeds:
    """The speeds of all sides with one file. Ours is loaded once for each level, since the form of
    weights in memory depends on it."""

    def __init__(
        self,
        model: Path,
        levels: Sequence[str],
        rivals: dict[str, str],
        bandwidth: Callable[[], float],
        prompts: Sequence[int] = PROMPTS,
    ) -> None:
        self.model, self.bandwidth, self.rivals = model, bandwidth, rivals
        self.prompts = prompts
        self.engines: dict[str, Engine] = {}
        self.memory_bytes: dict[str, int] = {}
        self.step_bytes: dict[str, int] = {}
        self.refusals: dict[str, str] = {}
        self.samples: dict[int, Samples] = defaultdict(Samples)
        for level in levels:
            library.set_level(level)
            loaded = load(ModelFile.load(model), None, CONFIG)
            assert loaded.residence is not None, "too little memory"
            self.engines[level], self.memory_bytes[level] = (
                Engine(loaded),
                loaded.residence.num_bytes,
            )

    def measure(self, threads: Sequence[int], rounds: int, until: float) -> None:
        """Runs rounds that will have ended by then, at least one."""
        for number in range(rounds):
            began = time.perf_counter()
            for count in threads:
                library.set_threads(count)
                self.samples[count].bandwidths.append(self.bandwidth())
                for side in in_turn([*self.engines, *self.rivals], number):
                    self._turn(side, count)
            now = time.perf_counter()
            if 2 * now - began > until:
                break

    def _turn(self, side: str, threads: int) -> None:
        if side in self.refusals:
            return
        try:
            found = self._ours(side) if side in self.engines else self._theirs(side, threads)
        except subprocess.CalledProcessError as error:
            ended = f"ended with code {error.returncode}"
            self.refusals[side] = (error.stderr.strip().splitlines() or [ended])[-1]
            print(f"{self.model.stem}: {side} fails: {self.refusals[side]}", flush=True)
            return
        for test, seconds in found.items():
            self.samples[threads].seconds[side][test] += seconds

    def _ours(self, level: str) -> dict[int, list[float]]:
        library.set_level(level)
        engine, found = self.engines[level], defaultdict[int, list[float]](list)
        for _ in range(REPETITIONS):
            for length in self.prompts:
                ids_T = torch.tensor(self._ids(engine, length))
                began = time.perf_counter()
                engine._prefill(ids_T)
                found[length].append(time.perf_counter() - began)
            engine._prefill(torch.tensor(PROMPT))
            seconds, self.step_bytes[level] = decode_s(engine, self._ids(engine, GENERATED))
            found[0].append(seconds)
        return found

    def _ids(self, engine: Engine, count: int) -> list[int]:
        generator, size = random.Random(count), engine.model.spec.vocab_size
        return [generator.randrange(3, size) for _ in range(count)]

    def _theirs(self, rival: str, threads: int) -> dict[int, list[float]]:
        found = llama_bench.seconds_of(
            self.rivals[rival].split(","),
            self.model,
            threads,
            prompts=self.prompts,
            generated=GENERATED,
            repetitions=REPETITIONS,
        )
        return found | {0: [seconds / GENERATED for seconds in found[0]]}

    def report(self) -> dict[str, Any]:
        """By number of threads and side the least seconds of each test; prints them over those of
        our first level."""
        found: dict[str, Any] = {"memory_bytes": self.memory_bytes, "refusals": self.refusals}
        for threads, samples in self.samples.items():
            rate, sides = max(samples.bandwidths), {}
            for side, seconds in samples.seconds.items():
                least = {test: min(each) for test, each in seconds.items()}
                sides[side] = {
                    "token_s": least[0],
                    "prompts_s": {str(length): least[length] for length in self.prompts},
                }
                if side in self.step_bytes:
                    limit = self.step_bytes[side] / rate
                    sides[side] |= {"step_bytes": self.step_bytes[side]}
                    sides[side] |= {"share_of_limit": limit / least[0]}
                first = next(iter(sides.values()))
                tests = [f"{first['token_s'] / least[0]:.2f}"]
                tests += [f"{first['prompts_s'][str(n)] / least[n]:.2f}" for n in self.prompts]
                print(
                    f"{self.model.stem}, {threads} threads, {side}: {1 / least[0]:.1f} tokens/s,"
                    f" speed over the first side's {', '.join(tests)}",
                    flush=True,
                )
            found[str(threads)] = {"bandwidth_gb_per_s": rate / 1e9, "sides": sides}
        return found


# ---- the command --------------------------------------------------------------------------------


def add(arguments: argparse.Namespace, model: Path, found: dict[str, Any]) -> None:
    result = result_of("low_bits", files={model.stem: about(model) | found})
    print(f"wrote {add_to_result(result, 'low-bits', arguments.output)}", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    maker = commands.add_parser("make", help="write random models")
    maker.add_argument("folder", type=Path)
    maker.add_argument("--types", default=",".join((*KINDS, MIXED)))
    divergence = commands.add_parser("values", help="compare logits with llama.cpp's")
    divergence.add_argument(
        "--rival", type=Path, required=True, help="a Python that has llama-cpp-python"
    )
    timer = commands.add_parser("speed", help="time tokens and prompts beside other programs")
    timer.add_argument("--rival", action="append", default=[], help="NAME=LLAMA_BENCH,OPTION,...")
    levels = ",".join(dict.fromkeys([library.usable_levels()[0], "avx2"]))
    timer.add_argument("--levels", default=levels, help="ours")
    timer.add_argument("--threads", default="2,1")
    timer.add_argument("--rounds", type=int, default=2)
    timer.add_argument("--seconds", type=float, default=math.inf)
    for each in (divergence, timer):
        each.add_argument("models", type=Path, nargs="+")
        each.add_argument("--output", type=Path)
    for each, do in ((maker, make), (divergence, values), (timer, speed)):
        each.set_defaults(do=do)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
