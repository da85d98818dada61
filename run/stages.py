"""The stages of `hotsplit run`, each of which makes an artifact in the cache.

Each stage does the work of a command (convert, profile, calibrate or solve). An artifact's key
contains its inputs and the options that its content depends on, except the device that computes it.
`prepare` decides which stages run, and in which order."""

import hashlib
import lzma
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.split_file import Split
from hotsplit.artifacts.trial_file import FILES, Winner
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig, ConvertReport
from hotsplit.costs.part_bytes import read_share
from hotsplit.errors import DoesNotFitError
from hotsplit.files.atomic import partial_file
from hotsplit.files.steady import reading
from hotsplit.files.written import Written
from hotsplit.measure.calibrate.calibrate import CalibrateConfig, busy_words, calibrate
from hotsplit.measure.calibrate.drive import LEAST_BYTES
from hotsplit.measure.evaluate.verify_conversion import verify
from hotsplit.profile.collect import profile
from hotsplit.profile.corpus.corpus import read_windows
from hotsplit.profile.predictors.check import check_predictors
from hotsplit.profile.profile_config import ProfileConfig
from hotsplit.profile.report import warnings
from hotsplit.run.cache_folder import Entry, RunCache
from hotsplit.run.choice import Choice, Wishes
from hotsplit.run.keys import STAGES, conversion_key, identity_of_texts
from hotsplit.run.rates import Rates, cpu_alone_name, machine_key
from hotsplit.run.source import RunSource
from hotsplit.run.trial import PlanTimes, Prediction, measured_by, tried
from hotsplit.runtime.step.workspace import workspace_bytes
from hotsplit.runtime.text.codec import TextCodec
from hotsplit.solver.prediction import (
    check_whole_host,
    cpu_alone_seconds,
    inputs_for,
    parts_of,
    write_obvious,
)
from hotsplit.solver.scales import Scales, scaled
from hotsplit.solver.solve import SolveConfig, solve
from hotsplit.system.processors import load_now
from hotsplit.system.progress import Advance, progress

LOOK_TOKENS = 512
EXPERT_TOKENS = 2048  # whose experts are recorded; more hardly improve a plan (docs/solver.md)
MODEL, LOOK, PROFILE, MACHINE, PLAN, TRIAL = (
    STAGES[kind].file for kind in ("model", "look", "profile", "machine", "plan", "trial")
)
PREDICTORS = "predictors"
OF_MACHINE = ("plan", "trial")  # kinds of artifacts that are made by a machine's figures
DEFAULT_TEXT = Path(__file__).with_name("default_corpus") / "default.txt.xz"


@dataclass(frozen=True, kw_only=True)
class RunJob:
    """One run: its inputs, the choices made, and the cache."""

    source: RunSource
    choice: Choice
    wishes: Wishes
    cache: RunCache
    rates: Rates
    is_verified: bool = True

    def say(self, line: str) -> None:
        self.cache.say(line)


# ---- keys ---------------------------------------------------------------------------------------


def model_key(job: RunJob) -> dict[str, Any]:
    """The key of the model without predictors, converted or as it is."""
    source = job.source
    if not job.choice.is_converted:
        return {"source": source.identity}
    return conversion_key(source.identity, job.choice.outtype, job.choice.layout, source.activation)


def look_tokens(job: RunJob) -> int:
    """The tokens of a look: of a mixture of experts, as many as its plan is priced with."""
    if not job.choice.model.spec.has_experts:
        return LOOK_TOKENS
    return job.wishes.tokens or EXPERT_TOKENS


def look_key(job: RunJob) -> dict[str, Any]:
    return profile_key(job, look_tokens(job))


def profile_key(job: RunJob, tokens: int) -> dict[str, Any]:
    texts = identity_of_texts(job.wishes.corpora) if job.wishes.corpora else _text_key()["text"]
    return {"model": model_key(job), "texts": texts, "tokens": tokens}


def _text_key() -> dict[str, Any]:
    return {"text": hashlib.sha256(DEFAULT_TEXT.read_bytes()).hexdigest()[:24]}


def full_key(job: RunJob, tokens: int) -> dict[str, Any]:
    return {"profile": profile_key(job, tokens)}


def plan_key(job: RunJob, tokens: int | None) -> dict[str, Any]:
    """The key of a plan. `tokens` are those of the profile with predictors; None without."""
    of_profile = {"model": model_key(job)}
    if tokens is not None:
        of_profile = profile_key(job, tokens)
    elif job.choice.needs_look(job.wishes):
        of_profile = look_key(job)
    texts = job.wishes.engine.num_sequences
    return {
        "profile": of_profile,
        "predictors": tokens is not None,
        "machine": machine_key(),
        "kv_offload": job.wishes.engine.kv_offload,
        "budgets": job.choice.budgets,
        "context": job.choice.context_length,
        "mode": job.wishes.engine.mode,
        "max loss": job.wishes.engine.max_loss,
        **({"rope": job.wishes.engine.rope} if any(job.wishes.engine.rope) else {}),
        **({"texts": texts} if texts > 1 else {}),
    }


# ---- stages -------------------------------------------------------------------------------------


def texts_of(corpora: tuple[Path, ...], cache: RunCache) -> tuple[Path, ...]:
    """The texts to profile on: the user's, or the package's, unpacked into the cache."""

    def unpack(folder: Path) -> Mapping[str, Any]:
        with partial_file(folder / STAGES["corpus"].file) as partial:
            partial.write_bytes(lzma.decompress(DEFAULT_TEXT.read_bytes()))
        return {}

    return corpora or (cache.obtain("corpus", _text_key(), "the package", unpack).file,)


def make_model(job: RunJob, folder: Path) -> Mapping[str, Any]:
    """Converts the source to a model file of the chosen type."""
    source = job.source
    config = ConvertConfig(
        source=source.path,
        output=folder / MODEL,
        outtype=job.choice.outtype,
        layout=job.choice.layout,
        activation=source.activation,
        tokenizer=source.tokenizer,
        force=True,
    )

    def check(advance: Advance, written: Written) -> list[str]:
        advance.begin("verifying")
        return verify(written).lines

    report = _convert(job, config, "converting", check if job.is_verified else None)
    job.rates.note(conversion_name(job), report.num_bytes / report.seconds)
    return {"model_id": report.model_id}


def conversion_name(job: RunJob) -> str:
    """The name under which a conversion's rate is stored."""
    more = " and verify" if job.is_verified else ""
    return f"convert {job.source.own_type} to {job.choice.outtype}{more}"


def make_look(job: RunJob, model: Path, folder: Path) -> Mapping[str, Any]:
    """Profiles a few tokens: how many neurons fire, and tokens counted per second."""
    texts = texts_of(job.wishes.corpora, job.cache)
    tokens = available(model, texts, look_tokens(job))
    config = ProfileConfig(
        model=model,
        corpora=texts,
        output=folder / LOOK,
        max_tokens=tokens,
        device="cpu",
        force=True,
    )
    heard: list[tuple[float, float]] = []  # (time, tokens counted since the last call)

    with reading(model, *texts), progress("looking", tokens, "tokens") as advance:

        def on_tokens(count: float) -> None:
            heard.append((time.perf_counter(), count))
            advance(count)

        report = profile(config, on_tokens)
    density = sum(report.density_L) / len(report.density_L)
    per_s = counted_per_s(heard, report.seconds)
    job.rates.note("count", per_s * flop_per_token(job.choice.model))
    return {"density": density, "tokens_per_s": per_s}


def counted_per_s(heard: Sequence[tuple[float, float]], seconds: float) -> float:
    """Tokens per second, from (time, tokens counted since the last call). The first call, before
    the first window, has none. If that was all, `seconds` is taken, the whole profile's time."""
    (first, tokens), (last, _) = heard[0], heard[-1]
    if len(heard) == 1:
        return tokens / seconds
    return sum(count for _, count in heard[1:]) / (last - first)


def make_profile(job: RunJob, tokens: int, model: Path, folder: Path) -> Mapping[str, Any]:
    """Counts firings and trains predictors; resumes an interrupted profile."""
    texts = texts_of(job.wishes.corpora, job.cache)
    count = job.wishes.tokens or available(model, texts, tokens)
    config = ProfileConfig(
        model=model,
        corpora=texts,
        output=folder / PROFILE,
        max_tokens=count,
        train_predictors=folder / PREDICTORS,
        device="cpu",
        force=True,
    )
    with reading(model, *texts), progress("profiling", count, "tokens") as advance:
        report = profile(config, advance)
    if report.quality is not None:
        job.say(
            f"mode {report.quality.mode} on text that it was not trained on: {report.quality.line}"
        )
    for line in warnings(report):
        job.say(line)
    rate = report.num_tokens / report.seconds
    job.rates.note("train", rate * flop_per_token(job.choice.model))
    return {"tokens": report.num_tokens}


def make_full(job: RunJob, profiled: Entry, model: Path, folder: Path) -> Mapping[str, Any]:
    """Adds the predictors to the model in one file."""

    def check(advance: Advance, written: Written) -> list[str]:
        found = check_predictors(written.path)
        return ["", *([found.line] if found and found.is_near_chance else [])]

    config = ConvertConfig(
        source=model, output=folder / MODEL, predictors=profiled.folder / PREDICTORS, force=True
    )
    return {"model_id": _convert(job, config, "adding predictors", check).model_id}


def _convert(
    job: RunJob,
    config: ConvertConfig,
    label: str,
    check: Callable[[Advance, Written], list[str]] | None,
) -> ConvertReport:
    with reading(config.source), progress(label, None, "MB") as advance:
        report = convert(
            config,
            on_bytes=lambda count: advance(count / 1e6),
            on_total=lambda count: advance.set_total(count / 1e6),
            verify=partial(check, advance) if check else None,
        )
    for line in (*(f"note: {note}" for note in report.notes), report.verified):
        if line:
            job.say(line)
    return report


def make_machine(job: RunJob, folder: Path) -> Mapping[str, Any]:
    """Calibrates this machine, and keeps what shows that other programs were running. The drive is
    that of the model's file, or of the cache."""
    load, file = load_now(), job.source.path
    is_there = file.is_file() and file.stat().st_size >= LEAST_BYTES
    config = CalibrateConfig(
        output=folder / MACHINE, force=True, drives=(file,) if is_there else ()
    )
    with progress("measuring the machine", None, "timings") as advance:
        machine = calibrate(config, on_probe=advance)
    return {"cpu": machine.cpu_name, "busy": busy_words(machine, load)}


def busy_note(machine: Entry, made: Sequence[str]) -> str:
    """What to do about figures that were measured while other programs ran; "" if none did. `made`:
    the kinds of artifacts that come from them."""
    busy = machine.facts.get("busy")
    if not isinstance(busy, str) or not busy:
        return ""
    return (
        f"note: this machine was busy when it was measured ({busy}): predictions may be far off;"
        f" measure it again when it is idle: hotsplit cache clear {' '.join(['machine', *made])}"
    )


def make_plan(
    job: RunJob, model: Path, machine: Path, profiled: Path | None, folder: Path
) -> Mapping[str, Any]:
    """Solves for a plan."""
    config = _solve_config(job, model, machine, profiled, folder / PLAN)
    with reading(*config.inputs):
        report = solve(config, workspace_bytes)
    if report.num_on_drive:
        raise DoesNotFitError(
            f"{job.source.name}: {report.num_on_drive:,} of its experts fit into no memory; the"
            " drive is read for the CPU alone so far: --vram 0 runs it there"
        )
    for note in report.notes:
        job.say(f"note: {note}")
    return {"mode": report.mode, "tokens_per_s": report.tokens_per_s}


def _solve_config(
    job: RunJob, model: Path, machine: Path, profiled: Path | None, output: Path
) -> SolveConfig:
    return SolveConfig(
        model=model,
        profile=profiled,
        machine=machine,
        output=output,
        vram_budget_bytes=job.choice.budgets,
        context_length=job.choice.context_length,
        mode=job.wishes.engine.mode,
        max_loss=job.wishes.engine.max_loss,
        force=True,
        kv_offload=job.wishes.engine.kv_offload,
        rope_scaling=job.wishes.engine.rope_scaling,
        rope_scale=job.wishes.engine.rope_scale,
        num_sequences=job.wishes.engine.num_sequences,
    )


def make_trial(
    job: RunJob, model: Path, machine: Path, profiled: Path | None, split: Path, folder: Path
) -> Mapping[str, Any]:
    """Tries a plan, and further ones if it is not what was predicted."""
    plan = Split.load(split)
    paths: dict[Winner, Path] = {name: folder / file for name, file in FILES.items()}
    config = _solve_config(job, model, machine, profiled, paths["the second plan"])

    def by(name: Winner) -> PlanTimes:
        own, context = job.wishes.engine, job.choice.context_length
        if name == "the CPU alone":
            check_whole_host(inputs)
            return measured_by(model, None, replace(own, device="cpu", context_length=context))
        if not any(own.rope):  # a scaling may follow from the context
            own = replace(own, context_length=None)
        path = split if name == "the plan" else paths[name]
        return measured_by(model, path, replace(own, device=job.choice.device, mode=None))

    def again(scales: Scales) -> float:
        scaled(inputs.machine, scales).save(folder / MACHINE)
        return solve(replace(config, machine=folder / MACHINE), workspace_bytes).objective_s

    inputs = inputs_for(plan, config, workspace_bytes)
    prediction = Prediction(
        token_s=plan.objective_s,
        parts_s=parts_of(plan, inputs),
        cpu_alone_s=cpu_alone_seconds(inputs),
        obvious_s=write_obvious(plan, inputs, paths),
    )
    trial = tried(prediction, by, again, tries_all=job.choice.model.spec.has_experts)
    trial.save(folder / TRIAL)
    if (cpu_s := trial.measured_s.get("the CPU alone")) is not None:
        job.rates.note(cpu_alone_name(plan.model_id), 1 / cpu_s)
    return {}


# ---- amounts ------------------------------------------------------------------------------------


def available(model: Path, texts: tuple[Path, ...], most: int) -> int:
    """The number of tokens that can be profiled in the texts, at most `most`."""
    file = ModelFile.load(model)
    windows = read_windows(
        texts,
        TextCodec.of(file),
        context_length=file.spec.context_length,
        max_tokens=most,
        seed=0,
        vocab_size=file.spec.vocab_size,
    )
    return windows.num_tokens


def flop_per_token(model: ModelFile) -> float:
    """Floating-point operations per token: two per element of all matrices, of experts as many as a
    token chooses, but of embeddings only if it is also the head."""
    found = 0.0
    for name, entry in model.tensors.items():
        is_looked_up = name in model.spec.tables and not (
            name == "token_embd.weight" and model.is_tied
        )
        if len(entry.shape) >= 2 and not is_looked_up:
            layer = name.split(".")[1] if name.startswith("blk.") else ""
            if layer == str(model.spec.num_layers):  # the draft block
                continue
            share = read_share(model, int(layer), name.split(".", 2)[2]) if layer else 1.0
            found += 2.0 * share * prod(entry.shape)
    return found
