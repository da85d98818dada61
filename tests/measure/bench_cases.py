"""A configuration and a mark for the tests of bench; bench_fixtures makes their files."""

from pathlib import Path

from hotsplit.commands.options.command_options import take_engine_options
from hotsplit.measure.bench.bench_config import BenchConfig


def config_of(path: Path, **options) -> BenchConfig:
    given = {"prompt_lengths": (5,), "gen_lengths": (4,), "repetitions": 2, "threads": 1}
    given |= options
    engine = take_engine_options(given)
    return BenchConfig(model=path, engine=engine, **given)
