"""The command `sparkinfer sparsify`."""

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import click

from sparkinfer.commands.outtype import OUTTYPE
from sparkinfer.commands.shared import (
    FILE,
    FOLDER,
    FileCommand,
    device_option,
    finish,
    force_option,
    json_option,
    output,
    say,
)

if TYPE_CHECKING:
    from sparkinfer.sparsify.config import SparsifyConfig
    from sparkinfer.sparsify.record import Made


@click.command(cls=FileCommand)
@click.argument("model", type=FILE)
@click.option("--corpus", "corpora", type=FILE, multiple=True, required=True,
              help="Text, .jsonl or .parquet file, a folder of them, or - ; may be repeated.")  # fmt: skip
@click.option("-o", "--output", type=output(".gguf"), required=True,
              help="The model file to write; of several shares, one each: model-60.gguf.")  # fmt: skip
@click.option("--share", "shares", type=float, multiple=True,
              help="Silent share of the neurons, 0.6 by default; repeated, one is reached after the"
                   " other.")  # fmt: skip
@click.option("--tokens", default=1_000_000, show_default=True, help="To train on, for each share.")
@click.option("--held-out", type=FILE, multiple=True,
              help="Text to measure on; the first decides which state is best. A part of the corpus"
                   " is held out where none is given.")  # fmt: skip
@click.option("--held-out-tokens", default=16_384, show_default=True,
              help="Of each text, at the end of a share.")  # fmt: skip
@click.option("--check-tokens", default=4_096, show_default=True,
              help="Of the first text, now and then.")  # fmt: skip
@click.option("--checks", default=12, show_default=True, help="How often, for each share.")
@click.option("--activation", "rule", default="threshold", show_default=True,
              type=click.Choice(["threshold", "relu", "fatrelu", "drelu"]),
              help="threshold keeps the model's own and silences what is small.")  # fmt: skip
@click.option("--allocation", type=click.Choice(["uniform", "global"]), default="uniform",
              show_default=True, help="The same share for every layer, or one threshold for all.")  # fmt: skip
@click.option("--rank", type=int, help="Train low-rank updates of this rank, not whole matrices.")
@click.option("--learning-rate", default=3e-4, show_default=True)
@click.option("--layer-weight", default=0.0, show_default=True,
              help="Weight of the error of every layer's output in the loss.")  # fmt: skip
@click.option("--window", default=256, show_default=True, help="Tokens of a training text.")
@click.option("--batch-tokens", default=1024, show_default=True, help="Of a step and process.")
@click.option("--micro-tokens", default=1024, show_default=True, help="That go through at once.")
@click.option("--precision", type=click.Choice(["auto", "f32", "bf16"]), default="auto",
              show_default=True, help="Of products; auto is what is fast here.")  # fmt: skip
@click.option("--text-key", default="text", show_default=True,
              help="Of JSON lines, and the column of parquet.")  # fmt: skip
@click.option("--save-checkpoint", type=FOLDER, help="Folder for a Hugging Face checkpoint.")
@click.option("--start-from", type=FILE,
              help="A trained checkpoint of this model to go on from, e.g. to a larger share.")  # fmt: skip
@click.option("--outtype", default="f16", show_default=True, type=OUTTYPE,
              help="Type of the model file's matrices.")  # fmt: skip
@click.option("--seed", default=0, show_default=True)
@device_option
@force_option
@json_option
def sparsify(outtype: Any, as_json: bool, **options: Any) -> None:
    """Train a dense model until it says the same with a part of its neurons.

    MODEL is a checkpoint folder or a .gguf file. Stopped, it leaves OUTPUT.sparsify; the same
    command goes on from there. By torchrun -m sparkinfer sparsify ... several processes share the
    text."""
    from sparkinfer.profile.ranks import rank_here
    from sparkinfer.progress import progress
    from sparkinfer.sparsify.config import SparsifyConfig
    from sparkinfer.sparsify.plan import finish as clean_up
    from sparkinfer.sparsify.run import sparsify as run

    config = SparsifyConfig(**options)
    is_first = rank_here() == 0
    total = config.tokens * len(config.targets)
    with progress("training", total, "tokens") if is_first else nullcontext() as advance:
        report = run(config, say, advance or (lambda count: None))
    if not is_first:
        return
    lines = [_convert(made, config, outtype) for made in report.record.made]
    clean_up(config)
    finish(report, as_json, lines)


def _convert(made: "Made", config: "SparsifyConfig", outtype: Any) -> str:
    """Converts a trained checkpoint to a model file; returns lines on it."""
    from sparkinfer.convert.convert import convert
    from sparkinfer.convert.options import ConvertConfig

    output = config.output_of(made.share)
    convert(
        ConvertConfig(source=made.checkpoint, output=output, outtype=outtype, force=config.force)
    )
    quality = next(iter(made.quality.values()))
    also = "" if config.save_checkpoint is None else f" and {made.checkpoint}"
    return f"wrote {output}{also}: {quality.line}"
