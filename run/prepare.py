"""Runs the stages from a source to a model file and, if needed, a plan, unless they are cached."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hotsplit.artifacts.trial_file import FILES, Trial
from hotsplit.errors import HotsplitError, Interrupted
from hotsplit.model.modes import Mode
from hotsplit.profile.corpus.corpus import WINDOW
from hotsplit.profile.profile_config import MIN_TRAINING_WINDOWS
from hotsplit.run import stages
from hotsplit.run.cache_folder import Entry, RunCache, is_new
from hotsplit.run.choice import Choice, Wishes, choose, worth
from hotsplit.run.default_budgets import Room, room_here
from hotsplit.run.estimate import (
    WorkEstimate,
    decided,
    estimate,
    expected_tokens,
    tokens_for,
    too_long,
    words,
)
from hotsplit.run.keys import digest
from hotsplit.run.rates import Rates, machine_key
from hotsplit.run.source import RunSource
from hotsplit.run.stages import RunJob


@dataclass(frozen=True, kw_only=True)
class Ready:
    """The prepared model, how to run it (arguments of Engine.load), and the work that was done."""

    model: Path
    split: Path | None
    mode: Mode | None
    device: str | None
    context_length: int | None
    seconds: float  # of preparation
    made: tuple[str, ...]  # stages that were run; the others were cached


@dataclass
class StageSteps:
    """Obtains a job's artifacts; counts the stages that make them and announces them to the user.
    Each is made only when needed: for an output that is in the cache, missing inputs are not made
    again."""

    job: RunJob
    planned: WorkEstimate
    done: int = 0
    before: int = 0  # stages done when `planned` was estimated
    current: str = ""
    is_warned: bool = False  # that the machine was busy when it was measured
    made: list[str] = field(default_factory=list)

    def replan(self, tokens: int | None) -> None:
        """Estimates the remaining work anew after a look, and announces it."""
        self.planned, self.before = estimate(self.job, tokens), self.done
        if self.planned.works:
            self.job.say(self.planned.line)

    def model(self) -> Path:
        """The model without predictors; the source itself if it can be run as it is."""
        if not self.job.choice.is_converted:
            return self.job.source.path
        return self._obtain("model", stages.model_key(self.job), stages.make_model).file

    def look(self) -> Entry:
        return self._obtain("look", stages.look_key(self.job), stages.make_look, self.model)

    def profile(self, tokens: int) -> Entry:
        key = stages.profile_key(self.job, tokens)
        return self._obtain("profile", key, stages.make_profile, lambda: tokens, self.model)

    def with_predictors(self, tokens: int) -> Path:
        key, profile = stages.full_key(self.job, tokens), lambda: self.profile(tokens)
        return self._obtain("full", key, stages.make_full, profile, self.model).file

    def machine(self) -> Path:
        found = self._obtain("machine", machine_key(), stages.make_machine)
        if (note := stages.busy_note(found, stages.OF_MACHINE)) and not self.is_warned:
            self.job.say(note)
            self.is_warned = True
        return found.file

    def counts(self, tokens: int | None) -> Path | None:
        """The profile that a plan is made from; None if it needs none."""
        if tokens is not None:
            return self.profile(tokens).file
        return self.look().file if self.job.choice.needs_look(self.job.wishes) else None

    def plan(self, model: Path, tokens: int | None) -> Path:
        key, counts = stages.plan_key(self.job, tokens), partial(self.counts, tokens)
        return self._obtain("plan", key, stages.make_plan, lambda: model, self.machine, counts).file

    def tried(self, model: Path, tokens: int | None, plan: Path) -> Path | None:
        """The plan that runs after the trial of this one; None for the CPU alone."""
        key, counts = {"plan": stages.plan_key(self.job, tokens)}, partial(self.counts, tokens)
        found = self._obtain(
            "trial", key, stages.make_trial, lambda: model, self.machine, counts, lambda: plan
        )
        trial = Trial.load(found.file)
        self.job.say(trial.line)
        if trial.runs == "the plan":
            return plan
        return found.folder / FILES[trial.runs] if trial.runs in FILES else None

    def _obtain(
        self,
        kind: str,
        key: Mapping[str, Any],
        make: Callable[..., Mapping[str, Any]],
        *inputs: Callable[[], object],
    ) -> Entry:
        """An artifact made by make(job, *inputs, folder). If it must be made, its inputs are made
        first, then a line announces its stage."""

        def made() -> list[object]:
            return [each() for each in inputs]

        def told(folder: Path) -> Mapping[str, Any]:
            self.done += 1
            total = max(self.done, self.before + len(self.planned.works))
            work = next((w for w in self.planned.works if w.kind == kind), None)
            time_left = f" ({words(work.seconds, work.at_most)})" if work else ""
            label = work.label if work else kind
            self.current = f"stage {self.done} of {total}, {label}"
            self.job.say(f"stage {self.done} of {total}: {label}{time_left}")
            facts = make(self.job, *made(), folder)
            self.made.append(kind)
            return facts

        if self.job.cache.find(kind, key) is None:
            made()
        return self.job.cache.obtain(kind, key, self.job.source.name, told)


def job_of(
    source: RunSource,
    wishes: Wishes,
    cache: RunCache,
    *,
    room: Room | None = None,
    says_again: bool = False,
) -> RunJob:
    """Decides everything that can be decided before any stage runs, and says why, if that was not
    said of this source before or `says_again`. `room`: the memory to use. Raises HotsplitError for
    a source that cannot be run with these options."""
    here = room_here(wishes.vram, wishes.engine.device) if room is None else room
    choice = choose(source, wishes, here)
    # Else too few tokens to train predictors would be noticed only after the conversion.
    least = MIN_TRAINING_WINDOWS * min(WINDOW, choice.model.spec.context_length)
    if wishes.tokens is not None and wishes.tokens < least and choice.predictors is not False:
        raise HotsplitError(
            f"--tokens {wishes.tokens}: too few to train predictors, wanted {least:,} or more;"
            " without --tokens the number is chosen by the time that it takes"
        )
    if says_again or is_new(cache.folder, source.identity, choice.lines):
        for line in choice.lines:
            cache.say(line)
    job = RunJob(
        source=source,
        choice=choice,
        wishes=wishes,
        cache=cache,
        rates=Rates.load(cache.folder, digest(machine_key())),
    )
    return decided(job) if here.is_here else job


def estimate_of(job: RunJob) -> WorkEstimate:
    """The estimate of a job. Raises HotsplitError if the disk has no room."""
    found = estimate(job, expected_tokens(job))
    found.check_disk(job.cache.folder)
    return found


def prepare(job: RunJob, planned: WorkEstimate) -> Ready:
    """Runs the stages. Raises Interrupted, which names the stage; finished work is kept."""
    began = time.perf_counter()
    steps = StageSteps(job, planned)
    try:
        model, split = _run(job, steps)
    except KeyboardInterrupt as error:
        number = error.exit_code - 128 if isinstance(error, Interrupted) else 2
        where = f" in {steps.current}" if steps.current else ""
        raise Interrupted(
            f"interrupted{where}; the same command continues from there", number
        ) from error
    choice, wishes = job.choice, job.wishes
    is_planned = split is not None and not any(
        wishes.engine.rope
    )  # a scaling may follow from the context
    is_replaced = bool(choice.budgets) and split is None  # the trial chose the CPU alone
    return Ready(
        model=model,
        split=split,
        mode=None if split else wishes.engine.mode,
        device="cpu" if is_replaced else choice.device,
        context_length=None if is_planned else wishes.engine.context_length,
        seconds=time.perf_counter() - began,
        made=tuple(steps.made),
    )


def _run(job: RunJob, steps: StageSteps) -> tuple[Path, Path | None]:
    choice = job.choice
    tokens = None
    if choice.needs_look(job.wishes):
        tokens = _tokens(job, steps.look())
        if steps.made:
            steps.replan(tokens)
    elif choice.predictors:
        tokens = job.wishes.tokens
    model = steps.model() if tokens is None else steps.with_predictors(tokens)
    if not choice.budgets:
        return model, None
    return model, steps.tried(model, tokens, steps.plan(model, tokens))


def _tokens(job: RunJob, look: Entry) -> int | None:
    """Tokens to profile, by a look; None for no predictors. Tells the user the reason."""
    if job.choice.predictors is False:
        return None
    per_s, density = float(look.facts["tokens_per_s"]), float(look.facts["density"])
    tokens = tokens_for(job, per_s)
    if job.choice.predictors is None:
        is_worth, line = worth(job.choice.model, density, has_plan=bool(job.choice.budgets))
        job.say(line)
        if not is_worth:
            return None
    if tokens is None:
        job.say(too_long(per_s))
    return tokens


def summary(job: RunJob, planned: WorkEstimate) -> dict[str, Any]:
    """What was chosen, and the stages that are left, for reports in JSON."""
    choice: Choice = job.choice
    return {
        "source": job.source.name,
        "outtype": choice.outtype or job.source.own_type,
        "device": choice.device,
        "predictors": choice.predictors,
        "budgets": choice.budgets,
        "context_length": choice.context_length,
        "types": [asdict(each) for each in choice.types],
        "reasons": choice.lines,
        "stages": [asdict(work) for work in planned.works],
        "seconds": planned.seconds,
        "num_bytes": planned.num_bytes,
        "free_bytes": planned.free_bytes,
        "cache": str(job.cache.folder),
    }
