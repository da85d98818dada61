"""`hotsplit bench`: measures a model's speed, reports it like llama-bench, and explains it."""

from typing import Any

import click

from hotsplit.commands.options import command_options as common
from hotsplit.commands.options.engine_options import long_text_options, neuron_cache_option
from hotsplit.commands.options.kept_files import bench_line
from hotsplit.commands.options.preparation import preparation, preparation_options
from hotsplit.errors import HotsplitError
from hotsplit.system.sizes import whole_number


def _lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(whole_number(number) for number in text.split(","))
    except ValueError as error:
        raise HotsplitError(
            f"{text!r} is not a list of numbers; wanted e.g. 512 or 128,512"
        ) from error


_LENGTHS = common.Parsed("N[,N...]", _lengths)


@click.command(cls=common.FileCommand)
@click.argument("model", type=common.FILE)
@common.split_option
@preparation_options
@common.option_table(
    """
-p --n-prompt | prompt_lengths: lengths* | Prompt lengths to test; 0: none. [default: 512]
-n --n-gen | gen_lengths: lengths* | Numbers of tokens to generate; 0: none. [default: 128]
-d --depth --n-depth | depths: lengths* | Tokens in the cache before a test. [default: 0]
-r --repetitions | int = 5 | Rounds to measure.
--text | file | Text to take tokens from, since a sparse mode's speed depends on them. [default:
    random tokens]
--seed | int = 0 | Seed of random tokens.
--compare | file PROGRAM | Measure llama.cpp in the same rounds: a Python with llama_cpp, or a
    llama-bench.
--compare-model | file FILE | The GGUF that llama.cpp loads. [default: MODEL]
--compare-gpu-layers | int N | Layers that llama.cpp puts on a GPU. [default: none if MODEL runs on
    the CPU, else all]
""",
    lengths=_LENGTHS,
)
@long_text_options
@neuron_cache_option
@common.ram_option
@common.running_options
@common.json_option
def bench(
    prompt_lengths: tuple[tuple[int, ...], ...],
    gen_lengths: tuple[tuple[int, ...], ...],
    depths: tuple[tuple[int, ...], ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Measure the speed of prompts and generation on this machine.

    Speeds are compared with the limit set by the memory's speed and, if the step is native,
    broken down by its parts."""
    lengths = {"prompt_lengths": prompt_lengths, "gen_lengths": gen_lengths, "depths": depths}
    options |= {name: sum(values, ()) for name, values in lengths.items() if values}
    with preparation(options):
        from hotsplit.measure.bench.bench_config import BenchConfig

        engine = common.take_engine_options(options)
        config = BenchConfig(
            engine=engine, **options
        )  # refuses wrong options before the imports, which take seconds
        from hotsplit.measure.bench.bench import bench as run
        from hotsplit.measure.bench.bench_tables import lines_of, to_json
        from hotsplit.system.progress import progress

        with progress("measuring", config.num_runs, "tests") as advance:
            report = run(config, advance)
        kept = bench_line(config.model) if config.split is None else None
        if kept and not as_json:
            common.say(kept)
        common.finish(to_json(report) if as_json else {}, as_json, lines_of(report))
