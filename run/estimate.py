"""Estimates the work before the first token: stages, their seconds and their bytes on disk.

Seconds follow from sizes and from this machine's rates: short measurements of reading, packing,
writing and multiplying, or the rates of earlier stages (`rates`); calibrating and solving count
with their time limits."""

import shutil
from dataclasses import dataclass, replace

from hotsplit.costs.part_bytes import all_neuron_bytes
from hotsplit.errors import HotsplitError
from hotsplit.measure.calibrate import calibrate, cpu_bandwidth
from hotsplit.run import stages
from hotsplit.run.cache_folder import VARIABLE
from hotsplit.run.choice import predictor_share
from hotsplit.run.rates import encode_bytes_per_s, machine_key, matmul_flops, unpack_values_per_s
from hotsplit.runtime.resolved_options import device_of
from hotsplit.system.sizes import format_bytes

# Counting firings reached 0.43 to 0.63 of the rate of bare matrix products (25 M and 68 M
# parameters in q8_0, two shared cores of a Zen 4); with training it took 2.9 to 3.3 times as long.
COUNT_SHARE, TRAIN_FACTOR = 0.5, 3.0
# Counting a mixture reached 1.4 and 1.6 times that rate (layers of the shapes of Qwen3-30B-A3B and
# Qwen3.6-35B-A3B in Q4_K_M, two cores of a Zen 4; docs/log/profile.md).
MIXTURE_SHARE = 1.5
# Verifying 134 M values, which one thread unpacks in 0.5 s, took 4 to 6 s. A checkpoint adds 4 s of
# processor time, to import transformers.
VERIFY_UNPACKINGS, IMPORT_S = 9.0, 4.0
VERIFY_LIMIT_S = 60.0  # maximum for a verification that was not requested
SOLVE_LIMIT_S = 30.0  # for the integer program
PATIENCE_S = 15 * 60.0  # maximum for a profile that was not requested
TOKENS = (131_072, 65_536, 32_768, 16_384)
TRIAL_S = 3.0  # of a trial's steps and checks, besides its two loads
LOADED_BYTES_PER_S = 1e9  # of a model in the page cache, copied and tiled by two cores
SPARE_BYTES = 256 << 20  # kept free on the disk


@dataclass(frozen=True)
class Work:
    """A stage to run. With `at_most`, its seconds are an upper bound, not an estimate."""

    kind: str
    label: str
    seconds: float
    num_bytes: int
    at_most: bool = False


@dataclass(frozen=True, kw_only=True)
class WorkEstimate:
    """The stages to run, and the free disk space."""

    works: tuple[Work, ...]
    free_bytes: int

    @property
    def seconds(self) -> float:
        return sum(work.seconds for work in self.works)

    @property
    def num_bytes(self) -> int:
        return sum(work.num_bytes for work in self.works)

    @property
    def line(self) -> str:
        if not self.works:
            return "nothing to prepare before the first token"
        parts = ", ".join(
            f"{each.label} {words(each.seconds, each.at_most)}" for each in self.works
        )
        return (
            f"before the first token: {words(self.seconds)} and {format_bytes(self.num_bytes)} of"
            f" disk, only once ({parts})"
        )

    def check_disk(self, folder: object) -> None:
        """Raises HotsplitError if the disk has no room for the stages' outputs."""
        if self.works and self.num_bytes + SPARE_BYTES > self.free_bytes:
            raise HotsplitError(
                f"{folder}: about {format_bytes(self.num_bytes)} would be written, but only"
                f" {format_bytes(self.free_bytes)} are free; set {VARIABLE} to a folder on another"
                " disk, or make room with hotsplit cache clear"
            )


def words(seconds: float, at_most: bool = False) -> str:
    about = "up to" if at_most else "about"
    if seconds < 10:
        return "a few seconds"
    if seconds < 100:
        return f"{about} {10 * round(seconds / 10)} s"
    if seconds < 5400:
        return f"{about} {round(seconds / 60)} min"
    return f"{about} {seconds / 3600:.1f} h"


def estimate(job: stages.RunJob, tokens: int | None) -> WorkEstimate:
    """Estimates the work that is not cached. `tokens`: to train predictors on; None without."""
    works = [] if tokens is None else _of_profile(job, tokens)
    if job.choice.needs_look(job.wishes) and not job.cache.find("look", stages.look_key(job)):
        seconds = stages.look_tokens(job) / count_per_s(job)
        works.insert(0, Work("look", "look", seconds, _counts(job)))
    is_base_run = tokens is None  # the converted model itself will be run
    if is_base_run or works:
        works = [*_of_model(job), *works]
    works += _of_plan(job, tokens)
    return WorkEstimate(works=tuple(works), free_bytes=shutil.disk_usage(job.cache.folder).free)


def expected_tokens(job: stages.RunJob) -> int | None:
    """Tokens to train predictors on, estimated if there was no look yet; None without."""
    if job.choice.predictors is False:
        return None
    look = job.cache.find("look", stages.look_key(job))
    if look is None:
        return tokens_for(job, count_per_s(job))
    return tokens_for(job, float(look.facts["tokens_per_s"]))


def tokens_for(job: stages.RunJob, tokens_per_s: float) -> int | None:
    """The number that was requested, or the largest of TOKENS that can be profiled within
    PATIENCE_S at this speed. Else the smallest if they were requested, or None."""
    if job.wishes.tokens is not None:
        return job.wishes.tokens
    allowed = [t for t in TOKENS if t * TRAIN_FACTOR / tokens_per_s <= PATIENCE_S]
    if not allowed and job.choice.predictors is None:
        return None
    return allowed[0] if allowed else TOKENS[-1]


def _is_hopeless(job: stages.RunJob) -> bool:
    """True if not even a look is worth it: it is not cached and would only decide on predictors,
    and training them on the fewest tokens would take over twice PATIENCE_S. False if the user gave
    the number of tokens."""
    choice = job.choice
    if choice.predictors is not None or choice.budgets or job.wishes.tokens is not None:
        return False
    if job.cache.find("look", stages.look_key(job)) is not None:
        return False
    return TOKENS[-1] * TRAIN_FACTOR / count_per_s(job) > 2 * PATIENCE_S


def too_long(per_s: float) -> str:
    """The line that says why there are no predictors."""
    return (
        f"mode exact: training predictors would take {words(TOKENS[-1] * TRAIN_FACTOR / per_s)}"
        f" here (a profile counts some {per_s:,.0f} tokens per second); --mode predicted trains"
        " them anyway"
    )


def count_per_s(job: stages.RunJob) -> float:
    """Tokens per second of a profile without training."""
    stored = job.rates.stored.get("count")
    if stored is None:
        device = device_of(job.choice.device)
        if (name := f"matmul on {device.type}") not in job.rates.stored:
            job.rates.note(name, matmul_flops(device))
        share = MIXTURE_SHARE if job.choice.model.spec.has_experts else COUNT_SHARE
        stored = share * job.rates.stored[name]
    return stored / stages.flop_per_token(job.choice.model)


def _of_model(job: stages.RunJob) -> list[Work]:
    choice, rates = job.choice, job.rates
    if not choice.is_converted or job.cache.find("model", stages.model_key(job)):
        return []
    size = sum(entry.num_bytes for entry in choice.model.tensors.values())
    if (rate := rates.stored.get(stages.conversion_name(job))) is not None:
        return [Work(kind="model", label="convert", seconds=size / rate, num_bytes=size)]
    seconds = size / encode_bytes_per_s(choice.model) + size / rates.write_bytes_per_s()
    seconds += verify_seconds(job) if job.is_verified else 0.0
    return [Work("model", "convert", seconds, size)]


def verify_seconds(job: stages.RunJob) -> float:
    """Seconds to compare a converted model with its source."""
    values = stages.flop_per_token(job.choice.model) / 2
    imports = IMPORT_S if job.source.path.is_dir() else 0.0
    return imports + VERIFY_UNPACKINGS * values / unpack_values_per_s()


def decided(job: stages.RunJob) -> stages.RunJob:
    """The job with verification decided (as requested, else if it is short), and without predictors
    if those would take too long."""
    if _is_hopeless(job):
        job.say(too_long(count_per_s(job)))
        job = replace(job, choice=replace(job.choice, predictors=False))
    is_verified = job.wishes.is_verified
    is_there = (
        not job.choice.is_converted or job.cache.find("model", stages.model_key(job)) is not None
    )
    if is_verified is None and not is_there:
        seconds = verify_seconds(job)
        is_verified = seconds <= VERIFY_LIMIT_S
        if not is_verified:
            job.say(
                f"the converted model is not compared with its source, which would take"
                f" {words(seconds)}: --verify does it"
            )
    return replace(job, is_verified=is_verified is not False)


def _of_profile(job: stages.RunJob, tokens: int) -> list[Work]:
    works, model = [], job.choice.model
    if job.cache.find("full", stages.full_key(job, tokens)):
        return []
    predictors = round(predictor_share(model) * all_neuron_bytes(model))
    if not job.cache.find("profile", stages.profile_key(job, tokens)):
        rate = job.rates.stored.get(
            "train", count_per_s(job) * stages.flop_per_token(model) / TRAIN_FACTOR
        )
        seconds = tokens * stages.flop_per_token(model) / rate
        size = predictors + 2 * _counts(job)
        works.append(Work("profile", "profile", seconds, size))
    size = predictors + sum(entry.num_bytes for entry in model.tensors.values())
    seconds = 2 * size / job.rates.write_bytes_per_s()
    return [*works, Work("full", "add predictors", seconds, size)]


def _of_plan(job: stages.RunJob, tokens: int | None) -> list[Work]:
    if not job.choice.budgets:
        return []
    size = sum(entry.num_bytes for entry in job.choice.model.tensors.values())
    loads = 4 if job.choice.model.spec.has_experts else 2
    seconds = TRIAL_S + loads * size / LOADED_BYTES_PER_S
    trial = Work("trial", "try the plan", seconds, 0)
    key = stages.plan_key(job, tokens)
    trials = [] if job.cache.find("trial", {"plan": key}) else [trial]
    if job.cache.find("plan", key):
        return trials
    works = []
    if not job.cache.find("machine", machine_key()):
        seconds = cpu_bandwidth.CPU_LIMIT_S + calibrate.COSTS_LIMIT_S + calibrate.GPU_LIMIT_S
        works.append(Work("machine", "calibrate", seconds, 0, at_most=True))
    size = 4 * job.choice.model.spec.num_layers * job.choice.model.spec.most_neurons
    plan = Work("plan", "solve", SOLVE_LIMIT_S, size, at_most=True)
    return [*works, plan, *trials]


def _counts(job: stages.RunJob) -> int:
    spec = job.choice.model.spec
    return 8 * spec.num_layers * spec.most_neurons
