"""The option of the neuron cache, --neuron-cache."""

from typing import Any

import click

from sparkinfer.neuron_cache import CacheOptions

OFF = "off"


def _parsed(ctx: click.Context, param: click.Parameter, value: Any) -> CacheOptions | None:
    return None if value is None or value == OFF else CacheOptions.parse(value)


neuron_cache_option = click.option(
    "--neuron-cache", metavar="on|off|SETTINGS", callback=_parsed,
    help="With a plan that has room for it: swap hot neurons as the text needs; settings such as"
    " decay=0.995,margin=0.05.",
)  # fmt: skip
