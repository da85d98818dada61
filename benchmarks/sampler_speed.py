"""Benchmarks the samplers in microseconds, each alone and in chains, for four vocabulary sizes.

    OMP_NUM_THREADS=1 python benchmarks/sampler_speed.py [--rounds N] [--rival PYTHON]

The logits are synthetic: as in a language model, a few tokens stand out from a broad bulk (Gumbel
noise over a Zipf law; the entropy is printed). The history is 512 tokens drawn from 40 ids. A
sampler measured alone starts from the whole vocabulary. With --rival (the Python of
build/llamacpp-venv), llama.cpp's default and greedy chains run on the same logits in the same
rounds; their times include filling the array of candidates and the calls from Python. Times are
processor time of one thread, so that other load matters less. Cases take turns within a round;
figures are medians of the rounds. The last line on stdout is one JSON object, which is also written
to results/."""

import argparse
import io
import json
import math
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import result_of, write_result

from hotsplit.measure.timing.interleave import take_turns
from hotsplit.options.generation_options import SamplingOptions
from hotsplit.runtime.generate.sampler_chain import SamplerChain

SIZES = (32_000, 49_152, 151_936, 262_144)
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1}
NO_BREAKERS = {"dry_sequence_breakers": ()}
CASES = {
    "default chain": {"seed": 1},
    "greedy": {"temperature": 0.0},
    "default, penalties": {"repeat_penalty": 1.1, "presence_penalty": 0.1, "seed": 1},
    "default, DRY": {"dry_multiplier": 0.8, "dry_penalty_last_n": -1, "seed": 1} | NO_BREAKERS,
    "default, no top-k": {"top_k": 0, "seed": 1},
    "everything": {
        "repeat_penalty": 1.1,
        "dry_multiplier": 0.8,
        "top_n_sigma": 4.0,
        "typ_p": 0.95,
        "xtc_probability": 0.5,
        "dynatemp_range": 0.2,
        "seed": 1,
    }
    | NO_BREAKERS,
    "greedy, penalties": {"temperature": 0.0, "repeat_penalty": 1.1},
    "penalties": OFF | {"repeat_penalty": 1.1},
    "dry": OFF | {"dry_multiplier": 0.8} | NO_BREAKERS,
    "top_n_sigma": OFF | {"top_n_sigma": 2.0},
    "top_k": OFF | {"top_k": 40},
    "typ_p": OFF | {"typ_p": 0.95},
    "top_p": OFF | {"top_p": 0.95},
    "min_p": OFF | {"min_p": 0.05},
    "xtc": OFF | {"xtc_probability": 1.0},
    "temperature": OFF | {"temperature": 0.8},
    "dynamic temperature": OFF | {"temperature": 0.8, "dynatemp_range": 0.2},
    "adaptive_p": OFF | {"samplers": ("adaptive_p",), "adaptive_target": 0.3},
    "mirostat_1": OFF | {"mirostat": 1},
    "mirostat_2": OFF | {"mirostat": 2},
    "logit_bias": OFF | {"logit_bias": tuple((i, 1.0) for i in range(100, 130)), "top_k": 40},
}
MIN_SECONDS = 0.03  # of a measurement
ROWS = 8  # of logits, used in turn, since in generation every step has new logits


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(1)
    result = result_of("samplers", rounds=arguments.rounds)
    for size in SIZES:
        result[str(size)] = _size(size, arguments)
    result["load_after"] = os.getloadavg()
    write_result(result, "samplers")
    print(json.dumps(result))


def _size(size: int, arguments: argparse.Namespace) -> dict[str, object]:
    rows = _logits(size)
    history = np.random.default_rng(1).integers(0, 40, 512).tolist()
    calls = {name: _call(rows, history, values) for name, values in CASES.items()}
    calls["logprobs, 5"] = _logprobs_call(rows)
    calls["default, half masked"] = _masked_call(rows, history)
    turns: dict[str, Callable[[int], Any]] = {
        name: partial(_microseconds, call) for name, call in calls.items()
    }
    if arguments.rival:
        turns["llama.cpp"] = lambda number: _rival(arguments.rival, rows)
    samples = take_turns(turns, arguments.rounds)
    rounds = samples.pop("llama.cpp", [{}])
    rival = {name: [each[name] for each in rounds] for name in rounds[0]}
    entropy = statistics.mean(_entropy_bits(row) for row in rows)
    print(f"{size:,} tokens, entropy {entropy:.1f} bits")
    middle = {name: statistics.median(values) for name, values in samples.items()}
    for name, value in middle.items():
        print(f"  {name:24} {value:9.1f} us")
    theirs = {name: statistics.median(values) for name, values in rival.items()}
    for name, value in theirs.items():
        print(f"  {'llama.cpp, ' + name:24} {value:9.1f} us   {value / middle[name]:.2f}x ours")
    return {"entropy_bits": entropy, "us": middle, "llama_cpp_us": theirs, "samples": samples}


def _logits(size: int) -> torch.Tensor:
    draw = np.random.default_rng(0)
    rank = np.stack([draw.permutation(size) for _ in range(ROWS)]) + 1.0
    return torch.from_numpy((-2.5 * np.log(rank) + draw.gumbel(size=rank.shape)).astype(np.float32))


def _entropy_bits(row_V: torch.Tensor) -> float:
    log_V = torch.log_softmax(row_V.double(), 0)
    return float(-(log_V.exp() * log_V).sum() / math.log(2))


def _call(rows: torch.Tensor, history: list[int], values: dict) -> Callable[[int], object]:
    chain = SamplerChain(SamplingOptions(**values), rows.shape[1])
    return lambda number: chain.sample(rows[number % ROWS], history)


def _masked_call(rows: torch.Tensor, history: list[int]) -> Callable[[int], object]:
    chain = SamplerChain(SamplingOptions(seed=1), rows.shape[1])
    mask = torch.from_numpy(np.random.default_rng(2).random(rows.shape[1]) < 0.5)
    return lambda number: chain.sample(rows[number % ROWS], history, mask)


def _logprobs_call(rows: torch.Tensor) -> Callable[[int], object]:
    chain = SamplerChain(SamplingOptions(), rows.shape[1])
    return lambda number: chain.logprobs(rows[number % ROWS], 5)


def _microseconds(call: Callable[[int], object], number: int) -> float:
    call(0)
    began, count = time.thread_time(), 0
    while (passed := time.thread_time() - began) < MIN_SECONDS:
        call(count)
        count += 1
    return 1e6 * passed / count


# Run by the rival's Python: float32 [rows, V] on stdin, microseconds per token as JSON on stdout.
_RIVAL = """
import ctypes, io, json, sys, time
import llama_cpp as llama, numpy as np
rows = np.load(io.BytesIO(sys.stdin.buffer.read()))
size = rows.shape[1]
chains = {"default chain": [("top_k", 40), ("top_p", 0.95, 0), ("min_p", 0.05, 0),
                            ("temp", 0.8), ("dist", 1)],
          "greedy": [("greedy",)]}
array = np.zeros(size, [("id", np.int32), ("logit", np.float32), ("p", np.float32)])
address = array.ctypes.data_as(ctypes.POINTER(llama.llama_token_data))
ids, found = np.arange(size, dtype=np.int32), {}
for name, samplers in chains.items():
    chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
    for sampler, *values in samplers:
        add = getattr(llama, "llama_sampler_init_" + sampler)(*values)
        llama.llama_sampler_chain_add(chain, add)
    passed, count = 0.0, -1
    while passed < 0.03:
        began = time.thread_time()
        array["id"], array["logit"] = ids, rows[count % len(rows)]
        data = llama.llama_token_data_array(data=address, size=size, selected=-1, sorted=False)
        llama.llama_sampler_apply(chain, ctypes.byref(data))
        passed += time.thread_time() - began if count >= 0 else 0.0
        count += 1
    found[name] = 1e6 * passed / count
print(json.dumps(found))
"""


def _rival(python: Path, rows: torch.Tensor) -> dict[str, float]:
    content = io.BytesIO()
    np.save(content, rows.numpy())
    done = subprocess.run(
        [python, "-c", _RIVAL], input=content.getvalue(), stdout=subprocess.PIPE, check=True
    )
    return json.loads(done.stdout)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rival", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
