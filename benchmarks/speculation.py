"""Benchmarks decoding with and without speculation, and the cost of a step of several rows.

    OMP_NUM_THREADS=1 python benchmarks/speculation.py build/smollm2 [--planted build/bench/q8_0.gguf]

A real chat model (`make smollm2`) rewrites a Python file of 150 lines (greedily) and writes a story
(greedily, and sampled with a fixed seed). In each round a text is generated without drafts and with
each drafter, in sequences of one engine that alternate every few tokens, so that other load affects
all alike; the tokens are compared, and the time runs from the first token to the last. The
controller starts afresh each time. For the planted model, whose text is meaningless, only the steps
are timed.

Steps of 1 to 17 rows are timed in turn. From their times follow the number of drafted tokens that a
step must accept to break even, and the share of right guesses at which drafts of that length break
even. Figures are medians of the rounds; the last line on stdout is one JSON object, which also goes
to results/."""

import argparse
import hashlib
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from machine import machine, processor, slug

from hotsplit import Engine
from hotsplit.files.atomic import partial_file
from hotsplit.runtime.generate.draft_model import DraftModel
from hotsplit.runtime.generate.draft_options import SpeculationOptions
from hotsplit.runtime.generate.generation_options import GenerationOptions
from hotsplit.runtime.generate.ngrams import NgramDrafter, NgramPool
from hotsplit.runtime.generate.sampling_options import SamplingOptions
from hotsplit.runtime.generate.speculation import Drafter, Speculation
from hotsplit.runtime.kernels.cpu import library

KINDS = ("q8_0", "q4_0")
ROWS = range(1, 18)
TURN = 8  # tokens of a text before the next one goes on
START = 600  # tokens in the cache before a timed step
FILE = Path(__file__).parent.parent / "tests" / "models.py"
NUM_LINES, NUM_GIVEN = 150, 12  # lines of the file, and how many of them begin the answer
TASK = "Write this file again, with a better docstring for the module."
STORY = "Write a long story about an old lighthouse keeper and a storm."
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}"
GREEDY = SamplingOptions(temperature=0.0)


@dataclass(frozen=True, kw_only=True)
class Case:
    prompt: str
    sampling: SamplingOptions
    wanted: float  # least speedup over no drafts


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(1)
    library.set_threads(arguments.threads)
    result: dict[str, object] = {
        "benchmark": "speculation",
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "level": library.level(),
        "threads": arguments.threads,
        "load_before": os.getloadavg(),
        "rounds": arguments.rounds,
        "tokens": arguments.tokens,
        "file": {"name": FILE.name, "lines": NUM_LINES, "sha256": _sha256(_file_text())},
    }
    for kind in arguments.kinds:
        result[f"SmolLM2-135M {kind}"] = _chat_model(arguments, arguments.models / f"{kind}.gguf")
    if arguments.planted:
        for mode in ("dense", "predicted"):
            with Engine.load(
                arguments.planted, mode=mode, device="cpu", context_length=1024
            ) as engine:
                found = _steps(engine, arguments.step_rounds)
            result[f"planted 1.1B {arguments.planted.stem} {mode}"] = found
            _print_steps(f"{arguments.planted.name} {mode}", found)
    result["load_after"] = os.getloadavg()
    name = f"speculation-{slug(processor())}.json"
    with partial_file(Path(__file__).parent / "results" / name) as partial:
        partial.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def _cases() -> dict[str, Case]:
    text = _file_text()
    beginning = "".join(text.splitlines(keepends=True)[:NUM_GIVEN])
    edit = CHAT.format(f"```python\n{text}```\n{TASK}", f"```python\n{beginning}")
    story = CHAT.format(STORY, "")
    drawn = SamplingOptions(seed=1)
    return {
        "code editing, greedy": Case(prompt=edit, sampling=GREEDY, wanted=1.5),
        "prose, greedy": Case(prompt=story, sampling=GREEDY, wanted=0.98),
        "prose, drawn": Case(prompt=story, sampling=drawn, wanted=0.98),
    }


def _chat_model(arguments: argparse.Namespace, path: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    context = 2560 + arguments.tokens
    with (
        Engine.load(
            path, mode="dense", device="cpu", context_length=context, num_sequences=4
        ) as engine,
        Engine.load(arguments.draft, mode="dense", device="cpu", context_length=context) as other,
        other.sequence() as sequence,
    ):
        found["steps"] = _steps(engine, arguments.step_rounds)
        _print_steps(path.name, found["steps"])
        makers: dict[str, Callable[[], Drafter]] = {
            "ngram": NgramDrafter,
            "ngram-mod": NgramPool,
            f"draft {arguments.draft.stem}": lambda: DraftModel(sequence, 0.75),
        }
        for name, case in _cases().items():
            ids = engine.codec.encode(case.prompt)
            rounds = [_round(engine, ids, case, makers, arguments) for _ in range(arguments.rounds)]
            found[name] = _summary(rounds, len(ids), case)
            print(f"{path.name}, {name}: {json.dumps(found[name])}", flush=True)
    return found


def _round(
    engine: Engine,
    ids: list[int],
    case: Case,
    makers: dict[str, Callable[[], Drafter]],
    arguments: argparse.Namespace,
) -> dict[str, dict[str, float]]:
    drafts = {name: Speculation(make(), SpeculationOptions()) for name, make in makers.items()}
    texts = {
        name: Text(engine, ids, case, arguments.tokens, drafts.get(name))
        for name in ("none", *makers)
    }
    turn = list(texts.values())
    while any(not text.is_over for text in turn):
        for text in turn:
            text.go_on()
        turn = [*turn[1:], turn[0]]  # each goes first in turn
    plain = texts.pop("none")
    found: dict[str, dict[str, float]] = {"none": {"seconds": plain.seconds}}
    for name, text in texts.items():
        assert text.ids == plain.ids, f"{name} changed the text"
        totals = drafts[name].totals
        found[name] = {
            "seconds": text.seconds,
            "times_none": plain.seconds / text.seconds,
            "estimated": totals.gain,
            "drafts": totals.drafts,
            "drafted": totals.drafted,
            "accepted": totals.accepted,
            "steps": totals.steps,
            "tokens_a_step": totals.tokens / totals.steps,
            "draft_share_of_time": totals.draft_s / (totals.draft_s + totals.step_s),
            "switched_off": totals.num_off,
            "switched_on": totals.num_on,
        }
    return found


class Text:
    """A text that grows a few tokens at a time; `seconds` from the first token on."""

    def __init__(
        self, engine: Engine, ids: list[int], case: Case, count: int, drafts: Speculation | None
    ) -> None:
        options = GenerationOptions(max_tokens=count, ignores_end=True)
        self._sequence = engine.sequence()
        self._tokens = engine.generate(
            ids, sampling=case.sampling, options=options, drafts=drafts, sequence=self._sequence
        )
        self.ids = [next(self._tokens).id]
        self.seconds, self.is_over = 0.0, False

    def go_on(self) -> None:
        if self.is_over:
            return
        began = time.perf_counter()
        more = [token.id for token in itertools.islice(self._tokens, TURN)]
        self.seconds += time.perf_counter() - began
        self.ids += more
        if len(more) < TURN:
            self.is_over = True
            self._sequence.close()


def _summary(
    rounds: list[dict[str, dict[str, float]]], num_prompt: int, case: Case
) -> dict[str, object]:
    middle: dict[str, object] = {"prompt_tokens": num_prompt, "wanted": case.wanted}
    for name in rounds[0]:
        keys = rounds[0][name]
        middle[name] = {key: statistics.median(r[name][key] for r in rounds) for key in keys}
        if name != "none":
            middle[name]["rounds"] = [round(r[name]["times_none"], 3) for r in rounds]
    return middle


def _steps(engine: Engine, rounds: int) -> dict[str, list[float]]:
    """The cost of steps of 1 to 17 rows: milliseconds, the ratio to one row, the drafted tokens
    that must be accepted to break even, and the acceptance rate, the same at every place, that
    breaks even."""
    vocab_size = engine.model.spec.vocab_size
    with engine.sequence() as text:
        text.extend([n * 7919 % vocab_size for n in range(START)], "none")
        seconds: dict[int, list[float]] = {rows: [] for rows in ROWS}
        for number in range(rounds):
            for rows, kept in seconds.items():
                ids = [(n * 104729 + number) % vocab_size for n in range(rows)]
                began = time.perf_counter()
                text.extend(ids, "all")
                kept.append(time.perf_counter() - began)
                text.rollback(START)
    middle = [statistics.median(kept) for kept in seconds.values()]
    ratio = [value / middle[0] for value in middle]
    return {
        "rows": list(ROWS),
        "ms": [1e3 * value for value in middle],
        "times_one_row": ratio,
        "accepted_at_break_even": [value - 1 for value in ratio],
        "right_at_break_even": [_right_share(r - 1, value) for r, value in zip(ROWS, ratio, strict=True)],
    }  # fmt: skip


def _right_share(length: int, ratio: float) -> float:
    """The a in [0, 1] with 1 + a + ... + a^length = ratio, by bisection; 1 if the ratio is larger,
    and 0 without a draft."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if sum(middle**n for n in range(length + 1)) < ratio:
            low = middle
        else:
            high = middle
    return high if length else 0.0


def _print_steps(name: str, found: dict[str, list[float]]) -> None:
    columns = zip(found["rows"], found["ms"], found["times_one_row"],
                  found["right_at_break_even"], strict=True)  # fmt: skip
    for rows, ms, ratio, share in columns:
        print(
            f"{name}: {rows:2} rows {ms:8.2f} ms  {ratio:5.2f}x one, break-even at {share:.0%} right"
        )


def _file_text() -> str:
    return "".join(FILE.read_text(encoding="utf-8").splitlines(keepends=True)[:NUM_LINES])


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path, help="folder of q8_0.gguf and q4_0.gguf")
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    parser.add_argument("--draft", type=Path, help="draft model (default: q4_0.gguf of the folder)")
    parser.add_argument("--planted", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step-rounds", type=int, default=15)
    arguments = parser.parse_args()
    arguments.draft = arguments.draft or arguments.models / "q4_0.gguf"
    return arguments


if __name__ == "__main__":
    main()
