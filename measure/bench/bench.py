"""Measures a model's prefill and decode speed on this machine: against the limit of memory
bandwidth, by part, and beside llama.cpp.

Each round measures the memory bandwidth and runs every test of one depth once; hotsplit and
llama.cpp alternate in going first. Each test is warmed up before its timed runs. The report has
medians, the limit, parts, and notes on doubtful numbers."""

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from hotsplit.artifacts.model_file import ModelFile, with_rope_scaling
from hotsplit.artifacts.split_file import Split
from hotsplit.errors import HotsplitError
from hotsplit.measure.bench.bench_config import BenchConfig
from hotsplit.measure.bench.parts import ORDER, StepBytes, bytes_by_part, part_ns
from hotsplit.measure.bench.result import (
    BenchReport,
    Limit,
    PartTime,
    Result,
    RunTimes,
    Setting,
    format_count,
    setting_of,
)
from hotsplit.measure.bench.rival import check_rival, start_rival
from hotsplit.measure.bench.runner import (
    Bandwidth,
    BenchRounds,
    BenchRunner,
    RandomTokens,
    RunSamples,
    Sample,
    TextTokens,
    Tokens,
    cpu_bandwidth,
    gpu_bandwidth,
)
from hotsplit.runtime.engine import Engine, load_engine
from hotsplit.runtime.kernels.threads import threads_in_use, use_threads
from hotsplit.system.processors import load_now
from hotsplit.system.sizes import format_bytes


def bench(
    config: BenchConfig, on_test: Callable[[float], None] = lambda count: None
) -> BenchReport:
    """Runs the benchmark; calls `on_test` after each run of a test, `config.num_runs` times in all.
    Raises HotsplitError for options that the model, the plan or llama.cpp does not support."""
    load_before = load_now()
    file = ModelFile.load(config.model)
    longest = with_rope_scaling(file, *config.engine.rope, config.num_tokens).spec.context_length
    for test in config.tests:
        if test.depth + test.length > longest:
            raise HotsplitError(
                f"{test.name} takes {test.depth + test.length} tokens, the model has a context of"
                f" {longest}; give shorter lengths with -p, -n and -d, or --rope-scaling yarn"
            )
    check_rival(config, file)
    plan = None if config.split is None else Split.load(config.split)
    if plan is not None and plan.context_length < config.num_tokens:
        raise HotsplitError(
            f"{config.split}: the plan has a context of {plan.context_length}, the longest test"
            f" takes {config.num_tokens}; give shorter lengths, or solve again with --context"
        )
    use_threads(config.threads)
    with ExitStack() as stack:
        asked = replace(config.engine, context_length=None if plan else config.num_tokens)
        engine = stack.enter_context(load_engine(config.model, config.split, asked))
        runner = BenchRunner(engine)
        stack.callback(runner.close)
        tokens: Tokens = RandomTokens(config.seed, engine.model.spec.vocab_size)
        if config.text is not None:
            longest = max(max(test.depth, test.length) for test in config.tests)
            tokens = TextTokens(config.text, engine, longest)
        threads = threads_in_use()
        rival = start_rival(config, engine, threads)
        if rival is not None:
            stack.callback(rival.close)
        setting = setting_of(engine, plan, threads, load_before)
        probes: dict[str, Bandwidth] = {}  # of the devices that read weights
        if engine.device.type == "cuda":
            probes["gpu"] = gpu_bandwidth(engine.device)
        if engine.device.type == "cpu" or plan is not None:
            probes["cpu"] = cpu_bandwidth(setting.model_size if setting.is_cached else None)
        rounds = BenchRounds(config, runner, tokens, rival, probes, on_test)
        rounds.run()
        return report_of(config, engine, plan, setting, rounds)


SAME_MODEL = 0.02  # relative difference in parameters above which models count as different
WIDE = 0.2  # spread relative to the median above which numbers are doubtful
BUSY = 0.5  # load average before the start above which the machine was busy


def report_of(
    config: BenchConfig, engine: Engine, plan: Split | None, setting: Setting, rounds: BenchRounds
) -> BenchReport:
    results, unknown = [], None
    for test, measured in rounds.measured.items():
        texts = measured.ours if test.kind == "tg" else []
        reads = [bytes_by_part(engine, plan, sample.steps) for sample in texts]
        unknown = unknown or (reads[0].unknown if reads else None)
        ours = RunTimes(num_tokens=test.length, samples_ns=tuple(s.ns for s in measured.ours))
        theirs = tuple(measured.theirs)
        read = reads[ours.middle] if reads else None
        results.append(
            Result(
                test=test,
                began=measured.began,
                ours=ours,
                theirs=RunTimes(num_tokens=test.length, samples_ns=theirs) if theirs else None,
                parts=_parts(measured.ours[ours.middle], read, plan),
                bytes_by_role={} if read is None else read.by_role,
                limit=_limit(ours, reads, measured, setting),
                predicted_s=plan.objective_s if plan is not None and test.kind == "tg" else None,
            )
        )
    rival = None if rounds.rival is None else rounds.rival.about
    is_native = rounds.runner.native is not None
    return BenchReport(
        config=config,
        setting=setting,
        bandwidth_gb_per_s={
            name: tuple(measured[name] / 1e9 for measured in rounds.bandwidths)
            for name in rounds.bandwidths[0]
        },
        results=tuple(results),
        rival=rival,
        parts_missing=None if is_native else "a step on a GPU is one CUDA graph",
        limit_missing=unknown,
        notes=(
            *_notes(config, setting, results, rival.model_n_params if rival else None),
            *([] if engine.neuron_cache is None else [engine.neuron_cache.line]),
        ),
    )


def _parts(sample: Sample, read: StepBytes | None, plan: Split | None) -> tuple[PartTime, ...]:
    """The parts in ORDER. Only native steps have times, and only generation has bytes."""
    counts, count = sample.steps.counts_LP2, sample.steps.num_steps
    times = {} if counts is None else part_ns(counts, plan, sample.ns)
    bytes_of = {} if read is None else {part: read.of_part(part) for part in ORDER}
    return tuple(
        PartTime(
            name=name,
            ns=times[name] / count if name in times else None,
            share=times[name] / sample.ns if name in times else None,
            num_bytes=bytes_of.get(name) or None,
        )
        for name in ORDER
        if name in times or bytes_of.get(name)
    )


def _limit(
    ours: RunTimes, reads: list[StepBytes], measured: RunSamples, setting: Setting
) -> Limit | None:
    """The limit by each round's bandwidth and bytes. A GPU and the CPU read concurrently."""
    if not reads or any(read.total is None for read in reads):
        return None
    sides = ["cpu"] if setting.device == "cpu" else list(measured.bandwidths[0])
    least_s = [
        max(
            ((read.total if sides == ["cpu"] else read.of_role(side)) or 0.0) / bandwidth[side]
            for side in sides
        )
        for read, bandwidth in zip(reads, measured.bandwidths, strict=True)
    ]
    shares = [
        least * 1e9 * ours.num_tokens / ns
        for least, ns in zip(least_s, ours.samples_ns, strict=True)
    ]
    total = reads[ours.middle].total
    assert total is not None
    return Limit(
        bytes_a_token=total,
        tokens_per_s=1 / statistics.median(least_s),
        share=statistics.median(shares),
    )


def _notes(
    config: BenchConfig, setting: Setting, results: list[Result], rival_params: int | None
) -> list[str]:
    found = []
    if setting.load_before is not None and setting.load_before > BUSY:
        slower = "; this slows llama.cpp more, because its threads spin while they wait"
        found.append(
            f"the machine was busy before the start: {setting.load_before:.1f} processes on"
            f" {setting.num_processors} processors{slower * (config.compare is not None)}"
        )
    if config.split is not None and setting.device == "cpu":
        found.append("no CUDA device is used: both sides of the plan run on the CPU")
    if setting.mode != "dense" and config.text is None:
        found.append(
            f"mode {setting.mode} reads the neurons that tokens need, and these tokens are random;"
            " --text FILE takes them from a text"
        )
    for result in results:
        low, high = result.ours.range_ts
        if high - low > WIDE * result.ours.median_ts:
            found.append(
                "rounds differ by more than a fifth, so something else is using this machine;"
                " ratios and shares of a round suffer less from it than speeds"
            )
        share = result.predicted_over_measured
        if share is not None and result.predicted_s is not None and setting.device != "cpu":
            found.append(
                f"{result.test.name}: the plan predicts {1e3 * result.predicted_s:.3g} ms a token,"
                f" which is {share:.2f} of what was measured; hotsplit run tries plans, and doctor"
                " shows their parts"
            )
    if setting.is_cached and setting.device == "cpu":
        found.append(
            f"the model fits into the last-level cache ({format_bytes(setting.last_cache_bytes)}):"
            " its limit is the speed at which so many bytes are read again and again"
        )
    ours = setting.model_n_params
    if rival_params and abs(rival_params / ours - 1) > SAME_MODEL:
        found.append(
            f"llama.cpp's model has {format_count(rival_params)} parameters, ours"
            f" {format_count(ours)}: the ratios compare two models"
        )
    return list(dict.fromkeys(found))
