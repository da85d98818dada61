"""Options for fields of EngineConfig: rotary embeddings, the KV cache and the neuron cache."""

from pathlib import Path

import click

from hotsplit.commands.options.command_options import engine_option, joined, option_table
from hotsplit.model.rope import KINDS
from hotsplit.options.cache_types import NAMES
from hotsplit.options.engine_config import EngineConfig
from hotsplit.options.key_selection import DEFAULT
from hotsplit.options.neuron_cache_options import OFF, CacheOptions

rope_options = option_table(
    """
--rope-scaling | rope_scaling: kind | How positions beyond the trained ones are computed, instead of
    the model's own way. [default with --rope-scale: yarn]
--rope-scale | rope_scale: float N | Allow texts N times as long as in training. [default with
    --rope-scaling: what --context needs]
""",
    kind=click.Choice(KINDS),
)
kv_offload_option = engine_option(
    "kv_offload",
    "--kv-offload",
    is_flag=False,
    flag_value=DEFAULT,
    metavar="[SIZES]",
    help="Keys and values stay in main memory; in long texts, read only the first keys, the last"
    " ones, and the best-scoring ones in between. Sizes such as window=2048,top=512.",
)
cache_type_options = joined(
    option_table(
        f"""
-ctk --cache-type-k | cache_type_k: kind TYPE | Type of cached keys (on the CPU without a plan):
    {", ".join(NAMES)}.
-ctv --cache-type-v | cache_type_v: kind TYPE | Type of cached values. [default: that of the keys]
""",
        kind=click.Choice(NAMES),
    ),
    kv_offload_option,
)
long_text_options = joined(rope_options, cache_type_options)
neuron_cache_option = engine_option(
    "neuron_cache",
    "--neuron-cache",
    metavar="on|off|SETTINGS",
    callback=lambda ctx, param, value: value if value in (None, OFF) else CacheOptions.parse(value),
    help="Swap the neurons or experts on the GPU to follow the text; settings such as"
    " decay=0.995,margin=0.05. [default: on with a plan that has room for it]",
)


def scaling_lines(model: Path, config: EngineConfig) -> list[str]:
    """The line that says how the model's positions are scaled with these options, if they are."""
    from hotsplit.artifacts.model_file import ModelFile, for_context, with_rope_scaling
    from hotsplit.runtime.resolved_options import context_of

    file = with_rope_scaling(ModelFile.load(model), *config.rope, config.context_length)
    scaling = for_context(file, context_of(file, None, config.context_length)).spec.rope_scaling
    return [] if scaling.kind == "none" else [f"rotary embeddings: {scaling.words}"]
