"""Options for fields of EngineConfig: rotary embeddings, the KV cache and the neuron cache."""

from pathlib import Path

import click

from hotsplit.commands.options.shared import engine_option, joined
from hotsplit.model.rope import KINDS
from hotsplit.options.cache_types import NAMES
from hotsplit.options.engine_config import EngineConfig
from hotsplit.options.key_selection import DEFAULT
from hotsplit.options.neuron_cache import OFF, CacheOptions

rope_options = joined(
    engine_option(
        "rope_scaling",
        "--rope-scaling",
        type=click.Choice(KINDS),
        help="How positions beyond the trained ones are computed, instead of the model's own way."
        " [default with --rope-scale: yarn]",
    ),
    engine_option(
        "rope_scale",
        "--rope-scale",
        type=float,
        metavar="N",
        help="Allow texts N times as long as in training. [default with --rope-scaling:"
        " what --context needs]",
    ),
)
kv_offload_option = engine_option(
    "kv_offload",
    "--kv-offload",
    is_flag=False,
    flag_value=DEFAULT,
    metavar="[SIZES]",
    help="Keys and values stay in main memory; in long texts, read only the first keys, the last ones,"
    " and the best-scoring ones in between. Sizes such as window=2048,top=512.",
)
cache_type_options = joined(
    engine_option(
        "cache_type_k",
        "-ctk",
        "--cache-type-k",
        type=click.Choice(NAMES),
        metavar="TYPE",
        help=f"Type of cached keys (on the CPU without a plan): {', '.join(NAMES)}.",
    ),
    engine_option(
        "cache_type_v",
        "-ctv",
        "--cache-type-v",
        type=click.Choice(NAMES),
        metavar="TYPE",
        help="Type of cached values. [default: that of the keys]",
    ),
    kv_offload_option,
)

long_text_options = joined(rope_options, cache_type_options)
neuron_cache_option = engine_option(
    "neuron_cache",
    "--neuron-cache",
    metavar="on|off|SETTINGS",
    callback=lambda ctx, param, value: value if value in (None, OFF) else CacheOptions.parse(value),
    help="Swap the neurons or experts on the GPU to follow the text; settings such as decay=0.995,margin=0.05."
    " [default: on with a plan that has room for it]",
)


def scaling_lines(model: Path, config: EngineConfig) -> list[str]:
    """The line that says how the model's positions are scaled with these options, if they are."""
    from hotsplit.artifacts.changed_model import for_context, with_rope_scaling
    from hotsplit.artifacts.model_file import ModelFile
    from hotsplit.runtime.resolved_options import context_of

    file = with_rope_scaling(ModelFile.load(model), *config.rope, config.context_length)
    scaling = for_context(file, context_of(file, None, config.context_length)).spec.rope_scaling
    return [] if scaling.kind == "none" else [f"rotary embeddings: {scaling.words}"]
