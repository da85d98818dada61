"""Measures a model's prefill and decode speed on this machine: against the limit of memory
bandwidth, by part, and beside llama.cpp.

Each round measures the memory bandwidth and runs every test of one depth once; hotsplit and
llama.cpp alternate in going first. Each test is warmed up before its timed runs."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from hotsplit.artifacts.model_file import ModelFile, with_rope_scaling
from hotsplit.artifacts.split_file import Split
from hotsplit.errors import HotsplitError
from hotsplit.measure.bench.bandwidth import Bandwidth, cpu_bandwidth, gpu_bandwidth
from hotsplit.measure.bench.bench_config import BenchConfig
from hotsplit.measure.bench.result import BenchReport, setting_of
from hotsplit.measure.bench.rival import check_rival, start_rival
from hotsplit.measure.bench.runner import BenchRounds, BenchRunner, RandomTokens, TextTokens, Tokens
from hotsplit.measure.bench.summary import report_of
from hotsplit.runtime.engine import load_engine
from hotsplit.runtime.kernels.threads import threads_in_use, use_threads
from hotsplit.system.processors import load_now


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
        probes: dict[str, Bandwidth] = {}  # of the devices that read weights
        if engine.device.type == "cuda":
            probes["gpu"] = gpu_bandwidth(engine.device)
        if engine.device.type == "cpu" or plan is not None:
            probes["cpu"] = cpu_bandwidth()
        rounds = BenchRounds(config, runner, tokens, rival, probes, on_test)
        rounds.run()
        setting = setting_of(engine, plan, threads, load_before)
        return report_of(config, engine, plan, setting, rounds)
