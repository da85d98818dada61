"""The option of the neuron cache, --neuron-cache."""

from typing import Any

import click

from hotsplit.commands.options.shared import engine_option
from hotsplit.options.neuron_cache import OFF, CacheOptions, Off


def _parsed(ctx: click.Context, param: click.Parameter, value: Any) -> CacheOptions | Off | None:
    return value if value is None or value == OFF else CacheOptions.parse(value)


neuron_cache_option = engine_option(
    "neuron_cache", "--neuron-cache", metavar="on|off|SETTINGS", callback=_parsed,
    help="Swap the neurons on the GPU to follow the text; settings such as decay=0.995,margin=0.05."
    " [default: on with a plan that has room for it]",
)  # fmt: skip
