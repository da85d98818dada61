"""Formats `generate`'s output about its texts: events per token, a report, lines for the user."""

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from hotsplit.system.sizes import format_bytes

if TYPE_CHECKING:
    from hotsplit.runtime.engine import Engine
    from hotsplit.runtime.generate.generation import Run, Token


@dataclass
class Writing:
    """A generated text, for the report."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    reasoning: str = ""  # of an answer
    logprobs: list[dict] = field(default_factory=list)


def event_of(number: int, token: "Token") -> dict:
    more: dict = {} if token.logprob is None else logprobs_of(token)
    if token.is_reasoning:
        more["is_reasoning"] = True
    return {"type": "token", "prompt": number, "id": token.id, "text": token.text, **more}


def logprobs_of(token: "Token") -> dict:
    most = [{"id": i, "logprob": logprob} for i, logprob in token.logprobs]
    return {"logprob": token.logprob, "top_logprobs": most}


def report_of(
    engine: "Engine", writings: list[Writing], num_threads: int, seed: int | None, *, is_many: bool
) -> tuple[dict, list[str]]:
    """The report, and its lines for the user; `seed`: one that was drawn."""
    from hotsplit.runtime.generate.generation import NOT_STOPPED

    roles = engine.bytes_by_role
    memory = [asdict(report) for report in engine.memory_report()]
    runs = engine.last_runs if is_many else [engine.last_run]
    texts = [
        {
            "text": w.text,
            **({"reasoning": w.reasoning} if w.reasoning else {}),
            "token_ids": w.ids,
            **asdict(run),
            "prefill_per_s": run.prefill_per_s,
            "decode_per_s": run.decode_per_s,
            **({"logprobs": w.logprobs} if w.logprobs else {}),
        }
        for w, run in zip(writings, runs, strict=True)
    ]
    common: dict[str, Any] = {
        "mode": engine.mode,
        "load_s": engine.load_s,
        "num_threads": num_threads,
        "bytes": roles,
        "memory": memory,
    }
    if seed is not None:
        common |= {"seed": seed}
    cache = engine.neuron_cache
    if cache is not None:
        common |= {"neuron_cache": cache.facts}
    report = {**common, "texts": texts} if is_many else {**texts[0], **common}
    where = ", ".join(
        f"{role.upper()} role {format_bytes(sum(items.values()))}" for role, items in roles.items()
    )
    where += "".join(
        f"; {found['device']} reserved at most {format_bytes(found['peak_reserved'])}"
        for found in memory
    )
    scaling = engine.model.spec.rope_scaling
    if scaling.kind != "none":
        where += f"; rotary embeddings: {scaling.words}"
    ends = [run.stopped_by for run in runs]
    ends = ["Ctrl-C or a signal" if end == NOT_STOPPED else end for end in ends]
    line = (
        f"[{engine.mode} on {engine.device}; loaded in {engine.load_s:.2f} s; {_speed(runs)},"
        f" {num_threads} threads; {where}; {'' if seed is None else f'seed {seed}; '}stopped by"
        f" {', '.join(dict.fromkeys(ends))}]"
    )
    return report, [line] if cache is None else [line, f"[{cache.line}]"]


def _speed(runs: "list[Run]") -> str:
    if len(runs) > 1:
        tokens, seconds = sum(r.decode_tokens for r in runs), max(r.decode_s for r in runs)
        rate = tokens / seconds if seconds else 0.0
        return f"{len(runs)} texts together; decode {tokens} tokens, {rate:.1f}/s"
    run = runs[0]
    if not run.prefill_s:
        return f"interrupted in the prompt of {run.prefill_tokens} tokens"
    kept = f" ({run.cached_tokens} kept)" if run.cached_tokens else ""
    drafts = f", {run.accepted} of {run.drafted} drafted right" if run.drafted else ""
    return (
        f"prefill {run.prefill_tokens} tokens{kept}, {run.prefill_per_s:.1f}/s; decode"
        f" {run.decode_tokens} tokens, {run.decode_per_s:.1f}/s{drafts}"
    )
