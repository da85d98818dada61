"""Runs the stages from a source to a model file and, if needed, a plan, unless they are cached."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hotsplit.errors import HotsplitError, Interrupted
from hotsplit.model.modes import Mode
from hotsplit.profile.config import MIN_TRAINING_WINDOWS
from hotsplit.profile.corpus.corpus import WINDOW
from hotsplit.run import stages
from hotsplit.run.cache_folder import Cache, Entry
from hotsplit.run.choice import Choice, Wishes, choose, room_here, worth
from hotsplit.run.estimate import (
    Estimate,
    decided,
    estimate,
    expected_tokens,
    tokens_for,
    too_long,
    words,
)
from hotsplit.run.keys import digest
from hotsplit.run.rates import Rates
from hotsplit.run.source import Source
from hotsplit.run.stages import Job

# Makes an artifact in a folder, from the model without predictors: (model, folder) -> facts.
Make = Callable[[Path, Path], Mapping[str, Any]]


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
class Steps:
    """Counts the stages and announces them to the user."""

    job: Job
    planned: Estimate
    done: int = 0
    before: int = 0  # stages done when `planned` was estimated
    current: str = ""
    made: list[str] = field(default_factory=list)

    def replan(self, tokens: int | None) -> None:
        """Estimates the remaining work anew after a look, and announces it."""
        self.planned, self.before = estimate(self.job, tokens), self.done
        if self.planned.works:
            self.job.say(self.planned.line)

    def obtain(
        self, kind: str, key: Mapping[str, Any], make: Callable[[Path], Mapping[str, Any]]
    ) -> Entry:
        """The artifact; if it must be made, a line announces its stage."""

        def told(folder: Path) -> Mapping[str, Any]:
            self.done += 1
            total = max(self.done, self.before + len(self.planned.works))
            work = next((w for w in self.planned.works if w.kind == kind), None)
            time_left = f" ({words(work.seconds, work.at_most)})" if work else ""
            label = work.label if work else kind
            self.current = f"stage {self.done} of {total}, {label}"
            self.job.say(f"stage {self.done} of {total}: {label}{time_left}")
            facts = make(folder)
            self.made.append(kind)
            return facts

        return self.job.cache.obtain(kind, key, self.job.source.name, told)


def job_of(
    source: Source,
    wishes: Wishes,
    texts: tuple[Path, ...],
    cache: Cache,
    *,
    is_verified: bool | None = None,
) -> Job:
    """Decides everything that can be decided before any stage runs, and says why. Raises
    HotsplitError for a source that cannot be run with these options."""
    choice = choose(source, wishes, room_here(wishes))
    _check_tokens(choice, wishes)
    for line in choice.lines:
        cache.say(line)
    job = Job(
        source=source, choice=choice, wishes=wishes, texts=texts, cache=cache,
        rates=Rates.load(cache.folder, digest(stages.machine_key())),
    )  # fmt: skip
    return decided(job, is_verified)


def _check_tokens(choice: Choice, wishes: Wishes) -> None:
    """Raises HotsplitError for too few tokens to train predictors, which would otherwise be found
    only after the conversion."""
    least = MIN_TRAINING_WINDOWS * min(WINDOW, choice.model.spec.context_length)
    if wishes.tokens is not None and wishes.tokens < least and choice.predictors is not False:
        raise HotsplitError(
            f"--tokens {wishes.tokens}: too few to train predictors, wanted {least:,} or more;"
            " without --tokens the number is chosen by the time that it takes"
        )


def estimate_of(job: Job) -> Estimate:
    """The estimate of a job. Raises HotsplitError if the disk has no room."""
    found = estimate(job, expected_tokens(job))
    found.check_disk(job.cache.folder)
    return found


def prepare(job: Job, planned: Estimate) -> Ready:
    """Runs the stages. An interrupt raises Interrupted, which names the stage; finished work is
    kept."""
    began = time.perf_counter()
    steps = Steps(job, planned)
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
    return Ready(
        model=model, split=split, mode=None if split else wishes.engine.mode, device=choice.device,
        context_length=None if is_planned else wishes.engine.context_length,
        seconds=time.perf_counter() - began, made=tuple(steps.made),
    )  # fmt: skip


def _run(job: Job, steps: Steps) -> tuple[Path, Path | None]:
    choice = job.choice
    base = Base(job, steps)
    tokens = None
    if choice.needs_look(job.wishes):
        tokens = _tokens(job, base.look())
        if steps.made:
            steps.replan(tokens)
    elif choice.predictors:
        tokens = job.wishes.tokens
    model = base.path() if tokens is None else base.with_predictors(tokens)
    return model, _plan(job, steps, base, model, tokens) if choice.budgets else None


@dataclass
class Base:
    """The model without predictors, and the artifacts made from it. Each is made only when needed:
    for an output that is in the cache, missing inputs are not made again."""

    job: Job
    steps: Steps
    _path: Path | None = None

    def path(self) -> Path:
        """The model file; the source itself if it can be run as it is."""
        job = self.job
        if self._path is None and not job.choice.is_converted:
            self._path = job.source.path
        elif self._path is None:
            key, make = stages.model_key(job), partial(stages.make_model, job)
            self._path = self.steps.obtain("model", key, make).file
        return self._path  # type: ignore[return-value]

    def look(self) -> Entry:
        make = partial(stages.make_look, self.job)
        return self._obtain("look", stages.look_key(self.job), lambda: make)

    def profile(self, tokens: int) -> Entry:
        make = partial(stages.make_profile, self.job, tokens)
        return self._obtain("profile", stages.profile_key(self.job, tokens), lambda: make)

    def with_predictors(self, tokens: int) -> Path:
        def make() -> Make:
            return partial(stages.make_full, self.job, self.profile(tokens))

        key = stages.full_key(self.job, tokens)
        return self._obtain("full", key, make).file

    def counts(self, tokens: int | None) -> Path:
        """The profile that a plan is solved for."""
        if tokens is None:
            return self.look().file
        return self.profile(tokens).file

    def _obtain(self, kind: str, key: Mapping[str, Any], make: Callable[[], Make]) -> Entry:
        """An artifact made from the model; its inputs are made before it is announced."""
        if self.job.cache.find(kind, key) is None:
            self.path()
            make()
        return self.steps.obtain(kind, key, lambda folder: make()(self.path(), folder))


def _tokens(job: Job, look: Entry) -> int | None:
    """The number of tokens to profile, decided by a look; None for no predictors. Tells the user
    the reason."""
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


def _plan(job: Job, steps: Steps, base: Base, model: Path, tokens: int | None) -> Path:
    def needed() -> tuple[Path, Path]:
        machine = steps.obtain("machine", stages.machine_key(), partial(stages.make_machine, job))
        return base.counts(tokens), machine.file

    key = stages.plan_key(job, tokens)
    if job.cache.find("plan", key) is None:
        needed()
    make = lambda folder: stages.make_plan(job, model, *needed(), folder)  # noqa: E731
    return steps.obtain("plan", key, make).file


def summary(job: Job, planned: Estimate) -> dict[str, Any]:
    """The report for --dry-run and --json."""
    choice: Choice = job.choice
    return {
        "source": job.source.name, "outtype": choice.outtype or job.source.own_type,
        "device": choice.device, "predictors": choice.predictors, "budgets": choice.budgets,
        "context_length": choice.context_length, "reasons": choice.lines,
        "stages": [asdict(work) for work in planned.works], "seconds": planned.seconds,
        "num_bytes": planned.num_bytes, "free_bytes": planned.free_bytes,
        "cache": str(job.cache.folder),
    }  # fmt: skip
