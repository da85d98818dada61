"""Benchmarks drafts: tokens a second of the same greedy texts without drafts, with drafts from the
text itself, and by a smaller model or the model's own draft block.

    python benchmarks/drafts.py MODEL [DRAFT] [--rounds N] [--tokens N] [--texts N] [--threads N]
        [--rival path/to/llama-server]
    python benchmarks/drafts.py --forced 0.8,0.6,0.4 [--kind q4_k_m] [--rounds N] [--tokens N]

MODEL and DRAFT are those of `make qwen-coder qwen2.5`. Without DRAFT, MODEL is one with a block; of
the bundled tiny-moe, which knows no chat and was trained on Python's library, the texts of code
begin as modules of that library do which it has not seen. Every text begins with a new controller,
as in a new program. The kinds take turns; seconds are those of the wall, the draft model's among
them and the prompt's not, and the best of the rounds counts. Answers must be the same, token for
token. HOTSPLIT_CPU_LEVEL forces a lower instruction level. Two llama-servers with the same files,
one of them with `-md` and its own defaults, take turns with these; their own seconds count. How it
is built is said in serve_throughput.py.

--forced makes 8 layers of Qwen3.6-35B-A3B's shape with a block, of random weights, whose guesses
are exchanged: so many of those at each place are right, if those before are. The text is drawn with
a seed. The controller's gain, and that of each number of guesses by what their rows and guesses
took, stand beside what `hotsplit plan` predicts of this machine, which it measures before, and
beside what it predicts from the experts that this text chooses: random weights give successive
tokens nearly the same ones, which plans do not assume."""

import argparse
import io
import json
import os
import random
import statistics
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import replace
from itertools import accumulate, count
from operator import mul, truediv
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch
from urllib.error import URLError
from urllib.request import Request, urlopen

import numpy as np
from machine import result_of, write_result
from random_model import make_mixture
from torch import Tensor

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.profile_file import Corpus, Profile
from hotsplit.cli import main as main_command
from hotsplit.commands.options.speculation_options import speculating
from hotsplit.measure.timing.interleave import take_turns
from hotsplit.options.generation_options import (
    GenerationOptions,
    SamplingOptions,
    SpeculationOptions,
)
from hotsplit.runtime.generate.block_drafter import BlockDrafter
from hotsplit.runtime.generate.chat import ChatOptions
from hotsplit.runtime.generate.speculation import Speculation
from hotsplit.runtime.kernels.cpu import library
from hotsplit.solver.assumed import assumed_experts

RIVALS = ("llama.cpp", "llama.cpp, draft")
PORT = 18340

# Tokens a second, tokens drafted and accepted; and by the place in a draft, how many of its tokens
# followed right ones, and how many of these were right.
Sample = tuple[float, int, int, list[int], list[int]]
CODE = """def square(x):
    return x * x

def cube(x):
    return x * square(x)

def total(xs):
    s = 0
    for x in xs:
        s += x
    return s
"""
TEXTS = {
    "code": (
        "Write a Python class LRUCache with get and put methods, and tests for it with pytest.",
        "Write a C function that reverses a linked list, with a main function that shows it.",
        "Write a Python script that counts the words of a file and prints the ten most frequent.",
        "Implement quicksort and binary search in JavaScript.",
        "Write a SQL schema for a library with books, members and loans, and three queries on it.",
    ),
    "prose": (
        "Write a short story about a lighthouse keeper who finds a letter.",
        "Explain how a heat pump works to somebody who has never seen one.",
        "What were the causes of the French Revolution?",
        "Give me advice for a first visit to Japan.",
        "Describe a walk through an old forest in autumn.",
    ),
    "German": (
        "Erkläre auf Deutsch, wie eine Wärmepumpe funktioniert und wann sie sich lohnt.",
        "Schreibe eine kurze Geschichte über einen Bäcker in Hamburg.",
        "Was sind die Unterschiede zwischen Demokratie und Monarchie?",
        "Schreibe ein Rezept für Kartoffelsuppe.",
        "Beschreibe auf Deutsch den Wasserkreislauf.",
    ),
    "rewritten": tuple(
        f"{task}:\n```python\n{CODE}```"
        for task in (
            "Rewrite this file, renaming `x` to `value`",
            "Add type annotations to this file",
            "Add a docstring to each function of this file",
            "Translate this file to JavaScript",
            "Rewrite this file so that every function checks that its argument is not None",
        )
    ),
}


def main() -> None:
    arguments = _arguments()
    library.set_threads(arguments.threads)
    if arguments.cpu_time:
        assert arguments.threads == 1, "seconds of threads that wait would count"
        time.perf_counter = time.process_time  # the controller's clock, too
    (_measure_forced if arguments.forced is not None else _measure_texts)(arguments)


def _measure_texts(arguments: argparse.Namespace) -> None:
    own = ("mtp", "auto") if arguments.draft is None else ("draft",)
    length = 1024 if arguments.draft is None else 2048
    texts_of = TEXTS if arguments.draft is not None else TEXTS | {"code": _modules()}
    with ExitStack() as stack:
        has_block = arguments.draft is None
        engine = stack.enter_context(
            Engine.load(arguments.model, device="cpu", draft_block=has_block, context_length=length)
        )
        rivals: dict[str, Callable[[str], Sample]] = {}
        if arguments.rival is not None:
            for port, (name, options) in enumerate(
                zip(
                    RIVALS,
                    ((), ("-md", arguments.draft, "--spec-type", "draft-simple")),
                    strict=True,
                ),
                PORT,
            ):
                rivals[name] = stack.enter_context(_rival(arguments, port, options))
        texts = {
            f"{about} {number}": _measured(engine, rivals, text, arguments)
            for about, group in texts_of.items()
            for number, text in enumerate(group[: arguments.texts], 1)
        }
    pairs = [(kind, "none") for kind in ("ngram", *own)]
    pairs += [(RIVALS[1], RIVALS[0]), ("none", RIVALS[0]), ("draft", RIVALS[1])] if rivals else []
    gains = {
        f"{about}, {kind} over {base}": statistics.median(
            text[kind]["tokens_per_s"] / text[base]["tokens_per_s"]
            for name, text in texts.items()
            if name.startswith(about)
        )
        for about in TEXTS
        for kind, base in pairs
    }
    print(*(f"{name}: {gain:.2f}x" for name, gain in gains.items()), sep="\n")
    result = result_of(
        "drafts",
        model=arguments.model.stem,
        draft="its block" if arguments.draft is None else arguments.draft.stem,
        level=library.level(),
        threads=arguments.threads,
        is_cpu_time=arguments.cpu_time,
        rounds=arguments.rounds,
        tokens=arguments.tokens,
        gains=gains,
        texts=texts,
    )
    name = f"drafts-{library.level()}"
    if arguments.draft is None:
        name = f"drafts-{arguments.model.stem}-{library.level()}"
    print(f"wrote {write_result(result, name, arguments.output)}")


class Forced(BlockDrafter):
    """A block's guesses, computed, but with these shares of right ones by place."""

    def __init__(self, drafter: BlockDrafter, known: list[int], shares: tuple[float, ...]) -> None:
        self.__dict__.update(vars(drafter))
        self._known, self._shares, self._random = known, shares, random.Random(0)

    def guesses(self, ids: Sequence[int]) -> Iterator[tuple[int, float]]:
        is_right = True
        for place, share, _ in zip(count(len(ids)), self._shares, super().guesses(ids)):
            is_right = is_right and place < len(self._known) and self._random.random() < share
            yield self._known[place] if is_right else 1, share


def _measure_forced(arguments: argparse.Namespace) -> None:
    shape, options = "qwen3.6-35b-a3b", {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"{shape}.gguf"
        make_mixture(path, shape, arguments.kind, has_block=True)
        with patch.dict(os.environ, {"HOTSPLIT_CACHE": f"{folder}/cache"}):
            predicted = _predicted(path, arguments)
            most = dict.fromkeys((len(arguments.forced), max(1, predicted["num_drafted"])))
            with Engine.load(path, device="cpu", draft_block=True, context_length=512) as engine:
                found = {f"at most {n}": _forced(engine, options, arguments, n) for n in most}
                recorded = _recorded(engine, options, arguments)
            of_text = _predicted(path, arguments, recorded)
    gains = {name: each["gain"] for name, each in found.items()}
    gains |= {"predicted": predicted["gain"], "predicted of the text": of_text["gain"]}
    print(gains, predicted["by_number"], of_text["by_number"], found, sep="\n")
    result = result_of(
        "drafts-forced",
        shape=shape,
        kind=arguments.kind,
        shares=arguments.forced,
        level=library.level(),
        threads=arguments.threads,
        tokens=arguments.tokens,
        gains=gains,
        predicted_tokens_per_s=predicted["tokens_per_s"],
        predicted_by_number=predicted["by_number"],
        predicted_of_text_by_number=of_text["by_number"],
        measured=found,
    )
    name = f"drafts-forced-{library.level()}"
    print(f"wrote {write_result(result, name, arguments.output)}")


def _predicted(
    path: Path, arguments: argparse.Namespace, routing_LTK: np.ndarray | None = None
) -> dict[str, Any]:
    """What `hotsplit plan` predicts, with assumed experts, or with those of recorded tokens."""

    def recorded(model: ModelFile, exponent: float) -> Profile:
        profile = assumed_experts(model, exponent)
        if routing_LTK is None:
            return profile
        number, num_tokens = profile.expert_count_LE.shape[1], routing_LTK.shape[1]
        return replace(
            profile,
            routing_LTK=routing_LTK,
            num_tokens=num_tokens,
            expert_count_LE=np.stack(
                [np.bincount(id_TK.ravel(), minlength=number) for id_TK in routing_LTK]
            ),
            corpora=(Corpus(name="drawn", sha256="0" * 64, num_tokens=num_tokens),),
        )

    command = ["plan", path, "--vram", 0, "-t", arguments.threads, "--context", 512, "--json"]
    with (
        patch("hotsplit.run.forecast.assumed_experts", recorded),
        redirect_stdout(io.StringIO()) as written,
    ):
        assert main_command([str(part) for part in command]) == 0
    found = json.loads(written.getvalue())
    token_s, drafts = found["token_s"], found["drafts"]
    return {
        "num_drafted": drafts["num_drafted"],
        "gain": token_s / drafts["token_s"],
        "tokens_per_s": 1 / token_s,
        "by_number": [token_s / seconds for seconds in drafts["by_number_s"]],
    }


def _recorded(
    engine: Engine, sampling: dict[str, float], arguments: argparse.Namespace
) -> np.ndarray:
    """The experts of the drawn text's tokens, int16 [L, T, K]."""
    chosen_L: dict[int, list[np.ndarray]] = {}

    def observe(name: str, layer: int | None, tensor: Tensor) -> None:
        assert layer is not None
        chosen_L.setdefault(layer, []).append(tensor.numpy().astype(np.int16))

    with engine.observe(observe, lambda name, layer: name == "ffn_experts"):
        tokens = engine.generate(
            "a b c",
            sampling=SamplingOptions(seed=1, **sampling),
            options=GenerationOptions(max_tokens=arguments.tokens, ignores_end=True),
        )
        for _ in tokens:
            pass
    return np.stack([np.concatenate(chosen_L[layer]) for layer in sorted(chosen_L)])


def _forced(
    engine: Engine, sampling: dict[str, float], arguments: argparse.Namespace, most: int
) -> dict[str, object]:
    """Tokens a second of each round without and with drafts of at most so many tokens, what rows
    and guesses took, and the gain of each number of guesses by that."""
    known, costs = list[int](), {}

    def text(drafts: Speculation | None) -> tuple[float, int, int]:
        began = time.perf_counter()
        tokens = engine.generate(
            "a b c",
            sampling=SamplingOptions(seed=1, **sampling),
            options=GenerationOptions(max_tokens=arguments.tokens, ignores_end=True),
            drafts=drafts,
        )
        ids = [token.id for token in tokens if token.id is not None]
        took, run = time.perf_counter() - began, engine.last_run
        known.extend(ids if not known else ())
        assert ids == known, "drafts changed the text"
        return (len(ids) - 1) / (took - run.prefill_s), run.drafted, run.accepted

    def with_drafts(_: int) -> tuple[float, int, int]:
        options = SpeculationOptions(type="mtp", most=most)
        with speculating(engine, options) as drafts:
            assert drafts is not None and isinstance(drafts.costly, BlockDrafter)
            prompt = engine.codec.encode("a b c")
            forced = Speculation(
                Forced(drafts.costly, [*prompt, *known], arguments.forced), options
            )
            found = text(forced)
            rows = range(1, 2 + most)
            costs.update({f"{n} rows": forced.costs.seconds(n) for n in rows})
            costs["guess"] = forced._guess_s
            return found

    text(None)
    turns = {"none": lambda _: text(None), "drafts": with_drafts}
    samples = take_turns(turns, arguments.rounds)
    rates = {kind: [each[0] for each in rounds] for kind, rounds in samples.items()}
    single_s, guess_s = costs["1 rows"], costs["guess"]
    tokens = list(accumulate((1.0, *accumulate(arguments.forced[:most], mul))))[1:]
    return {
        "gain": statistics.median(map(truediv, rates["drafts"], rates["none"])),
        "by_number": [
            single_s * expected / (costs[f"{num + 1} rows"] + num * guess_s)
            for num, expected in enumerate(tokens, 1)
        ],
        "tokens_per_s": rates,
        "seconds": costs,
        "drafted_and_accepted": samples["drafts"][-1][1:],
    }


@contextmanager
def _rival(
    arguments: argparse.Namespace, port: int, options: tuple
) -> Iterator[Callable[[str], Sample]]:
    """A llama-server, as a function of a text."""
    command = [arguments.rival, "-m", arguments.model, "-t", arguments.threads, "-c", 2048]
    command += ["-np", 1, "--port", port, *options]
    address = f"http://127.0.0.1:{port}"
    with subprocess.Popen(
        [str(part) for part in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            while True:
                assert process.poll() is None, f"{command} ended with {process.returncode}"
                try:
                    urlopen(f"{address}/health").close()
                    break
                except URLError:
                    time.sleep(0.5)

            def answer(text: str) -> Sample:
                body = {
                    "messages": [{"role": "user", "content": text}],
                    "temperature": 0,
                    "max_tokens": arguments.tokens,
                    "cache_prompt": False,
                }
                request = Request(f"{address}/v1/chat/completions", json.dumps(body).encode())
                with urlopen(request) as reply:
                    timings = json.load(reply)["timings"]
                drafts = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
                return timings["predicted_per_second"], *drafts, [], []

            yield answer
        finally:
            process.kill()


def _measured(
    engine: Engine,
    rivals: dict[str, Callable[[str], Sample]],
    text: str,
    arguments: argparse.Namespace,
) -> dict[str, dict]:
    """By kind: tokens a second, tokens drafted and accepted."""
    answers = set()

    def answer(kind: str) -> Sample:
        options = SpeculationOptions(type=kind)
        draft = arguments.draft if kind == "draft" else None
        greedy = SamplingOptions(temperature=0.0)
        generation = GenerationOptions(max_tokens=arguments.tokens)
        with speculating(engine, options, draft) as drafts:
            places = _watched(drafts)
            if arguments.draft is None:
                began = time.perf_counter()
                tokens = engine.generate(text, sampling=greedy, options=generation, drafts=drafts)
                ids = tuple(token.id for token in tokens)
                took, run = time.perf_counter() - began, engine.last_run
            else:
                chat_options = ChatOptions(generation=generation)
                chat = engine.chat(sampling=greedy, options=chat_options, drafts=drafts)
                with chat:
                    began = time.perf_counter()
                    ids = tuple(token.id for token in chat.say(text))
                    took, run = time.perf_counter() - began, chat.run
        answers.add(ids)
        return (len(ids) - 1) / (took - run.prefill_s), run.drafted, run.accepted, *places

    own = ("mtp", "auto") if arguments.draft is None else ("draft",)
    kinds = ("none", "ngram", *own)
    turns = {kind: lambda _, kind=kind: answer(kind) for kind in kinds}
    turns |= {name: lambda _, rival=rival: rival(text) for name, rival in rivals.items()}
    samples = take_turns(turns, arguments.rounds)
    assert len(answers) == 1, "drafts changed the text"
    names = ("tokens_per_s", "drafted", "accepted", "reached", "right")
    found = {kind: dict(zip(names, max(rounds), strict=True)) for kind, rounds in samples.items()}
    print(text.splitlines()[0], *(f"{of_kind['tokens_per_s']:.1f}" for of_kind in found.values()))
    return found


def _watched(drafts: Speculation | None) -> tuple[list[int], list[int]]:
    """Counts of drafts' places, see Sample, which grow with each check."""
    reached, right = list[int](), list[int]()
    if drafts is None:
        return reached, right
    learn = drafts.learn

    def watched(rows: int, accepted: int, seconds: float) -> None:
        for place in range(min(rows - 1, accepted + 1)):
            if place == len(reached):
                reached.append(0)
                right.append(0)
            reached[place] += 1
            right[place] += accepted > place
        learn(rows, accepted, seconds)

    drafts.learn = watched  # type: ignore[method-assign]
    return reached, right


def _modules() -> tuple[str, ...]:
    """Beginnings of modules of Python's library."""
    names = ("argparse", "csv", "heapq", "shutil", "textwrap")
    folder = Path(sysconfig.get_path("stdlib"))
    return tuple((folder / f"{name}.py").read_text()[:1000] for name in names)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("draft", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--texts", type=int, default=5, help="of each subject")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--forced", type=lambda text: tuple(map(float, text.split(","))))
    parser.add_argument("--kind", default="q4_k_m", help="of the model of --forced")
    parser.add_argument("--rival", type=Path, help="llama-server")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="seconds of the process in place of the wall's, for a busy machine; with --threads 1",
    )
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if (arguments.model is None) == (arguments.forced is None):
        parser.error("wanted either a model or --forced")
    return arguments


if __name__ == "__main__":
    main()
