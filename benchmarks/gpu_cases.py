"""The cases of gpu.py: one plan in one mode, and its rival, each in a separate process, in rounds.

A round runs every case once and its rival right after it, so that other load affects both; figures
are medians of the rounds."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from gpu_rival import GpuRival
from worker_process import Process, ProcessError

RIVAL_SECONDS = 0.7  # of decoding per measurement of a rival
FIRST_TOKENS = 4  # that a rival decodes before its speed is known


@dataclass(frozen=True, kw_only=True)
class Amount:
    """How much is measured: tokens of a prompt of half the context, and the steps after it."""

    prompt: int
    steps: int
    vocab_size: int
    rounds: int


@dataclass(kw_only=True)
class BudgetCase:
    """`limit_s` and `predicted_s` are seconds per token: a plan's limit, and the solver's
    prediction."""

    name: str
    mode: str
    budget_bytes: int
    limit_s: float
    predicted_s: float | None
    plan: dict[str, Any]  # the solver's report on it, for the JSON
    process: Process
    rival: GpuRival | None = None
    # load_s, why the step is not native (None: it is), and the least tokens of a pass that streams
    # cold weights (None: none does).
    loaded: dict[str, Any] = field(default_factory=dict)
    memory: list[dict[str, Any]] = field(default_factory=list)
    prefill_s: list[float] = field(default_factory=list)  # of the whole prompt
    decode_s: list[float] = field(default_factory=list)  # of one step
    ffn_bytes: int = 0  # read by one step, if the engine counts them
    rival_prefill_s: list[float] = field(default_factory=list)
    rival_decode_s: list[float] = field(default_factory=list)
    error: str | None = None
    rival_error: str | None = None

    @property
    def is_measured(self) -> bool:
        return self.error is None and bool(self.decode_s)


def load(cases: Sequence[BudgetCase]) -> None:
    """Loads the cases one by one, because each reads the whole file."""
    for case in cases:
        try:
            case.loaded = case.process.ask("load")
        except ProcessError as error:
            fail(case, error)


def fail(case: BudgetCase, error: ProcessError) -> None:
    case.error = str(error)
    case.process.close()


def measure(cases: Sequence[BudgetCase], amount: Amount, deadline: float) -> None:
    """Adds samples to the cases; the first round warms up. Starts no case after the deadline, a
    value of `time.monotonic`."""
    generator = random.Random(0)
    for number in range(amount.rounds + 1):
        ids = [generator.randrange(3, amount.vocab_size) for _ in range(amount.prompt)]
        for case in cases:
            if time.monotonic() > deadline:
                return
            if case.error is not None:
                continue
            try:
                _ours(case, amount, ids, is_warm=number > 0)
            except ProcessError as error:
                fail(case, error)
            if case.rival is not None:
                _theirs(case, case.rival, amount, ids, is_warm=number > 0)


def _ours(case: BudgetCase, amount: Amount, ids: list[int], *, is_warm: bool) -> None:
    prefill = case.process.ask("prefill", ids=ids)["seconds"]
    found = case.process.ask("decode", steps=amount.steps, start=amount.prompt)
    case.memory = case.process.ask("memory")["devices"]
    if is_warm:
        case.prefill_s.append(prefill)
        case.decode_s.append(found["seconds"] / amount.steps)
        case.ffn_bytes = found["ffn_bytes"] // amount.steps


def _theirs(
    case: BudgetCase, rival: GpuRival, amount: Amount, ids: list[int], *, is_warm: bool
) -> None:
    threads = case.process.about["threads"]
    count = FIRST_TOKENS
    if case.rival_decode_s:
        count = max(FIRST_TOKENS, min(amount.steps, round(RIVAL_SECONDS / case.rival_decode_s[-1])))
    try:
        (prefill,) = rival.process.ask("prefill", threads=threads, ids=ids)["seconds"]
        decode = rival.process.ask("decode", threads=threads, ids=ids[:count], start=amount.prompt)[
            "seconds"
        ]
    except ProcessError as error:
        rival.process.close()
        case.rival, case.rival_error = None, str(error)
        case.rival_decode_s, case.rival_prefill_s = [], []
        return
    if is_warm:
        case.rival_prefill_s.append(prefill)
        case.rival_decode_s.append(sum(decode) / count)


def close(cases: Sequence[BudgetCase]) -> None:
    for case in cases:
        if case.error is None:
            case.process.close()
        if case.rival is not None:
            case.rival.process.close()


def row(case: BudgetCase, amount: Amount) -> dict[str, Any]:
    """The figures of a case, for the JSON."""
    content: dict[str, Any] = {
        "name": case.name,
        "mode": case.mode,
        "budget_bytes": case.budget_bytes,
        "limit_s": case.limit_s,
        "predicted_s": case.predicted_s,
        "plan": case.plan,
        "loaded": case.loaded,
        "memory": case.memory,
        "error": case.error,
        "rival_error": case.rival_error,
    }
    if not case.is_measured:
        return content
    decode = median(case.decode_s)
    content |= {
        "decode_samples_s": case.decode_s,
        "prefill_samples_s": case.prefill_s,
        "decode_tokens_per_s": 1 / decode,
        "prefill_tokens_per_s": amount.prompt / median(case.prefill_s),
        "share_of_limit": case.limit_s / decode,
        "ffn_bytes": case.ffn_bytes,
    }
    if case.predicted_s is not None:
        content["predicted_over_measured"] = case.predicted_s / decode
    if case.rival_decode_s:
        content |= _beside(case)
    return content


def _beside(case: BudgetCase) -> dict[str, Any]:
    """Ratios per round: other load slows both alike."""
    assert case.rival is not None
    decode = zip(case.rival_decode_s, case.decode_s, strict=False)
    prefill = zip(case.rival_prefill_s, case.prefill_s, strict=False)
    return {
        "rival_layers": case.rival.num_layers,
        "rival_gpu_bytes": case.rival.gpu_bytes,
        "rival_decode_samples_s": case.rival_decode_s,
        "rival_prefill_samples_s": case.rival_prefill_s,
        "times_rival": median(theirs / ours for theirs, ours in decode),
        "times_rival_prefill": median(theirs / ours for theirs, ours in prefill),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A table: one line per case, then the targets."""
    lines = [
        f"{'case':22} {'tok/s':>8} {'limit':>6} {'pred.':>6} {'rival':>8} {'prefill':>8}"
        f" {'rival':>8}  VRAM of budget"
    ]
    for found in rows:
        name = f"{found['name']} {found['mode']}"
        if "decode_tokens_per_s" not in found:
            lines.append(f"{name:22} {found.get('error') or 'not measured: out of time'}")
            continue
        predicted = found.get("predicted_over_measured")
        lines.append(
            f"{name:22} {found['decode_tokens_per_s']:8.1f} {found['share_of_limit']:6.0%}"
            f" {_or_dash(predicted, '6.0%')} {_times(found.get('times_rival'))}"
            f" {found['prefill_tokens_per_s']:8.0f} {_times(found.get('times_rival_prefill'))}"
            f"  {_memory(found)}"
        )
    lines.append(
        "limit: share of what the plan could reach at best (wanted 60 %); pred.: predicted over"
        " measured seconds (wanted 85-115 %); rival: times llama.cpp's speed"
        " (wanted 5x within a budget; resident 0.9x dense, 1.5x predicted)"
    )
    return "\n".join(lines)


def _or_dash(value: float | None, form: str) -> str:
    return format("-", f">{form.split('.')[0]}") if value is None else format(value, form)


def _times(value: float | None) -> str:
    return f"{'no rival' if value is None else f'{value:.2f}x':>8}"


def _memory(found: dict[str, Any]) -> str:
    peak = sum(device["peak_reserved"] for device in found["memory"])
    budget = found["budget_bytes"]
    within = "ok" if peak <= budget else "OVER"
    return f"{peak / 2**30:.2f} of {budget / 2**30:.2f} GiB {within}"
