"""The options of rotary embeddings, with llama.cpp's names."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from hotsplit.commands.options.shared import engine_option
from hotsplit.model.rope import KINDS
from hotsplit.options.engine_config import EngineConfig

Command = Callable[..., Any]


def rope_options(command: Command) -> Command:
    """Adds the options, under the names of EngineConfig."""
    scale = engine_option(
        "rope_scale", "--rope-scale", type=float, metavar="N",
        help="Allow texts N times as long as in training. [default with --rope-scaling:"
        " what --context needs]",
    )  # fmt: skip
    scaling = engine_option(
        "rope_scaling", "--rope-scaling", type=click.Choice(KINDS),
        help="How positions beyond the trained ones are computed, instead of the model's own way."
        " [default with --rope-scale: yarn]",
    )  # fmt: skip
    return scaling(scale(command))


def scaling_lines(model: Path, config: EngineConfig) -> list[str]:
    """The line that says how the model's positions are scaled with these options, if they are."""
    from hotsplit.artifacts.longer_texts import with_rope_scaling
    from hotsplit.artifacts.model_file import ModelFile

    file = with_rope_scaling(ModelFile.load(model), *config.rope, config.context_length)
    scaling = file.spec.rope_scaling
    return [] if scaling.kind == "none" else [f"rotary embeddings: {scaling.words}"]
