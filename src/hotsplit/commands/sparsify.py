"""The command `hotsplit sparsify`."""

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import click

from hotsplit.commands.options.outtype import OUTTYPE
from hotsplit.commands.options.shared import (
    FILE,
    FOLDER,
    FileCommand,
    OutputPath,
    device_option,
    finish,
    report_options,
    say,
)
from hotsplit.files.atomic import locked_folder

if TYPE_CHECKING:
    from hotsplit.sparsify.config import SparsifyConfig
    from hotsplit.sparsify.state import Made


@click.command(cls=FileCommand, short_help="Train a dense model to be sparse.")
@click.argument("model", type=FILE)
@click.option("--corpus", "corpora", type=FILE, multiple=True, required=True,
              help="Text to train on: a text, .jsonl or .parquet file, or a folder of them; may be"
                   " repeated.")  # fmt: skip
@click.option("-o", "--output", type=OutputPath(".gguf"), required=True,
              help="The model file to write; with several shares, one for each, e.g. model-60.gguf.")  # fmt: skip
@click.option("--share", "shares", type=float, multiple=True,
              help="Share of the neurons to silence; if repeated, each is reached in turn."
                   " [default: 0.6]")  # fmt: skip
@click.option(
    "--tokens", default=1_000_000, show_default=True, help="Tokens to train on, for each share."
)
@click.option("--held-out", type=FILE, multiple=True,
              help="Text to measure on; the first one decides which state is best. [default: a part"
                   " of the corpus]")  # fmt: skip
@click.option("--held-out-tokens", default=16_384, show_default=True,
              help="Tokens of each held-out text to measure at the end of a share.")  # fmt: skip
@click.option("--check-tokens", default=4_096, show_default=True,
              help="Tokens of the first held-out text to measure during training.")  # fmt: skip
@click.option(
    "--checks",
    default=12,
    show_default=True,
    help="About how many measurements to make during training, per share.",
)
@click.option("--activation", "rule", default="threshold", show_default=True,
              type=click.Choice(["threshold", "relu", "fatrelu", "drelu"]),
              help="threshold keeps the model's own activation and silences small values.")  # fmt: skip
@click.option("--allocation", type=click.Choice(["sensitivity", "uniform", "global"]),
              default="sensitivity", show_default=True,
              help="Which neurons are silenced: those that the predictions depend on least"
                   " (sensitivity), the same share of every layer (uniform), or one threshold for"
                   " all layers, relative to their outputs (global).")  # fmt: skip
@click.option("--rank", type=int, help="Train low-rank updates of this rank, not whole matrices.")
@click.option("--learning-rate", default=3e-4, show_default=True)
@click.option("--layer-weight", default=10.0, show_default=True,
              help="Weight in the loss of the layers' mean output error.")  # fmt: skip
@click.option("--window", default=256, show_default=True, help="Tokens per training text.")
@click.option("--batch-tokens", default=512, show_default=True, help="Tokens per step and process.")
@click.option("--micro-tokens", default=512, show_default=True, help="Tokens per forward pass.")
@click.option("--precision", type=click.Choice(["auto", "f32", "bf16"]), default="auto",
              show_default=True, help="Precision of matrix products; auto chooses by the machine.")  # fmt: skip
@click.option("--text-key", default="text", show_default=True,
              help="Key of the text in .jsonl, or its column in .parquet.")  # fmt: skip
@click.option(
    "--save-checkpoint",
    type=FOLDER,
    help="Save a Hugging Face checkpoint to this folder, too; with several shares, one for each.",
)
@click.option("--start-from", type=FILE,
              help="A trained checkpoint of this model to continue from, e.g. to a larger share.")  # fmt: skip
@click.option("--outtype", default="f16", show_default=True, type=OUTTYPE,
              help="Type of the model file's matrices.")  # fmt: skip
@click.option("--seed", default=0, show_default=True)
@device_option
@report_options
def sparsify(as_json: bool, **options: Any) -> None:
    """Train a dense model to give the same answers with fewer of its neurons.

    MODEL is a checkpoint folder or a .gguf file. If stopped, it leaves OUTPUT.sparsify, and the
    same command continues from there. With torchrun -m hotsplit sparsify ... several processes
    share the text."""
    from hotsplit.sparsify.config import SparsifyConfig

    config = SparsifyConfig(
        **options
    )  # refuses wrong options before the imports, which take seconds
    from hotsplit.profile.corpus.processes import rank_here
    from hotsplit.sparsify.plan import finish as clean_up
    from hotsplit.sparsify.run import sparsify_locked as run
    from hotsplit.system.progress import progress

    is_first = rank_here() == 0
    total = config.tokens * len(config.targets)
    with locked_folder(config.work_folder) if is_first else nullcontext():
        with progress("training", total, "tokens") if is_first else nullcontext() as advance:
            report = run(config, say, advance or (lambda count: None))
        if not is_first:
            return
        lines = [_convert(made, config) for made in report.record.made]
        clean_up(config)
    finish(report, as_json, lines)


def _convert(made: "Made", config: "SparsifyConfig") -> str:
    """Converts a trained checkpoint to a model file; returns a line about it."""
    from hotsplit.convert.convert import convert
    from hotsplit.convert.options import ConvertConfig

    output = config.output_of(made.share)
    convert(
        ConvertConfig(
            source=made.checkpoint, output=output, outtype=config.outtype, force=config.force
        )
    )
    quality = next(iter(made.quality.values()))
    also = "" if config.save_checkpoint is None else f" and {made.checkpoint}"
    return f"wrote {output}{also}: {quality.line}"
