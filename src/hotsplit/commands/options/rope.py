"""The options of rotary embeddings, with llama.cpp's names."""

from pathlib import Path

import click

from hotsplit.commands.options.shared import engine_option, joined
from hotsplit.model.rope import KINDS
from hotsplit.options.engine_config import EngineConfig

# Under the names of EngineConfig.
rope_options = joined(
    engine_option(
        "rope_scaling", "--rope-scaling", type=click.Choice(KINDS),
        help="How positions beyond the trained ones are computed, instead of the model's own way."
        " [default with --rope-scale: yarn]",
    ),
    engine_option(
        "rope_scale", "--rope-scale", type=float, metavar="N",
        help="Allow texts N times as long as in training. [default with --rope-scaling:"
        " what --context needs]",
    ),
)  # fmt: skip


def scaling_lines(model: Path, config: EngineConfig) -> list[str]:
    """The line that says how the model's positions are scaled with these options, if they are."""
    from hotsplit.artifacts.longer_texts import with_rope_scaling
    from hotsplit.artifacts.model_file import ModelFile

    file = with_rope_scaling(ModelFile.load(model), *config.rope, config.context_length)
    scaling = file.spec.rope_scaling
    return [] if scaling.kind == "none" else [f"rotary embeddings: {scaling.words}"]
