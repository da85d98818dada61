"""`hotsplit eval`: compares a mode with the dense model on text."""

from dataclasses import replace
from typing import Any

import click

from hotsplit.commands.options import command_options as common
from hotsplit.commands.options.engine_options import long_text_options, scaling_lines


@click.command("eval", cls=common.FileCommand)
@click.argument("model", type=common.FILE)
@common.option_table(
    """
--corpus | corpora: file!* | Text to compare on: a text, .jsonl or .parquet file, or a folder of
    them.
--split | file | Plan made by hotsplit solve.
--tokens | max_tokens: int = 16384 | Maximum tokens to compare on.
--seed | int = 0 | Seed of the order of texts.
"""
)
@click.option(
    "--chat-template",
    is_flag=False,
    flag_value="",
    metavar="[NAME|FILE]",
    help="Wrap paragraphs as messages in the model's own template or the one given; tokens"
    " that the template adds are not counted.",
)
@common.context_option("Context length in tokens. [default: the model's, up to 4,096]")
@long_text_options
@common.mode_option
@common.threads_option
@common.device_option
@common.json_option
def evaluate(threads: int | None, as_json: bool, **options: Any) -> None:
    """Compare a mode with the dense model on text.

    Prints perplexity, KL divergence, and how often the likeliest token is the same. For tasks of
    lm-eval, see docs/reading-a-report.md."""
    from hotsplit.measure.evaluate.evaluate_config import EvalConfig

    # Refuses wrong options before the imports, which take seconds.
    config = EvalConfig(engine=common.take_engine_options(options), **options)
    from hotsplit.measure.evaluate.quality import eval_content
    from hotsplit.measure.evaluate.quality import evaluate as run
    from hotsplit.runtime.kernels.threads import use_threads
    from hotsplit.system.progress import progress

    use_threads(threads)
    found: list[int] = []  # tokens of the text
    with progress("evaluating", config.max_tokens, "tokens") as advance:

        def on_total(count: int) -> None:
            found.append(count)
            advance.set_total(count)

        report = run(config, advance, on_total)
    num_found = sum(found)
    notes = []
    if report.mode == "dense" and not (
        config.engine.cache_type_k or config.engine.cache_type_v or config.engine.kv_offload
    ):
        notes.append(
            "mode dense is what all modes are compared with, so this compares the model"
            " with itself; give --mode exact or predicted"
        )
    if num_found < config.max_tokens:
        notes.append(
            f"{num_found:,} tokens of text, fewer than the {config.max_tokens:,} of --tokens"
        )
    report = replace(report, notes=tuple(notes))
    lines = [
        *(f"note: {note}" for note in notes),
        f"{report.mode}: {report.line}",
        report.neurons_line,
        "± is half of the 95 % confidence interval",
        *scaling_lines(config.model, config.engine),
    ]
    common.finish(eval_content(report) if as_json else {}, as_json, lines)
